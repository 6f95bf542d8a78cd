"""What each codec makes of one pair of weight buffers: bytes, seconds, and proof that it is right.

All contestants get the same frames. Times are CPU time of one thread and cover everything from
old and new weights to an encoded frame, and from there to weights that have been changed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from lib.bench_codec import FRAME, chunks_of

from weightdelta.codecs import blocks, registry, stock
from weightdelta.codecs.blocks import Blocks, Inner
from weightdelta.codecs.names import Codec, Values
from weightdelta.codecs.transcode import transcode
from weightdelta.kernels import ops
from weightdelta.kernels.planes import BLOCK_BYTES, Chunks, Elements, Planes

#: Bytes that an index spends on a frame besides four for each of its parts.
INDEX_FRAME = 29


@dataclass(frozen=True)
class Encoded:
    """A frame: its bytes, and the sizes of its parts."""

    data: bytes
    sizes: np.ndarray[Any, Any]


class Contestant(ABC):
    """One way to code a frame; ``values`` is what it is given."""

    name: str
    values: Values = "xor"

    @abstractmethod
    def encode(self, planes: Planes, chunks: Chunks, width: int) -> Encoded:
        """A frame's changes as bytes."""

    @abstractmethod
    def decode(self, frame: Encoded, chunks: Chunks, width: int) -> Planes:
        """And back."""


class Ours(Contestant):
    """A codec of the format."""

    def __init__(self, name: str, codec: Codec, values: Values = "xor") -> None:
        self.name, self.codec, self.values = name, codec, values

    def encode(self, planes: Planes, chunks: Chunks, width: int) -> Encoded:
        """By the library."""
        data, sizes = registry.encode_frame(
            planes, codec=self.codec, chunks=chunks, width=width, values=self.values
        )
        return Encoded(data, sizes)

    def decode(self, frame: Encoded, chunks: Chunks, width: int) -> Planes:
        """By the library."""
        return registry.decode_frame(
            frame.data, frame.sizes, codec=self.codec, chunks=chunks, width=width,
            values=self.values, where="bench",
        )  # fmt: skip


class ZeroRuns(Ours):
    """Our blocks under Zstd; inner bytes are what the outer stage saves from."""

    def __init__(self, inner: Inner) -> None:
        codec: Codec = "snappy+zstd" if inner == "snappy" else "lz4+zstd"
        super().__init__(f"{inner} blocks", codec)
        self.inner: Inner = inner

    def inner_bytes(self, frame: Encoded, chunks: Chunks, width: int) -> int:
        """Bytes of the frame's blocks."""
        size = int(chunks.length.sum()) * width
        found = blocks.read_blocks(
            frame.data, frame.sizes, inner=self.inner, size=size, where="bench"
        )
        return len(found.arena)


