"""decode: fetched frames become absolute new values, checked against the resident weights.

Nothing is stored here: this is the dry run. A delta's values are added to (or XORed with) what
the receiver holds, and the digest of every tensor must change by exactly what the deltas say.
If it does not, the weights are not the version they should be, and that is known before a
single one has been touched.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from weightdelta.delta import canonical
from weightdelta.digest import MASK, U64
from weightdelta.errors import LayoutMismatch, StateMismatch
from weightdelta.fetch import Fetched
from weightdelta.kernels import ops
from weightdelta.kernels.planes import Elements
from weightdelta.placement import Resident
from weightdelta.sharing import Place


@dataclass(slots=True)
class Staged:
    """The changes of one resident tensor, ready to be stored.

    Attributes:
        index: uint64, canonical element indices, ascending.
        old: Values that must be there now.
        new: Values to store.
        digest_change: ``sum h(new) - h(old)``, modulo 2^64.
    """

    resident: Resident
    index: U64
    old: Elements
    new: Elements
    digest_change: int = 0
    offsets: U64 | None = None

    @property
    def places(self) -> U64:
        """Where in the resident memory each value lies."""
        if self.offsets is None:
            self.offsets = self.resident.offsets(self.index)
        return self.offsets


class Stager:
    """Folds the deltas of a path, one after the other, into one set of changes per tensor."""

    def __init__(self, residents: Sequence[Resident], *, pool: Executor) -> None:
        self._residents = {r.tensor: r for r in residents}
        self._pool = pool
        self._staged: dict[int, Staged] = {}
        self._expected: dict[int, int] = dict.fromkeys(self._residents, 0)

    def add(self, fetched: Fetched) -> None:
        """Fold one hop in; hops come in path order."""
        if not self._residents:
            return
        forward = fetched.hop.forward
        digests = fetched.delta.index.tensor_digest
        for tensor in self._residents:
            change = int(digests[tensor])
            self._expected[tensor] += change if forward else -change
        pieces = self._decode(fetched.holding(self._residents))
        folded = self._pool.map(lambda item: self._fold(item[0], item[1], fetched), pieces.items())
        for staged in folded:
            self._staged[staged.resident.tensor] = staged

    def finish(self) -> list[Staged]:
        """The changes of all tensors, in layout order.

        Raises:
            StateMismatch: A tensor's digest would not change as the deltas say.
            LayoutMismatch: Two tensors that lie in the same memory change differently.
        """
        for tensor, expected in self._expected.items():
            staged = self._staged.get(tensor)
            found = staged.digest_change if staged else 0
            if found != expected & MASK:
                name = self._residents[tensor].spec.name
                raise StateMismatch(
                    f"tensor {name!r}: expected its digest to change by {expected & MASK:#018x}, "
                    f"found {found:#018x}; its weights are not the version this receiver was at. "
                    "Nothing was changed; reload a checkpoint and attach()"
                )
        self._refuse_untied()
        return [self._staged[t] for t in sorted(self._staged) if len(self._staged[t].index)]

    def _refuse_untied(self) -> None:
        """Names that are published apart may share memory here only while they are equal."""
        first: dict[Place, Resident] = {}
        for tensor, resident in self._residents.items():
            other = first.setdefault(resident.place, resident) if resident.spec.numel else resident
            if other is not resident and not _alike(
                self._staged.get(other.tensor), self._staged.get(tensor)
            ):
                raise LayoutMismatch(
                    f"tensors {other.name!r} and {resident.name!r} share memory in this model, "
                    "but the trainer gives them different values; untie them"
                )

    def _decode(self, fetched: Fetched) -> dict[int, list[tuple[U64, Elements]]]:
        """Changes by tensor: lists of (canonical index, value)."""
        decoded = self._pool.map(lambda f: canonical(fetched.delta, f[0], f[1]), fetched.frames)
        pieces: dict[int, list[tuple[U64, Elements]]] = {}
        for frame in decoded:
            for segment, index, values in frame:
                if segment.tensor in self._residents:
                    pieces.setdefault(segment.tensor, []).append((index, values))
        return pieces

    def _fold(
        self, tensor: int, pieces: Sequence[tuple[U64, Elements]], fetched: Fetched
    ) -> Staged:
        xor = fetched.delta.entry.values == "xor"
        index, values = ordered(pieces)
        if not (xor or fetched.hop.forward):
            values = negated(values)
        before = self._staged.get(tensor)
        resident = self._residents[tensor]
        if before is None:
            return _dry_run(resident, index, values, xor=xor)
        old = _looked_up(before, index, resident)
        new = old ^ values if xor else old + values
        merged = ops().merge(before.index, before.old, before.new, index2=index, old2=old, new2=new)
        difference = merged[2] ^ merged[1]
        return _dry_run(resident, merged[0], difference, xor=True)


def _alike(one: Staged | None, other: Staged | None) -> bool:
    """Whether two tensors change in the same places to the same values."""
    if one is None or other is None:
        kept = one or other
        return kept is None or not len(kept.index)
    return np.array_equal(one.index, other.index) and np.array_equal(one.new, other.new)


def negated(values: Elements) -> Elements:
    """The differences that lead back."""
    found: Elements = (~values + values.dtype.type(1)).astype(values.dtype)
    return found


def ordered(pieces: Iterable[tuple[U64, Elements]]) -> tuple[U64, Elements]:
    """One ascending list; pieces of strided segments interleave."""
    parts = sorted(pieces, key=lambda piece: int(piece[0][0]))
    if len(parts) == 1:
        return parts[0]
    index = np.concatenate([p[0] for p in parts])
    values = np.concatenate([p[1] for p in parts])
    if bool((index[1:] > index[:-1]).all()):
        return index, values
    order = np.argsort(index, kind="stable")
    return index[order], values[order]


def _dry_run(resident: Resident, index: U64, values: Elements, *, xor: bool) -> Staged:
    offsets = resident.offsets(index)
    old, new, change = ops().dry_run(
        resident.memory, index, values, seed=resident.seed, offsets=offsets, xor=xor
    )
    return Staged(resident, index, old, new, change, offsets)


def _looked_up(before: Staged, index: U64, resident: Resident) -> Elements:
    """Values at ``index`` after the hops folded so far."""
    old = resident.memory[resident.offsets(index)]
    if not len(before.index):
        return old
    at = np.minimum(np.searchsorted(before.index, index), len(before.index) - 1)
    hit = before.index[at] == index
    old[hit] = before.new[at[hit]]
    return old
