"""Raw blocks into resident weights: streamed through two slots, all or none."""

from dataclasses import replace

import numpy as np
import pytest
from block_laws import INNERS
from mask_cases import Case

from weightdelta.apply_blocks import BlockApply
from weightdelta.codecs import blocks
from weightdelta.codecs.stock import Inner
from weightdelta.errors import DamagedObject, NotPrepared, StateMismatch
from weightdelta.kernels.planes import BLOCK_BYTES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("slot_bytes", [1, 1 << 19, 1 << 27])
def test_weights_change_bit_for_bit_and_back(inner: Inner, slot_bytes: int) -> None:
    case = Case(inner, device="cuda")
    update = case.update(inner, slot_bytes=slot_bytes)
    assert update.dry_run().tolist() == case.digests()
    assert case.holds(case.old)
    update.apply()
    assert case.holds(case.new)
    update.undo()
    assert case.holds(case.old)


@pytest.mark.parametrize("inner", INNERS)
def test_segments_in_rows(inner: Inner) -> None:
    """Pieces end where rows do; here the rows lie one after the other."""
    case = Case(inner, device="cuda", run=1000)
    update = case.update(inner)
    assert update.dry_run().tolist() == case.digests()
    update.apply()
    assert case.holds(case.new)


def test_weights_edited_after_the_dry_run_are_found() -> None:
    case = Case("snappy", device="cuda")
    update = case.update("snappy")
    update.dry_run()
    where = int(np.flatnonzero(case.old[1] != case.new[1])[-1])
    case.weights[1][where] ^= 1
    case.old[1][where] ^= 1
    for _ in range(2):
        with pytest.raises(StateMismatch, match="Nothing was changed"):
            update.apply()
        assert case.holds(case.old)


def test_apply_needs_a_dry_run() -> None:
    case = Case("lz4", device="cuda")
    with pytest.raises(NotPrepared, match="dry_run"):
        case.update("lz4").apply()
    assert case.holds(case.old)


def test_an_update_without_changes() -> None:
    update = BlockApply([], inner="lz4", tensors=3, device="cuda")
    assert update.dry_run().tolist() == [0, 0, 0]
    update.apply()


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_block_that_changes_in_host_memory_leaves_the_weights_alone(
    inner: Inner, number: int
) -> None:
    """A block that is still sound, but says something else than it did."""
    case = Case(inner, device="cuda")
    update = case.update(inner)
    update.dry_run()
    group = update._groups[number]
    block = len(group.job.sizes) // 2
    at, size = int(group.job.offsets[block]), int(group.job.sizes[block])
    length = int(group.job.lengths[block])
    memory = update._host[group.raw].numpy()[at : at + size]
    before = memory.copy()
    for i in range(size):  # whatever byte may change
        memory[:] = before
        memory[i] ^= 8
        found = blocks.Blocks(inner, length, np.array([size], np.uint32), memory.copy())
        out = np.zeros(length, np.uint8)
        try:
            blocks.unpack(found, out=out, where="it")
            break
        except DamagedObject:
            continue
    with pytest.raises(StateMismatch, match="Nothing was changed"):
        update.apply()
    assert case.holds(case.old)
    memory[:] = before
    update.apply()
    assert case.holds(case.new)


@pytest.mark.parametrize("inner", INNERS)
def test_damaged_blocks_are_named_before_a_device_sees_them(inner: Inner) -> None:
    case = Case(inner, device="cuda")
    frame = case.frames[2]
    arena = frame.blocks.arena.copy()
    arena[-30:] = 255
    damaged = blocks.Blocks(inner, frame.blocks.size, frame.blocks.sizes, arena)
    case.frames[2] = replace(frame, blocks=damaged)
    last = int(np.flatnonzero(frame.blocks.sizes)[-1])
    with pytest.raises(DamagedObject, match=f"frame 2, block {last}: damaged {inner} block"):
        case.update(inner)
    assert case.holds(case.old)


def test_memory_beside_the_weights_is_bounded() -> None:
    case = Case("snappy", device="cuda")
    update = case.update("snappy", slot_bytes=BLOCK_BYTES)
    frame = max(f.blocks.size for f in case.frames)
    assert update.device_bytes <= 4.5 * (frame + BLOCK_BYTES)
    assert update.pinned_bytes >= sum(len(f.blocks.arena) for f in case.frames)