class Stock(ZeroRuns):
    """cramjam's own blocks of the mask in the same container, as a peer would write them."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.name = f"{inner} blocks, stock"

    def encode(self, planes: Planes, chunks: Chunks, width: int) -> Encoded:
        """Every block that is not zero by the stock encoder."""
        mask = _mask(planes, chunks, width)
        parts, sizes = [np.empty(0, np.uint8)], np.zeros(-(-len(mask) // BLOCK_BYTES), np.uint32)
        for b in range(len(sizes)):
            part = mask[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]
            if part.any():
                parts.append(stock.compress(part, inner=self.inner))
                sizes[b] = len(parts[-1])
        found = Blocks(self.inner, len(mask), sizes, np.concatenate(parts))
        wrapped = list(blocks.wrap(found))
        table = np.zeros(15, np.uint32)
        table[: len(wrapped)] = [len(part) for part in wrapped]
        return Encoded(b"".join(wrapped), table)


class Whole(Contestant):
    """Plain Zstd-1 on the mask, a frame of ours at once: what most peers do."""

    name = "zstd-1 on the mask"

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, planes: Planes, chunks: Chunks, width: int) -> Encoded:
        """One Zstd frame."""
        data = self._compressor.compress(_mask(planes, chunks, width).data)
        return Encoded(data, np.zeros(0, np.uint32))

    def decode(self, frame: Encoded, chunks: Chunks, width: int) -> Planes:
        """The mask, and what is not zero in it."""
        mask = np.frombuffer(self._decompressor.decompress(frame.data), f"u{width}")
        return ops().encode(np.zeros(len(mask), mask.dtype), mask, chunks=chunks, xor=True)[0]


def _mask(planes: Planes, chunks: Chunks, width: int) -> np.ndarray[Any, Any]:
    mask = np.zeros(int(chunks.length.sum()), f"u{width}")
    mask[ops().expand(planes, chunks=chunks)] = planes.values
    return mask.view(np.uint8)


def contestants() -> list[Contestant]:
    """All of them, the default first."""
    return [
        Ours("sparse, differences", "sparse+zstd", "diff"),
        Ours("sparse, XOR", "sparse+zstd"),
        ZeroRuns("snappy"),
        Stock("snappy"),
        ZeroRuns("lz4"),
        Stock("lz4"),
        Ours("zstd", "zstd"),
        Whole(),
    ]


@dataclass(frozen=True)
class Row:
    """One contestant on one mask; bytes over all frames, seconds for all of them.

    Attributes:
        inner: Bytes of blocks before the outer stage; None for codecs without blocks.
        payload: Encoded frames and what an index spends on them.
    """

    name: str
    inner: int | None
    payload: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class _Part:
    old: Elements
    new: Elements
    chunks: Chunks


def _timed(action: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    best, found = float("inf"), None
    for _ in range(repeats):
        start = time.thread_time()
        found = action()
        best = min(best, time.thread_time() - start)
    return best, found


def memcpy_s(old: Elements, *, repeats: int) -> float:
    """Seconds to copy the weights once, into memory that has been touched."""
    target = old.copy()
    return _timed(lambda: np.copyto(target, old), repeats)[0]


def _cut(old: Elements, new: Elements) -> list[_Part]:
    step = FRAME // old.itemsize
    spans = [slice(lo, lo + step) for lo in range(0, len(old), step)]
    return [_Part(old[s], new[s], chunks_of(len(old[s]), first=s.start)) for s in spans]


def transcode_s(inner: Inner, old: Elements, new: Elements, *, repeats: int) -> float:
    """Seconds from encoded sparse frames to raw blocks, as a receiver does it while serving."""
    parts, who, width = _cut(old, new), Ours("", "sparse+zstd"), old.itemsize
    frames = [
        who.encode(ops().encode(p.old, p.new, chunks=p.chunks, xor=True)[0], p.chunks, width)
        for p in parts
    ]

    def action() -> None:
        for p, f in zip(parts, frames, strict=True):
            transcode(
                f.data, f.sizes, codec="sparse+zstd", inner=inner, chunks=p.chunks, width=width,
                values="xor", where="bench",
            )  # fmt: skip

    return _timed(action, repeats)[0]


def measure(who: Contestant, old: Elements, new: Elements, *, repeats: int) -> Row:
    """Encode, decode, compare bit for bit, and count."""
    width, xor = old.itemsize, who.values == "xor"
    parts = _cut(old, new)

    def encode() -> list[Encoded]:
        return [
            who.encode(ops().encode(p.old, p.new, chunks=p.chunks, xor=xor)[0], p.chunks, width)
            for p in parts
        ]

    work = np.empty_like(old)

    def decode() -> None:
        at = 0
        for p, frame in zip(parts, frames, strict=True):
            planes = who.decode(frame, p.chunks, width)
            part = work[at : at + len(p.old)]
            ops().decode_into(part, planes, chunks=p.chunks, xor=xor)
            at += len(part)

    encode_s, frames = _timed(encode, repeats)
    decode_s = float("inf")
    for _ in range(repeats):
        np.copyto(work, old)
        decode_s = min(decode_s, _timed(decode, 1)[0])
        if not np.array_equal(work, new):
            raise SystemExit(f"bench: {who.name} does not give the weights back")
    inner = None
    if isinstance(who, ZeroRuns):
        inner = sum(who.inner_bytes(f, p.chunks, width) for f, p in zip(frames, parts, strict=True))
    payload = sum(len(f.data) + 4 * int(np.count_nonzero(f.sizes)) + INDEX_FRAME for f in frames)
    return Row(who.name, inner, payload, encode_s, decode_s)
