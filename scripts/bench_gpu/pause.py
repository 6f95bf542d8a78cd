"""Rows of the receiver's kernels at the size of a rank: dry run, pause, full digest, dense XOR."""

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench_gpu.data import MATRIX, random_planes, random_window, tiled_chunks
from bench_gpu.rows import Row, median_seconds
from weightdelta.kernels import triton_ops
from weightdelta.kernels.device import ChunkLists, DeviceChunks, DevicePlanes, Placed, addresses
from weightdelta.kernels.planes import CHUNK


class Rank:
    """Resident bf16 matrices of a rank, and where the chunks of their tiles lie."""

    def __init__(self, nbytes: int) -> None:
        matrix = 2 * MATRIX * MATRIX
        self.matrices = nbytes // matrix
        self.weights = random_window(self.matrices * matrix, width=2)
        host, first = tiled_chunks(self.matrices)
        self.chunks = DeviceChunks.of(host, device="cuda")
        number = np.repeat(np.arange(self.matrices), len(first) // max(1, self.matrices))
        self.placed = Placed(
            torch.from_numpy(self.weights.data_ptr() + number * matrix).cuda(),
            torch.from_numpy(first).cuda(),
            torch.from_numpy(number.astype(np.int32)).cuda(),
        )
        begin = addresses(self.chunks, self.placed, width=2)
        self.placed = replace(self.placed, order=torch.argsort(begin).to(torch.int32))

    @property
    def place(self) -> dict[str, Any]:
        """Arguments of the kernels."""
        return {"chunks": self.chunks, "placed": self.placed, "width": 2}

    def digest(self) -> int:
        """Sum of the matrices' digests, with the keys that the chunks have."""
        total = torch.zeros(1, dtype=torch.int64, device="cuda")
        size = MATRIX * MATRIX
        for i, part in enumerate(self.weights.split(size)):
            total += triton_ops.digest(part, key=7919 * i, skip=0, run=size, stride=size)
        return int(total.item())


def sectors_bound(lists: ChunkLists, rank: Rank, *, bandwidth: float) -> tuple[int, float]:
    """32-byte sectors that the changes touch, and the time of 64 bytes for each."""
    touched = 0
    columns = int(rank.chunks.host.run[0])
    ends = torch.cumsum(lists.counts, 0, dtype=torch.int64)
    for low in range(0, len(rank.chunks), 1 << 16):
        high = min(low + (1 << 16), len(rank.chunks))
        begin = int(ends[low - 1]) if low else 0
        position = lists.position[begin : int(ends[high - 1])].to(torch.int64) & 0xFFFF
        chunk = torch.repeat_interleave(
            torch.arange(low, high, device="cuda"), lists.counts[low:high].to(torch.int64)
        )
        q = rank.chunks.skip[chunk] + position
        index = rank.placed.first[chunk] + q // columns * MATRIX + q % columns
        sector = (rank.placed.address[chunk] + 2 * index) // 32
        touched += int((sector[1:] != sector[:-1]).sum()) + 1
    return touched, 64 * touched / bandwidth


def synchronized(work: Any, *, repeats: int = 9, before: Any = lambda: None) -> float:
    """Median host time from the call to the end of a synchronize: the pause itself."""
    times = []
    for _ in range(repeats + 2):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


def staging_seconds(rank: Rank, planes: DevicePlanes) -> float:
    """Median time of the dry run."""
    return median_seconds(lambda: triton_ops.stage(planes, xor=False, **rank.place), repeats=5)[0]


def scatter_rows(
    rank: Rank, name: str, *, each: int, goal: float | None, ceiling: float
) -> list[Row]:
    """Stage and pause of one delta with ``each`` changes a chunk."""
    nbytes = rank.weights.nbytes
    planes = random_planes(len(rank.chunks), each=each, seed=each)
    before = rank.digest()
    lists, change = triton_ops.stage(planes, xor=False, **rank.place)
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    sums = torch.zeros_like(change)
    triton_ops.scatter(lists, wrong=wrong, sums=sums, **rank.place)
    expected = (before + int(change.sum().item())) % 2**64
    assert wrong.item() == 0
    assert torch.equal(sums, change)
    assert rank.digest() % 2**64 == expected
    triton_ops.scatter(lists, wrong=wrong, back=True, **rank.place)
    assert rank.digest() == before
    touched, bound = sectors_bound(lists, rank, bandwidth=ceiling)
    details = {"rank": nbytes, "changes": len(lists.new), "sectors": touched, "bound": bound}
    stage = staging_seconds(rank, planes)
    del planes
    found = [
        Row(
            "stage",
            f"{name}: dry run",
            stage,
            0,
            bound / stage,
            "the sector bound",
            details=details,
        )
    ]
    state = [False]

    def pause(digests: bool) -> None:
        extra = {"sums": sums} if digests else {}
        triton_ops.scatter(lists, wrong=wrong, back=state[0], **extra, **rank.place)
        state[0] = not state[0]

    for digests in (False, True):
        seconds = synchronized(lambda digests=digests: pause(digests))
        limit = goal if goal else 3 * bound
        label = f"{name}: pause{', digests' if digests else ''}"
        found.append(
            Row(
                "pause", label, seconds, 0, bound / seconds, "the sector bound",
                f"<= {limit * 1e3:.1f} ms", seconds <= limit, details,
            )
        )  # fmt: skip
    found.append(_graph_row(f"{name}: pause, as a CUDA graph", lambda: pause(False), bound))
    assert wrong.item() == 0
    return found


def _graph_row(name: str, pause: Any, bound: float) -> Row:
    """There and back, captured once and replayed: what launching it takes beside."""
    graphs = []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            pause()
    turn = itertools.cycle(graphs)
    seconds = synchronized(lambda: next(turn).replay(), repeats=10)
    return Row("pause", name, seconds, 0, bound / seconds, "the sector bound")


def rows(*, nbytes: int, ceiling: float) -> list[Row]:
    """Pause rows at rank scale, the full digest pass and the dense XOR."""
    rank = Rank(nbytes)
    label = f"{rank.weights.nbytes / 1e9:.0f} GB rank"
    found = []
    for text, each, goal in (("0.085 % of bytes", 0.0017, 0.008), ("1 % of bf16", 0.01, None)):
        found += scatter_rows(
            rank, f"{label}, {text}", each=round(each * CHUNK), goal=goal, ceiling=ceiling
        )
        torch.cuda.empty_cache()
    size = rank.weights.nbytes
    seconds, _ = median_seconds(rank.digest, repeats=2, warm=1)
    found.append(
        Row(
            "digest",
            f"{label}: full pass",
            seconds,
            size,
            size / seconds / ceiling,
            "the copy ceiling",
        )
    )
    half = rank.weights[: 2 << 30]
    other, out = rank.weights[2 << 30 : 4 << 30], rank.weights[4 << 30 : 6 << 30]
    triton_ops.dense_xor(half, other, out)
    assert torch.equal(out, half ^ other)
    for name, work in (
        ("dense XOR", lambda: triton_ops.dense_xor(half, other, out)),
        ("dense XOR, torch", lambda: torch.bitwise_xor(half, other, out=out)),
    ):
        seconds, _ = median_seconds(work)
        moved = 3 * half.nbytes
        found.append(
            Row("xor", name, seconds, moved, moved / seconds / ceiling, "the copy ceiling")
        )
    return found
