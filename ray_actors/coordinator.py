"""The coordinator actor: one a run, gathers receipts, commits, answers how it ended.

It is named and restarts on its own. All of its lasting state is the log: a restarted one opens
the next writer epoch, which settles whatever its predecessor had in flight, and tells ranks that
ask about a publication it does not know whether the log has it.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

import ray

from ray_actors.calls import Attachment, get
from weightdelta.digest import U64
from weightdelta.errors import (
    Busy,
    CommitInDoubt,
    Fenced,
    PublicationLost,
    RetryError,
    WeightDeltaError,
)
from weightdelta.job import Job
from weightdelta.publish import Outcome, Receipt, RunWriter
from weightdelta.record import OpenEntry
from weightdelta.store import Store

#: How often silent ranks and overdue publications are looked for [s].
WATCH_S = 0.5


class Coordinator:
    """Wraps a ``RunWriter``; every method may be called again with the same arguments.

    Attributes:
        writer: The writer of this life; a new one opens a new epoch.
    """

    def __init__(self, shared: Sequence[Any]) -> None:
        # A reference in a list: an argument of its own would be fetched by Ray, which then warns
        # at every start that a restart could miss it; the driver keeps it.
        found = shared[0]
        job: Job
        self._attachment, job = get(found) if isinstance(found, ray.ObjectRef) else found
        self._job = job
        attachment: Attachment = self._attachment
        self._changed = asyncio.Condition()
        self._lock = asyncio.Lock()
        self._entering = asyncio.Lock()
        self._entered = False
        self._beats: dict[int, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self.writer = RunWriter(
            Store.of(attachment.store, config=attachment.config),
            config=attachment.config,
            clock=time.monotonic,
            # The group in front: how a restarted coordinator knows its own earlier entries.
            nonce=attachment.group + secrets.token_hex(8),
        )

    async def _enter(self) -> None:
        """Once in this life, before anything else: settle what the earlier one had in flight.

        Not in ``__init__``: an actor whose constructor raises is dead for good and its error
        untyped, while a store that is away for a minute is to be asked again.
        """
        async with self._entering:
            while not self._entered:
                try:
                    await asyncio.to_thread(self._take_over)
                    self._entered = True
                except PublicationLost:
                    continue  # an entry of the earlier life landed meanwhile; open after it

    def _take_over(self) -> None:
        log = self.writer.log
        log.refresh()
        group = self._attachment.group
        opens = [e for e in log.entries if isinstance(e, OpenEntry)]
        if opens and opens[-1].nonce.startswith(group):
            self.writer.open(self._job)
        elif any(e.nonce.startswith(group) for e in opens):
            raise Fenced(
                f"store {self._attachment.store}: writer epoch {log.epoch} belongs to another "
                "job that attached since; this one must not publish any more"
            )

    async def newest(self) -> int:
        """Newest committed version in the store."""
        await self._enter()
        await asyncio.to_thread(self.writer.log.refresh)
        return self.writer.newest

    async def open(self, table: U64, version: int) -> list[str]:
        """Check the run against the ranks' baselines and open it.

        Returns:
            The groups that had opened it before, which the log fences from now on.

        Raises:
            PublicationLost: The baselines are at ``version``, and a later one was committed.
        """
        await self._enter()
        async with self._lock:
            newest = await self.newest()
            if newest != version:
                raise PublicationLost(
                    f"store {self._attachment.store}: version {newest} was published while this "
                    f"job attached at {version}; attach again"
                )
            await asyncio.to_thread(self.writer.open, self._job, table=table)
            return self._older()

    def _older(self) -> list[str]:
        """Groups of lower writer epochs: the log knows them, however they spell its store."""
        own = self._attachment.group
        nonces = [e.nonce for e in self.writer.log.entries if isinstance(e, OpenEntry)]
        mine = max(i for i, nonce in enumerate(nonces) if nonce.startswith(own))
        return sorted({nonce[: len(own)] for nonce in nonces[:mine]} - {own})

    async def bundle(self) -> tuple[Attachment, Job]:
        """What a restarted rank needs."""
        return self._attachment, self._job

    async def begin(self, write_id: str, step: int | None) -> int:
        """Start a publication; returns the version that ranks have to compare with.

        Raises:
            Busy: Another one is under way.
        """
        await self._enter()
        async with self._lock:
            self.writer.begin(write_id, step=step)
            self._beats.clear()
            if self._watcher is None or self._watcher.done():
                self._watcher = self._spawn(self._watch())
            return self.writer.newest

    async def captured(self, write_id: str) -> None:
        """All ranks have captured; from now on each of them has to be heard of."""
        if self._is_pending(write_id):
            for rank in range(self._job.world_size):
                self._beats.setdefault(rank, time.monotonic())

    async def beat(self, write_id: str, rank: int) -> None:
        """A rank with this publication in hand is alive."""
        if self._is_pending(write_id):
            self._beats[rank] = time.monotonic()

    def _is_pending(self, write_id: str) -> bool:
        pending = self.writer.pending
        return pending is not None and pending.write_id == write_id

    async def deliver(self, receipt: Receipt) -> None:
        """Take a receipt; the last one starts the commit."""
        await self._enter()
        complete = False
        async with self._lock:
            try:
                complete = self.writer.add(receipt)
            except PublicationLost as e:
                self._give_up(receipt.write_id, e)
        if complete:
            self._spawn(self._commit(receipt.write_id))
        await self._announce()

    async def fail(self, write_id: str, error: WeightDeltaError) -> None:
        """Give a publication up, unless it has been sent to the log."""
        await self._enter()
        async with self._lock:
            self._give_up(write_id, error)
        await self._announce()

    def _give_up(self, write_id: str, error: WeightDeltaError) -> None:
        # Only what is under way: an earlier life may have committed what this one never saw.
        if self.writer.outcome(write_id) is not None:
            return
        pending = self.writer.pending
        skip = isinstance(error, Busy) and self._attachment.config.on_busy != "error"
        if skip and pending is not None and not pending.committing:
            self.writer.skip(write_id)
        else:
            self.writer.abort(write_id, error)

    async def outcome(self, write_id: str, wait_s: float) -> Outcome | None:
        """How a publication ended; None when that is not known within ``wait_s`` seconds."""
        try:
            await self._enter()
        except RetryError:
            await asyncio.sleep(WATCH_S)  # whatever the log says, it cannot be read now
            return None
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self.writer.outcome(write_id) is not None),
                    wait_s,
                )
            except TimeoutError:
                return None
            return self.writer.outcome(write_id)

    async def tag(self, name: str, version: int | None) -> int:
        """Point a ref at a version; returns the version."""
        await self._enter()
        async with self._lock:
            return await asyncio.to_thread(self.writer.tag, name, version=version)

    async def _commit(self, write_id: str) -> None:
        """Commit; an entry in doubt is sent again until its slot is known."""
        while True:
            async with self._lock:
                try:
                    await asyncio.to_thread(self.writer.commit, write_id)
                    break
                except CommitInDoubt:
                    pass  # neither abort nor advance: only the log can tell
                except Exception as e:  # noqa: BLE001 (ranks wait for the outcome, whatever it is)
                    error = PublicationLost(f"commit failed with {type(e).__name__}: {e}")
                    if self.writer.abort(write_id, error):
                        break
            await asyncio.sleep(WATCH_S)
        await self._announce()

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Any) -> Any:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        """While a publication runs, give it up when a rank falls silent or time is over."""
        while (pending := self.writer.pending) is not None:
            error = self._overdue()
            if error:
                await self.fail(pending.write_id, error)
            await asyncio.sleep(WATCH_S)

    def _overdue(self) -> WeightDeltaError | None:
        pending = self.writer.pending
        if pending is None or pending.committing:
            return None
        late = sorted(set(range(self._job.world_size)) - set(pending.receipts))
        if self.writer.expired():
            return PublicationLost(
                f"publication {pending.write_id[:8]}: no receipt from ranks {late} within "
                f"{self._attachment.config.publish_timeout_s} s"
            )
        limit = time.monotonic() - self._attachment.config.heartbeat_s
        lost = [rank for rank in late if self._beats.get(rank, limit) < limit]
        if lost:
            return PublicationLost(
                f"rank {lost[0]} fell silent in mid-publication; the next one covers the span"
            )
        return None
