"""The coordinator without its actor: restarts, repeated calls, silence, a store that is away."""

import asyncio
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, Weights, job_for, save, total
from rayjobs import LONG

from ray_actors.calls import Attachment
from ray_actors.coordinator import WATCH_S, Coordinator
from weightdelta.config import Config
from weightdelta.errors import (
    Busy,
    CaptureDropped,
    Fenced,
    PublicationLost,
    StoreUnavailable,
)
from weightdelta.publish import Receipt
from weightdelta.record import OpenEntry
from weightdelta.testing.faults import FaultStore, Plan

WORLD = 2


class Run:
    """A run's ranks and its attachment, from which coordinators start and start again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.live: Weights = {"w": torch.zeros(300), "b": torch.ones(3)}
        base = save(folder, {n: t.bfloat16() for n, t in self.live.items()})
        self.config = Config.of({"store": {"retry_s": 0.0}, **settings})
        self.job = job_for(self.live, base, world_size=WORLD, config=self.config)
        self.ranks = [Rank(self.job, r) for r in range(WORLD)]
        self.url = f"memory://{secrets.token_hex(8)}"
        self.attachment = self.attach()

    def attach(self) -> Attachment:
        """What ``wd.attach`` sends."""
        return Attachment(secrets.token_hex(8), self.url, "", (), self.config, b"", b"", b"", {})

    def coordinator(self) -> Coordinator:
        """A new life of the coordinator."""
        return Coordinator([(self.attachment, self.job)])

    async def opened(self) -> Coordinator:
        """The first life, ready for publications."""
        made = self.coordinator()
        assert await made.open(total(r.baseline for r in self.ranks), 0) == []
        return made

    def receipts(self, write_id: str) -> list[Receipt]:
        """Uploads of all ranks, with another state."""
        self.live["w"] += 1
        return [r.deliver(write_id, self.live, self.ranks_store) for r in self.ranks]

    @property
    def ranks_store(self) -> Any:
        """The store, as ranks see it."""
        return self.coordinator().writer.log.store


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, LONG))


def test_calls_repeated_to_the_next_life_find_the_commit(run: Run) -> None:
    """Ray repeats a call whose answer was lost; it must not turn a commit into a loss."""

    async def story() -> None:
        first = await run.opened()
        write_id = "1" * 32
        assert await first.begin(write_id, 7) == 0
        receipts = run.receipts(write_id)
        for receipt in receipts:
            await first.deliver(receipt)
        committed = await first.outcome(write_id, LONG)
        assert committed
        assert committed.version == 1
        second = run.coordinator()
        await second.deliver(receipts[1])
        await second.fail(write_id, PublicationLost("late"))
        again = await second.outcome(write_id, LONG)
        assert again
        assert (again.version, again.result().step) == (1, 7)
        assert await second.newest() == 1

    play(story())


def test_what_the_next_life_never_heard_of_is_lost(run: Run) -> None:
    async def story() -> None:
        first = await run.opened()
        await first.begin("1" * 32, None)
        receipt, _ = run.receipts("1" * 32)
        second = run.coordinator()
        await second.deliver(receipt)
        outcome = await second.outcome("1" * 32, LONG)
        assert outcome
        assert isinstance(outcome.error, PublicationLost)
        # The earlier life, if it lives on, cannot commit any more.
        for late in run.receipts("1" * 32):
            await first.deliver(late)
        fenced = await first.outcome("1" * 32, LONG)
        assert fenced
        assert isinstance(fenced.error, Fenced)
        assert await second.newest() == 0

    play(story())


def test_begin_is_idempotent_and_exclusive(run: Run) -> None:
    async def story() -> None:
        coordinator = await run.opened()
        for _ in range(2):
            assert await coordinator.begin("1" * 32, None) == 0
        with pytest.raises(Busy):
            await coordinator.begin("2" * 32, None)
        await coordinator.fail("1" * 32, CaptureDropped("could not wait"))
        outcome = await coordinator.outcome("1" * 32, LONG)
        assert outcome
        assert isinstance(outcome.error, CaptureDropped)
        assert await coordinator.begin("2" * 32, None) == 0

    play(story())


@pytest.mark.parametrize("on_busy", ["skip", "wait", "error"])
def test_a_busy_rank_ends_a_publication_as_asked(tmp_path: Path, on_busy: str) -> None:
    run = Run(tmp_path, on_busy=on_busy)

    async def story() -> None:
        coordinator = await run.opened()
        await coordinator.begin("1" * 32, 5)
        await coordinator.fail("1" * 32, Busy("rank 1"))
        outcome = await coordinator.outcome("1" * 32, LONG)
        assert outcome
        if on_busy == "error":
            assert isinstance(outcome.error, Busy)
        else:
            assert outcome.version is None
            assert not outcome.result().committed
            assert outcome.result().step == 5

    play(story())


def test_silence_counts_only_from_a_rank_that_has_captured(tmp_path: Path) -> None:
    run = Run(tmp_path, heartbeat_s=0.1)

    async def story() -> None:
        coordinator = await run.opened()
        await coordinator.begin("1" * 32, None)
        await coordinator.beat("1" * 32, 0)
        await coordinator.fail("1" * 32, CaptureDropped("could not wait"))
        await coordinator.begin("2" * 32, None)
        # The last beat of the publication before arrives late; rank 0 is in a long step now.
        await coordinator.beat("1" * 32, 0)
        await coordinator.captured("1" * 32)
        assert await coordinator.outcome("2" * 32, 3 * WATCH_S) is None
        await coordinator.captured("2" * 32)
        outcome = await coordinator.outcome("2" * 32, LONG)
        assert outcome
        assert "silent" in str(outcome.error)

    play(story())


def test_a_publication_without_receipts_is_given_up_and_names_the_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path, publish_timeout_s=0.1)

    async def story() -> None:
        coordinator = await run.opened()
        await coordinator.begin("1" * 32, None)
        receipt, _ = run.receipts("1" * 32)
        await coordinator.deliver(receipt)
        outcome = await coordinator.outcome("1" * 32, LONG)
        assert outcome
        assert "no receipt from ranks [1]" in str(outcome.error)

    play(story())


def test_one_watcher_however_many_publications(run: Run) -> None:
    async def story() -> None:
        coordinator = await run.opened()
        before = len(asyncio.all_tasks())
        for number in range(20):
            await coordinator.begin(f"{number:032x}", None)
            await coordinator.fail(f"{number:032x}", CaptureDropped("could not wait"))
        assert len(asyncio.all_tasks()) == before + 1

    play(story())


def test_a_store_that_is_away_at_the_start_is_asked_again(run: Run) -> None:
    async def story() -> None:
        first = await run.opened()
        await first.begin("1" * 32, None)
        for receipt in run.receipts("1" * 32):
            await first.deliver(receipt)
        assert await first.outcome("1" * 32, LONG)
        second = run.coordinator()
        store = FaultStore(second.writer.log.store, Plan("before", forever=True))
        second.writer.log.store = store
        assert await second.outcome("1" * 32, LONG) is None  # not lost: not known
        with pytest.raises(StoreUnavailable):
            await second.begin("2" * 32, None)
        store.plan = None
        outcome = await second.outcome("1" * 32, LONG)
        assert outcome
        assert outcome.version == 1
        assert await second.begin("2" * 32, None) == 1

    play(story())


def test_an_entry_of_the_earlier_life_may_land_while_the_next_one_opens(run: Run) -> None:
    """As on an object store, where a request can outlive its sender."""

    async def story() -> None:
        first = await run.opened()
        await first.begin("1" * 32, None)
        second = run.coordinator()
        store = FaultStore(second.writer.log.store, Plan("hang", ops=frozenset({"create"})))
        second.writer.log.store = store
        opening = asyncio.create_task(second.newest())
        while not store.fired:
            await asyncio.sleep(0.01)
        for receipt in run.receipts("1" * 32):
            await first.deliver(receipt)
        committed = await first.outcome("1" * 32, LONG)
        assert committed
        assert committed.version == 1
        store.release()
        assert await opening == 1
        entries = second.writer.log.entries
        assert [isinstance(e, OpenEntry) for e in entries] == [True, False, True]

    play(story())


def test_another_attachment_is_told_by_its_own_name(run: Run) -> None:
    async def story() -> None:
        await run.opened()
        other = Coordinator([(run.attach(), run.job)])
        await other.open(total(r.baseline for r in run.ranks), 0)
        restarted = run.coordinator()
        for _ in range(2):
            with pytest.raises(Fenced, match="another job"):
                await restarted.begin("1" * 32, None)
            with pytest.raises(Fenced, match="another job"):
                await restarted.outcome("1" * 32, LONG)

    play(story())


def test_opening_tells_whose_run_it_was_before(run: Run) -> None:
    """Also after restarts on either side, and never of one that opened later."""

    async def story() -> None:
        await run.opened()
        await run.coordinator().newest()  # a second life, with an epoch of its own
        table = total(r.baseline for r in run.ranks)
        second, third = run.attach(), run.attach()
        coordinator = Coordinator([(second, run.job)])
        assert await coordinator.open(table, 0) == [run.attachment.group]
        restarted = Coordinator([(second, run.job)])
        assert await restarted.open(table, 0) == [run.attachment.group]
        assert await Coordinator([(third, run.job)]).open(table, 0) == sorted(
            [run.attachment.group, second.group]
        )
        await restarted.newest()  # reads the third one's entry
        with pytest.raises(Fenced):
            await restarted.open(table, 0)

    play(story())


def test_attaching_beside_a_running_job_has_to_start_over(run: Run) -> None:
    async def story() -> None:
        coordinator = await run.opened()
        await coordinator.begin("1" * 32, None)
        for receipt in run.receipts("1" * 32):
            await coordinator.deliver(receipt)
        assert await coordinator.outcome("1" * 32, LONG)
        other = Coordinator([(run.attach(), run.job)])
        with pytest.raises(PublicationLost, match="version 1 was published while"):
            await other.open(total(r.baseline for r in run.ranks), 0)

    play(story())
