"""One rank's session: whatever happens to a publication, the next one starts from the truth."""

import random
import secrets
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Weights, job_for, published, same, save, wire

from weightdelta import mirror
from weightdelta import session as session_module
from weightdelta.capture import SnapshotCapture
from weightdelta.config import Config, DeviceConfig
from weightdelta.errors import (
    Busy,
    DeviceLost,
    DeviceMemory,
    InputError,
    PublicationLost,
    StateMismatch,
    StoreUnavailable,
    WeightDeltaError,
)
from weightdelta.job import Job
from weightdelta.layout import Layout, TensorSpec
from weightdelta.live import Live
from weightdelta.publish import Outcome, Receipt, RunWriter
from weightdelta.record import data_name
from weightdelta.session import Payload, RankSession
from weightdelta.store import Store
from weightdelta.verify import verify

CONFIG = Config(max_step_delay_s=0.05, busy_wait_s=60.0)
LONG = 60.0
HERE = Path(__file__).parent


class Run:
    """A run of one rank, whose ``deliver`` can be told to misbehave."""

    def __init__(self, folder: Path) -> None:
        start = torch.arange(200, dtype=torch.float32)
        self.base = save(folder, {"w": start.bfloat16(), "b": torch.zeros(3)})
        self.live: Weights = {"w": start.clone(), "b": torch.zeros(3)}
        self.store = Store(f"memory://{secrets.token_hex(8)}")
        self.job: Job = job_for(self.live, self.base, config=CONFIG)
        self.session = RankSession(self.job, rank=0, store=self.store, clock=lambda: 0.0)
        self.writer = RunWriter(
            self.store, config=CONFIG, clock=lambda: 0.0, nonce=secrets.token_hex(16)
        )
        self.writer.open(self.job, table=self.session.start(version=0, fresh=True))
        self.receipts: list[Receipt] = []
        self.errors: list[WeightDeltaError] = []
        self.before: Callable[[], Any] = lambda: None
        self.after: Callable[[], Any] = lambda: None

    def change(self) -> None:
        """Another state."""
        self.live["w"][::7] += 1
        self.live["b"] -= 1

    def deliver(self, write_id: str, item: Payload | WeightDeltaError) -> Outcome:
        """Upload and commit at once."""
        self.before()
        if isinstance(item, WeightDeltaError):
            self.errors.append(item)
            return Outcome(write_id, error=item)
        self.store.write(data_name(write_id, 0), list(item.parts))
        self.receipts.append(item.receipt)
        self.writer.begin(write_id, step=None)
        self.writer.add(item.receipt)
        outcome = self.writer.commit(write_id)
        self.after()
        return outcome

    def publish(self, state: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Start a publication; its future."""
        write_id = secrets.token_hex(16)
        return self.session.publish(
            state or (lambda: self.live),
            write_id=write_id,
            deliver=lambda item: self.deliver(write_id, item),
            **more,
        )

    def check(self, version: int) -> None:
        """The next publication is ``version``, and the log holds what is live."""
        self.change()
        assert self.publish().result(LONG).version == version
        assert self.session.version == version
        assert same(published(self.store, self.job), wire(self.live, self.job.layout))
        assert verify(self.store, config=CONFIG, deep=True, base=self.base.path).ok


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.session.close(drain=True)


def lose() -> None:
    raise PublicationLost("the coordinator went away between commit and answer")


def test_each_commit_moves_the_baseline(run: Run) -> None:
    for version in (1, 2, 3):
        run.check(version)


def test_a_trainer_draws_the_same_random_numbers_as_without_us(run: Run) -> None:
    def states() -> list[object]:
        return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    run.check(1)
    assert states() == before


def test_steps_of_optimizers_of_other_weights_do_not_count(run: Run) -> None:
    """A critic must neither hide that a rank is behind nor make it seem so."""
    actor = torch.optim.AdamW([torch.nn.Parameter(run.live["w"])], lr=0.0, weight_decay=0.0)
    critic = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    for version, steps in ((1, 1), (2, 0), (3, 2)):
        for optimizer in [critic] * 5 + [actor] * steps:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
        run.check(version)
        assert run.receipts[-1].steps == steps
    assert (run.receipts[-1].count, run.receipts[-1].mark) == (3, None)


def test_an_empty_shard_makes_no_optimizer_one_of_ours(run: Run) -> None:
    """All empty shards lie at one address; a rank may hold one of the actor and one of a critic."""
    layout = Layout.of([TensorSpec("w", "F32", (3,)), TensorSpec("z", "F32", (0,))])
    live = Live({"w": run.live["b"], "z": torch.zeros(0)}, layout)
    critic = torch.optim.SGD([torch.nn.Parameter(torch.zeros(0))])
    actor = torch.optim.SGD([torch.nn.Parameter(run.live["b"])])
    before = run.session.fence.now()
    for optimizer in (critic, critic, actor):
        optimizer.step()
    now = run.session.fence.now()
    assert run.session.fence.since(before, now, published=live.storages) == 1


def test_catch_up_after_an_answer_that_was_lost(run: Run) -> None:
    run.change()
    run.after = lose
    with pytest.raises(PublicationLost):
        run.publish().result(LONG)
    run.after = lambda: None
    assert (run.session.version, run.writer.newest) == (0, 1)
    run.session.catch_up(1)
    assert run.session.version == 1
    run.check(2)
    assert run.receipts[-1].steps == 0  # counted from its own capture, which was committed
    run.check(3)
    assert run.receipts[-1].steps == 0


def test_catch_up_on_what_another_captured_leaves_the_steps_unknown(run: Run) -> None:
    run.change()
    run.after = lose
    with pytest.raises(PublicationLost):
        run.publish().result(LONG)
    run.after = lambda: None
    run.session._taken.clear()  # as after a restart: what was committed is not this rank's memory
    run.session.catch_up(1)
    run.check(2)
    assert run.receipts[-1].steps is None
    run.check(3)
    assert run.receipts[-1].steps == 0


def test_without_catching_up_the_delta_is_refused(run: Run) -> None:
    run.change()
    run.after = lose
    with pytest.raises(PublicationLost):
        run.publish().result(LONG)
    run.after = lambda: None
    with pytest.raises(PublicationLost, match="compared with version 0, the newest is 1"):
        run.publish().result(LONG)
    assert run.writer.newest == 1


def test_catch_up_waits_for_a_late_answer_and_keeps_the_count(run: Run) -> None:
    run.change()
    go = threading.Event()
    run.after = lambda: go.wait(LONG)
    future = run.publish()
    late = threading.Thread(target=run.session.catch_up, args=(1,), daemon=True)
    late.start()
    go.set()
    late.join(LONG)
    assert future.result(LONG).version == run.session.version == 1
    run.after = lambda: None
    run.check(2)
    assert run.receipts[-1].steps == 0  # and not unknown


def test_catch_up_goes_back_from_what_was_never_committed(run: Run) -> None:
    """A store restored from a copy may be behind a live rank."""
    run.check(1)
    run.session.catch_up(0)
    assert run.session.version == 0
    run.session.catch_up(1)
    run.check(2)


def test_a_baseline_that_was_damaged_is_rebuilt(run: Run) -> None:
    """The damage shows when the commit moves it, by the digest change of a frame."""
    run.change()
    # Between comparison and advance.
    run.after = lambda: next(iter(run.session._baseline.frames.values())).__setitem__(0, 77)
    with pytest.raises(StateMismatch, match="expected digest change"):
        run.publish().result(LONG)
    run.after = lambda: None
    assert run.writer.newest == 1
    run.check(2)
    assert run.receipts[-1].steps == 0, "what was committed is this rank's own capture"


def test_a_catch_up_that_failed_keeps_the_count(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails once must not make a rank one that nobody can tell the step of."""
    run.change()
    run.after = lose
    with pytest.raises(PublicationLost):
        run.publish().result(LONG)
    run.after = lambda: None
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "replay", unavailable)
        with pytest.raises(StoreUnavailable):
            run.session.catch_up(1)
    run.session._baseline.usable = False  # as half a replay leaves it
    run.session.catch_up(1)
    run.check(2)
    assert run.receipts[-1].steps == 0


