"""Which version weights are: their digests held against those of every version of a run."""

from collections.abc import Iterator, Sequence

import numpy as np

from weightdelta.delta import DeltaReader
from weightdelta.digest import U64, version_digest
from weightdelta.errors import StateMismatch
from weightdelta.layout import Layout
from weightdelta.log import Log
from weightdelta.placement import Resident


def recognize(
    found: U64, *, residents: Sequence[Resident], log: Log, reader: DeltaReader, layout: Layout
) -> tuple[int, U64]:
    """The newest version whose digests are those found.

    Args:
        found: uint64, one digest per tensor of the layout; those of tensors not held are 0.
        residents: The tensors held.
        log: The run's log.
        reader: Where its objects are read.
        layout: The run's canonical tensors.

    Returns:
        The version, and the digests of all its tensors, those not held included.

    Raises:
        StateMismatch: They are none; the message names tensors that differ from base.
    """
    if len(residents) < len(layout.tensors):
        return _part(found, residents, log, reader, layout)
    digest = version_digest(found)
    for version in range(log.newest, -1, -1):
        if log.digest(version) == digest:
            return version, found
    raise StateMismatch(_no_version(found, residents, log, reader, layout))


def _part(
    found: U64, residents: Sequence[Resident], log: Log, reader: DeltaReader, layout: Layout
) -> tuple[int, U64]:
    held = np.array([r.tensor for r in residents], np.int64)
    match = -1
    whole = found
    for version, table in _tables(log, reader, layout):
        if np.array_equal(table[held], found[held]):
            match, whole = version, table
    if match < 0:
        raise StateMismatch(_no_version(found, residents, log, reader, layout))
    return match, whole


def _tables(log: Log, reader: DeltaReader, layout: Layout) -> Iterator[tuple[int, U64]]:
    """Every version with its tensor digests."""
    table = reader.table(log.digest(0), layout=layout)
    yield 0, table
    for version in range(1, log.newest + 1):
        delta = reader.delta(log.versions[version], layout=layout)
        table = table + delta.index.tensor_digest
        yield version, table


def _no_version(
    found: U64, residents: Sequence[Resident], log: Log, reader: DeltaReader, layout: Layout
) -> str:
    table = reader.table(log.digest(0), layout=layout)
    names = [r.spec.name for r in residents if found[r.tensor] != table[r.tensor]]
    return (
        f"weights: expected a version of {log.store.url} (0 to {log.newest}), found "
        f"none; {len(names)} of {len(residents)} tensors differ from base, first "
        f"{names[0] if names else 'none'!r}; load the base checkpoint and attach()"
    )
