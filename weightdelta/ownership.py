"""Who publishes what: every element of every tensor gets exactly one owning rank.

Ranks that hold the same box share its bytes. How many bytes each takes is a load-balancing
problem over *holder sets* (the distinct sets of ranks that hold a box together): it is solved
to within a certified bound, then each set's boxes are laid end to end and cut, along rows,
where one rank's share ends and the next one's begins. A rank owns only what it holds, so nothing
is gathered. The result depends on the shards alone, not on their order.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from weightdelta.errors import LayoutMismatch, OwnershipError
from weightdelta.layout import Box, Layout, TensorSpec
from weightdelta.sharding.explicit import (
    I64,
    Boxes,
    LocalShard,
    cut_range,
    extents,
    first_miscovered,
)

F64 = npt.NDArray[np.float64]

#: The greatest load may exceed the proven lower bound by this factor before bytes are cut.
_NEAR: Final = 1.0005
#: Cuts may add this share of the lower bound to a rank's load.
_CUT_SHARE: Final = 0.004
#: Boxes of at most this many bytes are never cut: a segment costs more than it balances.
_SMALLEST_CUT: Final = 4096
_SWEEPS: Final = 32
#: The most cells in which a gap is looked for, to name it in an error.
_GAP_CELLS: Final = 1 << 20


class ShardSpec(NamedTuple):
    """A box of tensor number ``tensor`` and all ranks that hold exactly this box."""

    tensor: int
    box: Box
    ranks: tuple[int, ...]


class Owned(NamedTuple):
    """A box of tensor number ``tensor`` that ``rank`` alone publishes."""

    tensor: int
    box: Box
    rank: int


@dataclass(frozen=True)
class OwnerMap:
    """An exact cover of a layout by owned boxes, sorted by tensor and first element."""

    owned: tuple[Owned, ...]
    world_size: int

    def loads(self, *, layout: Layout) -> I64:
        """int64 [world_size], bytes that each rank owns."""
        load = np.zeros(self.world_size, dtype=np.int64)
        for tensor, box, rank in self.owned:
            load[rank] += box.numel * layout.tensors[tensor].width
        return load


def collect(per_rank: Sequence[Sequence[LocalShard]], *, layout: Layout) -> list[ShardSpec]:
    """Join equal boxes over ranks; ``per_rank[r]`` lists what rank r holds, in any order.

    Aliases count as the tensor they name. Empty boxes are dropped.

    Whether boxes fit their tensors and each other is for ``assign`` to check.

    Raises:
        LayoutMismatch: A shard's name, dtype or extent is not the layout's.
    """
    known = _names(layout)
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Box, list[int]]] = {}
    for rank, shards in enumerate(per_rank):
        for shard in shards:
            tensor = known.get((shard.name, shard.dtype, shard.extent))
            if tensor is None:
                raise LayoutMismatch(_mismatch(shard, rank, layout))
            box = shard.box
            if 0 in box.shape:
                continue
            key = (tensor, box.offset, box.shape)
            group = groups.get(key)
            if group is None:
                groups[key] = (box, [rank])
            elif group[1][-1] != rank:
                group[1].append(rank)
    return [ShardSpec(key[0], groups[key][0], tuple(groups[key][1])) for key in sorted(groups)]


def _names(layout: Layout) -> dict[tuple[str, str, tuple[int, ...]], int]:
    """Tensor numbers by name or alias, dtype and extent."""
    names = [(t.name, i) for i, t in enumerate(layout.tensors)]
    names += [(alias, layout.index[target]) for alias, target in layout.aliases]
    tensors = layout.tensors
    return {(name, tensors[i].dtype, tensors[i].extent): i for name, i in names}


def _mismatch(shard: LocalShard, rank: int, layout: Layout) -> str:
    tensor = layout.index.get(layout.alias_of.get(shard.name, shard.name))
    if tensor is None:
        return (
            f"rank {rank}: tensor {shard.name!r} is not in base; "
            "exclude it, or map it to a base name"
        )
    spec = layout.tensors[tensor]
    return (
        f"rank {rank}: tensor {shard.name!r} is {shard.dtype} with {shard.extent} elements; "
        f"base has {spec.dtype} with {spec.extent}"
    )


def assign(specs: Iterable[ShardSpec], *, layout: Layout, world_size: int) -> OwnerMap:
    """Give every element one owner among the ranks that hold it.

    The greatest load in bytes is within 1.02 of the least that the holder sets permit, provided
    boxes can be cut that finely (rows, then parts of rows; never below 4 KiB).

    Args:
        specs: Disjoint boxes that cover the layout, in any order; empty ones are ignored.
        layout: The canonical tensors.
        world_size: Number of ranks; owners are in [0, world_size).

    Raises:
        OwnershipError: A gap, an overlap, a box outside its tensor or a rank outside the world.
    """
    if world_size < 1:
        raise OwnershipError(f"world size {world_size}: at least one rank is needed")
    ordered, boxes, extent = _arrange(specs, layout)
    _check_cover(ordered, boxes, extent, layout)
    sets, member = _holder_sets(ordered, world_size, layout)
    widths = np.array([t.width for t in layout.tensors], dtype=np.int64)
    nbytes = boxes.numel * widths[boxes.tensor]
    # bincount would add in floating point; these sums are exact.
    size = np.zeros(len(sets), dtype=np.int64)
    np.add.at(size, member, nbytes)
    share, level = _shares(sets, size.tolist(), world_size)
    grain = _grain(sets, share, level)
    owner = np.zeros(len(ordered), dtype=np.int64)
    cuts: dict[int, list[Owned]] = {}
    by_set = np.argsort(member, kind="stable")
    ends = np.cumsum(np.bincount(member, minlength=len(sets)))
    for j, (ranks, parts) in enumerate(zip(sets, share, strict=True)):
        line = by_set[ends[j - 1] if j else 0 : ends[j]]
        inner, low, high = _deal(nbytes[line], parts)
        owner[line] = np.array(ranks, dtype=np.int64)[low]
        for i, at in inner.items():
            held_by = ranks[low[i] : high[i] + 1]
            cuts[int(line[i])] = _cut(ordered[line[i]], at, held_by, layout, grain)
    return OwnerMap(_merge(ordered, owner.tolist(), cuts), world_size)


def _deal(nbytes: I64, parts: F64) -> tuple[dict[int, list[float]], I64, I64]:
    """Lay boxes end to end and cut the line into ``parts``.

    Returns:
        For each box that is cut, the byte positions in it; first and last part of every box.
    """
    starts = np.concatenate([[0], np.cumsum(nbytes)])
    edge = np.minimum(np.round(np.concatenate([[0.0], np.cumsum(parts)])), starts[-1])
    edge[-1] = starts[-1]
    low = np.searchsorted(edge, starts[:-1], side="right") - 1
    high = np.searchsorted(edge, starts[1:], side="left") - 1
    inner = {
        i: (edge[low[i] + 1 : high[i] + 1] - starts[i]).tolist()
        for i in np.flatnonzero(low != high).tolist()
    }
    return inner, low, high


def _merge(
    ordered: Sequence[ShardSpec], owner: Sequence[int], cuts: dict[int, list[Owned]]
) -> tuple[Owned, ...]:
    whole = [Owned(s[0], s[1], rank) for s, rank in zip(ordered, owner, strict=True)]
    merged: list[Owned] = []
    done = 0
    for i in sorted(cuts):
        merged += whole[done:i]
        merged += cuts[i]
        done = i + 1
    return tuple(merged + whole[done:])


# --- validation -------------------------------------------------------------------------------


def _arrange(specs: Iterable[ShardSpec], layout: Layout) -> tuple[list[ShardSpec], Boxes, I64]:
    """Non-empty specs sorted by tensor and first element, their columns, the extents."""
    kept = [s for s in specs if 0 not in s.box.shape]
    ranks_of = [len(t.shape) for t in layout.tensors]
    for s in kept:
        if not 0 <= s.tensor < len(ranks_of):
            raise OwnershipError(f"ranks {list(s.ranks)}: there is no tensor number {s.tensor}")
        if not len(s.box.offset) == len(s.box.shape) == ranks_of[s.tensor]:
            raise OwnershipError(_outside(layout.tensors[s.tensor], s.box, s.ranks))
    extent = extents(layout)
    tensor = np.fromiter((s.tensor for s in kept), dtype=np.int64, count=len(kept))
    boxes = Boxes.of(tensor, [s.box for s in kept], ndim=extent.shape[1])
    room = extent[tensor] - boxes.offset
    outside = np.flatnonzero(
        ((boxes.offset < 0) | (boxes.shape < 0) | (boxes.shape > room)).any(axis=1)
    )
    if len(outside):
        bad = kept[outside[0]]
        raise OwnershipError(_outside(layout.tensors[bad.tensor], bad.box, bad.ranks))
    order = np.lexsort((boxes.first(extent=extent), tensor))
    return [kept[i] for i in order.tolist()], boxes.take(order), extent


def _outside(spec: TensorSpec, box: Box, ranks: Sequence[int]) -> str:
    return (
        f"tensor {spec.name!r}: ranks {list(ranks)} hold a box at {box.offset} of shape "
        f"{box.shape}, which is not within {spec.extent} elements"
    )


def _check_cover(ordered: Sequence[ShardSpec], boxes: Boxes, extent: I64, layout: Layout) -> None:
    tensor = first_miscovered(boxes, extent=extent)
    if tensor is None:
        return
    low, high = np.searchsorted(boxes.tensor, [tensor, tensor + 1]).tolist()
    held = ordered[low:high]
    spec = layout.tensors[tensor]
    if not held:
        raise OwnershipError(f"tensor {spec.name!r}: no rank holds any part of it")
    for i, s in enumerate(held):
        for other in held[i + 1 :]:
            if s.box.intersect(other.box):
                raise OwnershipError(
                    f"tensor {spec.name!r}: ranks {list(s.ranks)} hold the box at "
                    f"{s.box.offset} of shape {s.box.shape}, which overlaps the box at "
                    f"{other.box.offset} of shape {other.box.shape} of ranks {list(other.ranks)}"
                )
    raise OwnershipError(_gap_text(spec, held))


def _gap_text(spec: TensorSpec, held: Sequence[ShardSpec]) -> str:
    ranks = sorted({r for s in held for r in s.ranks})
    covered = sum(s.box.numel for s in held)
    place = _gap(spec.extent, [s.box for s in held])
    where = "" if place is None else f"; nobody holds the box at {place.offset} of {place.shape}"
    return f"tensor {spec.name!r}: ranks {ranks} hold {covered} of its {spec.numel} elements{where}"


def _gap(extent: tuple[int, ...], boxes: Sequence[Box]) -> Box | None:
    """A block that no box touches, found on the grid of all box sides."""
    lines = [
        sorted({0, n, *(b.offset[d] for b in boxes), *(b.end[d] for b in boxes)})
        for d, n in enumerate(extent)
    ]
    if math.prod(len(line) for line in lines) > _GAP_CELLS:
        return None
    taken = np.zeros([len(line) - 1 for line in lines], dtype=np.bool_)
    for box in boxes:
        sides = zip(lines, box.offset, box.end, strict=True)
        taken[tuple(slice(line.index(a), line.index(b)) for line, a, b in sides)] = True
    cell = np.argwhere(~taken)[0].tolist()
    offset = tuple(line[c] for line, c in zip(lines, cell, strict=True))
    end = tuple(line[c + 1] for line, c in zip(lines, cell, strict=True))
    return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))


def _holder_sets(
    ordered: Sequence[ShardSpec], world_size: int, layout: Layout
) -> tuple[list[tuple[int, ...]], I64]:
    """The distinct holder sets, smallest first, and the number of each spec's set."""
    clean: dict[tuple[int, ...], tuple[int, ...]] = {}
    for s in ordered:
        if s.ranks not in clean:
            ranks = clean[s.ranks] = tuple(sorted(set(s.ranks)))
            if not ranks or ranks[0] < 0 or ranks[-1] >= world_size:
                raise OwnershipError(
                    f"tensor {layout.tensors[s.tensor].name!r}: held by ranks {list(ranks)}; "
                    f"expected at least one rank, all in 0..{world_size - 1}"
                )
    sets = sorted(set(clean.values()), key=lambda ranks: (len(ranks), ranks))
    number = {ranks: i for i, ranks in enumerate(sets)}
    position = {given: number[ranks] for given, ranks in clean.items()}
    member = np.fromiter((position[s.ranks] for s in ordered), dtype=np.int64, count=len(ordered))
    return sets, member


