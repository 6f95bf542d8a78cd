"""Check a whole run: every entry, index, plan, frame, and with a base every weight's digest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weightdelta.base import Base
from weightdelta.baseline import Baseline
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader
from weightdelta.digest import version_digest
from weightdelta.errors import (
    DamagedObject,
    InputError,
    LayoutMismatch,
    MissingObject,
    StateMismatch,
    WeightDeltaError,
)
from weightdelta.layout import Layout
from weightdelta.log import Log
from weightdelta.record import HEAD, VersionEntry, log_name
from weightdelta.store import Store

Progress = Callable[[str], None]


@dataclass(slots=True)
class Findings:
    """What a verification found.

    Attributes:
        versions: Versions checked.
        frames: Frames read and decoded.
        problems: One message per damage; each names the object.
        notes: What is not as it was left, and harms nobody.
    """

    versions: int = 0
    frames: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def verify(
    store: Store,
    *,
    config: Config,
    deep: bool = False,
    base: Path | None = None,
    progress: Progress = lambda _: None,
) -> Findings:
    """Check a run without touching any model.

    Args:
        store: The run's store.
        config: Reader limits.
        deep: Also read, hash and decode every frame.
        base: The base checkpoint; with ``deep`` every version's weights are rebuilt from it
            and their digests compared.
        progress: Called with what is being checked.

    Raises:
        InputError: There is no run here; or ``base`` is no checkpoint, or one of another model.
    """
    found = Findings()
    log = Log(store)
    reader = DeltaReader(store, config=config)
    checkpoint = Base(base) if base and deep else None
    if checkpoint:
        len(checkpoint.places)  # refuses what is no checkpoint
    with _noting(found):
        hint = _hint(store)
        log.refresh()
        _check_hint(hint, log)
    if found.ok:
        found.notes += _stale(hint, log)
    if log.opened is None:
        if found.ok:
            raise InputError(f"{store.url}: expected a run's store, found no log")
        return found
    for layout in _layout(reader, log, log.opened.layout, found):
        rebuilt = Replay(checkpoint, reader, layout) if checkpoint else None
        for entry in log.versions.values():
            progress(f"version {entry.version}")
            with _noting(found):
                _check(reader, entry, layout, found, deep=deep)
                if rebuilt and found.ok:  # nothing can be rebuilt past the first damage
                    rebuilt.step(reader.delta(entry, layout=layout), layout)
            found.versions += 1
    return found


def _hint(store: Store) -> bytes | None:
    try:
        return store.read(HEAD, limit=20)
    except MissingObject:
        return None  # it may always be missing


def _check_hint(hint: bytes | None, log: Log) -> None:
    """A hint may be old. One that is no number was damaged; one too high has outlived entries."""
    if hint is None:
        return
    text = hint.strip()
    if not text.isdigit():
        raise DamagedObject(f"{HEAD}: expected the number of a log entry, found {text!r}")
    if int(text) >= log.next_seq:
        raise MissingObject(
            f"{log_name(int(text))}: named by {HEAD}, but the log ends before {log.next_seq}: "
            f"either the tail of the log was lost, or {HEAD} was damaged"
        )


def _stale(hint: bytes | None, log: Log) -> Iterator[str]:
    """A hint that does not lead to the log's last entry."""
    last = log.next_seq - 1
    if hint is None and last >= 0:
        yield f"{HEAD}: missing; readers find the end of the log without it, only later"
    elif hint is not None and int(hint) < last:
        yield (
            f"{HEAD}: names entry {int(hint)}, the log ends at {last}; readers look further, it is "
            "put right by the next version"
        )
    elif hint is not None and hint != b"%d\n" % int(hint):
        yield f"{HEAD}: expected a number and a newline, found {hint!r}; the number is right"


def _layout(reader: DeltaReader, log: Log, digest: str, found: Findings) -> Iterator[Layout]:
    """The layout, when it and version 0's table are whole."""
    with _noting(found):
        layout = reader.layout(digest)
        reader.table(log.digest(0), layout=layout)
        yield layout


def _check(
    reader: DeltaReader, entry: VersionEntry, layout: Layout, found: Findings, *, deep: bool
) -> None:
    delta = reader.delta(entry, layout=layout)
    _check_totals(delta)
    for name, size in _objects(delta):
        actual = reader.store.size(name)
        if actual != size:
            raise DamagedObject(f"{name}: expected {size} bytes, found {actual}")
    if deep:
        for frame, data in reader.frames(delta, range(len(delta.plan))):
            planes = delta.decode(frame, data)
            if planes.changed != int(delta.index.changed[frame]):
                raise DamagedObject(
                    f"{delta.where(frame)}: expected {delta.index.changed[frame]} changes, "
                    f"found {planes.changed}"
                )
            found.frames += 1


def _check_totals(delta: Delta) -> None:
    index, entry = delta.index, delta.entry
    for what, expected, actual in (
        ("changed elements", entry.changed, int(index.changed.sum(dtype=np.int64))),
        ("payload bytes", entry.payload_bytes, index.payload_bytes),
        (
            "digest change of all frames",
            int(index.tensor_digest.sum(dtype=np.uint64)),
            int(index.digest_change.sum(dtype=np.uint64)),
        ),
    ):
        if expected != actual:
            raise DamagedObject(
                f"index of version {entry.version}: {what}: expected {expected}, found {actual}"
            )


def _objects(delta: Delta) -> Iterator[tuple[str, int]]:
    """Data objects of a delta and their sizes."""
    for rank in _owners(delta):
        frames = delta.plan.owned(rank)
        size = sum(delta.index.length(f) for f in frames)
        if size:
            yield delta.object_of(frames[0]), size


def _owners(delta: Delta) -> list[int]:
    """Ranks that own a frame: a plan can claim a million others that cost a loop but no byte."""
    owners: list[int] = np.unique(delta.plan.owner).tolist()
    return owners


class Replay:
    """All weights, rebuilt version by version from the base checkpoint."""

    def __init__(self, base: Base, reader: DeltaReader, layout: Layout) -> None:
        for spec in layout.tensors:
            if spec.name not in base.places or base.places[spec.name].spec != spec:
                raise LayoutMismatch(
                    f"base {base.path}: expected tensor {spec.name!r}, {spec.dtype} {spec.shape}, "
                    "as in the run's layout; give the checkpoint that the run started from"
                )
        self._base = base
        self._reader = reader
        self._ranks: list[Baseline] = []

    def step(self, delta: Delta, layout: Layout) -> None:
        """Apply one delta and compare the digest of all weights with the log's.

        Raises:
            StateMismatch: The weights are not the version's.
        """
        if not self._ranks:
            self._load(delta, layout)
        table = np.zeros(len(layout.tensors), np.uint64)
        for baseline in self._ranks:
            baseline.replay(delta, self._reader)
            table += baseline.digests()
        if version_digest(table) != delta.entry.digest:
            raise StateMismatch(
                f"version {delta.entry.version}: expected digest {delta.entry.digest[:16]}, base "
                f"and deltas give {version_digest(table)[:16]}"
            )

    def _load(self, delta: Delta, layout: Layout) -> None:
        for rank in _owners(delta):
            baseline = Baseline(layout, delta.plan, rank, delta.entry.values)
            baseline.load(self._base)
            self._ranks.append(baseline)


class _noting:  # noqa: N801 (reads as a verb at the call)
    """Turns an error into a finding."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, WeightDeltaError) and not isinstance(error, InputError):
            problem = f"{error.kind}: {error}"
            if problem not in self._found.problems:  # versions share their plan
                self._found.problems.append(problem)
            return True
        return False
