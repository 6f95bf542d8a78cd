"""Every object of a small repository, damaged in every way: found before a weight changes.

The promise: a fresh receiver ends bit for bit at a committed version, or raises a typed error
while every weight is as it was. Only a lost log tail may leave it at an older version. The
normal run takes a seeded sample; ``WEIGHTDELTA_FULL=1`` damages every byte and every length.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from damage import (
    ALL_CODECS,
    SETTINGS,
    Damage,
    Repository,
    draw,
    flips,
    follow,
    judge,
    kind_of,
    lengths,
    swaps,
)

from weightdelta.codecs.names import Codec
from weightdelta.verify import verify

FULL = os.environ.get("WEIGHTDELTA_FULL") == "1"
pytestmark = [pytest.mark.fault, pytest.mark.timeout(3600 if FULL else 180)]
#: Damages at random, besides those of every kind; ``scripts/soak damage`` does a hundred thousand.
COUNT = 5000
#: Codecs of a run's versions; ranks and frames change with them.
MIXTURES: tuple[tuple[Codec, ...], ...] = (
    ("sparse+zstd", "snappy+zstd"),
    ("lz4+zstd", "zstd"),
    ("none",),
)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repository, Repository]:
    folder = tmp_path_factory.mktemp("runs")
    return (
        Repository(folder / "one", 1, ("sparse+zstd", "sparse+zstd")),
        Repository(folder / "other", 50, ("sparse+zstd", "sparse+zstd")),
    )


def _sampled(damages: Sequence[Damage], count: int) -> list[Damage]:
    if FULL or len(damages) <= count:
        return list(damages)
    return random.Random(7).sample(damages, count)


def _all(one: Repository, other: Repository, *, share: float = 1.0) -> list[Damage]:
    items = list(one.objects.items())
    swapped = [d for item in items for d in swaps(*item, one.objects, "its")]
    swapped += [d for item in items for d in swaps(*item, other.objects, "a foreign")]
    return [
        *_sampled([d for item in items for d in flips(*item)], int(500 * share)),
        *_sampled([d for item in items for d in lengths(*item)], int(250 * share)),
        *(Damage.to(name, "missing", None) for name in one.objects),
        *_sampled(swapped, int(100 * share)),
    ]


def _tally(damages: Sequence[Damage], one: Repository) -> Counter[str]:
    """Judge every damage; how often each end was met."""
    seen: Counter[str] = Counter()
    for damage in damages:
        error, version = one.suffer(damage)
        judge(damage, one, error=error, version=version)
        seen[error or f"version {version}"] += 1
    return seen


def test_no_damage_ever_reaches_a_weight(
    repositories: tuple[Repository, Repository],
) -> None:
    one, other = repositories
    assert follow(one) == ("", one.run.newest)
    seen = _tally(_all(one, other, share=1.0 if FULL else 0.3), one)
    assert seen["damaged-object"] > 100
    assert seen["missing-object"] > 5


@pytest.mark.parametrize("codecs", MIXTURES, ids=" ".join)
def test_thousands_of_damages_to_all_codecs_are_found(
    codecs: tuple[Codec, ...], tmp_path: Path
) -> None:
    one, other = Repository(tmp_path / "one", 1, codecs), Repository(tmp_path / "other", 60, codecs)
    assert follow(one) == ("", one.run.newest)
    count = -(-COUNT // len(MIXTURES))
    rng = random.Random(20)
    seen = _tally([draw(rng, one, other) for _ in range(count)], one)
    assert seen["damaged-object"] > count / 2
    assert seen["missing-object"] > count / 50


def test_the_mixtures_leave_no_codec_out() -> None:
    assert {codec for codecs in MIXTURES for codec in codecs} == set(ALL_CODECS)


def test_verify_names_the_damaged_object(
    repositories: tuple[Repository, Repository],
) -> None:
    one, other = repositories
    checkpoint = one.run.checkpoint
    assert verify(one.store, config=SETTINGS, deep=True, base=checkpoint).problems == []
    for damage in _all(one, other, share=0.3):
        one.put(damage.name, damage.data)
        found = verify(one.store, config=SETTINGS, deep=True)
        one.put(damage.name, one.objects[damage.name])
        if kind_of(damage.name) == "head" and (damage.data is None or _is_old(damage.data, one)):
            assert found.ok, f"{damage}: {found.problems}"
            assert [n for n in found.notes if damage.name in n], str(damage)
        else:
            named = [p for p in found.problems if damage.name in p]
            assert named, f"{damage}: {found.problems}"


def _is_old(hint: bytes, repository: Repository) -> bool:
    """Whether damage made a hint of one that is merely out of date."""
    return len(hint) <= 20 and hint.strip().isdigit() and int(hint) < _entries(repository)


def _entries(repository: Repository) -> int:
    return sum(name.startswith("log/") for name in repository.objects)


def test_two_objects_that_changed_places_are_found(
    repositories: tuple[Repository, Repository],
) -> None:
    one, _ = repositories
    names = sorted(one.objects)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if kind_of(first) != kind_of(second) or one.objects[first] == one.objects[second]:
                continue
            one.put(first, one.objects[second])
            one.put(second, one.objects[first])
            error, _version = follow(one)
            problems = " ".join(verify(one.store, config=SETTINGS, deep=True).problems)
            one.put(first, one.objects[first])
            one.put(second, one.objects[second])
            assert error == "damaged-object", (first, second)
            assert first in problems or second in problems
