"""``wd.Publisher`` in one process: publish, fail, go on, reopen, resume with other ranks."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Weights, published, same, save, wire

import weightdelta as wd
from weightdelta.base import Base
from weightdelta.errors import (
    Busy,
    CommitInDoubt,
    ConfigError,
    InputError,
    LayoutMismatch,
    NotYet,
    StateMismatch,
    StoreTimeout,
    StoreUnavailable,
    WeightDeltaError,
)
from weightdelta.log import Log
from weightdelta.publisher import step_number
from weightdelta.store import Store
from weightdelta.testing.faults import Fault, FaultStore, Plan
from weightdelta.verify import verify

CONFIG = wd.Config.of({"store": {"retry_s": 0.0, "fsync": False}, "on_busy": "skip"})
#: For who publishes again at once after a publication that failed.
WAITING = wd.Config.of({"store": {"retry_s": 0.0, "fsync": False}})


class Model(torch.nn.Module):
    """Tied weights, a buffer, a non-contiguous parameter, a frozen scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(12, 6)
        self.head = torch.nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(5, 7).t())
        self.scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def _step(model: Model, number: int) -> None:
    """One optimizer step that touches a part of the weights."""
    optimizer = torch.optim.SGD([model.embed.weight, model.turned], lr=0.5)
    optimizer.zero_grad()
    (model.embed.weight[number % 12].sum() + model.turned[:, number % 5].sum()).backward()
    optimizer.step()
    model.seen += 1


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """The untrained model in bfloat16, without the head's second name."""
    folder = tmp_path / "base"
    folder.mkdir()
    state = {k: v for k, v in Model().state_dict().items() if k != "head.weight"}
    return save(
        folder,
        {k: v.bfloat16().contiguous() if v.is_floating_point() else v for k, v in state.items()},
    )


@contextmanager
def _publisher(
    store: Store | str, state: Any, base: Base, config: wd.Config = CONFIG, **more: Any
) -> Iterator[wd.Publisher]:
    made = wd.Publisher(store, state, base=base.path, config=config, **more)
    try:
        yield made
    finally:
        made.close()


def _memory() -> Store:
    return Store(f"memory://publisher-{secrets.token_hex(8)}", timeout_s=None)


def _whole(store: Store, base: Base) -> list[str]:
    return verify(store, config=CONFIG, deep=True, base=base.path).problems


def test_every_step_becomes_a_version_of_the_live_bytes(base: Base, tmp_path: Path) -> None:
    model, url = Model(), str(tmp_path / "store")
    expected = []
    with _publisher(url, lambda: model, base) as publisher:
        for number in range(1, 4):
            _step(model, number)
            stats = publisher.publish(step=10 * number).wait()
            assert (stats.committed, stats.version, stats.step) == (True, number, 10 * number)
            assert stats.elements == 12 * 6 + 35 + 1 + 3
            expected.append(wire(model.state_dict(), publisher.job.layout))
        assert publisher.tag("best", version=2) == 2
        assert publisher.job.layout.alias_of == {"head.weight": "embed.weight"}
        job = publisher.job
    store = Store(url)
    for version, weights in enumerate(expected, start=1):
        assert same(published(store, job, version=version), weights)
    assert _whole(store, base) == []


@pytest.mark.parametrize("form", ["module", "dict", "function", "source"])
def test_every_form_of_state_is_followed(base: Base, form: str) -> None:
    model, calls = Model(), list[str]()
    tensors = dict(model.state_dict())
    source = wd.StateSource(
        model.state_dict, lambda: calls.append("prepare"), lambda: calls.append("release")
    )
    forms = {"module": model, "dict": tensors, "function": lambda: model, "source": source}
    with _publisher(_memory(), forms[form], base) as publisher:
        for number in (1, 2):
            _step(model, number)
            publisher.publish().wait()
        assert same(published(publisher._store, publisher.job), wire(tensors, publisher.job.layout))
    assert calls == (["prepare", "release"] * 3 if form == "source" else [])


def test_nothing_changed_is_a_valid_tiny_version(base: Base) -> None:
    store, model = _memory(), Model()
    with _publisher(store, model, base) as publisher:
        stats = [publisher.publish().wait() for _ in range(2)]
        assert [(s.version, s.changed, s.payload_bytes) for s in stats] == [(1, 0, 0), (2, 0, 0)]
        log = Log(store)
        log.refresh()
        assert len({log.digest(v) for v in (0, 1, 2)}) == 1
    assert not [n for n in store.names("data/") if not n.endswith("/index")]
    assert _whole(store, base) == []


