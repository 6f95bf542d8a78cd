"""The sparse codec: nothing is lost, damage is found, and memory stays bounded."""

import itertools
import tracemalloc

import numpy as np
import pytest
from chunking import WIDTHS, change, count_of, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import sparse, zstd
from weightdelta.codecs.sparse import PLANES, decode_frame, encode_frame
from weightdelta.errors import DamagedObject
from weightdelta.kernels import Ops, cpu_ops, ops, reference
from weightdelta.kernels.planes import CHUNK, UINTS, Chunks, Elements, Planes

KINDS: tuple[sparse.Values, ...] = ("diff", "xor")

#: bf16 patterns that arithmetic on floats would lose: NaNs, infinities, -0, denormals, all ones.
SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80)

#: Raw planes of small frames, quoted in FORMAT.md: kind, old, new, planes by name.
VECTORS: tuple[tuple[sparse.Values, Elements, dict[int, int], dict[str, str]], ...] = (
    (
        "diff",
        np.full(20, 0x3F80, np.uint16),
        {3: 0x3F81, 10: 0x3F7F, 19: 0x3F88},
        {"counts 0": "03", "gaps low": "030608", "nibbles": "010f", "values 0": "0f"},
    ),
    (
        "xor",
        np.full(20, 0x3F80, np.uint16),
        {3: 0x3F81, 10: 0x3F7F, 19: 0x3F88},
        {"counts 0": "03", "gaps low": "030608", "values 0": "01ff08"},
    ),
    (
        "diff",
        np.full(9, 0x10, np.uint8),
        {0: 0x0F, 2: 0x12, 7: 0x90, 8: 0x0E},
        {"counts 0": "04", "bitmap": "8501", "nibbles": "302f", "values 0": "fe"},
    ),
    (
        "diff",
        np.zeros(2, np.uint32),
        {0: 1, 1: 0x80000000},
        {
            "counts 0": "02", "nibbles": "f1", "values 0": "fe", "values 1": "ff",
            "values 2": "ff", "values 3": "ff",
        },
    ),
)  # fmt: skip


def encoded(
    old: Elements, new: Elements, *, chunks: Chunks, values: sparse.Values
) -> tuple[bytes, np.ndarray]:
    planes, _ = ops().encode(old, new, chunks=chunks, xor=values == "xor")
    return encode_frame(planes, width=old.itemsize, values=values)


def decoded(
    data: bytes, sizes: np.ndarray, *, chunks: Chunks, width: int, values: sparse.Values
) -> Planes:
    return decode_frame(data, sizes, chunks=chunks, width=width, values=values, where="frame 3")


def check_round_trip(
    old: Elements, new: Elements, *, chunks: Chunks, values: sparse.Values
) -> tuple[bytes, np.ndarray]:
    data, sizes = encoded(old, new, chunks=chunks, values=values)
    assert sizes.dtype == np.uint32
    assert sizes.shape == (15,)
    assert int(sizes.sum()) == len(data)
    planes = decoded(data, sizes, chunks=chunks, width=old.itemsize, values=values)
    target = old.copy()
    ops().decode_into(target, planes, chunks=chunks, xor=values == "xor")
    assert np.array_equal(target, new)
    return data, sizes


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    width=st.sampled_from(WIDTHS),
    density=st.floats(0, 1),
    small=st.booleans(),
    values=st.sampled_from(KINDS),
    seed=st.integers(0, 999),
)
def test_any_change_round_trips(
    sizes: list[int], width: int, density: float, small: bool, values: sparse.Values, seed: int
) -> None:
    chunks = segments(sizes)
    old = random_elements(count_of(chunks), width=width, seed=seed)
    where = np.flatnonzero(np.random.default_rng(seed).random(len(old)) < density)
    new = change(old, where, seed=seed, small=small)
    check_round_trip(old, new, chunks=chunks, values=values)


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.0002, 0.015, 0.16, 0.17, 0.4, 1.0])
def test_frames_of_several_chunks(width: int, density: float, values: sparse.Values) -> None:
    chunks = segments([CHUNK + 1, 2 * CHUNK - 1, 5])
    old = random_elements(count_of(chunks), width=width, seed=1)
    where = np.flatnonzero(np.random.default_rng(2).random(len(old)) < density)
    check_round_trip(old, change(old, where, seed=3), chunks=chunks, values=values)


