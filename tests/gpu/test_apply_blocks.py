"""Raw blocks into resident weights: streamed through two slots, all or none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_laws import INNERS
from chunking import random_elements, segments
from device_laws import put

from weightdelta.apply_blocks import BlockApply
from weightdelta.codecs import blocks
from weightdelta.codecs.stock import Inner
from weightdelta.errors import DamagedObject, NotPrepared, StateMismatch
from weightdelta.kernels import ops
from weightdelta.kernels.planes import BLOCK_BYTES, Elements
from weightdelta.pieces import MaskFrame

pytestmark = pytest.mark.gpu

SHARES = (0.0008, 0.3, 0.02, 0, 1, 0.004, 0.0002)


class Case:
    """Tensors of widths 2, 1 and 2 on the device, and a frame for each part of each."""

    def __init__(self, inner: Inner, *, run: int | None = None) -> None:
        self.old = [random_elements(n, width=w, seed=w) for n, w in ((900_001, 2), (400_000, 1))]
        self.new = [values.copy() for values in self.old]
        self.weights = [put(values, device="cuda", shift=values.itemsize) for values in self.old]
        self.frames: list[MaskFrame] = []
        for tensor, values in enumerate(self.old):
            size = -(-len(values) // 4)
            for part in range(4):
                count = min(size, len(values) - part * size)
                self._frame(tensor, part * size, count, inner=inner, run=run)

    def _frame(self, tensor: int, first: int, count: int, *, inner: Inner, run: int | None) -> None:
        width = self.old[tensor].itemsize
        chunks = segments([count], key=77 + tensor + first, run=run, stride=run)
        mask = random_elements(count, width=width, seed=len(self.frames))
        share = SHARES[len(self.frames) % len(SHARES)]
        mask[np.random.default_rng(first).random(count) >= share] = 0
        self.new[tensor][first : first + count] ^= mask
        planes, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
        packed = blocks.pack(planes, inner=inner, chunks=chunks, width=width)
        many = len(chunks)
        self.frames.append(
            MaskFrame(
                packed,
                width,
                chunks,
                address=np.full(many, self.weights[tensor].data_ptr()),
                first=np.full(many, first),
                tensor=np.full(many, tensor, np.int32),
                where=f"frame {len(self.frames)}",
            )
        )

    def update(self, inner: Inner, *, slot_bytes: int = 1 << 19) -> BlockApply:
        """An update of all frames."""
        return BlockApply(self.frames, inner=inner, tensors=2, device="cuda", slot_bytes=slot_bytes)

    def holds(self, wanted: list[Elements]) -> bool:
        """Whether the weights are these, bit for bit."""
        found = [w.view(torch.uint8).cpu().numpy().tobytes() for w in self.weights]
        return found == [values.tobytes() for values in wanted]

    def digests(self) -> list[int]:
        """Digest change of each tensor."""
        found = []
        for tensor, (old, new) in enumerate(zip(self.old, self.new, strict=True)):
            size = len(old)
            sums = [
                ops().digest(v, key=77 + tensor, skip=0, run=size, stride=size) for v in (old, new)
            ]
            found.append((sums[1] - sums[0]) % 2**64)
        return found


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("slot_bytes", [1, 1 << 19, 1 << 27])
def test_weights_change_bit_for_bit_and_back(inner: Inner, slot_bytes: int) -> None:
    case = Case(inner)
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
    case = Case(inner, run=1000)
    update = case.update(inner)
    assert update.dry_run().tolist() == case.digests()
    update.apply()
    assert case.holds(case.new)


def test_weights_edited_after_the_dry_run_are_found() -> None:
    case = Case("snappy")
    update = case.update("snappy")
    update.dry_run()
    where = int(np.flatnonzero(case.old[1] != case.new[1])[-1])
    case.weights[1][where] ^= 1
    case.old[1][where] ^= 1
    with pytest.raises(StateMismatch, match="Nothing was changed"):
        update.apply()
    assert case.holds(case.old)
    with pytest.raises(StateMismatch, match="Nothing was changed"):
        update.undo()


def test_apply_needs_a_dry_run() -> None:
    case = Case("lz4")
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
    case = Case(inner)
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
    case = Case(inner)
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
    case = Case("snappy")
    update = case.update("snappy", slot_bytes=BLOCK_BYTES)
    frame = max(f.blocks.size for f in case.frames)
    assert update.device_bytes <= 4.5 * (frame + BLOCK_BYTES)
    assert update.pinned_bytes >= sum(len(f.blocks.arena) for f in case.frames)
