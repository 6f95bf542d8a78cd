"""encode: planes of changed frames to compressed, hashed frames; their entropy bound."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightdelta.baseline import Baseline, EncodedFrame
from weightdelta.codecs.registry import encode_frame
from weightdelta.config import Config
from weightdelta.digest import U64
from weightdelta.kernels import ops

if TYPE_CHECKING:  # a coordinator needs no torch
    from weightdelta.capture import FramePlanes

#: Distinct XOR values and how often each occurs, by element width in bytes.
Histogram = Mapping[int, tuple[U64, npt.NDArray[np.int64]]]


def encode(
    planes: Sequence["FramePlanes"], *, baseline: Baseline, pool: Executor, config: Config
) -> list[EncodedFrame]:
    """Compress and hash every frame, one task a frame, in frame order.

    A frame's codec is what ``config`` says of its tensors, which all have the same.
    """
    return list(pool.map(lambda item: _encode(item, baseline, config), planes))


def _encode(item: "FramePlanes", baseline: Baseline, config: Config) -> EncodedFrame:
    frame = baseline.plan.frame(item.frame)
    codec = config.codec_for(baseline.layout.tensors[frame.segments[0].tensor].name)
    data, sizes = encode_frame(
        item.planes,
        codec=codec,
        chunks=baseline.chunks(item.frame),
        width=frame.width,
        values=baseline.values,
    )
    return EncodedFrame(
        frame=item.frame,
        codec=codec,
        data=data,
        sizes=sizes,
        digest=blake3(data).digest(length=16),
        digest_change=item.digest_change,
        changed=item.planes.changed,
    )


def tensor_digests(planes: Sequence["FramePlanes"], *, baseline: Baseline) -> U64:
    """Each tensor's digest change over the owned frames: uint64, one per tensor."""
    table = np.zeros(len(baseline.layout.tensors), np.uint64)
    for item in planes:
        segments = baseline.plan.frame(item.frame).segments
        ends = np.cumsum([segment.numel for segment in segments])
        owner = np.searchsorted(ends, baseline.chunks(item.frame).start, side="right")
        tensor = np.array([segment.tensor for segment in segments])[owner]
        np.add.at(table, tensor, item.chunk_digest)
    return table


def histogram(planes: Sequence["FramePlanes"], *, baseline: Baseline) -> Histogram:
    """How often each XOR value occurs, while the baseline still holds the old bytes."""
    found: dict[int, list[U64]] = {}
    for item in planes:
        if not item.planes.changed:
            continue
        old = baseline.frames[item.frame]
        values = item.planes.values
        if baseline.values == "diff":
            at = ops().expand(item.planes, chunks=baseline.chunks(item.frame))
            values = old[at] ^ (old[at] + values)
        found.setdefault(old.itemsize, []).append(values.astype(np.uint64))
    counted = {w: np.unique(np.concatenate(v), return_counts=True) for w, v in found.items()}
    return {w: (values, counts.astype(np.int64)) for w, (values, counts) in counted.items()}


def bound_bytes(histograms: Sequence[Histogram], *, elements: Mapping[int, int]) -> int:
    """Zero-order entropy of a delta's XOR mask, in bytes.

    The bound is ``N * h(k / N)`` bits for the positions of ``k`` changes among ``N`` elements and
    ``k * H(values)`` bits for their XOR values (Shannon), summed over the element widths.

    Args:
        histograms: One per rank.
        elements: Elements of the whole model by width.
    """
    bits = 0.0
    for width, total in elements.items():
        parts = [h[width] for h in histograms if width in h]
        if not parts:
            continue
        values = np.concatenate([p[0] for p in parts])
        weights = np.concatenate([p[1] for p in parts]).astype(np.float64)
        counts = np.bincount(np.unique(values, return_inverse=True)[1], weights)
        changed = counts.sum()
        bits += _entropy(np.array([changed, total - changed], np.float64))
        bits += _entropy(counts.astype(np.float64))
    return round(bits / 8)


def _entropy(counts: npt.NDArray[np.float64]) -> float:
    """Bits to tell which of the classes each item belongs to."""
    used = counts[counts > 0]
    total = used.sum()
    return float((used * np.log2(total / used)).sum())