@contextmanager
def _stuck(
    base: Base, model: Model, config: wd.Config
) -> Iterator[tuple[wd.Publisher, wd.Publication, FaultStore]]:
    """A publication that stays under way until the store is released."""
    store = FaultStore(_memory(), timeout_s=60.0)
    with _publisher(store, model, base, config) as publisher:
        store.plan = Plan("hang", ops=frozenset({"write"}))
        _step(model, 1)
        try:
            yield publisher, publisher.publish(), store
        finally:
            store.release()


@pytest.mark.parametrize(("on_busy", "wait_s"), [("skip", 9.0), ("wait", 0.0)])
def test_a_publication_that_is_still_running_is_not_overtaken(
    base: Base, on_busy: str, wait_s: float
) -> None:
    model = Model()
    config = CONFIG.model_copy(update={"on_busy": on_busy, "busy_wait_s": wait_s})
    with _stuck(base, model, config) as (publisher, first, store):
        _step(model, 2)  # the trainer goes on
        second = publisher.publish(step=2)
        assert not first.done()
        store.release()
        assert first.wait().version == 1
        skipped = second.wait()
        assert (skipped.committed, skipped.version, skipped.step) == (False, 1, 2)
        assert publisher.publish().wait().version == 2
        assert same(published(store, publisher.job), wire(model.state_dict(), publisher.job.layout))
        assert _whole(store, base) == []


def test_waiting_for_the_one_before_publishes_both(base: Base) -> None:
    model = Model()
    config = CONFIG.model_copy(update={"on_busy": "wait", "busy_wait_s": 60.0})
    with _stuck(base, model, config) as (publisher, first, store):
        _step(model, 2)
        threading.Timer(0.05, store.release).start()
        assert publisher.publish().wait().version == 2
        assert first.wait().version == 1


def test_an_error_on_busy_leaves_the_running_one_alone(base: Base) -> None:
    model = Model()
    config = CONFIG.model_copy(update={"on_busy": "error"})
    with _stuck(base, model, config) as (publisher, first, store):
        with pytest.raises(Busy, match="still running"):
            publisher.publish()
        store.release()
        assert first.wait().version == 1
        _step(model, 2)
        assert publisher.publish().wait().version == 2
        assert _whole(store, base) == []


@pytest.mark.fault
@pytest.mark.parametrize("ops", [{"write"}, {"write", "create", "hint"}])
@pytest.mark.parametrize("fault", ["before", "after", "cut", "enospc", "erofs", "eacces"])
def test_a_broken_disk_costs_only_that_publication(base: Base, fault: Fault, ops: set[Any]) -> None:
    model, store = Model(), FaultStore(_memory())
    with _publisher(store, model, base) as publisher:
        _step(model, 1)
        publisher.publish().wait()
        store.plan = Plan(fault, forever=True, ops=frozenset(ops))
        for number in (2, 3):
            _step(model, number)
            with pytest.raises(StoreUnavailable, match="data/"):
                publisher.publish().wait()
        store.plan = None
        _step(model, 4)
        stats = publisher.publish().wait()
        assert (stats.version, stats.changed) == (2, 3 * 6 + 3 * 7 + 3)  # the whole span
        assert same(published(store, publisher.job), wire(model.state_dict(), publisher.job.layout))
    assert _whole(store, base) == []


@pytest.mark.fault
def test_a_hanging_disk_blocks_nobody(base: Base) -> None:
    model, store = Model(), FaultStore(_memory(), timeout_s=0.3)
    with _publisher(store, model, base) as publisher:
        store.plan = Plan("hang", ops=frozenset({"write"}))
        _step(model, 1)
        publication = publisher.publish()
        _step(model, 2)
        with pytest.raises(StoreTimeout, match=r"data/.*0\.3 s"):
            publication.wait()
        store.plan = None
        assert publisher.publish().wait().version == 1
        store.release()  # the late write lands under a name that nothing leads to
        assert same(published(store, publisher.job), wire(model.state_dict(), publisher.job.layout))
    assert _whole(store, base) == []


@pytest.mark.fault
def test_a_baseline_that_was_edited_is_found_and_rebuilt(base: Base) -> None:
    """Memory that goes bad after the capture: what was published stays right."""
    model = Model()
    with _stuck(base, model, CONFIG) as (publisher, first, store):
        for elements in publisher._session._baseline.frames.values():
            elements ^= elements.dtype.type(1)
        store.release()
        with pytest.raises(StateMismatch, match="baseline frame"):
            first.wait()
        _step(model, 2)
        stats = publisher.publish().wait()
        assert (stats.version, stats.changed) == (2, 6 + 7 + 3)
        assert same(published(store, publisher.job), wire(model.state_dict(), publisher.job.layout))
        assert _whole(store, base) == []


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["before", "after"])
def test_an_entry_in_doubt_is_settled_when_the_store_comes_back(base: Base, fault: Fault) -> None:
    model, store = Model(), FaultStore(_memory())
    with _publisher(store, model, base) as publisher:
        store.plan = Plan(fault, forever=True, ops=frozenset({"create", "read"}))
        _step(model, 1)
        publication = publisher.publish()
        while not store.fired:
            time.sleep(0.001)
        _step(model, 2)
        skipped = publisher.publish()
        assert not publication.done()
        store.plan = None
        assert publication.wait().version == 1
        assert not skipped.wait().committed
        assert publisher.publish().wait().version == 2
    assert _whole(store, base) == []


