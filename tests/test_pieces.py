"""Pieces of masks: each byte of a changed block goes where its element lies."""

import numpy as np
import pytest
from chunking import random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import blocks
from weightdelta.kernels import cpu_pieces, ops
from weightdelta.kernels.planes import BLOCK_BYTES, Chunks
from weightdelta.pieces import MaskFrame, _cut, grouped, pieces_of, room_of, whole


def frame(chunks: Chunks, *, width: int, share: float, seed: int = 0) -> MaskFrame:
    count = int(chunks.length.sum())
    mask = random_elements(count, width=width, seed=seed)
    mask[np.random.default_rng(seed).random(count) >= share] = 0
    planes, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
    many = len(chunks)
    return MaskFrame(
        blocks.pack(planes, inner="lz4", chunks=chunks, width=width),
        width,
        chunks,
        address=(1 << 40) * (1 + np.arange(many)),
        first=np.arange(many) * 1000,
        tensor=np.arange(many, dtype=np.int32),
        where=f"frame {seed}",
    )


@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=3),
    width=st.sampled_from([1, 2, 4, 8]),
    run=st.sampled_from([None, 1000, 65_536]),
    share=st.sampled_from([0.00002, 0.01]),
)
def test_every_byte_of_a_changed_block_has_its_place(
    sizes: list[int], width: int, run: int | None, share: float
) -> None:
    chunks = segments(sizes, run=run, stride=run and run + 13)
    made = frame(chunks, width=width, share=share)
    pieces, count = pieces_of(made), made.blocks.size // width
    found = np.zeros((2, count), np.uint64)
    for i in range(len(pieces.begin)):
        assert 0 < pieces.size[i] <= BLOCK_BYTES
        k = np.arange(pieces.size[i] // width)
        part = found[:, pieces.begin[i] // width + k]
        assert not part.any(), "a place has two pieces"
        part = pieces.address[i] + k * width, pieces.key[i] + k.astype(np.uint64)
        found[:, pieces.begin[i] // width + k] = part
    wanted = np.zeros_like(found)
    for c in range(len(chunks)):
        q = chunks.skip[c] + np.arange(chunks.length[c])
        index = q // chunks.run[c] * chunks.stride[c] + q % chunks.run[c]
        address = made.address[c] + (made.first[c] + index) * width
        at = slice(int(chunks.start[c]), int(chunks.start[c] + chunks.length[c]))
        wanted[:, at] = address, chunks.key[c] + index.astype(np.uint64)
    changed = made.blocks.sizes[np.arange(count) * width // BLOCK_BYTES] > 0
    assert np.array_equal(found, np.where(changed, wanted, 0))


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    run=st.none() | st.integers(1, 3000),
    skip=st.integers(0, 4000),
    block=st.sampled_from([16, 1024, 65_536]),
    data=st.data(),
)
def test_compiled_cuts_are_those_of_numpy(
    sizes: list[int], run: int | None, skip: int, block: int, data: st.DataObject
) -> None:
    """Chunks may begin in the middle of a row, and end in another."""
    chunks = segments(sizes, run=run, stride=run and run + 13)
    chunks.skip[:] += skip
    count = -(-sum(sizes) // block)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    found = cpu_pieces.cut(chunks, kept=kept, block=block)
    for mine, other in zip(found, _cut(chunks, kept, block), strict=True):
        assert mine.tolist() == other.tolist()


def test_pieces_name_their_tensor() -> None:
    made = frame(segments([70_000, 300]), width=1, share=0.01)
    assert np.unique(pieces_of(made).tensor).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("slot", "wanted"), [(1, [1, 1, 1, 1]), (1 << 20, [3, 1])])
def test_groups_hold_frames_of_one_width_that_fit(slot: int, wanted: list[int]) -> None:
    """A frame larger than a slot has one of its own."""
    made = [frame(segments([100_000]), width=2, share=0.01, seed=i) for i in range(3)]
    made.append(frame(segments([100]), width=4, share=0.5))
    found = grouped(made, slot)
    assert [len(group) for group in found] == wanted
    assert [f.where for group in found for f in group] == [f.where for f in made]


def test_room_of_blocks_and_masks() -> None:
    made = frame(segments([100_000]), width=2, share=0.01)
    assert whole(made.blocks.size) == 4 * BLOCK_BYTES
    assert room_of([made, made]) % 32 == 0
    assert room_of([made]) >= len(made.blocks.arena)
