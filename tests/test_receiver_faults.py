"""The receiver under edits, errors, interruptions and many threads."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import SmallRun, Weights, all_bits, edit

from weightdelta.config import Config
from weightdelta.errors import (
    Busy,
    Dirty,
    InputError,
    MissingObject,
    NotPrepared,
    StateMismatch,
    StoreUnavailable,
)
from weightdelta.publish import Receipt
from weightdelta.receiver import Receiver
from weightdelta.record import data_name, encode, log_name
from weightdelta.testing.faults import FaultStore, Plan

NO_SCRUB = Config.of({"scrub_every": 0})


Follow = Callable[..., Receiver]


def _go(receiver: Receiver, version: int | None = None) -> None:
    receiver.prepare(version=version).wait()
    receiver.apply()


# -- weights that are not what they should be ------------------------------------------------


def _touched(run: SmallRun, version: int, name: str = "b") -> int:
    """An element that a version changes."""
    width = run.base[name].element_size()
    old, new = (
        np.frombuffer(run.versions[v][name], np.uint8).reshape(-1, width)
        for v in (version - 1, version)
    )
    return int(np.flatnonzero((old != new).any(axis=1))[0])


def test_an_edit_is_found_by_the_dry_run(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model, config=NO_SCRUB)
    edit(model["b"], _touched(run, 1), 4)
    edited = all_bits(model)
    preparation = receiver.prepare()
    for call in (preparation.wait, receiver.apply, receiver.prepare, receiver.scrub):
        with pytest.raises((StateMismatch, Dirty)):
            call()
    assert (receiver.state, receiver.version) == ("DIRTY", -1)
    assert all_bits(model) == edited


def test_an_edit_after_the_dry_run_is_found_by_apply(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    receiver.prepare(version=1).wait()
    at = _touched(run, 1)
    edit(model["b"], at, 4)
    edited = all_bits(model)
    with pytest.raises(StateMismatch, match=f"'b', element {at}: .*edited after prepare"):
        receiver.apply()
    assert (receiver.state, receiver.version) == ("DIRTY", -1)
    assert all_bits(model) == edited
    for call in (receiver.apply, receiver.prepare, receiver.rollback, receiver.scrub):
        with pytest.raises(Dirty, match=r"attach\(\)"):
            call()
    edit(model["b"], at, 4)
    assert receiver.attach() == 0
    _go(receiver)
    assert all_bits(model) == run.versions[3]


def test_an_edit_is_found_by_rollback(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    _go(receiver, 1)
    edit(model["b"], _touched(run, 1), 4)
    edited = all_bits(model)
    with pytest.raises(StateMismatch):
        receiver.rollback()
    assert all_bits(model) == edited
    assert receiver.state == "DIRTY"


def test_an_edit_of_an_untouched_element_is_found_by_a_scrub(run: SmallRun, follow: Follow) -> None:
    run.publish()
    run.publish()
    model = run.model(3)
    receiver = follow(model, config=Config.of({"scrub_every": 2}))
    edit(model["a"], 0)
    receiver.prepare(version=4).wait()
    with pytest.raises(StateMismatch, match=r"'a'.*behind the receiver's back"):
        receiver.prepare(version=4).wait()
    with pytest.raises(Dirty):
        receiver.apply()
    edit(model["a"], 0)
    receiver.attach()
    edit(model["s"].reshape(1), 0)
    with pytest.raises(StateMismatch, match="'s'"):
        receiver.scrub()


def test_a_bad_delta_is_not_blamed_on_good_weights(run: SmallRun, follow: Follow) -> None:
    """After a mismatch a full pass decides whether the weights are still the version."""

    def wrong(receipt: Receipt) -> Receipt:
        return replace(receipt, tensor_digest=receipt.tensor_digest + np.uint64(1))

    run.tamper = wrong
    run.step(9)
    model = run.model()
    receiver = follow(model)
    with pytest.raises(StateMismatch, match="expected its digest to change"):
        receiver.prepare().wait()
    assert (receiver.state, receiver.version) == ("CLEAN", 0)
    _go(receiver, 3)
    assert all_bits(model) == run.versions[3]


def test_an_entry_whose_digest_is_not_where_its_delta_leads(run: SmallRun, follow: Follow) -> None:
    entry = run.writer.log.versions[3]
    run.store.write(log_name(entry.seq), encode(replace(entry, digest="0" * 64)))
    model = run.model()
    receiver = follow(model)
    with pytest.raises(StateMismatch, match="version 3: expected digest 0000"):
        receiver.prepare().wait()
    assert all_bits(model) == run.versions[0]
    _go(receiver, 2)
    assert all_bits(model) == run.versions[2]


def test_tensors_with_other_memory_are_refused_and_found_again(
    run: SmallRun, follow: Follow
) -> None:
    """Storing into memory that the model no longer reads would leave it behind unseen."""
    model = run.model()
    receiver = follow(model)
    for call in (receiver.prepare, receiver.scrub):
        model["b"] = model["b"].clone()
        with pytest.raises(StateMismatch, match=r"'b'.*other memory"):
            call()
        assert receiver.attach() == 0
    receiver.prepare().wait()
    model["b"] = model["b"].clone()
    with pytest.raises(StateMismatch, match=r"'b'.*other memory"):
        receiver.apply()
    assert receiver.attach() == 0
    _go(receiver)
    model["a"] = model["a"].clone()
    with pytest.raises(StateMismatch, match=r"'a'.*other memory"):
        receiver.rollback()
    assert receiver.attach() == 3
    assert all_bits(model) == run.versions[3]


# -- errors ----------------------------------------------------------------------------------


def test_a_background_error_is_sticky_until_the_next_prepare(run: SmallRun, follow: Follow) -> None:
    store = FaultStore(run.store)
    model = run.model()
    receiver = follow(model, store=store)
    store.plan = Plan("before", at=4, ops=frozenset({"read"}))
    preparation = receiver.prepare()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            preparation.wait()
        with pytest.raises(StoreUnavailable):
            receiver.apply()
    assert all_bits(model) == run.versions[0]
    assert (receiver.state, receiver.version) == ("CLEAN", 0)
    _go(receiver)
    assert all_bits(model) == run.versions[3]


def test_every_read_may_fail_and_nothing_is_lost(run: SmallRun, follow: Follow) -> None:
    store = FaultStore(run.store)
    model = run.model()
    receiver = follow(model, store=store)
    at, failed = 1, 0
    while True:
        store.plan = Plan("before", at=at, ops=frozenset({"read", "size"}))
        receiver.release()
        try:
            receiver.prepare().wait()
        except StoreUnavailable:
            failed += 1
        else:
            if not store.fired:
                break
        assert all_bits(model) == run.versions[0]
        at += 1
    assert failed >= 5
    receiver.apply()
    assert all_bits(model) == run.versions[3]


def test_a_missing_object_is_named(run: SmallRun, follow: Follow) -> None:
    receiver = follow(run.model())
    entry = run.writer.log.versions[2]
    run.store.delete(data_name(entry.write_id, 1))
    with pytest.raises(MissingObject, match=f"{entry.write_id}/00001"):
        receiver.prepare().wait()
    _go(receiver, 1)
    assert receiver.version == 1


class _Engine:
    """An engine whose pause can go wrong on the way in or out."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.fail = ""
        self.inside: Callable[[], None] = lambda: None

    def tensors(self) -> Weights:
        return self.weights

    def aliases(self) -> list[tuple[str, ...]]:
        return []

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self.fail == "in":
            raise RuntimeError("cannot stop")
        self.inside()
        yield
        if self.fail == "out":
            raise RuntimeError("cannot go on")


