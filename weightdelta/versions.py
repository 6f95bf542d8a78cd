"""The graph of versions: deltas lead both ways, and a receiver takes the cheapest path."""

import heapq
from dataclasses import dataclass

from weightdelta.errors import InputError, NoPath
from weightdelta.log import Log
from weightdelta.record import VersionEntry

#: Bytes that one more request costs, in the choice between paths.
REQUEST_COST = 256 * 1024


@dataclass(frozen=True, slots=True)
class Hop:
    """One delta of a path, taken from parent to version (forward) or back."""

    entry: VersionEntry
    forward: bool

    @property
    def start(self) -> int:
        """Version before the hop."""
        return self.entry.parent if self.forward else self.entry.version

    @property
    def end(self) -> int:
        """Version after the hop."""
        return self.entry.version if self.forward else self.entry.parent


def check_target(*, version: int | None, ref: str | None) -> None:
    """Refuse what cannot name a version.

    Raises:
        InputError: Both are given, or the version is not a number from 0.
    """
    if version is not None and ref is not None:
        raise InputError(f"prepare: expected a version or a ref, found {version} and {ref!r}")
    if version is not None and (type(version) is not int or version < 0):
        raise InputError(f"prepare: expected a version from 0, found {version!r}")


def find_path(log: Log, *, start: int, end: int, max_chain: int) -> list[Hop]:
    """The path of fewest bytes from one version to another; empty when they are the same.

    Raises:
        NoPath: The versions are not connected, or only by more than ``max_chain`` deltas.
    """
    edges = _edges(log)
    best: dict[int, tuple[float, Hop | None]] = {start: (0.0, None)}
    queue = [(0.0, start)]
    while queue:
        cost, at = heapq.heappop(queue)
        if at == end:
            break
        if cost > best[at][0]:
            continue
        for hop in edges.get(at, ()):
            reached = cost + hop.entry.payload_bytes + hop.entry.index_bytes + REQUEST_COST
            if hop.end not in best or reached < best[hop.end][0]:
                best[hop.end] = (reached, hop)
                heapq.heappush(queue, (reached, hop.end))
    return _walk(best, start=start, end=end, max_chain=max_chain)


def _edges(log: Log) -> dict[int, list[Hop]]:
    edges: dict[int, list[Hop]] = {}
    for entry in log.versions.values():
        for hop in (Hop(entry, True), Hop(entry, False)):
            edges.setdefault(hop.start, []).append(hop)
    return edges


def _walk(
    best: dict[int, tuple[float, Hop | None]], *, start: int, end: int, max_chain: int
) -> list[Hop]:
    if end not in best:
        raise NoPath(f"no chain of deltas leads from version {start} to version {end}")
    path: list[Hop] = []
    at = end
    while at != start:
        hop = best[at][1]
        if hop is None:
            raise NoPath(f"no chain of deltas leads from version {start} to version {end}")
        path.append(hop)
        at = hop.start
    if len(path) > max_chain:
        raise NoPath(
            f"version {start} to {end}: {len(path)} deltas, more than max_chain={max_chain}; "
            "start from a newer checkpoint"
        )
    return path[::-1]
