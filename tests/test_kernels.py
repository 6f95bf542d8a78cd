"""The compiled kernels give the reference's bits; the reference obeys the laws of a delta."""

import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
from chunking import WIDTHS, Case, cases, change, count_of, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.errors import ConfigError
from weightdelta.kernels import compiled, cpu_ops, load, ops, reference
from weightdelta.kernels.planes import CHUNK, GAP_FACTOR, UINTS, Chunks, Elements, Planes

EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 251, 65521)
CHUNK_EDGES = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)
FIELDS = ("counts", "gaps", "bitmap", "values")


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


def agree(old: Elements, new: Elements, *, chunks: Chunks, xor: bool) -> Planes:
    """Encode and decode with both kernels, hold them against each other and the input."""
    planes, sums = reference.encode(old, new, chunks=chunks, xor=xor)
    compiled_planes, compiled_sums = cpu_ops.encode(old, new, chunks=chunks, xor=xor)
    for name in FIELDS:
        assert same(getattr(planes, name), getattr(compiled_planes, name)), name
    assert same(sums, compiled_sums)
    for kernels in (reference, cpu_ops):
        target = old.copy()
        assert same(kernels.decode_into(target, planes, chunks=chunks, xor=xor), sums)
        assert same(target, new)
        assert kernels.check(planes, chunks=chunks) == -1
        where = kernels.expand(planes, chunks=chunks)
        assert where.dtype == np.uint32
        assert np.array_equal(where, np.flatnonzero(old != new))
    return planes


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("xor", [False, True])
def test_sizes_around_words_and_chunks(width: int, xor: bool) -> None:
    for size in EDGES + CHUNK_EDGES:
        chunks = segments([size])
        old = random_elements(size, width=width, seed=size)
        where = np.flatnonzero(np.random.default_rng(size).random(size) < 0.05)
        agree(old, change(old, where, seed=1), chunks=chunks, xor=xor)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.0, 0.0003, 0.01, 0.15, 0.18, 0.5, 1.0])
def test_every_form_of_chunk(width: int, density: float) -> None:
    chunks = segments([CHUNK + 33, 7, 0, 3 * 641])
    old = random_elements(count_of(chunks), width=width, seed=3)
    where = np.flatnonzero(np.random.default_rng(4).random(len(old)) < density)
    for xor in (False, True):
        agree(old, change(old, where, seed=5), chunks=chunks, xor=xor)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [1, 2, 17, 64, CHUNK - 1, CHUNK, CHUNK + 1])
def test_one_change_at_each_end(width: int, size: int) -> None:
    old = random_elements(size, width=width, seed=size)
    for where in ([0], [size - 1], [0, size - 1]):
        new = change(old, np.unique(where), seed=1)
        agree(old, new, chunks=segments([size]), xor=False)


def test_form_follows_from_the_count_alone() -> None:
    n = 6 * 50
    old = np.zeros(n, np.uint16)
    for k, gaps, bits in ((0, 0, 0), (49, 49, 0), (50, 0, 38), (n - 1, 0, 38), (n, 0, 0)):
        new = old.copy()
        new[:k] = 1
        planes = agree(old, new, chunks=segments([n]), xor=False)
        assert (len(planes.gaps), len(planes.bitmap), planes.changed) == (gaps, bits, k)
        assert (k == 0) or (k == n) or (gaps > 0) == (GAP_FACTOR * k < n)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("run", "stride"), [(1, 1), (1, 5), (7, 19), (4096, 16384), (70001, 70100)]
)
def test_segments_of_rows(width: int, run: int, stride: int) -> None:
    chunks = segments([2 * 70001, 8191, 1], run=run, stride=stride)
    old = random_elements(count_of(chunks), width=width, seed=run)
    where = np.flatnonzero(np.random.default_rng(6).random(len(old)) < 0.02)
    agree(old, change(old, where, seed=7), chunks=chunks, xor=False)
    for skip in (0, 1, run - 1, run, 3 * run + 1):
        arguments = {"key": 2**64 - 3, "skip": skip, "run": run, "stride": stride}
        part = old[: 2 * run + 5]
        assert cpu_ops.digest(part, **arguments) == reference.digest(part, **arguments)


@given(case=cases(most=200))
def test_any_frame(case: Case) -> None:
    agree(case.old, case.new, chunks=case.chunks, xor=case.xor)


