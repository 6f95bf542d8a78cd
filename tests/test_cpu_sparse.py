"""Raw blocks straight to changes: the same as decoding the mask, and the same refusals."""

from typing import Any

import numpy as np
import pytest
from block_laws import INNERS
from chunking import WIDTHS, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import stock
from weightdelta.codecs.blocks import Blocks, block_lengths, unpack
from weightdelta.codecs.stock import Inner
from weightdelta.errors import DamagedObject
from weightdelta.kernels import ops, reference
from weightdelta.kernels.cpu_sparse import changes_of, planes_of
from weightdelta.kernels.cpu_walk import unsound
from weightdelta.kernels.planes import BLOCK_BYTES, CHUNK, UINTS, Elements

SHARES = (0.0, 0.0005, 0.02, 0.3, 1.0)


def a_mask(size: int, *, width: int, share: float, seed: int) -> Elements:
    """Elements of which about ``share`` are not zero; some have zero bytes, some repeat."""
    rng = np.random.default_rng(seed)
    mask = random_elements(size, width=width, seed=seed)
    mask[rng.random(size) < 0.5] &= mask.dtype.type(0xF0)
    mask[rng.random(size) < 0.2] = mask.dtype.type(1)
    mask[rng.random(size) >= share] = 0
    return mask


def packed(mask: Elements, inner: Inner, *, ours: bool) -> Blocks:
    """A mask's blocks, by our encoder or by a stock one."""
    raw = mask.view(np.uint8)
    cuts = [raw[at : at + BLOCK_BYTES] for at in range(0, len(raw), BLOCK_BYTES)]
    if ours:
        offsets = np.flatnonzero(mask).astype(np.uint32)
        arena, sizes = reference.zero_runs(
            offsets,
            mask[offsets],
            blocks=np.arange(len(cuts)),
            size=len(raw),
            lz4=inner == "lz4",
        )
        sizes[[not cut.any() for cut in cuts]] = 0
        return Blocks(inner, len(raw), sizes, arena)
    parts = [stock.compress(c, inner=inner) if c.any() else np.empty(0, np.uint8) for c in cuts]
    sizes = np.array([len(part) for part in parts], np.uint32)
    return Blocks(inner, len(raw), sizes, np.concatenate([np.empty(0, np.uint8), *parts]))


def found_in(blocks: Blocks, *, width: int, most: int = 1 << 30) -> Any:
    """What the kernel finds."""
    return changes_of(
        blocks.arena,
        blocks.sizes,
        lengths=block_lengths(blocks.size),
        lz4=blocks.inner == "lz4",
        width=width,
        most=most,
    )


def decoded(blocks: Blocks, *, width: int) -> Elements | None:
    """The mask as the plain decoder gives it, or None where it refuses a block."""
    out = np.empty(blocks.size, np.uint8)
    try:
        unpack(blocks, out=out, where="a test")
    except DamagedObject:
        return None
    return out.view(UINTS[width])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("ours", [True, False])
def test_changes_and_planes_are_those_of_the_mask(
    width: int, inner: Inner, share: float, ours: bool
) -> None:
    """Also where changes are so many that room for them has to be made again."""
    chunks = segments([CHUNK + 33, 7, 0, 2 * CHUNK, 641, CHUNK - 1])
    mask = a_mask(int(chunks.length.sum()), width=width, share=share, seed=width)
    blocks = packed(mask, inner, ours=ours)
    index, values = found_in(blocks, width=width)
    assert index.tolist() == np.flatnonzero(mask).tolist()
    assert values.tolist() == mask[mask != 0].tolist()
    planes = planes_of(index, values, chunks=chunks)
    wanted, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
    assert planes is not None
    for name in ("counts", "gaps", "bitmap", "values"):
        one, other = getattr(planes, name), getattr(wanted, name)
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist()), name


