"""Rows of encode: two resident windows to planes, beside the copy ceiling and torch."""

import numpy as np
import torch

from bench_gpu.data import changed, flat_chunks, random_window
from bench_gpu.rows import Row, median_seconds
from weightdelta.kernels import ops, triton_encode, triton_ops
from weightdelta.kernels.device import DeviceChunks, DevicePlanes
from weightdelta.kernels.planes import CHUNK, UINTS, Chunks

#: Passes over the shard in a timing: the rate is that of a pipeline under way. What one pass takes,
#: from the first call to the last plane, stands in the details.
PASSES = 4
PLANES = ("counts", "gaps", "bitmap", "values")
#: What is said of a mask, its element width and density, the MiB of a window in which scratch has
#: room for that, and the fraction of the ceiling to reach.
MASKS = (
    ("0.026 % of bytes, bf16", 2, 0.00052, 4096, 0.90),
    ("0.085 % of bytes, bf16", 2, 0.0017, 4096, 0.90),
    ("0.13 % of bytes, bf16", 2, 0.0026, 4096, 0.90),
    ("0.026 % of bytes, fp8", 1, 0.00026, 4096, 0.90),
    ("0.085 % of bytes, fp8", 1, 0.00085, 4096, 0.90),
    ("0.13 % of bytes, fp8", 1, 0.0013, 4096, 0.90),
    ("1.5 % of bf16", 2, 0.015, 4096, 0.80),
    ("4 % of bf16", 2, 0.04, 1024, None),
    ("8 % of bf16", 2, 0.08, 1024, 0.60),
    ("21 % of bf16", 2, 0.21, 1024, None),
    ("100 % of bf16", 2, 1.0, 1024, None),
)


def copy_ceiling(nbytes: int) -> Row:
    """Device-to-device copy, bytes read plus bytes written."""
    source = random_window(nbytes, width=8)
    target = torch.empty_like(source)
    seconds, worst = median_seconds(lambda: target.copy_(source))
    assert torch.equal(source, target)
    return Row("ceiling", "copy, device to device", seconds, 2 * nbytes, details={"worst": worst})


def check(
    old: torch.Tensor, new: torch.Tensor, planes: DevicePlanes, change: torch.Tensor,
    *, chunks: DeviceChunks,
) -> None:  # fmt: skip
    """Decode leads to ``new``, digests agree with a full pass, a sample with the CPU's bits."""
    target = old.clone()
    decoded = triton_ops.decode_into(target, planes, chunks=chunks, xor=False)
    assert torch.equal(target, new)
    assert torch.equal(decoded, change)
    whole = {"key": int(chunks.host.key[0]), "skip": 0, "run": 2**40, "stride": 2**40}
    full = triton_ops.digest(new, **whole) - triton_ops.digest(old, **whole)
    assert full.item() == change.sum().item()
    few = min(200, len(chunks))
    part = Chunks(*(getattr(chunks.host, n)[:few].copy() for n in Chunks.__slots__))
    size = int(part.start[-1] + part.length[-1])
    kind = UINTS[old.element_size()]
    sample = [t[:size].cpu().numpy().view(kind) for t in (old, new)]
    wanted, sums = ops().encode(*sample, chunks=part, xor=False)
    found = planes.host()
    assert np.array_equal(found.counts[:few], wanted.counts)
    for name in PLANES[1:]:
        mine, right = getattr(found, name), getattr(wanted, name)
        assert np.array_equal(mine[: len(right)], right), name
    assert np.array_equal(change[:few].cpu().numpy().view(np.uint64), sums)


def torch_peer(old: torch.Tensor, new: torch.Tensor) -> None:
    """What one writes without kernels of one's own: positions and values of a XOR mask."""
    mask = old ^ new
    where = mask.nonzero().squeeze(1)
    mask[where]


class Windows:
    """A shard before and after, cut into windows."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor, *, nbytes: int) -> None:
        size = nbytes // old.element_size()
        frame = 256 * CHUNK // old.element_size()
        self.parts = [
            (a, b, DeviceChunks.of(flat_chunks(len(a), frame=frame), device="cuda"))
            for a, b in zip(old.split(size), new.split(size), strict=True)
        ]

    def check(self) -> tuple[int, int]:
        """Every bit of every window; changed elements and bytes of planes in all."""
        changes, size = 0, 0
        for old, new, chunks in self.parts:
            planes, change = triton_ops.encode(old, new, chunks=chunks, xor=False)
            check(old, new, planes, change, chunks=chunks)
            changes += len(planes.values)
            size += sum(getattr(planes, n).nbytes for n in PLANES)
        return changes, size

    def encode(self, *, digest: bool = True, passes: int = 1) -> None:
        """All windows; one begins before the last one is finished."""
        before: triton_encode.Encoding | None = None
        for old, new, chunks in self.parts * passes:
            begun = triton_ops.begin_encode(old, new, chunks=chunks)
            if before is not None:
                before.finish(xor=False, digest=digest)
            before = begun
        assert before is not None
        before.finish(xor=False, digest=digest)


def mask_rows(
    name: str, *, width: int, density: float, window: int, goal: float | None, nbytes: int,
    ceiling: float,
) -> list[Row]:  # fmt: skip
    """Encode with digests, without, and torch's way."""
    old = random_window(nbytes, width=width)
    new = changed(old, density=density, seed=1)
    windows = Windows(old, new, nbytes=min(window << 20, nbytes))
    changes, size = windows.check()
    details = {"changed": changes / len(old), "planes": size, "window": window << 20}
    found = []
    for digest in (True, False):
        once, _ = median_seconds(lambda digest=digest: windows.encode(digest=digest))
        seconds, worst = median_seconds(
            lambda digest=digest: windows.encode(digest=digest, passes=PASSES)
        )
        seconds, worst = seconds / PASSES, worst / PASSES
        fraction = 2 * nbytes / seconds / ceiling
        aim = goal if digest else None
        found.append(
            Row(
                "encode", f"{name}{'' if digest else ', no digests'}", seconds, nbytes, fraction,
                "the copy ceiling", f">= {aim:.2f}" if aim else "",
                fraction >= aim if aim else None, {**details, "worst": worst, "one pass": once},
            )
        )  # fmt: skip
    if width == 2:
        part = nbytes // 4 // width  # torch's index takes 64 bits for each changed element
        seconds, _ = median_seconds(lambda: torch_peer(old[:part], new[:part]), repeats=3, warm=1)
        fraction = nbytes / 2 / seconds / ceiling
        label = f"{name}: torch XOR + nonzero, a quarter"
        found.append(Row("encode", label, seconds, nbytes // 4, fraction, "the copy ceiling"))
    return found


def rows(*, nbytes: int, ceiling: float) -> list[Row]:
    """All masks."""
    found = []
    for name, width, density, window, goal in MASKS:
        found += mask_rows(
            name, width=width, density=density, window=window, goal=goal, nbytes=nbytes,
            ceiling=ceiling,
        )  # fmt: skip
        torch.cuda.empty_cache()
    return found