def test_check_finds_the_damaged_chunk() -> None:
    chunks = segments([600, 600, 600])
    old = np.zeros(1800, np.uint16)
    new = old.copy()
    new[600:1799:7] = 1
    new[1200:1797:2] = 1
    planes, _ = reference.encode(old, new, chunks=chunks, xor=False)
    wide = Planes(planes.counts, planes.gaps.copy(), planes.bitmap, planes.values)
    wide.gaps[-1] += 600
    flipped = Planes(planes.counts, planes.gaps, planes.bitmap.copy(), planes.values)
    flipped.bitmap[3] ^= 1
    moved = Planes(planes.counts, planes.gaps, np.roll(planes.bitmap, 1), planes.values)
    moved.bitmap[:] = 0
    moved.bitmap[-1] = 0xFF
    for kernels in (reference, cpu_ops):
        assert kernels.check(planes, chunks=chunks) == -1
        assert kernels.check(wide, chunks=chunks) == 1
        assert kernels.check(flipped, chunks=chunks) == 2
        assert kernels.check(moved, chunks=chunks) == 2


def test_check_refuses_bits_past_the_end() -> None:
    chunks = segments([9])
    planes = Planes(
        np.array([2], np.uint32),
        np.empty(0, np.uint16),
        np.array([1, 2], np.uint8),
        np.array([1, 1], np.uint8),
    )
    for kernels in (reference, cpu_ops):
        assert kernels.check(planes, chunks=chunks) == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 4095, 4097, 9001])
def test_dry_run_and_scatter(width: int, dtype: type, count: int) -> None:
    resident = random_elements(20_000, width=width, seed=1)
    offsets = np.flatnonzero(np.random.default_rng(2).permutation(20_000) < count).astype(dtype)
    index = offsets * dtype(3) + dtype(11)
    values = random_elements(count, width=width, seed=3)
    for xor in (False, True):
        arguments = {"seed": 2**63 + 5, "offsets": offsets, "xor": xor}
        old, new, change_ = reference.dry_run(resident, index, values, **arguments)
        old2, new2, change2 = cpu_ops.dry_run(resident, index, values, **arguments)
        assert same(old, old2)
        assert same(new, new2)
        assert change_ == change2
        for kernels in (reference, cpu_ops):
            held = resident.copy()
            assert kernels.scatter(held, offsets, expect=old, new=new) == -1
            assert same(held[offsets], new)
            assert kernels.scatter(held, offsets, expect=old, new=new) == -1
            assert same(np.delete(held, offsets), np.delete(resident, offsets))


@pytest.mark.parametrize("bad", [0, 4095, 4096, 9000])
def test_scatter_puts_everything_back_on_a_mismatch(bad: int) -> None:
    resident = random_elements(30_000, width=2, seed=1)
    offsets = np.arange(0, 30_000, 3, dtype=np.uint32)
    old, new = resident[offsets], resident[offsets] + np.uint16(5)
    resident[offsets[bad]] += np.uint16(9)
    for kernels in (reference, cpu_ops):
        held = resident.copy()
        assert kernels.scatter(held, offsets, expect=old, new=new) == bad
        assert same(held, resident)


_lists = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 3)),
    unique_by=lambda entry: entry[0],
    max_size=20,
).map(sorted)


