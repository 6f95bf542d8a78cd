"""Times the sparse codec on given weights, one core, beside memcpy and plain Zstd.

Every figure is in GB of weights a second and stands for a verified round trip: encoding and
decoding are checked bit for bit, digest changes included, before anything is timed. Times are
the thread's own (CPU, user and system), so another process on the core does not count; each
repeat runs every contestant once, so that noise in memory bandwidth hits all of them.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from weightdelta.codecs import sparse, zstd
from weightdelta.kernels import ops
from weightdelta.kernels.planes import CHUNK, Chunks, Elements

#: Raw bytes of a frame.
FRAME: Final = 16 << 20
SEED: Final = 0x5EED


@dataclass(frozen=True)
class Rates:
    """GB of weights a second over the repeats."""

    best: float
    median: float


@dataclass(frozen=True)
class Result:
    """What one pair of buffers gave."""

    name: str
    width: int
    nbytes: int
    changed: int
    elements: int
    payload: int
    bound: float
    plain: int
    rates: dict[str, Rates] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Changed share of the elements."""
        return self.changed / self.elements

    def ratio(self, what: str) -> float:
        """Median speed of ``what`` as a multiple of memcpy's in the same run."""
        return self.rates[what].median / self.rates["memcpy"].median


def xor_bound(old: Elements, new: Elements) -> float:
    """Zero-order entropy of the XOR mask in bytes: positions, plus values of the changed."""
    mask = old ^ new
    mask = mask[mask != 0]
    n, k = len(old), len(mask)
    if k in (0, n):
        position = 0.0
    else:
        p = k / n
        position = -n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    share = np.unique(mask, return_counts=True)[1] / max(k, 1)
    return float(position - k * np.sum(share * np.log2(share))) / 8


def chunks_of(count: int, *, first: int = 0) -> Chunks:
    """Chunks of a frame that is one contiguous stretch of ``count`` elements of a tensor."""
    start = np.arange(0, count, CHUNK, dtype=np.int64)
    whole = np.full(len(start), max(count, 1), np.int64)
    return Chunks(
        start=start,
        length=np.minimum(CHUNK, count - start),
        key=np.full(len(start), (SEED + first) % (1 << 64), np.uint64),
        skip=start,
        run=whole,
        stride=whole,
    )


@dataclass(frozen=True)
class Part:
    """One frame's share of the buffers."""

    old: Elements
    new: Elements
    work: Elements
    chunks: Chunks


def _parts(old: Elements, new: Elements, work: Elements) -> Iterator[Part]:
    step = FRAME // old.dtype.itemsize
    for lo in range(0, len(old), step):
        span = slice(lo, lo + step)
        count = len(old[span])
        yield Part(old[span], new[span], work[span], chunks_of(count, first=lo))


@dataclass
class Bench:
    """The contestants on one pair of buffers."""

    old: Elements
    new: Elements
    values: sparse.Values = "diff"

    def __post_init__(self) -> None:
        self.width = self.old.dtype.itemsize
        self.work = self.old.copy()
        self.parts = list(_parts(self.old, self.new, self.work))
        self.changed = 0
        self.sums: list[np.ndarray] = []
        self.frames: list[tuple[bytes, np.ndarray]] = []
        mask = (self.old ^ self.new).view(np.uint8)
        self.masks = [mask[lo : lo + FRAME] for lo in range(0, len(mask), FRAME)]
        self.plain = [zstd.compress(m.data) for m in self.masks]

    def encode(self) -> None:
        """Weights to frames, digest changes included."""
        xor = self.values == "xor"
        self.frames, self.sums, self.changed = [], [], 0
        for part in self.parts:
            planes, change = ops().encode(part.old, part.new, chunks=part.chunks, xor=xor)
            self.frames.append(sparse.encode_frame(planes, width=self.width, values=self.values))
            self.sums.append(change)
            self.changed += planes.changed

    def scan(self) -> None:
        """Weights to planes only."""
        for part in self.parts:
            ops().encode(part.old, part.new, chunks=part.chunks, xor=self.values == "xor")

    def decode(self) -> list[np.ndarray]:
        """Frames into the work buffer, which holds the old weights before."""
        sums = []
        for part, (data, sizes) in zip(self.parts, self.frames, strict=True):
            planes = sparse.decode_frame(
                data, sizes, chunks=part.chunks, width=self.width, values=self.values, where="bench"
            )
            sums.append(
                ops().decode_into(part.work, planes, chunks=part.chunks, xor=self.values == "xor")
            )
        return sums

    def memcpy(self) -> None:
        """Old weights into the work buffer."""
        np.copyto(self.work, self.old)

    def zstd_encode(self) -> None:
        """XOR mask and plain Zstd, level 1."""
        for part in self.parts:
            zstd.compress((part.old ^ part.new).view(np.uint8).data)

    def zstd_decode(self) -> None:
        """Plain Zstd, level 1, and XOR into the work buffer."""
        for part, data, mask in zip(self.parts, self.plain, self.masks, strict=True):
            content = zstd.decompress(data, size=len(mask), where="bench")
            np.bitwise_xor(part.work, np.frombuffer(content, part.work.dtype), out=part.work)

    def digest(self) -> int:
        """One full digest pass over the old weights."""
        n = len(self.old)
        return ops().digest(self.old, key=SEED, skip=0, run=max(n, 1), stride=max(n, 1))

    def verify(self) -> None:
        """Check the whole round trip; leaves the work buffer equal to the old weights."""
        self.encode()
        self.memcpy()
        change = sum(int(s.sum(dtype=np.uint64)) for s in self.sums) % (1 << 64)
        applied = self.decode()
        assert np.array_equal(self.work, self.new), "decoded weights differ"
        assert all(np.array_equal(a, b) for a, b in zip(self.sums, applied, strict=True))
        before = self.digest()
        size = len(self.new)
        after = ops().digest(self.new, key=SEED, skip=0, run=max(size, 1), stride=max(size, 1))
        assert (after - before) % (1 << 64) == change, "digest change differs"
        assert self.changed == int(np.count_nonzero(self.old != self.new))
        self.memcpy()


