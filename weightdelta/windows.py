"""Windows: runs of whole frames of a rank that a device compares at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.baseline import Baseline
from weightdelta.frame import Frame
from weightdelta.kernels.device import DeviceChunks
from weightdelta.kernels.planes import UINTS, Chunks, Planes
from weightdelta.live import FramePlanes


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive frames of one element width.

    Attributes:
        low: Where the first of them starts in the baseline's arena [B].
        nbytes: Bytes from there to the end of the last.
        frames: Their numbers, and ``specs`` what they hold.
        bounds: Chunks of the i-th frame are ``bounds[i]:bounds[i + 1]``.
    """

    low: int
    nbytes: int
    width: int
    frames: tuple[int, ...]
    specs: tuple[Frame, ...]
    bounds: tuple[int, ...]
    chunks: DeviceChunks


def plan_windows(
    baseline: Baseline, frames: Sequence[int], *, limit: int, device: torch.device
) -> list[Window]:
    """Cut ``frames``, ascending, into windows of at most ``limit`` bytes, or one frame."""
    groups: list[list[int]] = []
    for frame in frames:
        if groups and _fits(baseline, groups[-1], frame, limit):
            groups[-1].append(frame)
        else:
            groups.append([frame])
    return [_window(baseline, group, device) for group in groups]


def _fits(baseline: Baseline, group: Sequence[int], frame: int, limit: int) -> bool:
    plan = baseline.plan
    end = baseline.offsets[frame] + int(plan.numel[frame] * plan.width[frame])
    return (
        group[-1] + 1 == frame
        and plan.width[frame] == plan.width[group[0]]
        and end - baseline.offsets[group[0]] <= limit
    )


def _window(baseline: Baseline, frames: Sequence[int], device: torch.device) -> Window:
    low, width = baseline.offsets[frames[0]], int(baseline.plan.width[frames[0]])
    tables = [baseline.chunks(frame) for frame in frames]
    sizes = [len(table) for table in tables]
    columns = {
        column.name: np.concatenate([getattr(table, column.name) for table in tables])
        for column in fields(Chunks)
    }
    shifts = [(baseline.offsets[frame] - low) // width for frame in frames]
    columns["start"] = columns["start"] + np.repeat(np.array(shifts, np.int64), sizes)
    specs = tuple(baseline.plan.frame(frame) for frame in frames)
    return Window(
        low=low,
        nbytes=baseline.offsets[frames[-1]] + specs[-1].nbytes - low,
        width=width,
        frames=tuple(frames),
        specs=specs,
        bounds=(0, *np.cumsum(sizes).tolist()),
        chunks=DeviceChunks.of(Chunks(**columns), device=device),
    )


def split_planes(
    window: Window, planes: Planes, chunk_digest: npt.NDArray[np.uint64]
) -> list[FramePlanes]:
    """A window's planes by frame, copied once into memory that its frames share."""
    kept = Planes(
        planes.counts.copy(),
        planes.gaps.copy(),
        planes.bitmap.copy(),
        planes.values.view(UINTS[window.width]).copy(),
    )
    digest = chunk_digest.copy()
    parts = kept.split(window.chunks.host.length, np.array(window.bounds))
    return [
        FramePlanes(frame, part, digest[low:high])
        for frame, part, (low, high) in zip(
            window.frames, parts, pairwise(window.bounds), strict=True
        )
    ]