@given(first=_lists, second=_lists, dtype=st.sampled_from([np.uint32, np.uint64]))
def test_merge_is_one_list_after_the_other(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], dtype: type
) -> None:
    expected = {i: (old, new) for i, old, new in first}
    for i, old, new in second:
        expected[i] = (expected[i][0] if i in expected else old, new)
    kept = sorted((i, o, n) for i, (o, n) in expected.items() if o != n)
    left = [np.array([e[c] for e in first], t) for c, t in enumerate((dtype, "u2", "u2"))]
    right = [np.array([e[c] for e in second], t) for c, t in enumerate((dtype, "u2", "u2"))]
    for kernels in (reference, cpu_ops):
        merged = kernels.merge(*left, index2=right[0], old2=right[1], new2=right[2])
        assert [column.dtype for column in merged] == [dtype, np.uint16, np.uint16]
        assert list(zip(*(column.tolist() for column in merged), strict=True)) == kept


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4095, 4096, 4097, 9001])
@pytest.mark.parametrize("small", [False, True])
def test_nibbles_and_byte_planes(width: int, count: int, small: bool) -> None:
    zeros = np.zeros(count, UINTS[width])
    values = change(zeros, np.arange(count), seed=count, small=small)
    nibbles, escapes = reference.pack_nibbles(values)
    assert all(map(same, cpu_ops.pack_nibbles(values), (nibbles, escapes)))
    assert all(map(same, cpu_ops.split(values), reference.split(values)))
    for kernels in (reference, cpu_ops):
        assert kernels.count_escapes(nibbles, count=count) == len(escapes)
        assert same(kernels.unpack_nibbles(nibbles, escapes, count=count), values)
        assert same(kernels.join(kernels.split(values), width=width, count=count), values)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_end_of_the_difference_range(width: int) -> None:
    top = 2 ** (8 * width - 1)
    values = [1, -1, 2, -2, 7, 8, -7, -8, 9, -9, top - 1, -top]
    array = np.array([v % 2 ** (8 * width) for v in values], UINTS[width])
    zigzag = [2 * v if v > 0 else -2 * v - 1 for v in values]
    for kernels in (reference, cpu_ops):
        nibbles, escapes = kernels.pack_nibbles(array)
        assert escapes.tolist() == [z - 1 for z in zigzag if z > 15]
        halves = [h for b in nibbles.tolist() for h in (b & 15, b >> 4)]
        assert halves == [min(z - 1, 15) for z in zigzag]
        assert same(kernels.unpack_nibbles(nibbles, escapes, count=len(values)), array)


def test_padding_of_the_last_nibble_is_checked() -> None:
    for kernels in (reference, cpu_ops):
        assert kernels.count_escapes(np.array([0x1F], np.uint8), count=1) == -1
        assert kernels.count_escapes(np.array([0x0F], np.uint8), count=1) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_join_takes_missing_planes_as_zeros(width: int) -> None:
    plane = np.arange(5, dtype=np.uint8)
    for slot in range(width):
        planes = [plane if i == slot else None for i in range(width)]
        for kernels in (reference, cpu_ops):
            joined = kernels.join(planes, width=width, count=5)
            assert joined.tolist() == [v << (8 * slot) for v in range(5)]


def test_read_only_and_unaligned_weights() -> None:
    old = random_elements(5000, width=2, seed=1)
    new = change(old, np.arange(0, 5000, 9), seed=2)
    frozen = np.frombuffer(b"x" + old.tobytes(), np.uint8)[1:].view(np.uint16)
    assert not frozen.flags.writeable
    assert not frozen.flags.aligned
    agree(frozen, new, chunks=segments([5000]), xor=False)


def test_threads_do_not_share_scratch() -> None:
    chunks = segments([3 * CHUNK])
    olds = [random_elements(3 * CHUNK, width=2, seed=s) for s in range(4)]
    news = [change(old, np.arange(s, 3 * CHUNK, 11), seed=s) for s, old in enumerate(olds)]
    wanted = [
        cpu_ops.encode(o, n, chunks=chunks, xor=False) for o, n in zip(olds, news, strict=True)
    ]
    wrong: list[int] = []

    def work(s: int) -> None:
        for _ in range(20):
            planes, sums = cpu_ops.encode(olds[s], news[s], chunks=chunks, xor=False)
            if not (same(planes.values, wanted[s][0].values) and same(sums, wanted[s][1])):
                wrong.append(s)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_numba_loads_only_when_kernels_are_asked_for() -> None:
    code = (
        "import sys; import weightdelta.codecs.sparse as s; before = 'numba' in sys.modules;"
        "from weightdelta.kernels import ops; print(before, ops().__name__.split('.')[-1])"
    )
    assert _python(code, WEIGHTDELTA_KERNELS="") == "False cpu_ops"
    assert _python(code, WEIGHTDELTA_KERNELS="reference") == "False reference"
    assert _python("import sys; sys.modules['numba'] = None; " + code, WEIGHTDELTA_KERNELS="") == (
        "True reference"
    )


def test_unknown_kernels_are_refused() -> None:
    assert ops() is ops()
    with pytest.raises(ConfigError, match=r"unknown kernels 'gpu'"):
        load("gpu")


def test_compiles_without_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numba.njit

    def without_cache(**options: bool) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return plain(**options)

    monkeypatch.setattr(numba, "njit", without_cache)

    def double(x: int) -> int:
        return 2 * x

    assert compiled.jit(double)(21) == 42
