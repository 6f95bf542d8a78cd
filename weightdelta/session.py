"""One trainer rank's side of every publication: capture, encode, deliver, settle.

The capture runs inside the caller's call, within the step fence. Everything after it runs on
one background thread: frames are encoded, handed to ``deliver`` and kept until the outcome is
known. Only a committed outcome moves the baseline.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Protocol

import numpy as np

from weightdelta import threads
from weightdelta.baseline import Baseline, EncodedFrame, rebuild, replay
from weightdelta.capture import FramePlanes, Inventory, SnapshotCapture
from weightdelta.codecs.names import IDS, Codec
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.device_memory import pin_if_used
from weightdelta.digest import U64
from weightdelta.encode import Encoding, histogram, rehearse, tensor_digests
from weightdelta.errors import Busy, InputError, PublicationLost, WeightDeltaError
from weightdelta.fence import Guard, StepFence
from weightdelta.index import SLOTS
from weightdelta.job import Job
from weightdelta.log import Log
from weightdelta.publish import Outcome, Receipt
from weightdelta.replicas import Hashes, hash_shards, shared_boxes
from weightdelta.state import State
from weightdelta.steps import Steps
from weightdelta.store import Store

Clock = Callable[[], float]
#: Captures that are remembered until it is known which of them was committed.
_TAKEN: Final = 8


class Payload:
    """What one rank delivers: first the bytes of its object, then the receipt.

    The upload can begin while later frames are still being encoded.
    """

    def __init__(
        self,
        coming: "Sequence[Future[EncodedFrame]]",
        receipt: Callable[[list[EncodedFrame]], Receipt],
        *,
        rank: int,
    ) -> None:
        self._coming = coming
        self._make = receipt
        self._rank = rank

    @property
    def parts(self) -> Iterator[bytes]:
        """The object's bytes, piece by piece, each as soon as it is encoded; none is empty.

        Can be read again.

        Raises:
            WeightDeltaError: A frame could not be encoded.
        """
        return (frame.data for frame in self._frames() if frame.data)

    @cached_property
    def receipt(self) -> Receipt:
        """What the coordinator is told; waits until all is encoded.

        Raises:
            WeightDeltaError: A frame could not be encoded.
        """
        try:
            return self._make(self.frames)
        except Exception as e:
            raise known(self._rank, e) from e

    @property
    def frames(self) -> list[EncodedFrame]:
        """The encoded frames; waits for all of them."""
        return list(self._frames())

    def check(self) -> None:
        """Raise what has gone wrong on this rank, if anything has."""
        for job in self._coming:
            if job.done():
                self._result(job)

    def _frames(self) -> Iterator[EncodedFrame]:
        return map(self._result, self._coming)

    def _result(self, job: "Future[EncodedFrame]") -> EncodedFrame:
        try:
            return job.result()
        except Exception as e:
            raise known(self._rank, e) from e


class Uploading(Protocol):
    """An upload under way, like ``store.Upload``."""

    def add(self, part: bytes) -> None: ...  # noqa: D102
    def finish(self) -> None: ...  # noqa: D102
    def abandon(self) -> None: ...  # noqa: D102


def upload(payload: Payload, *, begin: Callable[[], Uploading], clock: Clock) -> Receipt:
    """Write a rank's object while it is being encoded.

    Args:
        payload: What the rank delivers; without a change nothing is written.
        begin: Starts the upload.
        clock: Seconds.

    Returns:
        The receipt, with the time that the upload took beyond the encoding.

    Raises:
        WeightDeltaError: A frame could not be encoded, or the store failed.
    """
    under_way: Uploading | None = None
    try:
        for part in payload.parts:
            under_way = under_way or begin()
            under_way.add(part)
        encoded, receipt = clock(), payload.receipt
        if under_way:
            under_way.finish()
    except BaseException:
        if under_way:
            under_way.abandon()
        raise
    return receipt.uploaded(clock() - encoded)


#: Uploads a payload, or reports the error in its place, and returns how the publication ended;
#: what a payload raises is reported as well.
Deliver = Callable[[Payload | WeightDeltaError], Outcome]


@dataclass(frozen=True, slots=True)
class Captured:
    """The planes of one capture and their encoding.

    Attributes:
        since: Optimizer steps since the last commit; None when unknown.
        mark: The caller's step number, and ``count`` the optimizer's own.
    """

    write_id: str
    planes: Sequence[FramePlanes]
    encoding: Encoding
    steps: Steps
    since: int | None
    mark: int | None
    count: int | None
    seconds: float


class RankSession:
    """Baseline, fence and background thread of one trainer rank."""

    def __init__(self, job: Job, *, rank: int, store: Store, clock: Clock) -> None:
        self.job = job
        self.rank = rank
        self._store = store
        self._clock = clock
        config = job.config
        self._baseline = Baseline(job.layout, job.plan, rank, config.values)
        self._fence = StepFence(max_step_delay_s=config.max_step_delay_s, clock=clock)
        self._pool = threads.pool(config.threads, f"weightdelta-{rank}")
        self._worker = threads.pool(1, f"weightdelta-{rank}-publish")
        self._capture = SnapshotCapture(self._baseline, pool=self._pool, config=config.device)
        # Held from a capture until its outcome is settled; released by another thread.
        self._turn = threading.Lock()
        self._closed = False
        self._steps_at_commit: Steps | None = None
        # Where the optimizers were at the latest captures, by write id.
        self._taken: dict[str, Steps] = {}

    @property
    def fence(self) -> StepFence:
        """The step fence of this process."""
        return self._fence

    @property
    def version(self) -> int:
        """Version of the baseline."""
        return self._baseline.version

    def start(self, *, version: int, fresh: bool) -> U64:
        """Fill the baseline with a committed version.

        Args:
            version: Newest committed version.
            fresh: False after a restart of this rank alone: its step count then cannot be
                compared with the others' until the next commit.

        Returns:
            Digest of each tensor over the owned elements: uint64, one per tensor.
        """
        rehearse(self._baseline, config=self.job.config)
        self._rebuild(version)
        if fresh:
            self._steps_at_commit = self._fence.now()
        return self._baseline.digests()

    def _rebuild(self, version: int | None = None) -> None:
        """Load base and replay the log up to a version, the newest by default."""
        log, reader = self._log()
        newest = log.newest if version is None else version
        self._baseline.usable = False  # until the replay has ended
        self._steps_at_commit = self._steps_of(log, newest)
        rebuild(
            self._baseline,
            base=self.job.base,
            log=log,
            reader=reader,
            versions=range(1, newest + 1),
        )
        if self.job.config.device.use != "never":
            pin_if_used(self._baseline.arena)  # now: in a capture an optimizer would wait for it

    def hash_replicas(
        self,
        state: Callable[[], State],
        *,
        inventories: Sequence[Inventory],
        guard: Guard | None = None,
    ) -> Hashes:
        """Hashes of this rank's shards that other ranks hold too (``refuse_divergence``)."""
        shared = shared_boxes(inventories)
        if not shared:
            return {}
        with self._fence.capturing(guard=guard):
            return hash_shards(state(), shared=shared, layout=self.job.layout)

    def catch_up(self, version: int) -> None:
        """Bring a baseline that missed an outcome to a committed version.

        Happens when this rank lost the coordinator between commit and answer. A rank that is
        only late to hear of the commit waits for its own advance, which is cheaper and keeps
        its count of steps.

        Raises:
            Busy: The previous publication has not ended within ``busy_wait_s``.
        """
        if not self._turn.acquire(timeout=self.job.config.busy_wait_s):
            raise self._busy()
        try:
            if self._baseline.usable and version == self.version:
                return
            if not self._baseline.usable or version < self.version:
                self._rebuild(version)
                return
            log, reader = self._log()
            missed = range(self.version + 1, version + 1)
            self._steps_at_commit = self._steps_of(log, version)
            replay(self._baseline, log=log, reader=reader, versions=missed)
        finally:
            self._turn.release()

    def _steps_of(self, log: Log, version: int) -> Steps | None:
        """Where the optimizers were when a version was captured, if this process captured it."""
        entry = log.versions.get(version)
        return self._taken.get(entry.write_id) if entry else None

    def _busy(self) -> Busy:
        return Busy(f"rank {self.rank}: the previous publication has not ended")

    def _log(self) -> tuple[Log, DeltaReader]:
        log = Log(self._store)
        log.refresh()
        return log, DeltaReader(self._store, config=self.job.config)

    def publish(
        self,
        state: Callable[[], State],
        *,
        write_id: str,
        deliver: Deliver,
        mark: int | None = None,
        guard: Guard | None = None,
        codec: Codec | None = None,
    ) -> "Future[Outcome]":
        """Capture now; encode and deliver in the background.

        ``codec`` stands in for the one in the settings, for this publication.

        Returns:
            A future of the outcome, done after the baseline has moved.

        Raises:
            Busy: The previous publication of this rank has not ended. ``deliver`` is not called
                then, as it is for any other error: use ``skip``, or tell the others yourself.
            CaptureDropped: An optimizer step could not wait.
            LayoutMismatch: The state is not the one that was attached.
            InputError: The session is closed.
            ConfigError: The codec does not take the values that the settings name.
        """
        self._refuse_closed()
        if not self._turn.acquire(timeout=self.job.config.max_step_delay_s):
            raise self._busy()
        try:
            if not self._baseline.usable:
                self._rebuild()
            config = self.job.config.with_codec(codec) if codec else self.job.config
            captured = self._take(state, write_id, mark, guard, config)
        except BaseException as e:
            self._worker.submit(self._refuse, e, deliver)
            raise
        return self._worker.submit(self._finish, captured, deliver)

    def skip(self, reason: WeightDeltaError, *, deliver: Deliver) -> "Future[Outcome]":
        """Take part in a publication without a capture, so that the others can end it too.

        Raises:
            InputError: The session is closed.
        """
        self._refuse_closed()
        return self._worker.submit(deliver, reason)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InputError(f"rank {self.rank}: this session is closed; attach again")

    def close(self, *, drain: bool = False) -> None:
        """Remove the hooks and end the threads; with ``drain`` after what they have in hand."""
        self._closed = True
        self._fence.close()
        self._worker.shutdown(wait=drain, cancel_futures=not drain)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(
        self,
        state: Callable[[], State],
        write_id: str,
        mark: int | None,
        guard: Guard | None,
        config: Config,
    ) -> Captured:
        started = self._clock()
        encoding = Encoding(baseline=self._baseline, pool=self._pool, config=config)
        try:
            with self._fence.capturing(guard=guard) as token:
                steps = self._fence.now()
                planes = self._capture.capture(state(), token=token, sink=encoding.add)
                since, count = self._progress(steps)
        except BaseException:
            encoding.cancel()
            raise
        self._taken[write_id] = steps
        while len(self._taken) > _TAKEN:
            del self._taken[next(iter(self._taken))]
        return Captured(
            write_id, planes, encoding, steps, since, mark, count, self._clock() - started
        )

    def _progress(self, steps: Steps) -> tuple[int | None, int | None]:
        """Steps since the last commit, and the optimizer's own count."""
        published, before = self._capture.storages, self._steps_at_commit
        count = self._fence.own_count(published=published)
        if before is None:
            return None, count
        return self._fence.since(before, steps, published=published), count

    def _refuse(self, error: BaseException, deliver: Deliver) -> None:
        """Tell the others that this rank captured nothing."""
        try:
            deliver(known(self.rank, error))
        finally:
            self._turn.release()

    def _finish(self, captured: Captured, deliver: Deliver) -> Outcome:
        try:
            try:
                coming = captured.encoding.coming(captured.planes)
            except Exception as e:  # noqa: BLE001 (the other ranks must not wait for this one)
                return deliver(known(self.rank, e))
            making = partial(self._receipt, captured, self._clock())
            payload = Payload(coming, making, rank=self.rank)
            outcome = deliver(payload)
            if outcome.version is not None:
                start, frames = self._baseline.version, payload.frames
                self._steps_at_commit = captured.steps
                self._baseline.advance(frames, version=outcome.version)
                self._capture.advance(frames, start=start)
            return outcome
        finally:
            self._turn.release()

    def _receipt(
        self, captured: Captured, started: float, frames: Sequence[EncodedFrame]
    ) -> Receipt:
        baseline = self._baseline
        measured = (
            histogram(captured.planes, baseline=baseline) if self.job.config.measure_bound else None
        )
        ended = self._clock()
        return Receipt(
            write_id=captured.write_id,
            rank=self.rank,
            parent=baseline.version,
            steps=captured.since,
            mark=captured.mark,
            count=captured.count,
            codecs=np.array([IDS[f.codec] if f.changed else 0 for f in frames], np.uint8),
            sizes=np.array([f.sizes for f in frames], np.uint32).reshape(-1, SLOTS),
            hashes=np.frombuffer(b"".join(f.digest for f in frames), np.uint8).reshape(-1, 16),
            digest_change=np.array([f.digest_change for f in frames], np.uint64),
            changed=np.array([f.changed for f in frames], np.uint32),
            tensor_digest=tensor_digests(captured.planes, baseline=baseline),
            histogram=measured,
            capture_s=captured.seconds,
            encode_s=ended - started,
            upload_s=0.0,
            costs=self._capture.costs,
        )


def known(rank: int, error: BaseException) -> WeightDeltaError:
    """An error that every rank can be told."""
    if isinstance(error, WeightDeltaError):
        return error
    if isinstance(error, CancelledError):
        return PublicationLost(f"rank {rank} was closed in mid-publication")
    return PublicationLost(f"rank {rank} failed with {type(error).__name__}: {error}")
