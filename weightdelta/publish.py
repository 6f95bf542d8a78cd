"""publish: receipts of all ranks become one index and one log entry, or nothing.

A ``RunWriter`` is the single writer of a run: it opens an epoch, gathers one receipt a rank and
commits. It holds no state that the log does not: a new one on the same store takes over, and
what the old one had not committed is lost without harm.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.digest import U64, version_digest
from weightdelta.encode import Histogram, bound_bytes
from weightdelta.errors import (
    Busy,
    CommitInDoubt,
    InputError,
    LayoutMismatch,
    NotYet,
    PublicationLost,
    StateMismatch,
    WeightDeltaError,
)
from weightdelta.index import Index
from weightdelta.job import Job
from weightdelta.log import Log, LogWriter, Make
from weightdelta.record import (
    RefEntry,
    VersionEntry,
    index_name,
    layout_name,
    plan_name,
    table_name,
)
from weightdelta.skew import refuse_skew
from weightdelta.stats import CaptureCosts, PublishStats
from weightdelta.store import Store


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank has uploaded for one publication.

    Attributes:
        write_id: Random id of the publication, 32 hex digits.
        parent: Version of the baseline that was compared with.
        steps: Optimizer steps since this rank's last committed capture; None when unknown.
        mark: The caller's own step number on that rank, if ``attach`` was given one.
        count: The step count that the rank's optimizer keeps; shows where a restarted rank is.
        codecs: uint8[n], codec numbers of the owned frames in plan order; 0 where unchanged.
        sizes: uint32[n, 15], their plane sizes.
        hashes: uint8[n, 16], BLAKE3 of each encoded frame.
        digest_change: uint64[n].
        changed: uint32[n].
        tensor_digest: uint64, digest change of each tensor of the layout.
        histogram: XOR values, when the bound is measured.
        capture_s, encode_s, upload_s: Seconds spent.
        costs: What the capture took on the rank's devices and their link.
    """

    write_id: str
    rank: int
    parent: int
    steps: int | None
    mark: int | None
    codecs: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.uint32]
    hashes: npt.NDArray[np.uint8]
    digest_change: U64
    changed: npt.NDArray[np.uint32]
    tensor_digest: U64
    histogram: Histogram | None
    capture_s: float
    encode_s: float
    upload_s: float
    costs: CaptureCosts = field(default_factory=CaptureCosts)
    count: int | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of the rank's object."""
        return int(self.sizes.sum(dtype=np.int64))

    def uploaded(self, seconds: float) -> "Receipt":
        """The receipt with the time that the upload took."""
        return replace(self, upload_s=seconds)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a publication ended: committed with its stats, or lost with the reason."""

    write_id: str
    stats: PublishStats | None = None
    error: WeightDeltaError | None = None

    @property
    def version(self) -> int | None:
        """The committed version, or None."""
        return self.stats.version if self.stats and self.stats.committed else None

    def result(self) -> PublishStats:
        """The stats.

        Raises:
            WeightDeltaError: Why the publication was lost.
        """
        if self.stats is None:
            raise self.error or PublicationLost(f"publication {self.write_id} was lost")
        return self.stats


def skipped(write_id: str, *, step: int | None, version: int) -> Outcome:
    """The outcome of a publication that was not made; the next one covers the span."""
    stats = PublishStats(committed=False, version=version, step=step)
    return Outcome(write_id, stats=stats)


@dataclass(slots=True)
class Pending:
    """A publication under way."""

    write_id: str
    step: int | None
    parent: int
    started: float
    receipts: dict[int, Receipt] = field(default_factory=dict)
    last_receipt: float = 0.0
    committing: bool = False


class RunWriter:
    """Gathers receipts and commits versions; one per run, fenced by the log.

    Args:
        clock: Seconds that never jump, for time limits and durations.
        now: Unix time in seconds, for the entries.

    Attributes:
        newest: Newest committed version.
        pending: The publication under way, if any.
    """

    def __init__(
        self,
        store: Store,
        *,
        config: Config,
        clock: Callable[[], float],
        nonce: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._log = Log(store)
        self._writer = LogWriter(self._log, nonce=nonce, clock=now)
        self._outcomes: dict[str, Outcome] = {}
        self.pending: Pending | None = None
        self._job: Job | None = None
        self._table: U64 | None = None

    @property
    def log(self) -> Log:
        """The run's log, as far as it has been read."""
        return self._log

    @property
    def newest(self) -> int:
        """Newest committed version."""
        return self._log.newest

    @property
    def job(self) -> Job:
        """The job that was opened."""
        if self._job is None:
            raise NotYet("this run is not open yet; attach first")
        return self._job

    def open(self, job: Job, *, table: U64 | None = None) -> int:
        """Take over the run: check it against the job, then append an ``open`` entry.

        Args:
            job: The job that will publish.
            table: Tensor digests of the ranks' baselines at ``newest``. None resumes with the
                newest version's own digests, for a coordinator that restarted under live ranks.

        Returns:
            The newest version, from which the next delta starts.

        Raises:
            LayoutMismatch: The store holds a run of another model.
            StateMismatch: The store holds a run that started from other base bytes.
            Fenced: Another writer opened at the same time and won.
            UnsafeStore: The store cannot keep two writers apart.
        """
        self._store.probe()
        self._log.refresh()
        self._check(job, table)
        self._job = job
        self._table = self._resume() if table is None else table
        layout = job.layout.digest
        self._store.write(layout_name(layout), job.layout.to_bytes())
        self._store.write(plan_name(job.plan.digest), job.plan.to_bytes())
        digest = version_digest(self._table)
        if self.newest == 0:
            self._store.write(table_name(digest), self._table.astype("<u8").tobytes())
        self._writer.open(
            self.newest,
            parent_digest=digest,
            layout=layout,
            deadline_s=self._config.store.retry_s,
        )
        return self.newest

    def _check(self, job: Job, table: U64 | None) -> None:
        opened = self._log.opened
        if opened is None:
            return
        if opened.layout != job.layout.digest:
            raise LayoutMismatch(
                f"store {self._store.url}: expected layout {job.layout.digest[:16]}, found a run "
                f"of layout {opened.layout[:16]}; use another store or the same base and exclude"
            )
        expected = self._log.digest(self.newest)
        if table is not None and version_digest(table) != expected:
            raise StateMismatch(
                f"store {self._store.url}: base and deltas up to version {self.newest} should "
                f"have digest {expected[:16]}, found {version_digest(table)[:16]}; this run was "
                "started from other base bytes"
            )

    def _resume(self) -> U64:
        """Tensor digests of the newest version: those of version 0 plus every delta's change."""
        reader = DeltaReader(self._store, config=self._config)
        layout = self.job.layout
        table = reader.table(self._log.digest(0), layout=layout)
        for version in range(1, self.newest + 1):
            entry = self._log.versions[version]
            table = table + reader.delta(entry, layout=layout).index.tensor_digest
        return table

    def begin(self, write_id: str, *, step: int | None) -> None:
        """Start a publication; idempotent by ``write_id``.

        Raises:
            Busy: Another publication is under way.
        """
        if write_id in self._outcomes or (self.pending and self.pending.write_id == write_id):
            return
        if self.pending:
            raise Busy(f"publication {self.pending.write_id[:8]} is still running")
        self.pending = Pending(write_id, step, self.newest, self._clock())

    def add(self, receipt: Receipt) -> bool:
        """Take a rank's receipt; True when all ranks have delivered. Idempotent.

        Raises:
            PublicationLost: The receipt belongs to no publication under way, or its baseline is
                not the newest version.
        """
        pending = self._pending(receipt.write_id)
        if receipt.parent != self.newest:
            raise PublicationLost(
                f"rank {receipt.rank}: compared with version {receipt.parent}, the newest is "
                f"{self.newest}; the delta has to be computed again"
            )
        if pending.committing:  # the index is written and its entry sent: neither may change
            return True
        pending.receipts[receipt.rank] = receipt
        pending.last_receipt = self._clock()
        return len(pending.receipts) == self.job.world_size

    def commit(self, write_id: str) -> Outcome:
        """Write the index and the log entry once every receipt is there.

        Raises:
            CommitInDoubt: The entry was sent and its slot is not known yet; call again.
        """
        if write_id in self._outcomes:
            return self._outcomes[write_id]
        pending = self._pending(write_id)
        try:
            stats = self._commit(pending)
        except CommitInDoubt:
            raise
        except WeightDeltaError as e:
            return self._end(Outcome(write_id, error=e))
        return self._end(Outcome(write_id, stats=stats))

    def abort(self, write_id: str, error: WeightDeltaError) -> Outcome | None:
        """Give a publication up, unless its entry has been sent already (then None)."""
        known = self.outcome(write_id)  # the log's word counts, also for an earlier writer's
        if known is not None or (self.pending and self.pending.committing):
            return known
        return self._end(Outcome(write_id, error=error))

    def skip(self, write_id: str) -> Outcome:
        """End a publication as skipped: a rank had not finished the one before."""
        pending = self._pending(write_id)
        return self._end(skipped(write_id, step=pending.step, version=self.newest))

    def outcome(self, write_id: str) -> Outcome | None:
        """How a publication ended; None while it is under way.

        A publication that this writer never heard of was lost with the writer before it: its
        entry either is in the log, or its slot has been taken by this writer's ``open``.
        """
        if write_id in self._outcomes:
            return self._outcomes[write_id]
        if self.pending and self.pending.write_id == write_id:
            return None
        for entry in list(self._log.versions.values()):  # another thread may be appending
            if entry.write_id == write_id:
                return Outcome(write_id, stats=_stats(entry))
        error = PublicationLost(f"publication {write_id[:8]} was lost with its coordinator")
        return Outcome(write_id, error=error)

    def tag(self, name: str, *, version: int | None = None) -> int:
        """Point a ref at a version, the newest by default; returns the version.

        Raises:
            InputError: Readers could not name it: it is a number, or ``base``, which is version 0.
            NotYet: The version does not exist.
        """
        if name == "base" or str(name).isdigit():
            raise InputError(
                f"tag: expected a name that is no number and not 'base', found {name!r}"
            )
        chosen = self.newest if version is None else version
        self._log.digest(chosen)

        def make(seq: int, prev: str, epoch: int, nonce: str, now: float) -> RefEntry:
            return RefEntry(seq, prev, epoch, nonce, now, name, chosen)

        self._writer.append(make, deadline_s=self._config.store.retry_s)
        return chosen

    def expired(self) -> bool:
        """Whether the publication under way has outlasted ``publish_timeout_s``."""
        pending = self.pending
        limit = self._config.publish_timeout_s
        return bool(pending and not pending.committing and self._clock() - pending.started > limit)

    def _pending(self, write_id: str) -> Pending:
        if self.pending is None or self.pending.write_id != write_id:
            raise PublicationLost(f"publication {write_id[:8]} is not under way; it was given up")
        return self.pending

    def _end(self, outcome: Outcome) -> Outcome:
        # In this order: a reader on another thread must find one or the other.
        self._outcomes[outcome.write_id] = outcome
        if self.pending and self.pending.write_id == outcome.write_id:
            self.pending = None
        # Ranks ask within seconds; a handful of the latest is enough, the log has the rest.
        while len(self._outcomes) > 64:
            self._outcomes.pop(next(iter(self._outcomes)))
        return outcome

    def _commit(self, pending: Pending) -> PublishStats:
        receipts = [pending.receipts[rank] for rank in sorted(pending.receipts)]
        refuse_skew(receipts)
        index = self._index(receipts, pending.write_id, pending.parent)
        data = index.to_bytes()
        make = self._entry(pending, index, data)
        if not pending.committing:
            make(1, "0" * 64, 1, "0" * 32, 0.0)  # refuses what no entry can hold, while it may
            self._store.write(index_name(pending.write_id), data)
            pending.committing = True
        entry = self._append(pending, make)
        self._table = self._digests + index.tensor_digest
        costs = _costs(receipts)
        return replace(_stats(entry), commit_s=self._clock() - pending.last_receipt, **costs)

    def _append(self, pending: Pending, make: Make) -> VersionEntry:
        """Append the version entry, or find that an earlier try of it was committed."""
        try:
            self._writer.append(make, deadline_s=self._config.store.retry_s)
        except CommitInDoubt:
            raise
        except WeightDeltaError:
            # In doubt until now, and settled by another call on this writer.
            if not self._is_committed(pending):
                raise
        return self._log.versions[pending.parent + 1]

    def _is_committed(self, pending: Pending) -> bool:
        entry = self._log.versions.get(pending.parent + 1)
        return entry is not None and entry.write_id == pending.write_id

    def _index(self, receipts: Sequence[Receipt], write_id: str, parent: int) -> Index:
        plan, layout = self.job.plan, self.job.layout
        order = np.concatenate([np.asarray(plan.owned(r.rank), np.int64) for r in receipts])
        place = np.argsort(order, kind="stable")
        return Index(
            version=parent + 1,
            parent=parent,
            write_id=write_id,
            plan=plan,
            codecs=np.concatenate([r.codecs for r in receipts])[place],
            sizes=np.concatenate([r.sizes for r in receipts])[place],
            hashes=np.concatenate([r.hashes for r in receipts])[place],
            digest_change=np.concatenate([r.digest_change for r in receipts])[place],
            changed=np.concatenate([r.changed for r in receipts])[place],
            tensor_digest=np.sum([r.tensor_digest for r in receipts], axis=0, dtype=np.uint64)
            if layout.tensors
            else np.zeros(0, np.uint64),
        )

    def _entry(self, pending: Pending, index: Index, data: bytes) -> Make:
        job = self.job
        receipts = list(pending.receipts.values())
        fields: dict[str, Any] = {
            "version": index.version,
            "step": pending.step,
            "parent": index.parent,
            "parent_digest": version_digest(self._digests),
            "digest": version_digest(self._digests + index.tensor_digest),
            "write_id": pending.write_id,
            "index": blake3(data).hexdigest(),
            "index_bytes": len(data),
            "plan": job.plan.digest,
            "codec": ",".join(index.codec_names) or job.config.codec,
            "values": job.config.values,
            "changed": int(index.changed.sum(dtype=np.int64)),
            "elements": sum(job.elements.values()),
            "raw_bytes": job.layout.nbytes,
            "payload_bytes": sum(r.payload_bytes for r in receipts),
            "bound_bytes": _bound(receipts, job),
        }
        return lambda *common: VersionEntry(*common, **fields)

    @property
    def _digests(self) -> U64:
        """Tensor digests of the newest version."""
        if self._table is None:
            raise NotYet("this run is not open yet; attach first")
        return self._table


def _bound(receipts: Sequence[Receipt], job: Job) -> int | None:
    measured = [r.histogram for r in receipts if r.histogram is not None]
    complete = len(measured) == job.world_size
    return bound_bytes(measured, elements=job.elements) if complete else None


def _costs(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Times and memory of the rank that needed most, traffic of all together."""
    times = {n: max(getattr(r, n) for r in receipts) for n in ("capture_s", "encode_s", "upload_s")}
    most = {n: max(getattr(r.costs, n) for r in receipts) for n in ("device_bytes", "pinned_bytes")}
    traffic = {n: sum(getattr(r.costs, n) for r in receipts) for n in ("down_bytes", "up_bytes")}
    return times | most | traffic


def _stats(entry: VersionEntry) -> PublishStats:
    return PublishStats(
        committed=True,
        version=entry.version,
        step=entry.step,
        changed=entry.changed,
        elements=entry.elements,
        raw_bytes=entry.raw_bytes,
        payload_bytes=entry.payload_bytes,
        index_bytes=entry.index_bytes,
        bound_bytes=entry.bound_bytes,
    )