# --- balance ----------------------------------------------------------------------------------


def _shares(
    sets: Sequence[tuple[int, ...]], size: Sequence[int], world_size: int
) -> tuple[list[F64], float]:
    """Bytes of each holder set for each of its ranks, and a lower bound on the greatest load.

    Pouring each set's bytes over the loads of its ranks, smallest sets first, is already best
    for nested and disjoint sets, and converges for others. What it leaves is moved along
    chains of sets (``_settle``), which also proves the bound.
    """
    load = np.zeros(world_size, dtype=np.float64)
    index = [np.array(ranks, dtype=np.int64) for ranks in sets]
    share = [np.zeros(len(ranks), dtype=np.float64) for ranks in sets]
    _pour_all(index, size, share, load)
    level = _settle(index, share, load)
    _pour_all(index, size, share, load)
    return share, level


def _pour_all(index: Sequence[I64], size: Sequence[int], share: list[F64], load: F64) -> None:
    """Pour every set anew until nothing moves; the greatest load never rises."""
    total = float(sum(size))
    order = range(len(index))
    for sweep in range(_SWEEPS):
        moved = 0.0
        # To and fro, so that bytes travel far in either direction.
        for j in order if sweep % 2 == 0 else reversed(order):
            ranks = index[j]
            if len(ranks) == 1 and share[j][0] == size[j]:
                continue
            rest = load[ranks] - share[j]
            poured = _pour(float(size[j]), rest)
            moved = max(moved, float(np.abs(poured - share[j]).max()))
            share[j] = poured
            load[ranks] = rest + poured
        if moved <= 1e-6 * total / len(load):
            return


