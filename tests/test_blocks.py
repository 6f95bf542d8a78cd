"""Codecs on the XOR mask: plain blocks that everybody decodes, nothing lost, damage found."""

import itertools
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
from chunking import WIDTHS, change, count_of, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st
from test_zero_runs import by_pyarrow, stock, zero_runs

from weightdelta.codecs import blocks, registry, zstd
from weightdelta.codecs.blocks import PARTS, Inner, pack, pieces, read_blocks, unpack
from weightdelta.codecs.names import BY_ID, DEFAULT, IDS, Codec
from weightdelta.codecs.transcode import staged, transcode
from weightdelta.errors import DamagedObject, InputError
from weightdelta.kernels import ops
from weightdelta.kernels.planes import BLOCK_BYTES, UINTS, Chunks, Elements, Planes

CODECS: tuple[Codec, ...] = get_args(Codec)
MASKED = tuple(c for c in CODECS if c != DEFAULT)
INNERS: tuple[Inner, ...] = ("snappy", "lz4")


# -- frames ------------------------------------------------------------------------------------


def encoded(
    old: Elements, new: Elements, *, chunks: Chunks, codec: Codec
) -> tuple[bytes, np.ndarray[Any, Any]]:
    planes, _ = ops().encode(old, new, chunks=chunks, xor=True)
    return registry.encode_frame(
        planes, codec=codec, chunks=chunks, width=old.itemsize, values="xor"
    )


def decoded(
    data: bytes, sizes: np.ndarray[Any, Any], *, chunks: Chunks, width: int, codec: Codec
) -> Planes:
    return registry.decode_frame(
        data, sizes, codec=codec, chunks=chunks, width=width, values="xor", where="frame 3"
    )


