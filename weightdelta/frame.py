"""The static plan of frames: how owned boxes are cut into units of at most 16 MiB.

A frame is what is encoded, fetched and checked as one. It has one owner and one element width
and consists of *segments*: ``rows`` runs of ``run`` consecutive elements, ``stride`` apart,
from element ``first`` on. A plan is computed once per owner map, named by its BLAKE3 and shared
by all deltas; a delta's index then holds arrays per frame only (``index``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightdelta.cover import Columns, miscovered
from weightdelta.digest import seed
from weightdelta.errors import (
    ConfigError,
    DamagedObject,
    OwnershipError,
    UnsupportedFormat,
)
from weightdelta.kernels.planes import CHUNK, Chunks
from weightdelta.layout import Layout
from weightdelta.ownership import OwnerMap
from weightdelta.sharding.explicit import (
    I64,
    MOST_ELEMENTS,
    Boxes,
    extents,
    levels,
    slices,
    tiles,
)

#: Default and greatest permitted raw bytes of a frame.
FRAME_BYTES: Final = 16 << 20
MOST_FRAME_BYTES: Final = 1 << 30
#: The most ranks, frames and segments that a plan may have.
MOST_RANKS: Final = 1 << 20
MOST_FRAMES: Final = 1 << 26
MOST_SEGMENTS: Final = 1 << 28

_FAMILY: Final = b"WDPLAN"
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("layout", "u1", 32),
        ("frames", "<u8"),
        ("segments", "<u8"),
        ("max_bytes", "<u8"),
        ("world_size", "<u4"),
    ]
)
_MAGIC: Final = b"WDPLAN01"
_FRAME_COLUMNS: Final = (("owner", "<u4"), ("width", "<u1"), ("count", "<u4"))
_SEGMENT_COLUMNS: Final = (
    ("first", "<u8"),
    ("stride", "<u8"),
    ("tensor", "<u4"),
    ("rows", "<u4"),
    ("run", "<u4"),
)


class Segment(NamedTuple):
    """Elements ``first + i * stride + j`` of a tensor, for i < rows and j < run, in this order."""

    tensor: int
    first: int
    rows: int
    run: int
    stride: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.run


class Frame(NamedTuple):
    """One owner's segments of one element width, concatenated."""

    owner: int
    width: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(s.numel for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return self.numel * self.width


@dataclass(frozen=True, eq=False)
class FramePlan:
    """All frames, by owner, width and group, then by tensor and first element.

    Attributes:
        layout: Digest of the layout, in hex.
        world_size: Number of ranks.
        max_bytes: No frame has more raw bytes.
        owner, width: int64 [frames].
        bounds: int64 [frames + 1]; segments of frame i are ``bounds[i]:bounds[i + 1]``.
        tensor, first, rows, run, stride: int64 [segments].
    """

    layout: str
    world_size: int
    max_bytes: int
    owner: I64
    width: I64
    bounds: I64
    tensor: I64
    first: I64
    rows: I64
    run: I64
    stride: I64

    def __len__(self) -> int:
        return len(self.owner)

    def frame(self, i: int) -> Frame:
        """Frame number ``i``, in 0..len - 1."""
        if not 0 <= i < len(self):
            raise IndexError(f"frame {i}: the plan has {len(self)} frames")
        part = slice(int(self.bounds[i]), int(self.bounds[i + 1]))
        columns = (self.tensor, self.first, self.rows, self.run, self.stride)
        segments = map(Segment._make, zip(*(c[part].tolist() for c in columns), strict=True))
        return Frame(int(self.owner[i]), int(self.width[i]), tuple(segments))

    def owned(self, rank: int) -> range:
        """Numbers of the frames that ``rank`` owns; they are consecutive."""
        low, high = np.searchsorted(self.owner, [rank, rank + 1]).tolist()
        return range(low, high)

    def holding(self, tensors: I64) -> list[int]:
        """Numbers of the frames that hold a part of one of ``tensors`` (int64), ascending."""
        hit = np.flatnonzero(np.isin(self.tensor, tensors))
        found: list[int] = np.unique(np.searchsorted(self.bounds, hit, side="right") - 1).tolist()
        return found

    @cached_property
    def numel(self) -> I64:
        """int64 [frames], elements in each frame."""
        total: I64 = np.concatenate([[0], np.cumsum(self.rows * self.run)])
        return np.diff(total[self.bounds])

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the plan's bytes, in hex: its name in the store."""
        return blake3(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Fixed little-endian columns behind a header (FORMAT.md, "Plan")."""
        header = np.zeros(1, dtype=_HEADER)
        header["magic"] = _MAGIC
        header["layout"] = np.frombuffer(bytes.fromhex(self.layout), dtype=np.uint8)
        header["frames"], header["segments"] = len(self), len(self.tensor)
        header["max_bytes"], header["world_size"] = self.max_bytes, self.world_size
        columns = [
            (np.diff(self.bounds) if name == "count" else getattr(self, name)).astype(kind)
            for name, kind in (*_SEGMENT_COLUMNS, *_FRAME_COLUMNS)
        ]
        return b"".join([header.tobytes(), *(c.tobytes() for c in columns)])

    @classmethod
    def from_bytes(
        cls, data: bytes, *, layout: Layout, digest: str | None = None, where: str = "plan"
    ) -> "FramePlan":
        """Parse a plan and check that its segments cover ``layout`` exactly.

        Args:
            data: What ``to_bytes`` wrote.
            layout: The layout that the plan is for.
            digest: The plan's name; when given, the bytes must hash to it.
            where: Name of the object, for errors.

        Raises:
            UnsupportedFormat: Written by another format version.
            DamagedObject: Not a plan for this layout, or not the bytes that ``digest`` names.
        """
        if digest is not None and (found := blake3(data).hexdigest()) != digest:
            raise DamagedObject(f"{where}: expected BLAKE3 {digest}, found {found}")
        plan = _parse(data, where)
        if plan.layout != layout.digest:
            raise DamagedObject(
                f"{where}: the plan is for layout {plan.layout}, expected {layout.digest}"
            )
        fault = _fault(plan, layout)
        if fault:
            raise DamagedObject(f"{where}: {fault}")
        return plan

    @classmethod
    def build(
        cls,
        owner_map: OwnerMap,
        *,
        layout: Layout,
        max_bytes: int = FRAME_BYTES,
        groups: Sequence[int] | None = None,
    ) -> "FramePlan":
        """Cut the boxes of ``owner_map`` into frames of at most ``max_bytes`` raw bytes.

        The plan depends on the set of owned boxes alone, not on their order. Matrices larger
        than a frame are tiled about squarely, so that a slice by rows or by columns meets few
        tiles beyond its own; smaller boxes share frames with their neighbours in the layout.
        Tensors of different ``groups`` (a number below 256 for each) never share a frame.

        Raises:
            ConfigError: ``max_bytes`` is not in 8 B .. 1 GiB.
            OwnershipError: The boxes do not cover the layout exactly.
        """
        if not 8 <= max_bytes <= MOST_FRAME_BYTES:
            raise ConfigError(f"frame size {max_bytes}: expected 8..{MOST_FRAME_BYTES} bytes")
        widths = np.array([t.width for t in layout.tensors], dtype=np.int64)
        extent = extents(layout)
        boxes, owner = _columns(owner_map, layout, extent)
        boxes, owner = _tile(boxes, owner, widths, max_bytes)
        tensor, owner, *columns = _flatten(boxes, owner, extent)
        width = widths[tensor]
        group = np.zeros(len(widths), np.int64) if groups is None else np.array(groups, np.int64)
        kind = (owner * 16 + width) * 256 + group[tensor]
        order = np.lexsort((columns[0], tensor, kind))
        tensor, owner, width = tensor[order], owner[order], width[order]
        first, rows, run, stride = (column[order] for column in columns)
        bounds = _pack(kind[order], rows * run * width, max_bytes)
        head = bounds[:-1]
        plan = cls(
            layout.digest, owner_map.world_size, max_bytes, owner[head], width[head],
            bounds, tensor, first, rows, run, stride,
        )  # fmt: skip
        fault = _fault(plan, layout)
        if fault:
            raise OwnershipError(f"owner map: {fault}")
        return plan


def chunks_of(frame: Frame, *, layout: Layout) -> Chunks:
    """The chunks of a frame, segment after segment, each of at most 65536 elements."""
    columns = np.array(frame.segments, dtype=np.int64).reshape(-1, 5).T
    tensor, first, rows, run, stride = columns
    seeds = [seed(layout.tensors[t].name) for t in tensor.tolist()]
    key = np.array(seeds, dtype=np.uint64) + first.astype(np.uint64)
    numel = rows * run
    count = -(-numel // CHUNK)
    segment = np.repeat(np.arange(len(count)), count)
    skip = (np.arange(len(segment)) - (np.cumsum(count) - count)[segment]) * CHUNK
    return Chunks(
        start=(np.cumsum(numel) - numel)[segment] + skip,
        length=np.minimum(numel[segment] - skip, CHUNK),
        key=key[segment],
        skip=skip,
        run=run[segment],
        stride=stride[segment],
    )


# --- cutting ----------------------------------------------------------------------------------


def _columns(owner_map: OwnerMap, layout: Layout, extent: I64) -> tuple[Boxes, I64]:
    """Non-empty owned boxes and their owners; ranks and bounds checked."""
    owned = [o for o in owner_map.owned if 0 not in o.box.shape]
    for o in owned:
        if not (0 <= o.tensor < len(layout.tensors) and 0 <= o.rank < owner_map.world_size):
            raise OwnershipError(f"owner map: no such tensor or rank: {o}")
        if len(o.box.offset) != len(layout.tensors[o.tensor].shape):
            raise OwnershipError(f"owner map: {o} has not the tensor's number of dimensions")
    tensor = np.fromiter((o.tensor for o in owned), dtype=np.int64, count=len(owned))
    owner = np.fromiter((o.rank for o in owned), dtype=np.int64, count=len(owned))
    boxes = Boxes.of(tensor, [o.box for o in owned], ndim=extent.shape[1])
    bad = (boxes.offset < 0) | (boxes.shape < 0) | (boxes.shape > extent[tensor] - boxes.offset)
    if bad.any():
        o = owned[int(np.flatnonzero(bad.any(axis=1))[0])]
        raise OwnershipError(f"tensor {layout.tensors[o.tensor].name!r}: {o} is out of bounds")
    return boxes, owner


def _replace(
    boxes: Boxes, owner: I64, mask: npt.NDArray[np.bool_], parts: Sequence[tuple[I64, I64]]
) -> tuple[Boxes, I64]:
    """Put ``parts`` (offsets and shapes for each masked box) in place of the masked boxes."""
    counts = [len(offset) for offset, _ in parts]
    kept = boxes.take(~mask)
    tensor = np.repeat(boxes.tensor[mask], counts)
    joined = Boxes(
        np.concatenate([kept.tensor, tensor]),
        np.concatenate([kept.offset, *(offset for offset, _ in parts)]),
        np.concatenate([kept.shape, *(shape for _, shape in parts)]),
    )
    return joined, np.concatenate([owner[~mask], np.repeat(owner[mask], counts)])


def _tile(boxes: Boxes, owner: I64, widths: I64, max_bytes: int) -> tuple[Boxes, I64]:
    """Cut boxes larger than a frame."""
    width = widths[boxes.tensor]
    large = boxes.numel * width > max_bytes
    if not large.any():
        return boxes, owner
    tiled = [
        tiles(offset, shape, max_bytes // w)
        for offset, shape, w in zip(
            boxes.offset[large], boxes.shape[large], width[large].tolist(), strict=True
        )
    ]
    return _replace(boxes, owner, large, tiled)


def _flatten(boxes: Boxes, owner: I64, extent: I64) -> tuple[I64, I64, I64, I64, I64, I64]:
    """Columns tensor, owner, first, rows, run, stride; deeper boxes become several segments."""
    rows, run, stride, deep = levels(boxes, extent)
    while deep.any():
        parts = [
            slices(offset, shape)
            for offset, shape in zip(boxes.offset[deep], boxes.shape[deep], strict=True)
        ]
        boxes, owner = _replace(boxes, owner, deep, parts)
        rows, run, stride, deep = levels(boxes, extent)
    return boxes.tensor, owner, boxes.first(extent=extent), rows, run, stride


def _pack(group: I64, nbytes: I64, max_bytes: int) -> I64:
    """Bounds of frames: consecutive segments of one group, as many as fit."""
    total = np.concatenate([[0], np.cumsum(nbytes)])
    ends = np.append(np.flatnonzero(np.diff(group)) + 1, len(group))
    bounds = [0]
    for end in ends.tolist():
        while bounds[-1] < end:
            limit = total[bounds[-1]] + max_bytes
            bounds.append(min(end, int(np.searchsorted(total, limit, side="right")) - 1))
    return np.array(bounds, dtype=np.int64)


# --- reading and checking ---------------------------------------------------------------------


def _parse(data: bytes, where: str) -> FramePlan:
    """Columns out of bytes; nothing is allocated before counts have been held against length."""
    if len(data) < _HEADER.itemsize:
        raise DamagedObject(f"{where}: {len(data)} bytes are too few for a plan")
    header = np.frombuffer(data, dtype=_HEADER, count=1)[0]
    magic = data[: len(_MAGIC)]
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise UnsupportedFormat(f"{where}: plan format {magic!r}, this reader knows {_MAGIC!r}")
        raise DamagedObject(f"{where}: starts with {magic!r}, expected {_MAGIC!r}")
    frames, segments = int(header["frames"]), int(header["segments"])
    fields = [(*c, segments) for c in _SEGMENT_COLUMNS] + [(*c, frames) for c in _FRAME_COLUMNS]
    expected = _HEADER.itemsize + sum(np.dtype(t).itemsize * n for _, t, n in fields)
    if frames > MOST_FRAMES or segments > MOST_SEGMENTS or len(data) != expected:
        raise DamagedObject(
            f"{where}: {frames} frames and {segments} segments take {expected} bytes, "
            f"found {len(data)}"
        )
    columns: dict[str, I64] = {}
    offset = _HEADER.itemsize
    for name, kind, count in fields:
        column = np.frombuffer(data, dtype=kind, count=count, offset=offset)
        columns[name] = column.astype(np.int64)
        offset += column.nbytes
    bounds = np.concatenate([[0], np.cumsum(columns.pop("count"))])
    return FramePlan(
        layout=header["layout"].tobytes().hex(),
        world_size=int(header["world_size"]),
        max_bytes=int(header["max_bytes"]),
        bounds=bounds,
        **columns,
    )


def _fault(plan: FramePlan, layout: Layout) -> str | None:
    """What is wrong with a plan for this layout, or None."""
    numel = [t.numel for t in layout.tensors]
    if sum(numel) >= MOST_ELEMENTS:
        return f"the layout has {sum(numel)} elements, at least {MOST_ELEMENTS}"
    sizes = np.array(numel, dtype=np.int64)
    return (
        _frame_fault(plan, layout)
        or _segment_fault(plan, layout, sizes)
        or _cover_fault(plan, layout, sizes)
    )


def _frame_fault(plan: FramePlan, layout: Layout) -> str | None:
    if not 1 <= plan.world_size <= MOST_RANKS:
        return f"world size {plan.world_size}, expected 1..{MOST_RANKS}"
    if not 8 <= plan.max_bytes <= MOST_FRAME_BYTES:
        return f"frame size {plan.max_bytes}, expected 8..{MOST_FRAME_BYTES} bytes"
    if plan.bounds[-1] != len(plan.tensor) or (np.diff(plan.bounds) < 1).any():
        return "the frames' segment counts do not add up"
    if (np.diff(plan.owner) < 0).any() or (plan.owner >= plan.world_size).any():
        return f"frames are not in order of owners 0..{plan.world_size - 1}"
    if (plan.tensor >= len(layout.tensors)).any():
        return f"a segment's tensor number is not below {len(layout.tensors)}"
    widths = np.array([t.width for t in layout.tensors], dtype=np.int64)
    frame = np.repeat(np.arange(len(plan)), np.diff(plan.bounds))
    wrong = np.flatnonzero(widths[plan.tensor] != plan.width[frame])
    if len(wrong):
        name = layout.tensors[int(plan.tensor[wrong[0]])].name
        return f"frame {frame[wrong[0]]} has not the element width of tensor {name!r}"
    return None


def _segment_fault(plan: FramePlan, layout: Layout, sizes: I64) -> str | None:
    """Bounds of segments and frames; no product is formed before its factors are bounded."""
    numel = sizes[plan.tensor]
    first, rows, run, stride = plan.first, plan.rows, plan.run, plan.stride
    good = (first >= 0) & (rows >= 1) & (run >= 1) & (stride >= run)
    good &= (first < numel) & (run <= numel - first) & (stride <= numel)
    good &= rows - 1 <= (numel - first - run) // np.maximum(stride, 1)
    several = rows > 1
    # Rows lie within a grid of the tensor, as those of a box do.
    grid = np.maximum(stride, 1)
    good &= np.where(several, (numel % grid == 0) & (run <= grid - first % grid), stride == run)
    if not good.all():
        i = int(np.flatnonzero(~good)[0])
        segment = Segment(*(int(c[i]) for c in (plan.tensor, first, rows, run, stride)))
        name = layout.tensors[segment.tensor].name
        return f"tensor {name!r}: {segment} is not within {numel[i]} elements"
    # A segment is bounded before sums over a frame's segments are formed.
    if (rows * run > plan.max_bytes).any():
        return f"a segment has more than {plan.max_bytes} bytes"
    large = np.flatnonzero(plan.numel * plan.width > plan.max_bytes)
    if len(large):
        return f"frame {large[0]} has more than {plan.max_bytes} bytes"
    return None


def _cover_fault(plan: FramePlan, layout: Layout, sizes: I64) -> str | None:
    """What keeps some tensor from having every element in exactly one segment, or None."""
    columns = Columns(plan.tensor, plan.first, plan.rows, plan.run, plan.stride)
    bad = miscovered(columns, sizes=sizes)
    if bad is None:
        return None
    mine = np.flatnonzero(plan.tensor == bad)
    ranks = np.unique(plan.owner[np.searchsorted(plan.bounds, mine, side="right") - 1]).tolist()
    return (
        f"tensor {layout.tensors[bad].name!r}: segments of ranks {ranks} count "
        f"{int((plan.rows * plan.run)[mine].sum())} elements of {sizes[bad]}; "
        "expected each exactly once"
    )