def test_a_pause_that_cannot_start_changes_nothing(run: SmallRun, follow: Follow) -> None:
    engine = _Engine(run.model())
    receiver = follow(engine)
    receiver.prepare(version=1).wait()
    engine.fail = "in"
    with pytest.raises(RuntimeError):
        receiver.apply()
    assert (receiver.state, receiver.version) == ("CLEAN", 0)
    assert all_bits(engine.weights) == run.versions[0]
    engine.fail = ""
    assert receiver.apply().version == 1


@pytest.mark.parametrize("move", ["apply", "rollback"])
def test_nothing_stands_still_for_a_preparation(run: SmallRun, follow: Follow, move: str) -> None:
    """However long the store takes: the pause begins once the preparation has ended."""
    engine = _Engine(run.model())
    store = FaultStore(run.store)
    receiver = follow(engine, store=store)
    _go(receiver, 1)
    store.plan = Plan("hang", ops=frozenset({"read"}))
    running = receiver.prepare(version=2)
    while not store.fired:
        threading.Event().wait(0.01)
    paused: list[bool] = []
    engine.inside = lambda: paused.append(running.done())
    mover = threading.Thread(target=getattr(receiver, move))
    mover.start()
    mover.join(0.3)
    assert paused == []
    store.release()
    mover.join(60)
    assert paused == [True]
    assert receiver.version == (2 if move == "apply" else 0)
    assert all_bits(engine.weights) == run.versions[receiver.version]


def test_a_pause_that_cannot_end_has_still_applied(run: SmallRun, follow: Follow) -> None:
    """The way back must be that of the apply that took place, not of the one before."""
    engine = _Engine(run.model())
    receiver = follow(engine)
    _go(receiver, 1)
    receiver.prepare(version=2).wait()
    engine.fail = "out"
    with pytest.raises(RuntimeError):
        receiver.apply()
    assert (receiver.state, receiver.version) == ("CLEAN", 2)
    engine.fail = ""
    with pytest.raises(NotPrepared):
        receiver.apply()
    assert receiver.rollback().version == 1
    assert all_bits(engine.weights) == run.versions[1]


