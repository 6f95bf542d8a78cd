"""Paths through the graph of versions."""

import secrets

import pytest

from weightdelta.errors import NoPath
from weightdelta.log import Log
from weightdelta.record import VersionEntry
from weightdelta.store import Store
from weightdelta.versions import REQUEST_COST, find_path


def _entry(version: int, parent: int, payload: int = 10) -> VersionEntry:
    return VersionEntry(
        seq=version, prev="0" * 64, epoch=1, nonce="0" * 32, time=0.0, version=version, step=None,
        parent=parent, parent_digest="0" * 64, digest="0" * 64, write_id="0" * 32,
        index="0" * 64, index_bytes=1, plan="0" * 64, codec="sparse+zstd", values="diff",
        changed=0, elements=1, raw_bytes=2, payload_bytes=payload, bound_bytes=None,
    )  # fmt: skip


def _log(*entries: VersionEntry) -> Log:
    log = Log(Store(f"memory://{secrets.token_hex(8)}", timeout_s=None))
    log.versions = {entry.version: entry for entry in entries}
    return log


def _steps(log: Log, start: int, end: int, *, max_chain: int = 100) -> list[tuple[int, int, bool]]:
    path = find_path(log, start=start, end=end, max_chain=max_chain)
    return [(hop.start, hop.end, hop.forward) for hop in path]


CHAIN = (_entry(1, 0), _entry(2, 1), _entry(3, 2))


def test_a_chain_leads_forward_and_back() -> None:
    log = _log(*CHAIN)
    assert _steps(log, 0, 3) == [(0, 1, True), (1, 2, True), (2, 3, True)]
    assert _steps(log, 3, 1) == [(3, 2, False), (2, 1, False)]
    assert _steps(log, 2, 2) == []


def test_a_branch_is_reached_through_the_version_that_both_come_from() -> None:
    log = _log(*CHAIN, _entry(4, 0))
    assert _steps(log, 0, 4) == [(0, 4, True)]
    assert _steps(log, 2, 4) == [(2, 1, False), (1, 0, False), (0, 4, True)]


@pytest.mark.parametrize("payload", [REQUEST_COST, 3 * REQUEST_COST])
def test_of_two_ways_the_cheaper_one_is_taken(payload: int) -> None:
    """Bytes count, and so do requests."""
    log = _log(*CHAIN)
    log.versions[99] = _entry(3, 0, payload)  # a second delta to version 3, from the base
    direct = payload < 2 * REQUEST_COST
    assert len(_steps(log, 0, 3)) == (1 if direct else 3)
    assert len(_steps(log, 3, 0)) == (1 if direct else 3)


def test_no_path_and_long_chains_are_refused() -> None:
    log = _log(*CHAIN, _entry(9, 8))
    with pytest.raises(NoPath, match="version 0 to version 9"):
        _steps(log, 0, 9)
    with pytest.raises(NoPath, match="version 7 to version 0"):
        _steps(log, 7, 0)
    with pytest.raises(NoPath, match="max_chain=2"):
        _steps(log, 0, 3, max_chain=2)
    assert len(_steps(log, 0, 3, max_chain=3)) == 3
