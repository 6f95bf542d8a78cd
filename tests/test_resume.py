"""A run outlives its ranks: sessions of any number continue one chain of versions."""

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Weights, job_for, published, same, save, wire

import weightdelta as wd
from weightdelta.base import Base
from weightdelta.errors import WeightDeltaError
from weightdelta.job import Job
from weightdelta.kernels.planes import Elements
from weightdelta.publish import Outcome, RunWriter
from weightdelta.record import data_name
from weightdelta.session import Payload, RankSession
from weightdelta.store import Store
from weightdelta.verify import verify

CONFIG = wd.Config.of({"store": {"retry_s": 0.0}})


def _memory() -> Store:
    return Store(f"memory://resume-{secrets.token_hex(8)}", timeout_s=None)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Version 0, of three widths."""
    generator = torch.Generator().manual_seed(6)
    w = torch.randn(12, 6, generator=generator)
    t = torch.randn(7, 5, generator=generator)
    return save(tmp_path, {"w": w.bfloat16(), "t": t, "n": torch.zeros(3, dtype=torch.int64)})


def _live(base: Base) -> Weights:
    """The master weights: another float type, one of them not contiguous."""
    t = torch.from_numpy(base.elements("t").copy().view(np.float32)).reshape(7, 5)
    w = torch.from_numpy(base.elements("w").copy().view(np.int16)).view(torch.bfloat16)
    return {
        "w": w.reshape(12, 6).float(),
        "t": t.t().contiguous().t(),
        "n": torch.zeros(3, dtype=torch.int64),
    }


class Group:
    """Ranks of one process: each has its session, deliveries meet here."""

    def __init__(self, job: Job, store: Store) -> None:
        self.job = job
        self.writer = RunWriter(store, config=job.config, clock=time.time, nonce="7" * 32)
        self.writer.log.refresh()
        self.sessions = [
            RankSession(job, rank=r, store=store, clock=time.monotonic)
            for r in range(job.world_size)
        ]
        version = self.writer.newest
        parts = [s.start(version=version, fresh=True) for s in self.sessions]
        self.writer.open(job, table=np.sum(np.stack(parts), axis=0, dtype=np.uint64))
        self._store = store
        self._lock = threading.Lock()
        self._met = threading.Barrier(job.world_size)

    def deliver(self, rank: int, item: Payload | WeightDeltaError) -> Outcome:
        """Upload, hand in the receipt, wait for the others, commit."""
        assert isinstance(item, Payload)
        write_id = item.receipt.write_id
        if parts := list(item.parts):
            self._store.write(data_name(write_id, rank), parts)
        with self._lock:
            self.writer.add(item.receipt)
        self._met.wait()
        with self._lock:
            return self.writer.commit(write_id)

    def publish(self, live: Weights, write_id: str) -> list[Outcome]:
        """One publication of all ranks; every rank's view of its outcome."""
        self.writer.begin(write_id, step=None)
        futures = [
            session.publish(lambda: live, write_id=write_id, deliver=partial(self.deliver, rank))
            for rank, session in enumerate(self.sessions)
        ]
        return [f.result(timeout=60) for f in futures]

    def close(self) -> None:
        """End the sessions."""
        for session in self.sessions:
            session.close()


def test_a_run_goes_on_with_another_number_of_ranks(base: Base) -> None:
    """One rank, then three, then two, then one again: one chain, every version exact."""
    store, live = _memory(), _live(base)
    expected: list[dict[str, Elements]] = []

    def change(number: int) -> Job:
        live["w"][number] += 1
        live["t"][:, number] *= 3
        live["n"] += 1
        job = job_for(live, base, world_size=max(1, number), config=CONFIG, max_bytes=32)
        expected.append(wire(live, job.layout))
        return job

    job = change(0)
    with closing(wd.Publisher(store, live, base=base.path, config=CONFIG)) as publisher:
        assert publisher.publish().wait().version == 1
    for version, world in ((2, 3), (3, 2)):
        job = change(world)
        group = Group(job, store)
        outcomes = group.publish(live, f"{version:032x}")
        assert [o.version for o in outcomes] == [version] * world
        assert {s.version for s in group.sessions} == {version}
        group.close()
    change(1)
    with closing(wd.Publisher(store, live, base=base.path, config=CONFIG)) as publisher:
        assert publisher.publish().wait().version == 4
    for version, weights in enumerate(expected, start=1):
        assert same(published(store, job, version=version), weights)
    assert verify(store, config=CONFIG, deep=True, base=base.path).problems == []


def test_sessions_agree_though_their_ranks_finish_in_any_order(base: Base) -> None:
    """Many versions in a row on threads: baselines of all ranks stay one version."""
    store, live = _memory(), _live(base)
    job = job_for(live, base, world_size=3, config=CONFIG, max_bytes=32)
    group = Group(job, store)
    with ThreadPoolExecutor(1) as other:
        for number in range(1, 6):
            live["w"][number] -= number
            outcomes = other.submit(group.publish, live, f"{number:032x}").result(timeout=60)
            assert {o.version for o in outcomes} == {number}
    group.close()
    assert same(published(store, job), wire(live, job.layout))
    assert verify(store, config=CONFIG, deep=True, base=base.path).problems == []
