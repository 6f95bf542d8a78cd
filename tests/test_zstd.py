"""The outer stage: round trips, and frames that lie about their size."""

import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.codecs import zstd
from weightdelta.errors import DamagedObject

#: A frame written by hand from RFC 8878: one raw block "abc", content size, no checksum.
PLAIN = bytes.fromhex("28b52ffd 20 03 190000 616263")


@given(st.binary(max_size=3000))
def test_round_trip(data: bytes) -> None:
    frame = zstd.compress(data)
    assert len(frame) <= zstd.bound(len(data))
    assert zstd.decompress(frame, size=len(data), where="x") == data
    assert zstd.decompress(memoryview(frame), size=len(data), where="x") == data


def test_frames_carry_size_and_checksum() -> None:
    for size in (0, 1, 255, 256, 70_000, 3_000_000):
        header = zstandard.get_frame_parameters(zstd.compress(bytes(size)))
        assert header.content_size == size
        assert header.has_checksum
        assert header.dict_id == 0
        assert header.window_size <= max(size, zstd.MAX_WINDOW)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_truncation_and_extra_bytes(size: int) -> None:
    frame = zstd.compress(bytes(range(256)) * 20 if size == 5000 else bytes(size))
    size = 5120 if size == 5000 else size
    for bad in (*(frame[:n] for n in range(len(frame))), frame + b"\0", frame + frame):
        with pytest.raises(DamagedObject, match=r"^obj 7: "):
            zstd.decompress(bad, size=size, where="obj 7")


def test_a_wrong_size_is_refused() -> None:
    frame = zstd.compress(b"abcdef")
    for size in (0, 5, 7, 2**40):
        with pytest.raises(DamagedObject, match=rf"expected a content size of {size} bytes"):
            zstd.decompress(frame, size=size, where="x")


def test_bombs_take_no_memory() -> None:
    bomb = zstd.compress(bytes(64 << 20))
    forged = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\0\0" + bytes(4)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        for frame in (bomb, forged, unsized):
            with pytest.raises(DamagedObject, match="content size"):
                zstd.decompress(frame, size=100, where="x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_other_frames_are_refused() -> None:
    wide = b"\x28\xb5\x2f\xfd\xc4" + bytes([(30 - 10) << 3]) + (100).to_bytes(8, "little")
    cases = {
        "checksum": PLAIN,
        "window": wide + bytes(20),
        "Zstd frame": b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd",
        "header": PLAIN[:5],
    }
    for expected, frame in cases.items():
        with pytest.raises(DamagedObject, match=expected):
            zstd.decompress(frame, size=3 if frame is PLAIN else 100, where="x")


@given(data=st.binary(min_size=20, max_size=300), flip=st.integers(0, 10_000))
def test_flipped_bits_never_pass_as_other_content(data: bytes, flip: int) -> None:
    frame = bytearray(zstd.compress(data))
    frame[flip // 8 % len(frame)] ^= 1 << flip % 8
    try:
        content = zstd.decompress(frame, size=len(data), where="x")
    except DamagedObject:
        return
    assert content == data  # one header bit is reserved, and decoders ignore it
