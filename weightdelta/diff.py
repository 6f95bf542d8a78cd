"""What lies between two versions: which tensors, how many elements, how densely.

No weights are read. The deltas of a path are folded element by element, so what a later delta
takes back does not count. Differences fold by addition and XORs by XOR; an element that deltas
of both forms have touched (a run whose ``values`` setting was changed) cannot be folded without
its weight, so it counts as changed, and the result says that it is not exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta import threads
from weightdelta.batches import Progress, batches
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader, canonical
from weightdelta.digest import U64
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import Layout, TensorSpec
from weightdelta.log import Log
from weightdelta.versions import find_path

#: Raw bytes of the tensors folded together; bounds memory, with the largest tensor.
GROUP_BYTES: Final = 1 << 30
#: Upper ends of the histogram's classes, as shares of a tensor's elements.
EDGES: Final = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

_DIFF: Final = 1
_XOR: Final = 2


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How one tensor differs.

    Attributes:
        elements: Elements of the tensor.
        changed: How many of them differ.
        raw_bytes: Bytes of the tensor.
        changed_bytes: Bytes of the elements that differ.
        one_step: Elements that differ by one unit in the last place; None where XORs were
            published, which do not tell.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    raw_bytes: int
    changed_bytes: int
    one_step: int | None

    @property
    def density(self) -> float:
        """Share of the elements that differ."""
        return self.changed / self.elements if self.elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self) | {"shape": list(self.shape), "density": self.density}


@dataclass(frozen=True, slots=True)
class DensityClass:
    """Tensors whose density is above ``low`` and at most ``high``; the first: just 0."""

    low: float
    high: float
    tensors: int
    changed: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What lies between two versions.

    Attributes:
        start, end: The versions.
        hops: Deltas on the path between them.
        fetched_bytes: Encoded bytes of these deltas: what a receiver would fetch.
        exact: False when deltas of both forms met in some element; see the module.
        tensors: Every tensor, in layout order.
    """

    start: int
    end: int
    hops: int
    fetched_bytes: int
    exact: bool
    tensors: tuple[TensorChange, ...]

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(t.changed for t in self.tensors)

    @property
    def changed_bytes(self) -> int:
        """Bytes of the elements that differ."""
        return sum(t.changed_bytes for t in self.tensors)

    @property
    def elements(self) -> int:
        """Elements of the model."""
        return sum(t.elements for t in self.tensors)

    @property
    def differing(self) -> tuple[TensorChange, ...]:
        """The tensors that differ, most changed elements first."""
        found = [t for t in self.tensors if t.changed]
        return tuple(sorted(found, key=lambda t: (-t.changed, t.name)))

    def histogram(self) -> tuple[DensityClass, ...]:
        """How densely tensors changed."""
        classes = [DensityClass(0.0, 0.0, *_sums(t for t in self.tensors if not t.changed))]
        for low, high in pairwise(EDGES):
            inside = (t for t in self.tensors if low < t.density <= high)
            classes.append(DensityClass(low, high, *_sums(inside)))
        return tuple(classes)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values; tensors that do not differ are left out."""
        return {
            "from": self.start,
            "to": self.end,
            "hops": self.hops,
            "fetched_bytes": self.fetched_bytes,
            "exact": self.exact,
            "elements": self.elements,
            "changed": self.changed,
            "changed_bytes": self.changed_bytes,
            "tensors_in_all": len(self.tensors),
            "tensors": [t.as_dict() for t in self.differing],
            "histogram": [asdict(c) for c in self.histogram()],
        }


def _sums(tensors: Iterator[TensorChange]) -> tuple[int, int]:
    changed = [t.changed for t in tensors]
    return len(changed), sum(changed)


def diff(
    log: Log,
    *,
    start: int,
    end: int,
    config: Config,
    progress: Progress = lambda *_: None,
) -> Difference:
    """Compare two versions by the deltas between them, in either direction.

    Args:
        log: The run's log, refreshed.
        start: One version; 0 is the base.
        end: The other.
        config: Threads and reader limits.
        progress: Called with what is being done.

    Raises:
        NotYet: One of the versions is not published.
        NoPath: They are further apart than ``limits.max_chain``.
        DamagedObject, MissingObject: A delta between them is not whole.
    """
    for version in (start, end):
        log.digest(version)
    reader = DeltaReader(log.store, config=config)
    layout = reader.layout(log.opened.layout if log.opened else "")
    path = find_path(log, start=start, end=end, max_chain=config.limits.max_chain)
    deltas = [(hop.forward, reader.delta(hop.entry, layout=layout)) for hop in path]
    changes, exact, done = list[TensorChange](), True, 0
    for group in _groups(layout):
        folds = _fold_group(reader, deltas, group, config=config)
        for tensor in group:
            fold = folds.get(tensor, _Fold.empty(layout.tensors[tensor].width))
            exact = exact and not fold.mixed
            changes.append(_change(layout.tensors[tensor], fold))
            done += layout.tensors[tensor].nbytes
        progress(f"version {start} to {end}", done, layout.nbytes)
    fetched = sum(hop.entry.payload_bytes for hop in path)
    return Difference(start, end, len(path), fetched, exact, tuple(changes))


def _groups(layout: Layout) -> Iterator[list[int]]:
    """Consecutive tensors of about GROUP_BYTES together."""
    group, size = list[int](), 0
    for i, spec in enumerate(layout.tensors):
        if group and size + spec.nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(i)
        size += spec.nbytes
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Fold:
    """Touched elements of one tensor: sums of differences, XORs, and which of the two there were.

    Attributes:
        index: uint64, canonical element indices, ascending.
        total, xor: What they add up to, of the element's width.
        forms: uint8, _DIFF and _XOR.
    """

    index: U64
    total: Elements
    xor: Elements
    forms: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls, width: int) -> "_Fold":
        none = np.empty(0, UINTS[width])
        return cls(np.empty(0, np.uint64), none, none, np.empty(0, np.uint8))

    @classmethod
    def of(cls, index: U64, values: Elements, *, xor: bool) -> "_Fold":
        none = np.zeros_like(values)
        forms = np.full(len(index), _XOR if xor else _DIFF, np.uint8)
        return cls(index, none if xor else values, values if xor else none, forms)

    @property
    def mixed(self) -> bool:
        """Whether some element was touched in both forms."""
        return bool((self.forms == _DIFF | _XOR).any())

    def then(self, other: "_Fold") -> "_Fold":
        """This, then another; each holds an index once."""
        both = np.concatenate([self.index, other.index])
        order = np.argsort(both, kind="stable")  # two ascending runs: merged in one pass
        both = both[order]
        new = np.ones(len(both), np.bool_)
        np.not_equal(both[1:], both[:-1], out=new[1:])
        place = np.empty(len(both), np.int64)
        place[order] = np.cumsum(new) - 1
        index = both[new]
        total = np.zeros(len(index), self.total.dtype)
        xor, forms = np.zeros_like(total), np.zeros(len(index), np.uint8)
        for part, at in zip((self, other), np.split(place, [len(self.index)]), strict=True):
            total[at] += part.total
            xor[at] ^= part.xor
            forms[at] |= part.forms
        return _Fold(index, total, xor, forms)


def _fold_group(
    reader: DeltaReader, deltas: Sequence[tuple[bool, Delta]], group: list[int], *, config: Config
) -> dict[int, _Fold]:
    folds: dict[int, _Fold] = {}
    ahead = config.store.threads
    with threads.pool(ahead, "weightdelta-fetch") as pool:
        for forward, delta in deltas:
            pieces: dict[int, list[tuple[U64, Elements]]] = {}
            frames = delta.plan.holding(np.asarray(group, np.int64))
            for batch in batches(reader, delta, frames, pool=pool, ahead=ahead):
                for frame, data in batch:
                    for segment, index, values in canonical(delta, frame, data):
                        pieces.setdefault(segment.tensor, []).append((index, values))
            for tensor in set(pieces) & set(group):
                xor = delta.entry.values == "xor"
                fold = _joined(pieces[tensor], xor=xor, negate=not (xor or forward))
                folds[tensor] = folds[tensor].then(fold) if tensor in folds else fold
    return folds


def _joined(pieces: Sequence[tuple[U64, Elements]], *, xor: bool, negate: bool) -> _Fold:
    index = np.concatenate([p[0] for p in pieces])
    values = np.concatenate([p[1] for p in pieces])
    if negate:
        values = (~values + values.dtype.type(1)).astype(values.dtype)
    if not bool((index[1:] > index[:-1]).all()):  # pieces of strided segments interleave
        order = np.argsort(index, kind="stable")
        index, values = index[order], values[order]
    return _Fold.of(index, values, xor=xor)


def _change(spec: TensorSpec, fold: _Fold) -> TensorChange:
    changed = int(np.count_nonzero((fold.total != 0) | (fold.xor != 0) | (fold.forms == 3)))
    told = not bool((fold.forms & _XOR).any())
    step = fold.total.dtype.type(1)
    one = int(np.count_nonzero((fold.total == step) | (~fold.total == fold.total.dtype.type(0))))
    return TensorChange(
        spec.name, spec.dtype, spec.shape, spec.numel, changed,
        spec.nbytes, changed * spec.width, one if told else None,
    )  # fmt: skip
