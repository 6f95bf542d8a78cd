"""Raw blocks: what we write is read by every decoder, and what others write is read by us."""

import itertools

import cramjam
import numpy as np
import pyarrow as pa
import pytest
from chunking import WIDTHS, random_elements
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import blocks
from weightdelta.codecs.blocks import Inner, unpack
from weightdelta.errors import DamagedObject
from weightdelta.kernels import Ops, cpu_ops, reference
from weightdelta.kernels.planes import BLOCK_BYTES, Elements

INNERS: tuple[Inner, ...] = ("snappy", "lz4")
KERNELS: tuple[Ops, ...] = (reference, cpu_ops)


def by_cramjam(block: bytes, size: int, inner: Inner) -> bytes:
    if inner == "snappy":
        return bytes(cramjam.snappy.decompress_raw(block))
    return bytes(cramjam.lz4.decompress_block(block, output_len=size))


def by_pyarrow(block: bytes, size: int, inner: Inner) -> bytes:
    codec = pa.Codec("snappy" if inner == "snappy" else "lz4_raw")
    return bytes(codec.decompress(block, decompressed_size=size, asbytes=True))


def by_us(block: bytes, size: int, inner: Inner) -> bytes:
    out = np.full(size, 255, np.uint8)
    found = blocks.Blocks(
        inner, size, np.array([len(block)], np.uint32), np.frombuffer(block, np.uint8)
    )
    unpack(found, out=out, where="block")
    return out.tobytes()


def stock(mask: bytes, inner: Inner) -> list[bytes]:
    """Both libraries' own blocks."""
    if inner == "snappy":
        return [bytes(cramjam.snappy.compress_raw(mask)), pa.Codec("snappy").compress(mask, True)]
    found = cramjam.lz4.compress_block(mask, store_size=False)
    return [bytes(found), pa.Codec("lz4_raw").compress(mask, True)]


def zero_runs(mask: Elements, *, lz4: bool, kernels: Ops = cpu_ops) -> tuple[bytes, list[int]]:
    offsets = np.flatnonzero(mask).astype(np.uint32)
    numbers = np.arange(-(-mask.nbytes // BLOCK_BYTES))
    arena, sizes = kernels.zero_runs(
        offsets, mask[offsets], blocks=numbers, size=mask.nbytes, lz4=lz4
    )
    return arena.tobytes(), sizes.tolist()


def check_blocks(mask: Elements, inner: Inner) -> None:
    """Zero-run blocks of both kernels are equal, and every decoder reads them."""
    arena, sizes = zero_runs(mask, lz4=inner == "lz4")
    assert zero_runs(mask, lz4=inner == "lz4", kernels=reference) == (arena, sizes)
    raw, at = mask.tobytes(), 0
    for number, size in enumerate(sizes):
        wanted = raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        block = arena[at : at + size]
        assert by_cramjam(block, len(wanted), inner) == wanted
        assert by_pyarrow(block, len(wanted), inner) == wanted
        assert size <= blocks.stock.most(len(wanted), inner=inner)
        at += size
    assert at == len(arena)


@given(
    size=st.one_of(st.integers(1, 80), st.integers(1, 70_000)),
    width=st.sampled_from(WIDTHS),
    density=st.sampled_from([0, 0.0003, 0.01, 0.16, 0.5, 1]),
    small=st.booleans(),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 999),
)
def test_zero_run_blocks_are_read_by_all(
    size: int, width: int, density: float, small: bool, inner: Inner, seed: int
) -> None:
    """Of every density, though only sparse ones are written so."""
    mask = random_elements(size, width=width, seed=seed)
    if small:
        mask &= mask.dtype.type(7)
    mask[np.random.default_rng(seed).random(size) >= density] = 0
    check_blocks(mask, inner)


#: inner, mask, block: where a stretch of zeros is just long enough, or just too short.
VECTORS: tuple[tuple[Inner, str, str], ...] = (
    ("snappy", "01 0000000000 02", "07 04 01 00 01 01 00 02"),
    ("snappy", "01 00000000 02", "06 14 01 00000000 02"),
    ("snappy", "01 0000000000", "06 04 01 00 01 01"),
    ("snappy", "00" * 13, "0D 00 00 2E 01 00"),
    ("lz4", "00" * 13, "13 00 01 00 50 0000000000"),
    ("lz4", "00" * 12, "C0" + "00" * 12),
    ("lz4", "01 0000000000 02" + "00" * 5, "C0 01 0000000000 02" + "00" * 5),
    ("lz4", "01 0000000000 02" + "03" * 7, "20 01 00 01 00 80 02" + "03" * 7),
    ("lz4", "01" * 7 + "00" * 9 + "02" * 6, "84" + "01" * 7 + "00 01 00" + "60" + "02" * 6),
)


@pytest.mark.parametrize(("inner", "mask", "block"), VECTORS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_fixed_vectors(kernels: Ops, inner: Inner, mask: str, block: str) -> None:
    elements = np.frombuffer(bytes.fromhex(mask), np.uint8)
    arena, _ = zero_runs(elements, lz4=inner == "lz4", kernels=kernels)
    assert arena == bytes.fromhex(block)
    assert by_pyarrow(arena, len(elements), inner) == elements.tobytes()


@pytest.mark.parametrize("inner", INNERS)
def test_every_place_of_two_changes_in_a_short_block(inner: Inner) -> None:
    """The rules for the ends of stretches and blocks, at every distance."""
    for size in (1, 5, 12, 13, 14, 17, 18, 19, 31):
        for first, second in itertools.combinations_with_replacement(range(size), 2):
            mask = np.zeros(size, np.uint8)
            mask[[first, second]] = 1, 2
            check_blocks(mask, inner)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("run", [*range(1, 22), 59, 60, 61, 64, 65, 68, 75, 255, 256, 257, 5000])
def test_every_length_of_literal_and_copy(run: int, inner: Inner) -> None:
    mask = np.zeros(2 * run + 40, np.uint8)
    mask[10 : 10 + run] = 1 + np.arange(run) % 255
    mask[10 + 2 * run] = 9
    check_blocks(mask, inner)


@given(
    size=st.integers(1, 3000),
    kind=st.sampled_from(["zeros", "sparse", "dense", "noise"]),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 99),
)
def test_we_read_the_blocks_of_all(size: int, kind: str, inner: Inner, seed: int) -> None:
    mask = random_elements(size, width=1, seed=seed)
    share = {"zeros": 0, "sparse": 0.02, "dense": 0.5, "noise": 1}[kind]
    mask[np.random.default_rng(seed).random(size) >= share] = 0
    raw = mask.tobytes()
    for block in stock(raw, inner):
        if any(raw):
            assert by_us(block, size, inner) == raw
            continue
        with pytest.raises(DamagedObject, match="all zero"):
            by_us(block, size, inner)


def test_what_the_two_kernels_write_does_not_depend_on_the_choice_of_blocks() -> None:
    mask = np.zeros(3 * BLOCK_BYTES // 2, np.uint16)
    mask[::977] = 3
    offsets = np.flatnonzero(mask).astype(np.uint32)
    for kernels, lz4 in itertools.product(KERNELS, (False, True)):
        whole, sizes = zero_runs(mask, lz4=lz4, kernels=kernels)
        arena, found = kernels.zero_runs(
            offsets, mask[offsets], blocks=np.array([0, 2]), size=mask.nbytes, lz4=lz4
        )
        assert found.tolist() == [sizes[0], sizes[2]]
        assert arena.tobytes() == whole[: sizes[0]] + whole[sizes[0] + sizes[1] :]
