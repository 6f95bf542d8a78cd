"""The chunks of all frames of a plan at once, for pipelines that work on many frames."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightdelta.digest import U64, seed
from weightdelta.frame import FramePlan
from weightdelta.kernels.planes import CHUNK, Chunks
from weightdelta.layout import Layout
from weightdelta.sharding.explicit import I64


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Chunks of many frames, frame after frame.

    Attributes:
        chunks: As ``frame.chunks_of`` gives them; ``start`` counts within the frame.
        bounds: int64 [frames + 1]; chunks of frame i are ``bounds[i]:bounds[i + 1]``.
        width: int64 [frames], bytes of an element.
        tensor: int64 [chunks], the tensor that a chunk is of.
        first: int64 [chunks], canonical index of its segment's first element.
    """

    chunks: Chunks
    bounds: I64
    width: I64
    tensor: I64
    first: I64

    def frame(self, i: int) -> Chunks:
        """The chunks of frame ``i``."""
        return part(self.chunks, int(self.bounds[i]), int(self.bounds[i + 1]))

    @classmethod
    def of_plan(cls, plan: FramePlan, *, layout: Layout) -> "ChunkTable":
        """The frames of a plan, by their numbers."""
        columns = (plan.tensor, plan.first, plan.rows, plan.run, plan.stride)
        return cls._of(*columns, plan.bounds, plan.width, layout)

    @classmethod
    def of_tensors(cls, tensors: Sequence[int], *, layout: Layout) -> "ChunkTable":
        """One frame a tensor, each whole, in the given order."""
        tensor = np.array(tensors, np.int64)
        numel = np.array([layout.tensors[t].numel for t in tensors], np.int64)
        width = np.array([layout.tensors[t].width for t in tensors], np.int64)
        nothing, one = np.zeros_like(numel), np.minimum(numel, 1)
        row = np.maximum(numel, 1)
        bounds = np.arange(len(tensor) + 1, dtype=np.int64)
        return cls._of(tensor, nothing, one, row, row, bounds, width, layout)

    @classmethod
    def _of(
        cls,
        tensor: I64,
        first: I64,
        rows: I64,
        run: I64,
        stride: I64,
        bounds: I64,
        width: I64,
        layout: Layout,
    ) -> "ChunkTable":
        numel = rows * run
        count = -(-numel // CHUNK)
        ends = np.concatenate([[0], np.cumsum(count)])
        segment = np.repeat(np.arange(len(numel)), count)
        skip = (np.arange(len(segment)) - ends[segment]) * CHUNK
        before = np.concatenate([[0], np.cumsum(numel)])
        frame = np.searchsorted(bounds, segment, side="right") - 1
        seeds: U64 = np.array([seed(t.name) for t in layout.tensors], np.uint64)
        chunks = Chunks(
            start=before[segment] - before[bounds[frame]] + skip,
            length=np.minimum(numel[segment] - skip, CHUNK),
            key=seeds[tensor[segment]] + first[segment].astype(np.uint64),
            skip=skip,
            run=run[segment],
            stride=stride[segment],
        )
        return cls(chunks, ends[bounds], width, tensor[segment], first[segment])


def part(chunks: Chunks, low: int, high: int) -> Chunks:
    """A view of chunks ``[low, high)``."""
    cut = slice(low, high)
    return Chunks(
        chunks.start[cut],
        chunks.length[cut],
        chunks.key[cut],
        chunks.skip[cut],
        chunks.run[cut],
        chunks.stride[cut],
    )
