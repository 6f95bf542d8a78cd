"""Many frames decoded at once are the frames decoded one by one, or none at all."""

from typing import Any

import numpy as np
import pytest
from batch_laws import a_wrong_size_is_refused, no_damaged_byte_passes
from chunking import WIDTHS, change, count_of, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import batch, sparse
from weightdelta.codecs.names import Values
from weightdelta.kernels import cpu_ops
from weightdelta.kernels.planes import CHUNK, Chunks, Planes


def _joined(tables: list[Chunks]) -> tuple[Chunks, Any]:
    columns = (np.concatenate([getattr(t, n) for t in tables]) for n in Chunks.__slots__)
    return Chunks(*columns), np.cumsum([0, *(len(t) for t in tables)])


class _Frames:
    """Encoded frames in one piece of memory, with something before and between them."""

    def __init__(
        self, sizes: list[int], densities: list[float], width: int, values: Values
    ) -> None:
        self.width, self.values = width, values
        tables, planes, data, starts, table = [], [], b"???", [], []
        for seed, (size, density) in enumerate(zip(sizes, densities, strict=True)):
            chunks = segments([size, max(size // 3, 1)])
            old = random_elements(count_of(chunks), width=width, seed=seed)
            hit = np.flatnonzero(np.random.default_rng(seed).random(len(old)) < density)
            new = change(old, hit, seed=seed, small=seed % 2 == 0)
            found, _ = cpu_ops.encode(old, new, chunks=chunks, xor=values == "xor")
            encoded, parts = sparse.encode_frame(found, width=width, values=values)
            tables.append(chunks)
            planes.append(found)
            starts.append(len(data))
            table.append(parts)
            data += encoded
        self.planes: list[Planes] = planes
        self.chunks, self.bounds = _joined(tables)
        self.data = np.frombuffer(data, np.uint8).copy()
        self.start = np.array(starts, np.int64)
        self.sizes = np.array(table, np.uint32)

    def decode(self, changed: Any = None, memory: Any = np.empty) -> Planes | None:
        return batch.decode_frames(
            self.data,
            self.start,
            self.sizes,
            chunks=self.chunks,
            bounds=self.bounds,
            width=self.width,
            values=self.values,
            changed=changed,
            memory=lambda nbytes: memory(nbytes).view(np.uint8)[:nbytes],
        )


@given(
    frames=st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1)), min_size=1, max_size=6),
    width=st.sampled_from(WIDTHS),
    values=st.sampled_from(["diff", "xor"]),
)
def test_a_batch_is_its_frames(frames: list[Any], width: int, values: Values) -> None:
    made = _Frames([f[0] for f in frames], [f[1] for f in frames], width, values)
    found = made.decode()
    assert found is not None
    for name in Planes.__slots__:
        whole = np.concatenate([getattr(p, name) for p in made.planes])
        assert getattr(found, name).dtype == whole.dtype
        assert np.array_equal(getattr(found, name), whole), name


@given(
    frames=st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1)), min_size=1, max_size=6),
    width=st.sampled_from(WIDTHS),
    values=st.sampled_from(["diff", "xor"]),
)
def test_encoding_a_batch_makes_the_same_bytes(
    frames: list[Any], width: int, values: Values
) -> None:
    made = _Frames([f[0] for f in frames], [f[1] for f in frames], width, values)
    found = batch.encode_frames(made.planes, width=width, values=values)
    assert found is not None
    for (data, sizes), planes in zip(found, made.planes, strict=True):
        whole, parts = sparse.encode_frame(planes, width=width, values=values)
        assert (data, sizes.dtype, sizes.tolist()) == (whole, parts.dtype, parts.tolist())


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_large_frames_fill_several_buffers(values: Values) -> None:
    made = _Frames([20 * CHUNK, 9 * CHUNK, 3], [0.3, 0.9, 0.0], 2, values)
    found = made.decode()
    assert found is not None
    assert np.array_equal(found.values, np.concatenate([p.values for p in made.planes]))
    encoded = batch.encode_frames(made.planes, width=2, values=values)
    assert encoded is not None
    assert b"".join(data for data, _ in encoded) == made.data[3:].tobytes()


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_no_damaged_byte_passes(values: Values) -> None:
    no_damaged_byte_passes(_Frames([700, 900], [0.1, 0.5], 2, values))


@pytest.mark.parametrize("slot", range(15))
def test_a_wrong_size_is_refused(slot: int) -> None:
    a_wrong_size_is_refused(_Frames([700, 900], [0.1, 0.5], 2, "diff"), slot)


@pytest.mark.parametrize("step", [-1, 1])
def test_another_number_of_changes_is_refused_before_memory_is_taken(step: int) -> None:
    made = _Frames([700, 900], [0.1, 0.5], 2, "diff")
    changed = np.array([p.changed for p in made.planes], np.int64)
    assert made.decode(changed) is not None
    changed[0] += step
    with_memory: list[int] = []

    def memory(nbytes: int) -> Any:
        with_memory.append(nbytes)
        return np.empty(nbytes, np.uint8)

    assert made.decode(changed, memory) is None
    assert not with_memory


@pytest.mark.parametrize("extra", [b"\0", b"\x28\xb5\x2f\xfd\x24\x00\x01\x00\x00", b"x" * 40])
def test_nothing_may_lie_behind_a_plane(extra: bytes) -> None:
    """Zstd itself says nothing of it when it decompresses many at once."""
    made = _Frames([700, 900], [0.1, 0.5], 2, "diff")
    whole, sizes = made.data.tobytes(), made.sizes.copy()
    for slot in np.flatnonzero(sizes[1]):
        end = int(made.start[1] + sizes[1, : slot + 1].sum())
        made.data = np.frombuffer(whole[:end] + extra + whole[end:], np.uint8)
        made.sizes[1, slot] += len(extra)
        assert made.decode() is None
        made.sizes = sizes.copy()


def test_a_plane_cut_to_any_length_is_refused() -> None:
    made = _Frames([900], [0.5], 2, "diff")
    whole, sizes = made.data.tobytes(), made.sizes.copy()
    for slot in np.flatnonzero(sizes[0]):
        end = int(made.start[0] + sizes[0, : slot + 1].sum())
        for gone in range(1, int(sizes[0, slot])):
            made.data = np.frombuffer(whole[: end - gone] + whole[end:], np.uint8)
            made.sizes[0, slot] = sizes[0, slot] - gone
            assert made.decode() is None
        made.sizes = sizes.copy()
