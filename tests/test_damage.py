"""Every object of a small repository, damaged in every way: found before a weight changes.

The promise: a fresh receiver ends bit for bit at a committed version, or raises a typed error
while every weight is as it was. Only a lost log tail may leave it at an older version. The
normal run takes a seeded sample; ``WEIGHTDELTA_FULL=1`` damages every byte and every length.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_runs import SmallRun, all_bits, some_weights

from weightdelta.config import Config
from weightdelta.errors import WeightDeltaError
from weightdelta.receiver import Receiver
from weightdelta.store import Store
from weightdelta.verify import verify

FULL = os.environ.get("WEIGHTDELTA_FULL") == "1"
pytestmark = [pytest.mark.fault, pytest.mark.timeout(3600 if FULL else 180)]
SETTINGS = Config.of({"threads": 1, "store": {"threads": 1, "fsync": False}})


@dataclass(frozen=True)
class Damage:
    """What an object holds instead; None when it is gone."""

    name: str
    how: str
    data: bytes | None

    @property
    def kind(self) -> str:
        """What the object is."""
        if self.name.startswith("data/"):
            return "index" if self.name.endswith("/index") else "data"
        return self.name.split("/")[0]

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"


class Repository:
    """A run on local disk, and every object's bytes."""

    def __init__(self, folder: Path, seed: int, versions: int = 3) -> None:
        self.root = folder / "store"
        self.root.mkdir(parents=True)
        self.store = Store(self.root, timeout_s=None, fsync=False)
        self.run = SmallRun(folder, store=self.store, weights=some_weights(seed), max_bytes=64)
        for step in range(versions - 1):
            self.run.step(seed + step)
        self.run.writer.tag("eval")
        self.run.step(seed + versions)
        self.run.close()
        self.objects = {name: (self.root / name).read_bytes() for name in self.store.names("")}

    def put(self, name: str, data: bytes | None) -> None:
        """Replace one object."""
        if data is None:
            (self.root / name).unlink()
        else:
            (self.root / name).write_bytes(data)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repository, Repository]:
    folder = tmp_path_factory.mktemp("runs")
    return Repository(folder / "one", 1), Repository(folder / "other", 50)


def _flips(name: str, data: bytes) -> Iterator[Damage]:
    for at, byte in enumerate(data):
        flipped = data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :]
        yield Damage(name, f"byte {at} of {len(data)} flipped", flipped)


def _lengths(name: str, data: bytes) -> Iterator[Damage]:
    yield Damage(name, "missing", None)
    for size in range(len(data)):
        yield Damage(name, f"cut to {size} of {len(data)}", data[:size])
    for extra in (b"\0", b"\n", data):
        yield Damage(name, f"extended by {len(extra)}", data + extra)


def _swaps(name: str, data: bytes, others: dict[str, bytes], whose: str) -> Iterator[Damage]:
    kind = Damage(name, "", None).kind
    for other, content in others.items():
        if Damage(other, "", None).kind == kind and content != data:
            yield Damage(name, f"has the bytes of {whose} {other}", content)


def _sampled(damages: Sequence[Damage], count: int) -> list[Damage]:
    if FULL or len(damages) <= count:
        return list(damages)
    return random.Random(7).sample(damages, count)


def _all(one: Repository, other: Repository, *, share: float = 1.0) -> list[Damage]:
    flips = [d for item in one.objects.items() for d in _flips(*item)]
    lengths = [d for item in one.objects.items() for d in _lengths(*item)]
    swaps = [d for item in one.objects.items() for d in _swaps(*item, one.objects, "its")]
    swaps += [d for item in one.objects.items() for d in _swaps(*item, other.objects, "a foreign")]
    missing = [Damage(name, "missing", None) for name in one.objects]
    return [
        *_sampled(flips, int(500 * share)),
        *_sampled(lengths, int(250 * share)),
        *missing,
        *_sampled(swaps, int(100 * share)),
    ]


def _follow(repository: Repository) -> tuple[str, int]:
    """What becomes of a fresh sampler: how it ended, and at which version."""
    run = repository.run
    model = run.model()
    try:
        receiver = Receiver(repository.store, model, config=SETTINGS)
    except WeightDeltaError as e:
        assert all_bits(model) == run.versions[0]
        return e.kind, 0
    try:
        receiver.prepare().wait()
    except WeightDeltaError as e:
        assert all_bits(model) == run.versions[0]
        assert (receiver.state, receiver.version) == ("CLEAN", 0)
        return e.kind, 0
    else:
        receiver.apply()
        assert all_bits(model) == run.versions[receiver.version]
        return "", receiver.version
    finally:
        receiver.close()


def test_no_damage_ever_reaches_a_weight(
    repositories: tuple[Repository, Repository],
) -> None:
    one, other = repositories
    newest = one.run.newest
    assert _follow(one) == ("", newest)
    seen: Counter[str] = Counter()
    for damage in _all(one, other):
        one.put(damage.name, damage.data)
        error, version = _follow(one)
        one.put(damage.name, one.objects[damage.name])
        seen[error or f"version {version}"] += 1
        last = sorted(n for n in one.objects if n.startswith("log/"))[-1]
        tail = damage.name == last and damage.data is None
        if not error:
            # What a receiver that holds the whole base never reads cannot harm it.
            unread = damage.kind in ("head", "table") or (
                damage.kind == "data" and damage.how.startswith("extended")
            )
            assert unread or tail, f"{damage} was not noticed"
            assert tail or version == newest, f"{damage} left the receiver at version {version}"
    print(f"{sum(seen.values())} damages: {dict(seen)}")
    assert seen["damaged-object"] > 100
    assert seen["missing-object"] > 5


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
        if damage.kind == "head" and (damage.data is None or _is_old(damage.data, one)):
            assert found.ok, f"{damage}: {found.problems}"
        else:
            named = [p for p in found.problems if damage.name in p]
            assert named, f"{damage}: {found.problems}"


def _is_old(hint: bytes, repository: Repository) -> bool:
    """Whether damage made a hint of one that is merely out of date."""
    entries = sum(name.startswith("log/") for name in repository.objects)
    return len(hint) <= 20 and hint.strip().isdigit() and int(hint) < entries


def test_two_objects_that_changed_places_are_found(
    repositories: tuple[Repository, Repository],
) -> None:
    one, _ = repositories
    names = sorted(one.objects)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            same = Damage(first, "", None).kind == Damage(second, "", None).kind
            if not same or one.objects[first] == one.objects[second]:
                continue
            one.put(first, one.objects[second])
            one.put(second, one.objects[first])
            error, _version = _follow(one)
            problems = " ".join(verify(one.store, config=SETTINGS, deep=True).problems)
            one.put(first, one.objects[first])
            one.put(second, one.objects[second])
            assert error == "damaged-object", (first, second)
            assert first in problems or second in problems
