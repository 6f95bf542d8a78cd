"""Many frames of blocks decoded at once are the frames decoded one by one, or none at all."""

from typing import Any, Final

import numpy as np
import pytest
from batch_laws import a_wrong_size_is_refused, no_damaged_byte_passes
from chunking import WIDTHS, change, count_of, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import batch, blocks
from weightdelta.codecs.names import Codec
from weightdelta.kernels import cpu_ops
from weightdelta.kernels.planes import GAP_FACTOR, Chunks, Planes

CODECS: Final[tuple[Codec, ...]] = ("snappy+zstd", "lz4+zstd")


class _Frames:
    """Encoded frames in one piece of memory, with something before them."""

    def __init__(self, sizes: list[int], density: float, width: int, codec: Codec) -> None:
        self.width, self.inner = width, blocks.INNER[codec]
        tables, data, table, starts = [], b"???", [], []
        self.planes: list[Planes] = []
        for seed, size in enumerate(sizes):
            chunks = segments([size, max(size // 3, 1)])
            old = random_elements(count_of(chunks), width=width, seed=seed)
            hit = np.flatnonzero(np.random.default_rng(seed).random(len(old)) < density)
            new = change(old, np.r_[hit, 0], seed=seed)
            found, _ = cpu_ops.encode(old, new, chunks=chunks, xor=True)
            encoded, parts = blocks.encode_frame(found, codec=codec, chunks=chunks, width=width)
            tables.append(chunks)
            self.planes.append(found)
            starts.append(len(data))
            table.append(parts)
            data += encoded
        columns = (np.concatenate([getattr(t, n) for t in tables]) for n in Chunks.__slots__)
        self.chunks = Chunks(*columns)
        self.bounds = np.cumsum([0, *(len(t) for t in tables)])
        self.data, self.start = np.frombuffer(data, np.uint8).copy(), np.array(starts, np.int64)
        self.sizes = np.array(table, np.uint32)
        self.changed = np.array([p.changed for p in self.planes], np.int64)

    def decode(self) -> Planes | None:
        return batch.decode_block_frames(
            self.data, self.start, self.sizes, inner=self.inner, chunks=self.chunks,
            bounds=self.bounds, width=self.width, changed=self.changed,
            memory=lambda nbytes: np.full(nbytes, 7, np.uint8),
        )  # fmt: skip


@given(
    sizes=st.lists(st.integers(1, 3000) | st.just(70_000), min_size=1, max_size=4),
    density=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3]),
    width=st.sampled_from(WIDTHS),
    codec=st.sampled_from(CODECS),
)
def test_a_batch_is_its_frames(sizes: list[int], density: float, width: int, codec: Codec) -> None:
    made = _Frames(sizes, density, width, codec)
    numel = np.add.reduceat(made.chunks.length, made.bounds[:-1])
    found = made.decode()
    if (GAP_FACTOR * made.changed > numel).any():
        assert found is None
        return
    assert found is not None
    for name in Planes.__slots__:
        whole = np.concatenate([getattr(p, name) for p in made.planes])
        assert getattr(found, name).dtype == whole.dtype
        assert np.array_equal(getattr(found, name), whole), name


@pytest.mark.parametrize("codec", CODECS)
def test_frames_of_many_pieces(codec: Codec) -> None:
    """More than 64 blocks, and more than eight times as many."""
    made = _Frames([600 * 65536 // 8, 70 * 65536 // 8, 9], 0.001, 8, codec)
    found = made.decode()
    assert found is not None
    assert np.array_equal(found.values, np.concatenate([p.values for p in made.planes]))
    assert np.array_equal(found.gaps, np.concatenate([p.gaps for p in made.planes]))


@pytest.mark.parametrize("codec", CODECS)
def test_no_damaged_byte_passes(codec: Codec) -> None:
    no_damaged_byte_passes(_Frames([700, 900], 0.05, 2, codec))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("slot", range(15))
def test_a_wrong_size_is_refused(slot: int, codec: Codec) -> None:
    a_wrong_size_is_refused(_Frames([700, 900], 0.05, 2, codec), slot)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("step", [-1, 1])
def test_another_number_of_changes_is_refused(step: int, codec: Codec) -> None:
    made = _Frames([700, 900], 0.05, 2, codec)
    made.changed[1] += step
    assert made.decode() is None


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_missing_or_cut_short_is_refused(codec: Codec) -> None:
    made = _Frames([700, 900], 0.05, 2, codec)
    whole: Any = made.data
    for end in range(3, len(whole)):
        made.data = whole[:end]
        assert made.decode() is None