def _pour(amount: float, base: F64) -> F64:
    """Split ``amount`` so that the lowest of ``base`` rise to a common level."""
    low = np.sort(base)
    filled = (amount + np.cumsum(low)) / np.arange(1, len(low) + 1)
    upper = np.append(low[1:], np.inf)
    level = filled[np.argmax(filled <= upper)]
    poured: F64 = np.maximum(level - base, 0.0)
    return poured


def _settle(index: Sequence[I64], share: Sequence[F64], load: F64) -> float:
    """Move bytes until the greatest load is within _NEAR of a lower bound; return the bound.

    Bytes can move from rank a to rank b when a has a share of a set that b is in, and so on
    along chains. When no rank below ``level`` can be reached from those above it, every set
    that has bytes on the ranks reached lies within them: their mean load is a lower bound.
    """
    # fsum and sequential cumsum, never np.sum: results must not depend on the CPU's vectors.
    level = math.fsum(load) / len(load)
    sets_of: list[list[int]] = [[] for _ in load]
    for j, ranks in enumerate(index):
        for rank in ranks.tolist():
            sets_of[rank].append(j)
    while float(load.max(initial=0.0)) > level * _NEAR:
        chain, seen = _route(index, share, load, sets_of, level)
        if chain:
            _shift(chain, index, share, load, level)
        else:
            level = max(level, math.fsum(load[seen]) / len(seen))
    return level