@given(
    width=st.sampled_from(WIDTHS),
    inner=st.sampled_from(INNERS),
    share=st.sampled_from(SHARES[1:4]),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 3),
    ours=st.booleans(),
    seed=st.integers(0, 99),
)
def test_damage_is_refused_or_leads_to_the_same_mask(
    width: int,
    inner: Inner,
    share: float,
    edits: list[tuple[float, int]],
    cut: int,
    ours: bool,
    seed: int,
) -> None:
    """Never another mask, never a byte outside; the call after it starts from zeros again."""
    mask = a_mask((BLOCK_BYTES + 1000) // width, width=width, share=share, seed=seed)
    good = packed(mask, inner, ours=ours)
    arena, sizes = good.arena.copy(), good.sizes.copy()
    for where, byte in edits:
        arena[int(where * (len(arena) - 1))] = byte
    if cut and sizes[-1] > cut:
        sizes[-1] -= cut
        arena = arena[:-cut]
    bad = Blocks(inner, good.size, sizes, arena)
    found, wanted = found_in(bad, width=width), decoded(bad, width=width)
    if found is not None:
        assert wanted is not None, "what a plain decoder refuses is refused"
        assert found[0].tolist() == np.flatnonzero(wanted).tolist()
        assert found[1].tolist() == wanted[wanted != 0].tolist()
    index, values = found_in(good, width=width)
    assert index.tolist() == np.flatnonzero(mask).tolist()
    assert values.tolist() == mask[mask != 0].tolist()


@pytest.mark.parametrize("inner", INNERS)
def test_too_many_changes_are_left_to_a_mask(inner: Inner) -> None:
    """A few bytes may stand for a change everywhere: memory stays within the frame's."""
    ones = np.ones(40 * BLOCK_BYTES, np.uint8)
    bomb = packed(ones, inner, ours=False)
    assert len(bomb.arena) < len(ones) // 15
    assert found_in(bomb, width=1, most=len(ones) // 6) is None
    assert len(found_in(bomb, width=1, most=len(ones))[0]) == len(ones)


@pytest.mark.parametrize(
    ("inner", "block", "length"),
    [
        ("lz4", "1007010000", 5),  # a match to the end, and no literal behind it
        ("lz4", "100701001009", 6),  # one literal where five are due
        ("snappy", "01f00005", 1),  # a length of its own for one byte, and nothing behind
        ("snappy", "01f4000005", 1),
    ],
)
def test_blocks_that_end_otherwise_than_formats_say_are_refused_by_all(
    inner: Inner, block: str, length: int
) -> None:
    """Else receivers with and without compiled kernels would not agree on a version."""
    arena = np.frombuffer(bytes.fromhex(block), np.uint8)
    blocks = Blocks(inner, length, np.array([len(arena)], np.uint32), arena)
    assert decoded(blocks, width=1) is None
    assert found_in(blocks, width=1) is None
    lengths = block_lengths(length)
    assert unsound(arena, blocks.sizes, lengths=lengths, lz4=inner == "lz4") == 0


def test_zeros_that_belong_left_out_are_refused() -> None:
    zeros = np.zeros(BLOCK_BYTES, np.uint8)
    for inner in INNERS:
        block = stock.compress(zeros, inner=inner)
        blocks = Blocks(inner, BLOCK_BYTES, np.array([len(block)], np.uint32), block)
        assert found_in(blocks, width=2) is None


@pytest.mark.parametrize("inner", INNERS)
def test_blocks_outside_of_the_arena_are_refused(inner: Inner) -> None:
    """Compiled code checks no bounds."""
    good = packed(a_mask(900, width=4, share=0.3, seed=1), inner, ours=False)
    longer = Blocks(inner, good.size, good.sizes + 1, good.arena)
    assert found_in(good, width=4) is not None
    assert found_in(longer, width=4) is None


def test_changes_outside_of_all_chunks_are_refused() -> None:
    chunks = segments([100])
    index, values = np.array([3, 100], np.uint32), np.array([1, 1], np.uint16)
    assert planes_of(index, values, chunks=chunks) is None
    chunks.start[:] = 50
    assert planes_of(index[:1], values[:1], chunks=chunks) is None
    chunks.start[:] = 0
    found = planes_of(index[:1], values[:1], chunks=chunks)
    assert found is not None
    assert found.counts.tolist() == [1]
