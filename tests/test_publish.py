"""A version exists if and only if its entry does, whatever the store does and when."""

import itertools
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Rank, Weights, content, job_for, same, save, total, wire

from weightdelta.base import Base
from weightdelta.baseline import rebuild
from weightdelta.config import Config, StoreConfig
from weightdelta.delta import DeltaReader
from weightdelta.digest import U64, version_digest
from weightdelta.errors import (
    Busy,
    CaptureSkew,
    CommitInDoubt,
    Fenced,
    InputError,
    LayoutMismatch,
    NotYet,
    PublicationLost,
    StateMismatch,
    StoreUnavailable,
    WeightDeltaError,
)
from weightdelta.job import Job
from weightdelta.kernels.planes import Elements
from weightdelta.log import Log
from weightdelta.publish import Outcome, RunWriter
from weightdelta.record import index_name
from weightdelta.store import Store
from weightdelta.testing.faults import Fault, FaultStore, Plan
from weightdelta.verify import verify

#: An entry in doubt is reported at once instead of being resent for a minute.
CONFIG = Config(store=StoreConfig(retry_s=0.0), measure_bound=True)
WORLD = 2


def _id(number: int) -> str:
    return f"{number:032x}"


@dataclass
class Trainer:
    """Ranks and the run's writer; ``Trainer.start`` is what a fresh process does."""

    store: Store
    job: Job
    ranks: list[Rank]
    writer: RunWriter
    now: list[float] = field(default_factory=lambda: [0.0])

    @classmethod
    def start(cls, store: Store, job: Job) -> "Trainer":
        """Rebuild the baselines from base and log, then open the run."""
        now = [0.0]
        writer = RunWriter(store, config=CONFIG, clock=lambda: now[0], nonce=secrets.token_hex(16))
        writer.log.refresh()
        made = cls(store, job, [Rank(job, r) for r in range(WORLD)], writer, now)
        for rank in made.ranks:
            rebuild(
                rank.baseline,
                base=job.base,
                log=writer.log,
                reader=DeltaReader(store, config=CONFIG),
                versions=range(1, writer.newest + 1),
            )
        writer.open(job, table=made.table())
        return made

    def table(self) -> U64:
        """Digests of the baselines."""
        return total(r.baseline for r in self.ranks)

    def begin(self, number: int, live: Weights) -> str:
        """A publication with every receipt in, up to the commit."""
        write_id = _id(number)
        self.writer.begin(write_id, step=number)
        complete = [
            self.writer.add(rank.deliver(write_id, live, self.store)) for rank in self.ranks
        ]
        assert complete == [False] * (WORLD - 1) + [True]
        return write_id

    def publish(self, number: int, live: Weights) -> Outcome:
        """A whole publication."""
        outcome = self.writer.commit(self.begin(number, live))
        for rank in self.ranks:
            rank.settle(outcome)
        return outcome

    def content(self) -> dict[str, Elements]:
        """What the baselines hold."""
        return content([r.baseline for r in self.ranks])


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Version 0."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(20, 8, generator=generator)
    return save(tmp_path, {"w": w, "b": torch.zeros(9).bfloat16()})


def _live(base: Base) -> Weights:
    w = torch.from_numpy(base.elements("w").copy().view(np.float32)).reshape(20, 8)
    return {"w": w, "b": torch.zeros(9)}


def _step(live: Weights, number: int) -> None:
    live["w"][number % 20] += 1
    live["b"][number % 9] -= 0.5


def _job(base: Base) -> Job:
    return job_for(_live(base), base, world_size=WORLD, config=CONFIG, max_bytes=128)


def _memory() -> Store:
    return Store(f"memory://publish-{secrets.token_hex(8)}", timeout_s=None)


@pytest.fixture
def trainer(base: Base) -> Trainer:
    """A run that has just been opened, over a store that can be broken."""
    return Trainer.start(FaultStore(_memory()), _job(base))


def _faults(trainer: Trainer) -> FaultStore:
    assert isinstance(trainer.store, FaultStore)
    return trainer.store