def unavailable(*_: Any, **__: Any) -> None:
    raise StoreUnavailable(5, "injected")


@pytest.mark.parametrize("error", [DeviceMemory("no room"), DeviceLost("gone")])
def test_what_is_committed_is_told_even_if_a_devices_copy_cannot_follow(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: WeightDeltaError
) -> None:
    """And the next publication counts its steps from it."""
    monkeypatch.setenv("WEIGHTDELTA_DEVICE_KERNELS", "torch_ops")
    config = DeviceConfig(use="always", baseline="device")
    session = run.session
    session._capture = SnapshotCapture(session._baseline, pool=session._pool, config=config)
    run.check(1)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(mirror.DevicePlanes, "of", fail)
        run.check(2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(run.live["w"])], lr=1.0)
    optimizer.step()
    run.check(3)
    assert run.receipts[-1].steps == 1


def test_an_exception_in_the_state_reaches_caller_and_peers(run: Run) -> None:
    def state() -> Weights:
        raise ArithmeticError("reshuffled")

    with pytest.raises(ArithmeticError):
        run.publish(state)
    run.check(1)
    assert [str(e) for e in run.errors] == ["rank 0 failed with ArithmeticError: reshuffled"]


def test_an_exception_after_the_capture_reaches_the_peers(run: Run) -> None:
    @contextmanager
    def guard() -> Iterator[None]:
        yield
        run.session._pool.shutdown()  # captured, but nothing can be encoded any more

    outcome = run.publish(guard=guard).result(LONG)
    assert isinstance(outcome.error, PublicationLost)
    assert run.errors == [outcome.error]
    assert run.session.version == 0


