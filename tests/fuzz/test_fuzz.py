"""No input but typed errors, bounded memory and bounded time: seeds, hostile inputs, old finds.

``scripts/soak fuzz`` runs the same targets for as long as one likes.
"""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.everything import keep, kept, target_of, targets
from fuzz.guard import MARGIN, TooMuch, guarded
from weightdelta.errors import DamagedObject

pytestmark = [pytest.mark.fault, pytest.mark.timeout(170)]
NAMES = (
    "entry", "log", "head", "layout", "base", "shards", "config", "plan", "index", "table", "zstd",
    "frame sparse+zstd", "frame snappy+zstd", "frame lz4+zstd", "frame zstd", "frame none", "run",
)  # fmt: skip
#: Inputs for each example that hypothesis asks for: a number is cheap, so it stands for several.
BATCH = {"run": 1, "head": 1, "config": 4, "base": 16}


def test_every_target_is_tested() -> None:
    assert set(targets()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted_and_every_mutator_can_work_on_them(name: str) -> None:
    target = targets()[name]
    for seed in target.seeds:
        assert guarded(target.check, seed, declared=target.declared(seed)).error == ""
    changed = 0
    for i, mutator in enumerate(target.mutators):
        for seed in target.seeds[:8]:
            changed += mutator(random.Random(i), seed) != seed
    assert changed >= len(target.mutators) - 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(number=st.integers(0, 2**48))
def test_hostile_input_meets_typed_errors_and_bounds(name: str, number: int) -> None:
    target = targets()[name]
    for i in range(BATCH.get(name, 24)):
        data = target.make(32 * number + i)
        try:
            guarded(target.check, data, declared=target.declared(data))
        except BaseException as e:
            e.add_note(f"kept as {keep(name, data)}")
            raise


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.name)
def test_old_finds_stay_mended(path: Path) -> None:
    data, target = path.read_bytes(), target_of(path)
    guarded(target.check, data, declared=target.declared(data))


def test_the_guard_sees_what_it_guards_against() -> None:
    def takes(_: bytes) -> None:
        bytearray(2 * MARGIN)

    def refuses(_: bytes) -> None:
        raise DamagedObject("x")

    def escapes(_: bytes) -> None:
        raise ValueError("x")

    assert guarded(takes, b"", declared=2 * MARGIN).peak >= 2 * MARGIN
    assert guarded(refuses, b"", declared=0).error == "damaged-object"
    with pytest.raises(TooMuch):
        guarded(takes, b"", declared=0)
    with pytest.raises(ValueError, match="x"):
        guarded(escapes, b"", declared=0)