def _once(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return time.thread_time() - start


def run(
    name: str,
    old: Elements,
    new: Elements,
    *,
    values: sparse.Values = "diff",
    repeats: int = 5,
) -> Result:
    """Verify and time the codec on one pair of buffers.

    Args:
        name: What the buffers are.
        old: Elements before: 1-D, contiguous, uint8/16/32/64.
        new: The same elements after.
        values: Differences or XORs.
        repeats: Times that each contestant runs.

    Returns:
        Payload (frames and their 15 sizes each), bound and rates: "memcpy", "encode", "scan"
        (encode without its outer stage), "decode" (decode and apply), "zstd encode", "zstd
        decode", "digest".
    """
    bench = Bench(old, new, values)
    bench.verify()
    contestants: dict[str, Callable[[], object]] = {
        "memcpy": bench.memcpy,
        "encode": bench.encode,
        "scan": bench.scan,
        "decode": bench.decode,
        "zstd encode": bench.zstd_encode,
        "zstd decode": bench.zstd_decode,
        "digest": bench.digest,
    }
    spent: dict[str, list[float]] = {what: [] for what in contestants}
    for _ in range(repeats):
        for what, action in contestants.items():
            bench.memcpy()
            spent[what].append(_once(action))
    gigabytes = old.nbytes / 1e9
    return Result(
        name=name,
        width=bench.width,
        nbytes=old.nbytes,
        changed=bench.changed,
        elements=len(old),
        payload=sum(len(data) + sizes.nbytes for data, sizes in bench.frames),
        bound=xor_bound(old, new),
        plain=sum(map(len, bench.plain)),
        rates={
            what: Rates(gigabytes / min(times), gigabytes / statistics.median(times))
            for what, times in spent.items()
        },
    )


def bf16_pair(
    count: int, *, density: float, clustered: bool = False, seed: int = 0
) -> tuple[Elements, Elements]:
    """Weights like a bf16 model's, and their successor.

    89 % of the changes are one unit in the last place, the rest fall off by a power of three.

    Args:
        count: Elements.
        density: Share of the elements that change.
        clustered: Changes gather in runs of about a thousand elements instead of evenly.
        seed: For the random numbers.
    """
    random = np.random.default_rng(seed)
    weights = (random.standard_normal(count, dtype=np.float32) * np.float32(0.02)).view(np.uint32)
    old = (weights >> 16).astype(np.uint16)
    chance: np.ndarray | np.float32 = np.float32(density)
    if clustered:
        busy = random.random(-(-count // 1024), dtype=np.float32) < 0.25
        chance = np.repeat(busy, 1024)[:count] * np.float32(min(1.0, 4 * density))
    where = np.flatnonzero(random.random(count, dtype=np.float32) < chance)
    step = 1 + np.minimum(random.geometric(0.67, len(where)), 200)
    step = np.where(random.random(len(where)) < 0.89, 1, step)
    signed = np.where(random.random(len(where)) < 0.5, step, -step).astype(np.int64)
    new = old.copy()
    new[where] = (old[where].astype(np.int64) + signed).astype(np.uint16)
    return old, new


def byte_pair(count: int, *, density: float, seed: int = 0) -> tuple[Elements, Elements]:
    """Random bytes, ``density`` of which change to any other byte: the article's proxy."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count, dtype=np.uint8)
    where = np.flatnonzero(random.random(count, dtype=np.float32) < density)
    new = old.copy()
    new[where] ^= random.integers(1, 256, len(where), dtype=np.uint8)
    return old, new


def table(results: list[Result]) -> str:
    """Results as a Markdown table; "x" is the multiple of memcpy."""
    lines = [
        "| data | changed | payload/bound | plain zstd/bound | memcpy | encode | x | planes only"
        " | decode+apply | x | zstd encode | zstd apply | digest |",
        "|---" * 13 + "|",
    ]
    for r in results:
        rate = {what: f"{r.rates[what].median:.2f}" for what in r.rates}
        lines.append(
            f"| {r.name} | {100 * r.density:.3g} % | {r.payload / r.bound:.3f}"
            f" | {r.plain / r.bound:.2f} | {rate['memcpy']} | {rate['encode']}"
            f" | {r.ratio('encode'):.2f} | {rate['scan']} | {rate['decode']}"
            f" | {r.ratio('decode'):.2f} | {rate['zstd encode']} | {rate['zstd decode']}"
            f" | {rate['digest']} |"
        )
    return "\n".join(lines)