def test_one_publication_at_a_time_from_many_threads(run: Run) -> None:
    go = threading.Event()
    run.before = lambda: go.wait(LONG)
    together = threading.Barrier(8)
    found: list[Any] = []

    def publish() -> None:
        together.wait(LONG)
        try:
            found.append(run.publish())
        except Busy as e:
            found.append(e)

    threads = [threading.Thread(target=publish, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    go.set()
    futures = [f for f in found if not isinstance(f, Busy)]
    assert len(found) == 8
    assert [f.result(LONG).version for f in futures] == [1]
    run.check(2)


def test_busy_does_not_disturb_what_is_running(run: Run) -> None:
    run.change()
    go = threading.Event()
    run.before = lambda: go.wait(LONG)
    future = run.publish()
    with pytest.raises(Busy):
        run.publish()
    skipped = run.session.skip(Busy("later"), deliver=lambda item: run.deliver("0" * 32, item))
    go.set()
    assert future.result(LONG).version == 1
    assert isinstance(skipped.result(LONG).error, Busy)
    run.check(2)


def test_closing_drains_what_peers_wait_for(run: Run) -> None:
    go = threading.Event()
    run.before = lambda: go.wait(LONG)
    run.change()
    future = run.publish()
    skipped = run.session.skip(Busy("later"), deliver=lambda item: run.deliver("0" * 32, item))
    threading.Timer(0.05, go.set).start()
    run.session.close(drain=True)
    assert future.done()
    assert skipped.done()
    with pytest.raises(InputError, match="closed"):
        run.publish()
    with pytest.raises(InputError, match="closed"):
        run.session.skip(Busy("later"), deliver=lambda item: run.deliver("0" * 32, item))


@pytest.mark.parametrize("codec", ["sparse+zstd", "snappy+zstd"])
def test_a_publication_compiles_nothing(codec: str) -> None:
    """Else the one behind the first would find it under way for seconds."""
    code = f"""
        import tempfile, pathlib, numba, torch
        from small_runs import SmallRun
        from weightdelta.config import Config
        from weightdelta.kernels import ops
        def compiled():
            kernels = {{}}
            for name, module in list(__import__("sys").modules.items()):
                if name.startswith("weightdelta.kernels."):
                    for key, value in vars(module).items():
                        if hasattr(value, "nopython_signatures"):
                            kernels[name, key] = set(map(str, value.nopython_signatures))
            return kernels
        assert ops().__name__.endswith("cpu_ops")
        values = "diff" if {codec!r} == "sparse+zstd" else "xor"
        config = Config.of({{"codec": {codec!r}, "values": values}})
        run = SmallRun(pathlib.Path(tempfile.mkdtemp()), config=config)
        before = compiled()
        for seed in range(2):
            run.step(seed)
        run.close()
        new = {{k: v - before.get(k, set()) for k, v in compiled().items()}}
        new = {{k: v for k, v in new.items() if v}}
        assert not new, new
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=HERE, timeout=170)