def _route(
    index: Sequence[I64],
    share: Sequence[F64],
    load: F64,
    sets_of: Sequence[Sequence[int]],
    level: float,
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """A shortest chain of (from, set, to) to a rank below ``level``, and all ranks seen."""
    seen = np.flatnonzero(load > level * _NEAR).tolist()
    came: dict[int, tuple[int, int]] = dict.fromkeys(seen, (-1, -1))
    queue = deque(seen)
    used: set[int] = set()
    while queue:
        rank = queue.popleft()
        for j in sets_of[rank]:
            slot = int(np.searchsorted(index[j], rank))
            if j in used or share[j][slot] <= 1e-9 * level:
                continue
            used.add(j)
            for other in index[j].tolist():
                if other not in came:
                    came[other] = (rank, j)
                    if load[other] < level * (1 - 1e-9):
                        return _chain(other, came), []
                    queue.append(other)
    return [], list(came)


def _chain(end: int, came: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    links: list[tuple[int, int, int]] = []
    while came[end][0] >= 0:
        start, j = came[end]
        links.append((start, j, end))
        end = start
    return links


def _shift(
    chain: Sequence[tuple[int, int, int]],
    index: Sequence[I64],
    share: Sequence[F64],
    load: F64,
    level: float,
) -> None:
    """Move as many bytes along ``chain`` (last link first) as its ends and links permit."""
    slots = [
        (share[j], int(np.searchsorted(index[j], a)), int(np.searchsorted(index[j], b)))
        for a, j, b in chain
    ]
    source, sink = chain[-1][0], chain[0][2]
    amount = min(load[source] - level, level - load[sink], *(s[a] for s, a, _ in slots))
    for s, a, b in slots:
        s[a] -= amount
        s[b] += amount
    load[source] -= amount
    load[sink] += amount


# --- cutting ----------------------------------------------------------------------------------


def _grain(sets: Sequence[tuple[int, ...]], share: Sequence[F64], level: float) -> float:
    """Bytes to which cuts are rounded: all cuts of a rank together stay within _CUT_SHARE."""
    busy: dict[int, int] = {}
    for ranks, parts in zip(sets, share, strict=True):
        if len(ranks) > 1:
            for slot in np.flatnonzero(parts >= 1.0).tolist():
                busy[ranks[slot]] = busy.get(ranks[slot], 0) + 1
    return max(_SMALLEST_CUT, _CUT_SHARE * level / max(busy.values(), default=1))


def _cut(
    spec: ShardSpec,
    inner: Sequence[float],
    ranks: Sequence[int],
    layout: Layout,
    grain: float,
) -> list[Owned]:
    """Cut a box at byte positions ``inner``, one part for each of ``ranks``, on whole rows."""
    width = layout.tensors[spec.tensor].width
    unit = _unit(spec.box, width, grain)
    edges = [0, *(round(at / (unit * width)) * unit for at in inner), spec.box.numel]
    edges = [min(e, spec.box.numel) for e in edges]
    return [
        Owned(spec.tensor, Box(_add(spec.box.offset, part.offset), part.shape), rank)
        for rank, low, high in zip(ranks, edges[:-1], edges[1:], strict=True)
        for part in cut_range(spec.box.shape, low=low, high=high)
    ]


def _unit(box: Box, width: int, grain: float) -> int:
    """Elements between permitted cuts: the box, a row, or less, the largest within grain."""
    unit = box.numel
    for n in box.shape:
        if unit * width <= grain:
            return unit
        unit //= n
    return max(1, int(grain) // width)


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