@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_move_is_finished_by_apply(
    run: SmallRun, follow: Follow, back: bool
) -> None:
    engine = _Engine(run.model())
    receiver = follow(engine)
    _go(receiver, 1)
    if back:
        _go(receiver, 2)
    else:
        receiver.prepare(version=2).wait()
    # The threads that store have gone: what a crash of one of them looks like from outside.
    engine.inside = receiver._pool.shutdown
    with pytest.raises(RuntimeError, match="shutdown"):
        receiver.rollback() if back else receiver.apply()
    assert receiver.state == "APPLYING"
    for call in (receiver.prepare, receiver.rollback, receiver.scrub):
        with pytest.raises(Dirty, match=r"apply\(\) again"):
            call()
    engine.inside = lambda: None
    receiver.release()  # new threads; the interrupted move is kept
    stats = receiver.apply()
    assert (stats.version, receiver.state) == (1 if back else 2, "CLEAN")
    assert all_bits(engine.weights) == run.versions[stats.version]
    if not back:
        assert receiver.rollback().version == 1
        assert all_bits(engine.weights) == run.versions[1]
    with pytest.raises(NotPrepared):
        receiver.rollback()
    _go(receiver)
    assert all_bits(engine.weights) == run.versions[3]


def test_attach_ends_an_interrupted_move_when_the_weights_are_whole(
    run: SmallRun, follow: Follow
) -> None:
    engine = _Engine(run.model())
    receiver = follow(engine)
    receiver.prepare(version=2).wait()
    engine.inside = receiver._pool.shutdown
    with pytest.raises(RuntimeError, match="shutdown"):
        receiver.apply()
    engine.inside = lambda: None
    receiver.release()
    assert receiver.attach() == 0
    assert receiver.state == "CLEAN"


# -- memory and threads ----------------------------------------------------------------------


def test_release_frees_what_was_staged_and_goes_on(run: SmallRun, follow: Follow) -> None:
    """Also while the caller keeps its ``Preparation``."""
    model = run.model()
    receiver = follow(model)
    held = []

    def watch() -> list[weakref.ref[Any]]:
        preparation = receiver.prepare()
        preparation.wait()
        held.append(preparation)
        step = preparation._future.result()
        assert step.staged.host
        return [weakref.ref(item.new) for item in step.staged.host]

    def gone(values: list[weakref.ref[Any]]) -> bool:
        return not any(value() is not None for value in values)

    prepared = watch()
    assert not gone(prepared)
    receiver.release()
    assert gone(prepared)
    with pytest.raises(NotPrepared):
        receiver.apply()

    undo = watch()
    receiver.apply()
    assert not gone(undo), "the way back"
    receiver.release()
    assert gone(undo)
    with pytest.raises(NotPrepared):
        receiver.rollback()

    _go(receiver, 1)
    replaced = watch()
    receiver.prepare(version=2).wait()
    assert gone(replaced), "a preparation that another one replaced"
    receiver.apply()
    assert all_bits(model) == run.versions[2]


def test_a_dropped_preparation_says_so(run: SmallRun, follow: Follow) -> None:
    receiver = follow(run.model())
    for _ in range(20):  # dropped before, while or after it ran: typed in each case
        preparation = receiver.prepare()
        receiver.release()
        if preparation._future.cancelled():
            with pytest.raises(NotPrepared, match="dropped"):
                preparation.wait()
        else:
            assert preparation.wait().version == 3
    with pytest.raises(NotPrepared):
        receiver.apply()


def test_a_closed_receiver_refuses_everything(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    _go(receiver, 1)
    receiver.prepare()
    receiver.close()
    receiver.close()
    receiver.release()
    for call in (receiver.prepare, receiver.apply, receiver.rollback, receiver.scrub,
                 receiver.attach):  # fmt: skip
        with pytest.raises(InputError, match="closed"):
            call()
    assert all_bits(model) == run.versions[1]


def test_many_threads_call_everything_at_once(run: SmallRun, follow: Follow) -> None:
    """Whatever the order, no untyped error, no deadlock, and the weights are the version's."""
    model = run.model()
    receiver = follow(model)
    strange: list[BaseException] = []
    expected = (Busy, NotPrepared)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        calls: list[Callable[[], Any]] = [
            lambda: receiver.prepare(version=int(rng.integers(4))),
            lambda: receiver.prepare().wait(),
            receiver.apply, receiver.apply, receiver.rollback, receiver.scrub,
            receiver.attach, receiver.release,
        ]  # fmt: skip
        for _ in range(25):
            try:
                calls[rng.integers(len(calls))]()
            except expected:
                continue
            except BaseException as e:  # noqa: BLE001
                strange.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert strange == []
    assert all_bits(model) == run.versions[receiver.version]
    assert receiver.scrub() == receiver.version
