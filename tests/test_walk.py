"""Blocks are walked before a device sees them: no decoder's good block is refused."""

import cramjam
import numpy as np
import pytest
from chunking import random_elements
from hypothesis import given
from hypothesis import strategies as st
from test_zero_runs import INNERS, by_cramjam, stock, zero_runs

from weightdelta.codecs.blocks import Blocks
from weightdelta.codecs.stock import Inner
from weightdelta.codecs.transcode import ALIGN, staged
from weightdelta.kernels.cpu_walk import lay_out, unsound


def first_unsound(blocks: list[bytes], lengths: list[int], inner: Inner) -> int:
    arena = np.frombuffer(b"".join(blocks), np.uint8)
    sizes = np.array([len(b) for b in blocks], np.uint32)
    return unsound(arena, sizes, lengths=np.array(lengths), lz4=inner == "lz4")


def mask_of(size: int, share: float, *, seed: int) -> bytes:
    mask = random_elements(size, width=1, seed=seed)
    mask[np.random.default_rng(seed).random(size) >= share] = 0
    return mask.tobytes()


@given(
    size=st.one_of(st.integers(1, 80), st.integers(1, 65_536)),
    share=st.sampled_from([0, 0.001, 0.02, 0.5, 1]),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 99),
)
def test_blocks_of_all_encoders_are_sound(size: int, share: float, inner: Inner, seed: int) -> None:
    mask = mask_of(size, share, seed=seed)
    ours, _ = zero_runs(np.frombuffer(mask, np.uint8), lz4=inner == "lz4")
    for block in (ours, *stock(mask, inner)):
        assert first_unsound([block, b"", block], [size, 7, size], inner) == -1
        assert first_unsound([block, block], [size, size + 1], inner) == 1
        assert first_unsound([block[:-1], block], [size, size], inner) == 0


def strict_lz4(block: bytes) -> bytes | None:
    """An LZ4 block by the book, but without the book's rules for its end; None if damaged.

    The stock decoder takes an offset of 0, and refuses late matches.
    """
    out, at = bytearray(), 0

    def length(count: int, at: int) -> tuple[int, int]:
        while count >= 15:
            count += block[at]
            at += 1
            if block[at - 1] < 255:
                break
        return count, at

    try:
        while True:
            token = block[at]
            count, at = length(token >> 4, at + 1)
            if at + count > len(block):
                return None
            out += block[at : at + count]
            at += count
            if at == len(block):
                return bytes(out)
            offset = block[at] | block[at + 1] << 8
            count, at = length(token & 15, at + 2)
            if not 1 <= offset <= len(out):
                return None
            for _ in range(count + 4):
                out.append(out[-offset])
    except IndexError:
        return None


@given(
    data=st.data(),
    size=st.integers(1, 600),
    share=st.sampled_from([0.02, 0.3]),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 99),
)
def test_sound_is_what_a_careful_decoder_takes(
    data: st.DataObject, size: int, share: float, inner: Inner, seed: int
) -> None:
    block = bytearray(stock(mask_of(size, share, seed=seed), inner)[0])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(block) - 1))
        block[at] = data.draw(st.integers(0, 255))
    try:
        found = by_cramjam(bytes(block), size, inner) if inner == "snappy" else strict_lz4(block)
    except cramjam.DecompressionError:
        found = None
    taken = found is not None and len(found) == size
    assert (first_unsound([bytes(block)], [size], inner) == -1) == taken


@pytest.mark.parametrize(
    ("inner", "block", "length"),
    [
        ("snappy", "04 0C 01", 4),  # a literal that goes on past the end
        ("snappy", "08 00 01 0D 02", 8),  # a copy from before the beginning
        ("snappy", "08 00 01 0D 00", 8),  # a copy from nowhere
        ("snappy", "02 04 01 02 00 03", 2),  # more than it says
        ("snappy", "FF FF FF FF FF 01", 2),  # a size without end
        ("snappy", "F4", 1),
        ("lz4", "50 01 02", 5),
        ("lz4", "F0 FF", 300),
        ("lz4", "14 01 02 00 00", 9),
        ("lz4", "14 01 00 00 00", 9),
        ("lz4", "14 01 01", 9),
        ("lz4", "14 01 01 00", 9),  # no last literal
    ],
)
def test_damage_by_hand(inner: Inner, block: str, length: int) -> None:
    assert first_unsound([bytes.fromhex(block)], [length], inner) == 0


def test_blocks_are_laid_out_as_a_device_takes_them() -> None:
    """As ``transcode.staged`` has them, in memory of the caller's."""
    sizes = np.array([5, 0, 16, 33, 0, 1], np.uint32)
    arena = random_elements(int(sizes.sum()), width=1, seed=1)
    wanted = staged(Blocks("lz4", 6 * 65_536, sizes, arena)).buffer
    out = np.full(len(wanted) + 9, 7, np.uint8)
    assert lay_out(arena, sizes, align=ALIGN, out=out) == len(wanted)
    out[: len(wanted)][wanted == 0] = 0  # what lies between blocks is anything
    assert out.tobytes() == wanted.tobytes() + b"\7" * 9
