"""Whole runs on a real store: publish and receive, and a server that dies in mid-air."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from servers import BUCKET, Server
from small_runs import SmallRun, all_bits, clone, edit, some_weights

import weightdelta as wd
from weightdelta.errors import UnsafeStore
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore, Op, Plan
from weightdelta.verify import verify


def _url() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.mark.parametrize("bulk", ["fsspec", "obstore"])
@pytest.mark.usefixtures("s3")
def test_a_receiver_follows_a_run(tmp_path: Path, bulk: str) -> None:
    """Publish, update, roll back, join late, tag, verify: all of it through one URL."""
    if bulk == "obstore":
        pytest.importorskip("obstore")
    config = wd.Config.of({"store": {"bulk": bulk}})
    url = _url()
    run = SmallRun(tmp_path, store=Store.of(url, config=config), config=config)
    early = run.model()
    with_it = wd.Receiver(url, early, config=config)
    for seed in (1, 2, 3):
        run.step(seed)
        with_it.prepare().wait()
        with_it.apply()
        assert all_bits(early) == run.versions[seed]
    with_it.rollback()
    assert all_bits(early) == run.versions[2]
    late = run.model()
    joined = wd.Receiver(url, late, config=config)
    joined.prepare().wait()
    joined.apply()
    assert all_bits(late) == run.versions[3]
    found = verify(Store(url), config=config, deep=True, base=run.checkpoint)
    run.close()
    assert (found.problems, found.versions) == ([], 3)


@pytest.mark.fault
@pytest.mark.parametrize("op", ["write", "create"])
def test_a_server_killed_in_mid_publication(s3: Server, tmp_path: Path, op: Op) -> None:
    """The trainer goes on; whatever became of that publication, the next one covers the span."""
    weights, url = some_weights(), _url()
    base = tmp_path / "model.safetensors"
    save_file(weights, str(base))
    config = wd.Config.of({"store": {"timeout_s": 20.0, "retry_s": 5.0, "retries": 2}})
    store = FaultStore(Store.of(url, config=config))
    live = clone(weights)
    publisher = wd.Publisher(store, live, base=base, config=config)
    try:
        edit(live["a"], 3)
        publisher.publish().wait(60)
        store.plan = Plan("hang", ops=frozenset({op}))
        edit(live["a"], 4)
        publication = publisher.publish()
        _until(lambda: store.fired == 1)
        s3.kill()
        store.release()
        for i in range(5):  # training goes on, with no store at all
            edit(live["b"], i)
        assert not publication.done() or not _committed(publication)
        s3.start()
        settled = publication.settled(60)
        last = publisher.publish().wait(90)
    finally:
        publisher.close()
    assert settled
    assert last.committed
    found = verify(Store(url), config=config, deep=True, base=base)
    assert found.problems == []
    sampler = clone(weights)
    receiver = wd.Receiver(url, sampler, config=config)
    receiver.prepare().wait()
    receiver.apply()
    assert all_bits(sampler) == all_bits(live)


def _committed(publication: wd.Publication) -> bool:
    try:
        return publication.wait(0).committed
    except wd.WeightDeltaError:
        return False


def _until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_writer_refuses_a_store_that_cannot_fence(tmp_path: Path) -> None:
    store = Store("memory://" + secrets.token_hex(8))
    store._conditional = False
    with pytest.raises(UnsafeStore):
        SmallRun(tmp_path, store=store)
    assert store.names() == []