def test_receipts_of_all_ranks_become_one_version(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    for number in (1, 2, 3):
        _step(live, number)
        stats = trainer.publish(number, live).result()
        assert (stats.committed, stats.version, stats.step) == (True, number, number)
        assert (stats.changed, stats.elements) == (9, 169)
        assert stats.bound_bytes is not None
        assert same(trainer.content(), wire(live, trainer.job.layout))
        entry = trainer.writer.log.versions[number]
        assert entry.digest == version_digest(trainer.table())
    assert verify(trainer.store, config=CONFIG, deep=True, base=base.path).problems == []


def test_nothing_changed_is_a_version_too(trainer: Trainer, base: Base) -> None:
    stats = trainer.publish(1, _live(base)).result()
    assert (stats.version, stats.changed, stats.payload_bytes, stats.bound_bytes) == (1, 0, 0, 0)
    assert verify(trainer.store, config=CONFIG, deep=True, base=base.path).ok


def test_every_call_may_be_repeated(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    _step(live, 1)
    writer = trainer.writer
    receipts = [rank.deliver(_id(1), live, trainer.store) for rank in trainer.ranks]
    for _ in range(2):
        writer.begin(_id(1), step=1)
    assert [writer.add(receipts[0]) for _ in range(2)] == [False, False]
    assert [writer.add(r) for r in (receipts[1], receipts[0])] == [True, True]
    first = writer.commit(_id(1))
    assert first.version == 1
    assert writer.commit(_id(1)) is first
    writer.begin(_id(1), step=1)
    assert writer.pending is None
    assert writer.newest == 1
    assert writer.abort(_id(1), PublicationLost("too late")) is first


def test_one_publication_at_a_time(trainer: Trainer) -> None:
    trainer.writer.begin(_id(1), step=None)
    with pytest.raises(Busy, match=_id(1)[:8]):
        trainer.writer.begin(_id(2), step=None)
    trainer.writer.abort(_id(1), PublicationLost("given up"))
    trainer.writer.begin(_id(2), step=None)


def test_a_receipt_of_another_parent_is_refused(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    receipt = trainer.ranks[0].deliver(_id(2), live, trainer.store)
    trainer.publish(1, live)
    trainer.writer.begin(_id(2), step=None)
    with pytest.raises(PublicationLost, match="rank 0: compared with version 0, the newest is 1"):
        trainer.writer.add(receipt)
    assert trainer.writer.newest == 1


def test_a_receipt_of_no_running_publication_is_refused(trainer: Trainer, base: Base) -> None:
    receipt = trainer.ranks[0].deliver(_id(1), _live(base), trainer.store)
    with pytest.raises(PublicationLost, match="not under way"):
        trainer.writer.add(receipt)
    trainer.writer.begin(_id(2), step=None)
    with pytest.raises(PublicationLost, match="not under way"):
        trainer.writer.add(receipt)


@pytest.mark.parametrize("what", ["steps", "mark"])
def test_ranks_at_different_steps_are_refused(trainer: Trainer, base: Base, what: str) -> None:
    live = _live(base)
    _step(live, 1)
    before = trainer.content()
    trainer.writer.begin(_id(1), step=None)
    for rank in trainer.ranks:
        receipt = rank.deliver(_id(1), live, trainer.store)
        trainer.writer.add(replace(receipt, **{what: 3 + rank.rank}))
    outcome = trainer.writer.commit(_id(1))
    for rank in trainer.ranks:
        rank.settle(outcome)
    with pytest.raises(CaptureSkew, match="rank 0: 3, rank 1: 4"):
        outcome.result()
    assert (trainer.writer.newest, trainer.writer.pending) == (0, None)
    assert same(trainer.content(), before)
    assert trainer.publish(2, live).version == 1


def test_a_commit_without_every_receipt_is_lost(trainer: Trainer, base: Base) -> None:
    trainer.writer.begin(_id(1), step=None)
    trainer.writer.add(trainer.ranks[1].deliver(_id(1), _live(base), trainer.store))
    with pytest.raises(InputError):
        trainer.writer.commit(_id(1)).result()
    assert trainer.writer.newest == 0


def test_an_aborted_publication_is_over(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    _step(live, 1)
    write_id = trainer.begin(1, live)
    outcome = trainer.writer.abort(write_id, PublicationLost("rank 1 went away"))
    assert outcome is not None
    with pytest.raises(PublicationLost, match="rank 1 went away"):
        outcome.result()
    assert trainer.writer.commit(write_id) is outcome
    assert trainer.writer.outcome(write_id) is outcome
    assert trainer.writer.newest == 0
    assert trainer.publish(2, live).version == 1


def _in_doubt(trainer: Trainer, live: Weights, fault: Fault) -> str:
    """A publication whose entry was sent and got no answer."""
    write_id = trainer.begin(1, live)
    _faults(trainer).plan = Plan(fault, forever=True, ops=frozenset({"create", "read"}))
    with pytest.raises(CommitInDoubt, match="log/"):
        trainer.writer.commit(write_id)
    return write_id


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["before", "after"])
def test_what_was_sent_cannot_be_aborted_and_is_settled_later(
    trainer: Trainer, base: Base, fault: Fault
) -> None:
    live = _live(base)
    _step(live, 1)
    write_id = _in_doubt(trainer, live, fault)
    writer = trainer.writer
    assert writer.abort(write_id, PublicationLost("impatient")) is None
    assert writer.outcome(write_id) is None
    with pytest.raises(Busy):
        writer.begin(_id(2), step=None)
    with pytest.raises(CommitInDoubt):
        writer.commit(write_id)
    _faults(trainer).plan = None
    outcome = writer.commit(write_id)
    assert outcome.version == 1
    for rank in trainer.ranks:
        rank.settle(outcome)
    _goes_on(trainer, live, base)


def _goes_on(trainer: Trainer, live: Weights, base: Base) -> None:
    """The next version follows, and all of them hold."""
    _step(live, 2)
    assert trainer.publish(2, live).version == 2
    assert verify(trainer.store, config=CONFIG, deep=True, base=base.path).problems == []


@pytest.mark.fault
def test_a_receipt_that_comes_again_changes_nothing_that_was_sent(
    trainer: Trainer, base: Base
) -> None:
    """A restarted rank may deliver other bytes' receipt; the index is written already."""
    live = _live(base)
    _step(live, 1)
    write_id = _in_doubt(trainer, live, "after")
    receipt = trainer.writer.pending.receipts[0] if trainer.writer.pending else None
    assert receipt is not None
    other = replace(receipt, tensor_digest=receipt.tensor_digest + np.uint64(1))
    assert trainer.writer.add(other)
    _faults(trainer).plan = None
    for rank in trainer.ranks:
        rank.settle(trainer.writer.commit(write_id))
    _goes_on(trainer, live, base)


@pytest.mark.fault
def test_an_index_that_cannot_be_written_loses_only_this_publication(
    trainer: Trainer, base: Base
) -> None:
    live = _live(base)
    _step(live, 1)
    write_id = trainer.begin(1, live)
    _faults(trainer).plan = Plan("enospc", ops=frozenset({"write"}))
    with pytest.raises(StoreUnavailable, match=index_name(write_id)):
        trainer.writer.commit(write_id).result()
    _step(live, 2)
    assert trainer.publish(2, live).version == 1
    assert same(trainer.content(), wire(live, trainer.job.layout))
    assert verify(trainer.store, config=CONFIG, deep=True, base=base.path).ok


def test_a_publication_expires_only_until_its_entry_is_sent(trainer: Trainer, base: Base) -> None:
    assert not trainer.writer.expired()
    live = _live(base)
    write_id = trainer.begin(1, live)
    trainer.now[0] += CONFIG.publish_timeout_s
    assert not trainer.writer.expired()
    trainer.now[0] += 1
    assert trainer.writer.expired()
    _faults(trainer).plan = Plan("after", forever=True, ops=frozenset({"create"}))
    with pytest.raises(CommitInDoubt):
        trainer.writer.commit(write_id)
    assert not trainer.writer.expired()


def test_outcomes_are_known_after_a_restart(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    _step(live, 1)
    trainer.publish(1, live)
    trainer.begin(2, live)  # never committed: its coordinator dies
    job = trainer.job
    writer = RunWriter(trainer.store, config=CONFIG, clock=lambda: 0.0, nonce="2" * 32)
    assert writer.open(job) == 1  # under live ranks: digests come from the log
    found = writer.outcome(_id(1))
    assert found is not None
    assert (found.version, found.result().changed) == (1, 9)
    lost = writer.outcome(_id(2))
    assert lost is not None
    with pytest.raises(PublicationLost, match="lost with its coordinator"):
        lost.result()
    with pytest.raises(Fenced):
        trainer.writer.commit(_id(2)).result()
    trainer.writer = writer
    _step(live, 3)
    assert trainer.publish(3, live).version == 2
    assert verify(trainer.store, config=CONFIG, deep=True, base=base.path).problems == []


def test_old_outcomes_are_found_in_the_log(trainer: Trainer, base: Base) -> None:
    live = _live(base)
    for number in range(1, 70):
        trainer.publish(number, live)
    found = trainer.writer.outcome(_id(1))
    assert found is not None
    assert found.version == 1


def test_a_run_of_another_model_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    live = {"other": torch.zeros(3)}
    other = tmp_path / "other"
    other.mkdir()
    job = job_for(live, save(other, live))
    writer = RunWriter(trainer.store, config=CONFIG, clock=lambda: 0.0, nonce="3" * 32)
    with pytest.raises(LayoutMismatch, match="use another store"):
        writer.open(job, table=np.zeros(1, np.uint64))


@pytest.mark.parametrize("versions", [0, 1])
def test_a_run_from_other_base_bytes_is_refused(
    trainer: Trainer, base: Base, versions: int
) -> None:
    live = _live(base)
    for number in range(1, versions + 1):
        trainer.publish(number, live)
    writer = RunWriter(trainer.store, config=CONFIG, clock=lambda: 0.0, nonce="3" * 32)
    with pytest.raises(StateMismatch, match="other base bytes"):
        writer.open(trainer.job, table=trainer.table() + np.uint64(1))
    assert trainer.publish(5, live).version == versions + 1  # the refused one fenced nobody


def test_a_writer_must_be_open(base: Base) -> None:
    writer = RunWriter(_memory(), config=CONFIG, clock=lambda: 0.0, nonce="3" * 32)
    with pytest.raises(NotYet):
        _ = writer.job
    with pytest.raises(NotYet):
        writer.open(_job(base))  # no run to resume


@pytest.mark.parametrize("step", [10**5000, -1, 2**63], ids=["huge", "negative", "large"])
def test_a_step_that_no_entry_can_hold_is_refused_and_the_next_publication_goes_on(
    trainer: Trainer, base: Base, step: int
) -> None:
    write_id, live = _id(9), _live(base)
    trainer.writer.begin(write_id, step=step)
    for rank in trainer.ranks:
        trainer.writer.add(rank.deliver(write_id, live, trainer.store))
    error = trainer.writer.commit(write_id).error
    assert isinstance(error, InputError)
    assert "step must be" in str(error)
    assert trainer.writer.pending is None
    trainer.publish(1, _live(base))
    assert trainer.writer.newest == 1


def test_refs_point_at_versions_that_exist(trainer: Trainer, base: Base) -> None:
    trainer.publish(1, _live(base))
    assert trainer.writer.tag("eval") == 1
    assert trainer.writer.tag("start", version=0) == 0
    with pytest.raises(NotYet, match="version 7"):
        trainer.writer.tag("future", version=7)
    for name in ("base", "7", "0", 5):
        with pytest.raises(InputError, match="a name that is no number and not 'base'"):
            trainer.writer.tag(name, version=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="name"):
        trainer.writer.tag(None)  # type: ignore[arg-type]
    log = Log(trainer.store)
    log.refresh()
    assert log.refs == {"eval": 1, "start": 0}


Known = dict[str, dict[str, Elements]]


def _attempts(store: FaultStore, job: Job, live: Weights, known: Known) -> list[str]:
    """What one process gets done before the store stops it: ids of acknowledged versions."""
    acknowledged = []
    try:
        trainer = Trainer.start(store, job)
        for number in (1, 2):
            _step(live, number)
            known[_id(number)] = wire(live, job.layout)
            before, version = trainer.content(), trainer.writer.newest
            try:
                outcome = trainer.publish(number, live)
            finally:
                if trainer.ranks[0].baseline.version == version:
                    assert same(trainer.content(), before)
            if outcome.version is not None:
                acknowledged.append(_id(number))
    except WeightDeltaError:
        if not store.fired:
            raise
    return acknowledged


@pytest.mark.fault
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("fault", ["before", "after", "cut", "enospc"])
def test_no_fault_at_any_operation_loses_an_acknowledged_version(
    base: Base, fault: Fault, forever: bool
) -> None:
    """The process ends with the fault; a fresh one continues from what the log says."""
    job = _job(base)
    for at in itertools.count(1):
        store = FaultStore(_memory(), Plan(fault, at=at, forever=forever))
        live, known = _live(base), Known()
        acknowledged = _attempts(store, job, live, known)
        struck, store.plan = store.fired, None
        after = Trainer.start(store, job)
        written = [e.write_id for e in after.writer.log.versions.values()]
        assert written[: len(acknowledged)] == acknowledged, at
        if written:
            assert same(after.content(), known[written[-1]]), at
        _step(live, 3)
        assert after.publish(3, live).version == len(written) + 1, at
        assert same(after.content(), wire(live, job.layout)), at
        assert verify(store, config=CONFIG, deep=True, base=base.path).problems == [], at
        if not struck:
            break
    assert acknowledged == [_id(1), _id(2)]
    assert at > 20  # every operation of two publications was struck once


@pytest.mark.fault
def test_an_entry_that_arrives_after_its_writer_is_gone_harms_nobody(base: Base) -> None:
    """The create hangs, the process dies, a fresh one goes on, then the create takes place."""
    job, live = _job(base), _live(base)
    store = FaultStore(_memory(), timeout_s=0.2)
    first = Trainer.start(store, job)
    _step(live, 1)
    write_id = first.begin(1, live)
    store.plan = Plan("hang", ops=frozenset({"create"}))
    with pytest.raises(CommitInDoubt):
        first.writer.commit(write_id)
    second = Trainer.start(store, job)
    store.release()
    _step(live, 2)
    assert second.publish(2, live).version == 1
    with pytest.raises(Fenced):
        first.writer.commit(write_id).result()
    assert same(second.content(), wire(live, job.layout))
    assert verify(store, config=CONFIG, deep=True, base=base.path).problems == []