@pytest.mark.fault
def test_closing_ends_what_is_in_doubt_and_the_next_writer_settles_it(base: Base) -> None:
    """A store that is gone for good must not keep the process from exiting."""
    model, store = Model(), FaultStore(_memory())
    with _publisher(store, model, base) as publisher:
        store.plan = Plan("after", forever=True, ops=frozenset({"create"}))
        _step(model, 1)
        publication = publisher.publish()
        while store.fired < 2:
            time.sleep(0.001)
        store.plan = Plan("before", forever=True)
    with pytest.raises(CommitInDoubt):
        publication.wait(10)
    store.plan = None
    with _publisher(store, model, base) as publisher:
        assert publisher.publish().wait().changed == 0, "it had been written all the same"
    assert _whole(store, base) == []


@pytest.mark.fault
def test_a_read_only_folder_is_a_typed_error(base: Base, tmp_path: Path) -> None:
    """A plain file where the store's folder should be stops even the superuser."""
    blocked = tmp_path / "store"
    blocked.write_bytes(b"")
    with pytest.raises(WeightDeltaError, match="store"):
        wd.Publisher(str(blocked), Model(), base=base.path, config=CONFIG)


def test_reopening_goes_on_from_the_newest_version(base: Base, tmp_path: Path) -> None:
    model, url = Model(), str(tmp_path / "store")
    with _publisher(url, model, base) as publisher:
        _step(model, 1)
        publisher.publish().wait()
    _step(model, 2)
    with _publisher(url, model, base) as publisher:
        stats = publisher.publish().wait()
        assert (stats.version, stats.changed) == (2, 6 + 7 + 3)
        job = publisher.job
    assert same(published(Store(url), job), wire(model.state_dict(), job.layout))
    assert _whole(Store(url), base) == []


def test_another_base_is_refused_and_the_run_stays_whole(base: Base, tmp_path: Path) -> None:
    model, store = Model(), _memory()
    with _publisher(store, model, base) as publisher:
        _step(model, 1)
        publisher.publish().wait()
    other = tmp_path / "other"
    other.mkdir()
    changed = {s.name: torch.zeros(s.shape).bfloat16() for s in base.specs}
    changed["seen"] = torch.zeros(3, dtype=torch.int64)
    save(other, changed)
    with pytest.raises(StateMismatch, match="other base bytes"):
        wd.Publisher(store, model, base=other, config=CONFIG)
    assert _whole(store, base) == []


def test_another_model_is_refused(base: Base, tmp_path: Path) -> None:
    store = _memory()
    with _publisher(store, Model(), base) as publisher:
        publisher.publish().wait()
    other = tmp_path / "other"
    other.mkdir()
    live = {"w": torch.zeros(2)}
    save(other, live)
    with pytest.raises(LayoutMismatch, match="use another store"):
        wd.Publisher(store, live, base=other, config=CONFIG)


def _broken(change: Callable[[Weights], object]) -> Weights:
    tensors = dict(Model().state_dict())
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("turned"), "'turned' is in base but on none"),
        (lambda t: t.update(extra=torch.zeros(1)), "'extra' is in the trainer's state"),
        (lambda t: t.update(turned=torch.zeros(5, 7)), "'turned': expected shape"),
        (lambda t: t.update(seen=torch.zeros(3)), "'seen': expected dtype I64"),
    ],
)
def test_a_state_that_is_not_the_base_is_named(
    base: Base, change: Callable[[Weights], object], named: str
) -> None:
    store = _memory()
    with pytest.raises(LayoutMismatch, match=named):
        wd.Publisher(store, _broken(change), base=base.path, config=CONFIG)
    assert store.names() == []


