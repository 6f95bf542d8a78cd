"""A path of deltas as one: changes of each tensor, added up by canonical index on the CPU."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from weightdelta.chunk_table import ChunkTable
from weightdelta.decode import negated, ordered
from weightdelta.decode_batch import Decoded
from weightdelta.delta import spread
from weightdelta.digest import U64
from weightdelta.errors import LayoutMismatch
from weightdelta.fetch import Fetched
from weightdelta.kernels.planes import CHUNK, GAP_FACTOR, Elements, Planes
from weightdelta.placement import Resident
from weightdelta.sharing import Place


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one tensor: ascending canonical indices, uint64, and what each adds (or XORs)."""

    index: U64
    values: Elements
    xor: bool


class Folds:
    """Folds hops, one after the other, into one set of changes per tensor."""

    def __init__(self, residents: Mapping[int, Resident], *, pool: Executor) -> None:
        self._residents = residents
        self._pool = pool
        self._found: dict[int, Changes] = {}
        self._tied = _ties(residents)

    def add(self, fetched: Fetched, decoded: Iterable[Decoded], table: ChunkTable) -> None:
        """Fold one hop in; hops come in path order."""
        self._fold(fetched, decoded, table, self._residents)

    def watch(
        self, fetched: Fetched, decoded: Iterator[Decoded], table: ChunkTable
    ) -> Iterator[Decoded]:
        """Pass the frames of a single hop on; keep the changes of tensors that share memory."""
        tied = {tensor for group in self._tied for tensor in group}
        if not tied:
            return decoded
        frames = list(decoded)
        self._fold(fetched, frames, table, tied)
        return iter(frames)

    @property
    def tied(self) -> bool:
        """Whether some tensors share memory."""
        return bool(self._tied)

    def of(self, tensor: int, *, xor: bool) -> Changes | None:
        """What the path changes in a tensor, if its values have that form."""
        found = self._found.get(tensor)
        return found if found and found.xor == xor and len(found.index) else None

    def refuse_untied(self) -> None:
        """Check that names which are published apart share memory only while they are equal.

        Raises:
            LayoutMismatch: Two of them change differently.
        """
        for group in self._tied:
            first, *others = (self._found.get(tensor) for tensor in group)
            for tensor, other in zip(group[1:], others, strict=True):
                if not _alike(first, other):
                    names = self._residents[group[0]].name, self._residents[tensor].name
                    raise LayoutMismatch(
                        f"tensors {names[0]!r} and {names[1]!r} share memory in this model, but "
                        "the trainer gives them different values; untie them"
                    )

    def _fold(
        self,
        fetched: Fetched,
        decoded: Iterable[Decoded],
        table: ChunkTable,
        wanted: Iterable[int],
    ) -> None:
        plan, keep = fetched.delta.plan, frozenset(wanted)
        xor = fetched.delta.entry.values == "xor"
        negate = not (xor or fetched.hop.forward)

        def canonical(item: Decoded) -> list[tuple[int, U64, Elements]]:
            (frame,) = item.frames
            found = spread(plan.frame(frame), item.planes, chunks=table.frame(frame))
            return [(s.tensor, index, values) for s, index, values in found if s.tensor in keep]

        pieces: dict[int, list[tuple[U64, Elements]]] = {}
        frames = (one for item in decoded for one in item.split(table))
        for found in self._pool.map(canonical, frames):
            for tensor, index, values in found:
                pieces.setdefault(tensor, []).append((index, values))

        def one(item: tuple[int, list[tuple[U64, Elements]]]) -> tuple[int, Changes]:
            index, values = ordered(item[1])
            hop = Changes(index, negated(values) if negate else values, xor)
            before = self._found.get(item[0])
            return item[0], self._joined(item[0], before, hop) if before else hop

        self._found.update(self._pool.map(one, pieces.items()))

    def _joined(self, tensor: int, first: Changes, second: Changes) -> Changes:
        """Two sets of changes, one after the other, as one."""
        if first.xor != second.xor:
            look = self._residents[tensor].values_at
            first = _as_xor(first, look(first.index)) if not first.xor else first
            if not second.xor:
                second = _as_xor(second, _after(first, look(second.index), second.index))
        both = np.union1d(first.index, second.index)
        values = np.zeros(len(both), first.values.dtype)
        values[np.searchsorted(both, first.index)] = first.values
        at = np.searchsorted(both, second.index)
        values[at] = values[at] ^ second.values if second.xor else values[at] + second.values
        kept = values != 0
        return Changes(both[kept], values[kept], second.xor)


def as_planes(changes: Changes, *, numel: int) -> Planes:
    """The planes of a tensor's changes, the whole tensor being one segment."""
    starts = np.arange(0, numel, CHUNK, dtype=np.int64)
    length = np.minimum(numel - starts, CHUNK)
    first = np.searchsorted(changes.index, starts.astype(np.uint64))
    counts = np.diff(first, append=len(changes.index))
    place = changes.index.astype(np.int64) % CHUNK
    gaps = np.diff(place, prepend=-1) - 1
    heads = first[counts > 0]
    gaps[heads] = place[heads]
    sparse = (GAP_FACTOR * counts < length) & (counts < length)
    bitmap = [np.empty(0, np.uint8)]
    for c in np.flatnonzero((counts < length) & ~sparse).tolist():
        flags = np.zeros(int(length[c]), np.uint8)
        flags[place[first[c] : first[c] + counts[c]]] = 1
        bitmap.append(np.packbits(flags, bitorder="little"))
    return Planes(
        counts.astype(np.uint32),
        gaps[np.repeat(sparse, counts)].astype(np.uint16),
        np.concatenate(bitmap),
        changes.values,
    )


def _as_xor(changes: Changes, old: Elements) -> Changes:
    """Differences as XORs, given the values that they are added to."""
    return Changes(changes.index, old ^ (old + changes.values), True)


def _after(first: Changes, old: Elements, index: U64) -> Elements:
    """Values at ``index`` once ``first``, XORs, has changed them."""
    if not len(first.index):
        return old
    at = np.minimum(np.searchsorted(first.index, index), len(first.index) - 1)
    hit = first.index[at] == index
    return np.where(hit, old ^ first.values[at], old)


def _ties(residents: Mapping[int, Resident]) -> list[list[int]]:
    """Groups of tensors that lie in the same memory."""
    groups: dict[Place, list[int]] = {}
    for tensor, resident in residents.items():
        if resident.spec.numel:
            groups.setdefault(resident.place, []).append(tensor)
    return [group for group in groups.values() if len(group) > 1]


def _alike(one: Changes | None, other: Changes | None) -> bool:
    if one is None or other is None:
        kept = one or other
        return kept is None or not len(kept.index)
    return (
        one.xor == other.xor
        and np.array_equal(one.index, other.index)
        and np.array_equal(one.values, other.values)
    )