@pytest.mark.parametrize("values", KINDS)
def test_every_pair_of_special_patterns(values: sparse.Values) -> None:
    old = np.repeat(np.array(SPECIAL, np.uint16), len(SPECIAL))
    new = np.tile(np.array(SPECIAL, np.uint16), len(SPECIAL))
    check_round_trip(old, new, chunks=segments([len(old)]), values=values)
    for width in WIDTHS:
        low, high = np.zeros(7, UINTS[width]), np.full(7, 2 ** (8 * width) - 1, UINTS[width])
        check_round_trip(low, high, chunks=segments([7]), values=values)
        check_round_trip(high, low, chunks=segments([7]), values=values)


@pytest.mark.parametrize(("values", "old", "changes", "expected"), VECTORS)
@pytest.mark.parametrize("kernels", [reference, cpu_ops])
def test_fixed_vectors(
    monkeypatch: pytest.MonkeyPatch, kernels: Ops, values: sparse.Values, old: Elements,
    changes: dict[int, int], expected: dict[str, str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sparse, "ops", lambda: kernels)
    new = old.copy()
    new[list(changes)] = list(changes.values())
    chunks = segments([len(old)])
    planes, _ = kernels.encode(old, new, chunks=chunks, xor=values == "xor")
    data, sizes = encode_frame(planes, width=old.itemsize, values=values)
    found, start = {}, 0
    for name, size in zip(PLANES, sizes.tolist(), strict=True):
        if size:
            raw = bytes.fromhex(expected[name])
            part = data[start : start + size]
            found[name] = zstd.decompress(part, size=len(raw), where=name).hex()
        start += size
    assert found == expected


def test_nothing_changed_is_no_bytes() -> None:
    old = random_elements(1000, width=2, seed=1)
    data, sizes = check_round_trip(old, old, chunks=segments([1000]), values="diff")
    assert data == b""
    assert not sizes.any()
    check_round_trip(old[:0], old[:0], chunks=segments([]), values="diff")


def test_zero_planes_are_left_out() -> None:
    old = np.zeros(2000, np.uint16)
    new = old.copy()
    new[::100] = 1
    _, sizes = check_round_trip(old, new, chunks=segments([2000]), values="diff")
    assert [PLANES[i] for i in np.flatnonzero(sizes)] == ["counts 0", "gaps low", "nibbles"]
    _, sizes = check_round_trip(new, old, chunks=segments([2000]), values="diff")
    assert [PLANES[i] for i in np.flatnonzero(sizes)] == ["counts 0", "gaps low"]


@pytest.fixture(params=KINDS)
def sample(request: pytest.FixtureRequest) -> tuple[bytes, np.ndarray, Chunks, sparse.Values]:
    """A frame that has every kind of plane its value kind allows."""
    chunks = segments([CHUNK, 700, 700, 50])
    old = random_elements(count_of(chunks), width=2, seed=1)
    where = np.concatenate([np.arange(0, CHUNK + 700, 331), np.arange(CHUNK + 700, len(old), 2)])
    new = change(old, where, seed=2)
    data, sizes = encoded(old, new, chunks=chunks, values=request.param)
    assert np.count_nonzero(sizes) == (8 if request.param == "diff" else 7)
    return data, sizes, chunks, request.param


Sample = tuple[bytes, np.ndarray, Chunks, sparse.Values]


def refuse(data: bytes, sizes: np.ndarray, chunks: Chunks, values: sparse.Values) -> str:
    with pytest.raises(DamagedObject) as caught:
        decoded(data, sizes, chunks=chunks, width=2, values=values)
    assert str(caught.value).startswith("frame 3")
    return str(caught.value)


def test_every_wrong_size_is_refused(sample: Sample) -> None:
    data, sizes, chunks, values = sample
    for slot in range(15):
        for size in {0, 1, int(sizes[slot]) - 1, int(sizes[slot]) + 1, 2**31, 2**32 - 1}:
            if size < 0 or size == sizes[slot]:
                continue
            wrong = sizes.copy()
            wrong[slot] = size
            refuse(data, wrong, chunks, values)
    for table in (sizes[:14], np.append(sizes, 0), sizes.reshape(3, 5)):
        refuse(data, table, chunks, values)


def test_bytes_moved_between_planes_are_refused(sample: Sample) -> None:
    data, sizes, chunks, values = sample
    present = np.flatnonzero(sizes)
    for slot, after in itertools.pairwise(present):
        wrong = sizes.copy()
        wrong[slot] -= 1
        wrong[after] += 1
        refuse(data, wrong, chunks, values)
    for slot in present:
        wrong = sizes.copy()
        wrong[slot], wrong[14] = 0, wrong[slot]
        refuse(data, wrong, chunks, values)


def test_truncation_and_extra_bytes_are_refused(sample: Sample) -> None:
    data, sizes, chunks, values = sample
    for length in range(0, len(data), 7):
        refuse(data[:length], sizes, chunks, values)
    refuse(data + b"\0", sizes, chunks, values)
    last = int(np.flatnonzero(sizes)[-1])
    longer = sizes.copy()
    longer[last] += 1
    refuse(data + b"\0", longer, chunks, values)


def test_every_missing_plane_is_refused(sample: Sample) -> None:
    data, sizes, chunks, values = sample
    ends = np.cumsum(sizes)
    for slot in np.flatnonzero(sizes).tolist():
        rest = sizes.copy()
        rest[slot] = 0
        cut = data[: ends[slot] - sizes[slot]] + data[ends[slot] :]
        try:
            planes = decoded(cut, rest, chunks=chunks, width=2, values=values)
        except DamagedObject:
            continue
        # A plane of zeros may be what a writer meant; the result must still be sound.
        assert PLANES[slot] in {"counts 1", "gaps low", "gaps high", "values 0", "values 1"}
        assert reference.check(planes, chunks=chunks) == -1


def test_flipped_bytes_never_reach_a_kernel_unsound(sample: Sample) -> None:
    data, sizes, chunks, values = sample
    wanted = decoded(data, sizes, chunks=chunks, width=2, values=values)
    refused = 0
    for at in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            planes = decoded(bytes(flipped), sizes, chunks=chunks, width=2, values=values)
        except DamagedObject:
            refused += 1
            continue
        assert np.array_equal(planes.values, wanted.values)
        assert np.array_equal(planes.gaps, wanted.gaps)
    assert refused > len(data) // 4


def forge(
    planes: Planes, *, values: sparse.Values = "diff", **raw: bytes
) -> tuple[bytes, np.ndarray]:
    """A frame of ``planes`` with some raw planes replaced."""
    data, sizes = encode_frame(planes, width=planes.values.itemsize, values=values)
    ends = np.cumsum(sizes)
    parts = [data[e - s : e] for e, s in zip(ends, sizes, strict=True)]
    for name, content in raw.items():
        parts[PLANES.index(name.replace("_", " "))] = zstd.compress(content)
    return b"".join(parts), np.array([len(p) for p in parts], np.uint32)


def test_planes_that_contradict_the_chunks_are_refused() -> None:
    chunks = segments([100, 40])
    old = np.zeros(140, np.uint16)
    new = old.copy()
    new[[5, 50, 99]] = 1
    new[100:139:2] = 100
    planes, _ = reference.encode(old, new, chunks=chunks, xor=False)
    forged = {
        "counts 101 changes of 100": forge(planes, counts_0=bytes([101, 20])),
        "content size of 4 bytes": forge(planes, counts_0=bytes([4, 20])),
        "positions of chunk 0": forge(planes, gaps_low=bytes([5, 44, 49])),
        "positions of chunk 1": forge(planes, bitmap=bytes([0x57, 0x55, 0x55, 0x55, 0x55])),
        "unused half": forge(planes, nibbles=b"\x11\xf1" + b"\xff" * 9 + b"\x1f"),
        "escaped value": forge(planes, values_0=bytes([14] * 20)),
    }
    for expected, (data, sizes) in forged.items():
        assert expected in refuse(data, sizes, chunks, "diff")
    top = forge(planes, values_0=b"\xff" * 20, values_1=b"\xff" * 20)
    assert "escaped value" in refuse(*top, chunks, "diff")
    planes, _ = reference.encode(old, new, chunks=chunks, xor=True)
    zero = forge(planes, values="xor", values_0=bytes(22) + b"\x01")
    assert "XOR of zero" in refuse(*zero, chunks, "xor")
    assert "'nibbles'" in refuse(*forge(planes, values="xor", nibbles=b"\x01"), chunks, "xor")
    assert "'values 2'" in refuse(*forge(planes, values="xor", values_2=b"\x01"), chunks, "xor")


def test_bombs_take_no_memory() -> None:
    chunks = segments([1000])
    planes = Planes(
        np.array([1], np.uint32),
        np.array([0], np.uint16),
        np.empty(0, np.uint8),
        np.array([1], np.uint16),
    )
    bombs = [forge(planes, **{name.replace(" ", "_"): bytes(64 << 20)}) for name in PLANES]
    tracemalloc.start()
    try:
        for data, sizes in bombs:
            refuse(data, sizes, chunks, "diff")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200), st.lists(st.integers(0, 40), min_size=15, max_size=15))
def test_noise_is_refused(data: bytes, sizes: list[int]) -> None:
    refuse(data + b"x", np.array(sizes, np.uint32), segments([500]), "diff")