def test_wrong_arguments_are_named(base: Base, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fast"):
        wd.Publisher(_memory(), Model(), base=base.path, config="fast")
    with pytest.raises(InputError, match="nowhere"):
        wd.Publisher(_memory(), Model(), base=tmp_path / "nowhere", config=CONFIG)


def test_excluded_tensors_are_notpublished(base: Base) -> None:
    model, store = Model(), _memory()
    with _publisher(store, model, base, exclude=["seen", "sca*"]) as publisher:
        _step(model, 1)
        assert publisher.publish().wait().changed == 6 + 7
        assert [t.name for t in publisher.job.layout.tensors] == ["embed.weight", "turned"]


def test_a_capture_that_fails_raises_in_the_call_and_the_next_one_works(base: Base) -> None:
    tensors, store = dict(Model().state_dict()), _memory()
    with _publisher(store, lambda: tensors, base, config=WAITING) as publisher:
        good = tensors["turned"]
        tensors["turned"] = torch.zeros(1)
        with pytest.raises(LayoutMismatch, match="'turned'"):
            publisher.publish()
        tensors["turned"] = good
        tensors["scale"] = tensors["scale"] + 1
        assert publisher.publish().wait().changed == 1


def test_a_source_that_fails_is_the_callers_error(base: Base) -> None:
    model, broken = Model(), list[bool]()

    def prepare() -> None:
        if broken:
            raise RuntimeError("weights are offloaded")

    source = wd.StateSource(model.state_dict, prepare)
    with _publisher(_memory(), source, base, config=WAITING) as publisher:
        broken.append(True)
        with pytest.raises(RuntimeError, match="offloaded"):
            publisher.publish()
        broken.clear()
        assert publisher.publish().wait().version == 1


def test_refs_are_written(base: Base) -> None:
    store = _memory()
    with _publisher(store, Model(), base) as publisher:
        publisher.publish().wait()
        assert publisher.tag("eval") == 1
        with pytest.raises(NotYet, match="version 9"):
            publisher.tag("soon", version=9)
    log = Log(store)
    log.refresh()
    assert log.refs == {"eval": 1}


def test_a_guard_is_held_around_each_capture_alone(base: Base) -> None:
    held: list[str] = []

    @contextmanager
    def guard() -> Iterator[None]:
        held.append("enter")
        yield
        held.append("leave")

    model = Model()
    state = wd.StateSource(model.state_dict, lambda: held.append("read"))
    with _publisher(_memory(), state, base, guard=guard) as publisher:
        held.clear()
        publisher.publish().wait()
    assert held == ["enter", "read", "leave"]


def test_a_publication_from_within_another_is_busy(base: Base) -> None:
    """A signal handler, or as here a state, that publishes: a lock would wait for itself."""
    model, made = Model(), list[wd.Publisher]()

    def state() -> Model:
        for publisher in made:
            with pytest.raises(Busy, match="signal handler"):
                publisher.publish()
        return model

    with _publisher(_memory(), state, base) as publisher:
        made.append(publisher)
        assert [publisher.publish().wait().version for _ in range(2)] == [1, 2]


_HUGE = pytest.param(1 << 99999, id="huge")
_NO_STEPS = [True, 1.0, "1", -1, 2**63, _HUGE, np.True_, torch.tensor(True), torch.zeros(2).int()]


@pytest.mark.parametrize("step", _NO_STEPS)
def test_a_step_that_is_none_is_refused_in_the_call(base: Base, step: Any) -> None:
    with _publisher(_memory(), Model(), base) as publisher:
        with pytest.raises(InputError, match=r"expected an integer step.*found"):
            publisher.publish(step=step)
        assert publisher.publish(step=np.int64(7)).wait().step == 7  # type: ignore[arg-type]
    assert [step_number(s) for s in (None, 0, 2**63 - 1)] == [None, 0, 2**63 - 1]


def test_a_mark_that_fails_costs_only_that_publication(base: Base) -> None:
    marks: Any = iter(["one", 2])
    with _publisher(
        _memory(), Model(), base, config=WAITING, mark=lambda: next(marks)
    ) as publisher:
        with pytest.raises(ValueError, match="one"):
            publisher.publish()
        assert publisher.publish().wait().version == 1


def test_what_appeared_or_was_untied_after_attach_is_refused(base: Base) -> None:
    model = Model()
    with _publisher(_memory(), model, base, config=WAITING, exclude=["lora*"]) as publisher:
        model.head.weight = torch.nn.Parameter(model.embed.weight.detach() + 1)
        with pytest.raises(LayoutMismatch, match=r"'head\.weight'.*second name"):
            publisher.publish()
        model.head.weight = model.embed.weight
        model.register_buffer("lora_a", torch.zeros(1))
        assert publisher.publish().wait().version == 1
        model.register_buffer("late", torch.zeros(1))
        with pytest.raises(LayoutMismatch, match="'late'"):
            publisher.publish()


def test_extra_state_that_is_no_tensor_can_be_excluded(base: Base) -> None:
    class Extra(Model):
        def get_extra_state(self) -> dict[str, int]:
            return {}

    with pytest.raises(LayoutMismatch, match=r"'_extra_state'.*exclude="):
        wd.Publisher(_memory(), Extra(), base=base.path, config=CONFIG)
    with _publisher(_memory(), Extra(), base, exclude=["*_extra_state"]) as publisher:
        assert publisher.publish().wait().version == 1