def check_round_trip(
    old: Elements, new: Elements, *, chunks: Chunks, codec: Codec
) -> tuple[bytes, np.ndarray[Any, Any]]:
    data, sizes = encoded(old, new, chunks=chunks, codec=codec)
    assert (sizes.dtype, sizes.shape, int(sizes.sum())) == (np.uint32, (15,), len(data))
    planes = decoded(data, sizes, chunks=chunks, width=old.itemsize, codec=codec)
    wanted, _ = ops().encode(old, new, chunks=chunks, xor=True)
    for name in ("counts", "gaps", "bitmap", "values"):
        found, expected = getattr(planes, name), getattr(wanted, name)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected), name
    return data, sizes


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    width=st.sampled_from(WIDTHS),
    density=st.floats(0, 1),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 999),
)
def test_any_change_round_trips(
    sizes: list[int], width: int, density: float, codec: Codec, seed: int
) -> None:
    chunks = segments(sizes)
    old = random_elements(count_of(chunks), width=width, seed=seed)
    where = np.flatnonzero(np.random.default_rng(seed).random(len(old)) < density)
    check_round_trip(old, change(old, where, seed=seed), chunks=chunks, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_frames_of_several_blocks_of_every_kind(width: int, codec: Codec) -> None:
    """Empty, sparse, dense and full blocks; segments that end inside of blocks."""
    chunks = segments([BLOCK_BYTES + 1, 2 * BLOCK_BYTES - 1, 5])
    old = random_elements(count_of(chunks), width=width, seed=1)
    kinds = np.repeat([0, 0.002, 0.3, 1, 0.16, 0.17], -(-len(old) // 6))[: len(old)]
    where = np.flatnonzero(np.random.default_rng(2).random(len(old)) < kinds)
    check_round_trip(old, change(old, where, seed=3), chunks=chunks, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_changed_is_no_bytes(codec: Codec) -> None:
    old = random_elements(1000, width=2, seed=1)
    data, sizes = check_round_trip(old, old, chunks=segments([1000]), codec=codec)
    assert (data, sizes.any()) == (b"", False)
    check_round_trip(old[:0], old[:0], chunks=segments([]), codec=codec)


def test_sparse_blocks_are_ours_and_dense_ones_stock() -> None:
    """The rule looks at counts alone: one change less or more than a sixth decides."""
    each = BLOCK_BYTES // 2
    mask = np.zeros(2 * each, np.uint16)
    mask[: 6 * (each // 6) : 6] = 0x0107  # 5461 of 32768: 6 k < n
    mask[each : each + 6 * (each // 6 + 1) : 6] = 0x0107
    chunks = segments([2 * each])
    planes, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
    for inner in INNERS:
        found = pack(planes, inner=inner, chunks=chunks, width=2)
        arena, first = found.arena.tobytes(), int(found.sizes[0])
        ours, sizes = zero_runs(mask, lz4=inner == "lz4")
        assert arena[:first] == ours[: sizes[0]]
        assert arena[first:] == stock(mask[each:].tobytes(), inner)[0]


def test_zero_blocks_and_pieces_are_left_out() -> None:
    chunks = segments([200 * BLOCK_BYTES])
    mask = np.zeros(200 * BLOCK_BYTES, np.uint8)
    mask[70 * BLOCK_BYTES + 5] = 1
    assert [(p.start, p.stop) for p in pieces(200)] == [(0, 50), (50, 100), (100, 150), (150, 200)]
    for codec in MASKED:
        _, sizes = check_round_trip(np.zeros_like(mask), mask, chunks=chunks, codec=codec)
        present = [PARTS[i] for i in np.flatnonzero(sizes)]
        table = ["block sizes 0", "block sizes 1"] if "+" in codec else []
        assert present == [*table, "piece 1"]
    data, sizes = encoded(np.zeros_like(mask), mask, chunks=chunks, codec="lz4+zstd")
    found = read_blocks(data, sizes, inner="lz4", size=len(mask), where="frame")
    assert np.flatnonzero(found.sizes).tolist() == [70]


@pytest.mark.parametrize("count", [1, 64, 65, 255, 448, 449, 512, 513, 16384])
def test_pieces_hold_every_block_once(count: int) -> None:
    found = pieces(count)
    assert [b for piece in found for b in piece] == list(range(count))
    assert len(found) == min(8, -(-count // 64))
    assert all(len(piece) for piece in found)


def test_differences_are_refused() -> None:
    chunks = segments([10])
    old = np.arange(10, dtype=np.uint16)
    planes, _ = ops().encode(old, old + np.uint16(1), chunks=chunks, xor=False)
    for codec in MASKED:
        with pytest.raises(InputError, match="values: xor"):
            registry.encode_frame(planes, codec=codec, chunks=chunks, width=2, values="diff")
        with pytest.raises(DamagedObject, match=r"frame 3: codec .* 'xor'"):
            registry.decode_frame(
                b"", [0] * 15, codec=codec, chunks=chunks, width=2, values="diff", where="frame 3"
            )


def test_numbers_of_codecs_are_fixed() -> None:
    """They are stored."""
    expected = {"sparse+zstd": 0, "snappy+zstd": 1, "lz4+zstd": 2, "zstd": 3, "none": 4}
    assert expected == IDS
    assert {v: k for k, v in IDS.items()} == BY_ID
    assert set(IDS) == set(CODECS)


# -- transcoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("codec", CODECS)
def test_transcoding_gives_the_blocks_that_would_have_been_published(
    codec: Codec, inner: Inner
) -> None:
    chunks = segments([BLOCK_BYTES + 9, 3 * BLOCK_BYTES, 7])
    old = random_elements(count_of(chunks), width=2, seed=1)
    where = np.flatnonzero(np.random.default_rng(2).random(len(old)) < 0.004)
    where = where[where > BLOCK_BYTES]  # the first two blocks are empty, the third is dense
    new = change(old, np.append(np.arange(BLOCK_BYTES, BLOCK_BYTES + 9000), where), seed=3)
    data, sizes = encoded(old, new, chunks=chunks, codec=codec)
    found = transcode(
        data, sizes, codec=codec, inner=inner, chunks=chunks, width=2, values="xor", where="f"
    )
    published = f"{inner}+zstd"
    data, sizes = encoded(old, new, chunks=chunks, codec=published)  # type: ignore[arg-type]
    wanted = read_blocks(data, sizes, inner=inner, size=old.nbytes, where="f")
    assert found.sizes.tolist() == wanted.sizes.tolist()
    assert found.arena.tobytes() == wanted.arena.tobytes()
    assert np.flatnonzero(found.sizes == 0).tolist() == [0, 1, 8]
    check_staged(found, (old ^ new).tobytes())


def check_staged(found: blocks.Blocks, mask: bytes) -> None:
    """What a batched device decoder is given is enough to make the mask."""
    batch = staged(found)
    out = bytearray(len(mask))
    for offset, size, target, length in zip(*(c.tolist() for c in batch[1:]), strict=True):
        assert offset % 16 == 0
        block = batch.buffer[offset : offset + size].tobytes()
        out[target : target + length] = by_pyarrow(block, length, found.inner)
    assert out == mask


def test_differences_cannot_be_transcoded() -> None:
    chunks = segments([10])
    with pytest.raises(InputError, match="publish with `values: xor`"):
        transcode(
            b"", [0] * 15, codec=DEFAULT, inner="lz4", chunks=chunks, width=2, values="diff",
            where="frame 3",
        )  # fmt: skip


# -- damage ------------------------------------------------------------------------------------

Sample = tuple[bytes, np.ndarray[Any, Any], Chunks, Codec]


@pytest.fixture(params=MASKED)
def sample(request: pytest.FixtureRequest) -> Sample:
    """A frame of two pieces with empty, sparse and dense blocks."""
    chunks = segments([66 * BLOCK_BYTES // 2 - 7])
    old = np.zeros(count_of(chunks), np.uint16)
    where = np.concatenate([np.arange(5, 60_000, 331), np.arange(len(old) - 40_000, len(old), 3)])
    data, sizes = encoded(old, change(old, where, seed=2), chunks=chunks, codec=request.param)
    if request.param == "none":  # four megabytes of zeros would only take time
        chunks = segments([700])
        data, sizes = encoded(old[:700], change(old[:700], where[:2], seed=2), chunks=chunks,
                              codec="none")  # fmt: skip
    return data, sizes, chunks, request.param


def refuse(data: bytes, sizes: Any, chunks: Chunks, codec: Codec) -> str:
    with pytest.raises(DamagedObject) as caught:
        decoded(data, np.asarray(sizes), chunks=chunks, width=2, codec=codec)
    assert str(caught.value).startswith("frame 3")
    return str(caught.value)


def test_every_wrong_size_is_refused(sample: Sample) -> None:
    data, sizes, chunks, codec = sample
    for slot in range(15):
        for size in {0, 1, int(sizes[slot]) - 1, int(sizes[slot]) + 1, 2**31, 2**32 - 1}:
            if size < 0 or size == sizes[slot]:
                continue
            wrong = sizes.copy()
            wrong[slot] = size
            refuse(data, wrong, chunks, codec)
    for table in (sizes[:14], np.append(sizes, 0), sizes.reshape(3, 5)):
        refuse(data, table, chunks, codec)


def test_bytes_moved_between_parts_are_refused(sample: Sample) -> None:
    data, sizes, chunks, codec = sample
    present = np.flatnonzero(sizes).tolist()
    for slot, after in itertools.pairwise(present):
        wrong = sizes.copy()
        wrong[slot] -= 1
        wrong[after] += 1
        refuse(data, wrong, chunks, codec)
    for slot, other in itertools.product(present, range(15)):
        if other not in present:
            wrong = sizes.copy()
            wrong[slot], wrong[other] = 0, wrong[slot]
            refuse(data, wrong, chunks, codec)


def test_truncation_and_extra_bytes_are_refused(sample: Sample) -> None:
    data, sizes, chunks, codec = sample
    for length in range(0, len(data), max(1, len(data) // 60)):
        refuse(data[:length], sizes, chunks, codec)
    last = int(np.flatnonzero(sizes)[-1])
    longer = sizes.copy()
    longer[last] += 1
    refuse(data + b"\0", sizes, chunks, codec)
    refuse(data + b"\0", longer, chunks, codec)


def test_every_missing_part_is_refused(sample: Sample) -> None:
    data, sizes, chunks, codec = sample
    ends = np.cumsum(sizes, dtype=np.int64)
    for slot in np.flatnonzero(sizes).tolist():
        if codec in ("zstd", "none"):
            continue  # a piece of zeros may be what the writer meant
        rest = sizes.copy()
        rest[slot] = 0
        cut = data[: ends[slot] - int(sizes[slot])] + data[ends[slot] :]
        refuse(cut, rest, chunks, codec)


def test_pieces_of_another_size_or_of_zeros_are_refused() -> None:
    """`none` has no outer stage that would know."""
    chunks = segments([50])
    for content, problem in (
        (bytes(100), "zeros"),
        (b"\1" * 99, "expected 100 bytes, found 99"),
        (b"\1", "expected 100 bytes, found 1"),
        (b"\1" * 101, "expected 100 bytes, found 101"),
    ):
        sizes = np.zeros(15, np.uint32)
        sizes[7] = len(content)
        assert problem in refuse(content, sizes, chunks, "none")
    packed = zstd.compress(bytes(100))
    sizes[7] = len(packed)
    assert "zeros" in refuse(packed, sizes, chunks, "zstd")


def test_flipped_bytes_are_refused(sample: Sample) -> None:
    """The outer stage's checksum finds them; `none` has only the frame's hash."""
    data, sizes, chunks, codec = sample
    if codec == "none":
        return
    wanted = decoded(data, sizes, chunks=chunks, width=2, codec=codec)
    refused = 0
    spots = range(0, len(data), max(1, len(data) // 150))
    for at in spots:
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            planes = decoded(bytes(flipped), sizes, chunks=chunks, width=2, codec=codec)
        except DamagedObject:
            refused += 1
            continue
        assert np.array_equal(planes.values, wanted.values)
    assert refused > 0.9 * len(spots)


def forge(
    table: bytes, arena: bytes, *, codec: Codec, high: bytes = b""
) -> tuple[bytes, np.ndarray[Any, Any]]:
    """A frame of one piece with any block table and any blocks, its outer stage sound."""
    parts = [b""] * 15
    parts[0] = zstd.compress(table)
    parts[1] = zstd.compress(high) if high else b""
    parts[7] = zstd.compress(arena) if arena else b""
    assert codec in ("snappy+zstd", "lz4+zstd")
    return b"".join(parts), np.array([len(p) for p in parts], np.uint32)


@pytest.mark.parametrize("inner", INNERS)
def test_blocks_that_do_not_fit_are_refused(inner: Inner) -> None:
    codec: Codec = "snappy+zstd" if inner == "snappy" else "lz4+zstd"
    chunks = segments([50])
    mask = np.zeros(50, np.uint16)
    mask[7] = 1
    whole, shorter, longer = (
        stock(m.tobytes(), inner)[0] for m in (mask, mask[:49], np.append(mask, mask))
    )
    zeros = stock(bytes(100), inner)[0]
    good, sizes = forge(bytes([len(whole)]), whole, codec=codec)
    assert decoded(good, sizes, chunks=chunks, width=2, codec=codec).values.tolist() == [1]
    forged = {
        "frame 3, block 0": forge(bytes([len(shorter)]), shorter, codec=codec),
        "frame 3, block 0: damaged": forge(bytes([len(longer)]), longer, codec=codec),
        "all zero": forge(bytes([len(zeros)]), zeros, codec=codec),
        "content size": forge(bytes([len(whole) - 1]), whole, codec=codec),
        "content size of 1 bytes": forge(bytes([len(whole), 0]), whole, codec=codec),
        "block 0 takes 5120 bytes": forge(b"\0", bytes(5120), high=b"\x14", codec=codec),
        "'piece 0' of": forge(bytes([len(whole)]), b"", codec=codec),
    }
    for expected, (data, table) in forged.items():
        assert expected in refuse(data, table, chunks, codec)


@given(
    block=st.binary(min_size=1, max_size=80),
    size=st.integers(1, 200),
    inner=st.sampled_from(INNERS),
)
def test_any_block_is_decoded_or_refused_within_its_place(
    block: bytes, size: int, inner: Inner
) -> None:
    out = np.zeros(size + 64, np.uint8)
    found = blocks.Blocks(
        inner, size, np.array([len(block)], np.uint32), np.frombuffer(block, np.uint8)
    )
    try:
        unpack(found, out=out[32:-32], where="block")
    except DamagedObject:
        pass
    else:
        assert out[32:-32].any()
    assert not out[:32].any()
    assert not out[-32:].any()


def test_bombs_take_no_memory() -> None:
    chunks = segments([1000])
    bomb = zstd.compress(bytes(64 << 20))
    decoded(b"", np.zeros(15), chunks=chunks, width=2, codec="zstd")  # this thread's own mask
    tracemalloc.start()
    try:
        for codec, slot in itertools.product(MASKED, range(15)):
            sizes = np.zeros(15, np.uint32)
            sizes[slot] = len(bomb)
            refuse(bomb, sizes, chunks, codec)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(
    st.binary(max_size=200),
    st.lists(st.integers(0, 40), min_size=15, max_size=15),
    st.sampled_from(MASKED),
)
def test_noise_is_refused(data: bytes, sizes: list[int], codec: Codec) -> None:
    refuse(data + b"x", sizes, segments([500]), codec)


def test_a_forged_bomb_of_blocks_is_refused_before_it_is_unpacked() -> None:
    """Every size is possible, yet no block gives more than its own place in the mask."""
    limit = blocks.stock.most(BLOCK_BYTES, inner="snappy")
    chunks = segments([4 * BLOCK_BYTES])
    planes = [bytes([limit >> shift & 255] * 4) for shift in (0, 8, 16)]
    parts = [zstd.compress(p) for p in planes] + [b""] * 4 + [zstd.compress(bytes(4 * limit))]
    sizes = [len(p) for p in parts] + [0] * (15 - len(parts))
    with pytest.raises(DamagedObject, match="frame 3, block 0"):
        registry.decode_frame(
            b"".join(parts), sizes, codec="snappy+zstd", chunks=chunks, width=1, values="xor",
            where="frame 3",
        )  # fmt: skip


def test_elements_of_a_mask_are_little_endian() -> None:
    chunks = segments([3])
    old = np.zeros(3, UINTS[4])
    data, sizes = encoded(old, old + np.uint32(0x01020304), chunks=chunks, codec="none")
    assert sizes.tolist() == [0] * 7 + [12] + [0] * 7
    assert data == bytes([4, 3, 2, 1] * 3)
