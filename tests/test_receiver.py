"""The receiver: attach, prepare, apply and roll back, in every order that is allowed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SmallRun, all_bits, edit

from weightdelta.config import Config
from weightdelta.errors import (
    Busy,
    InputError,
    LayoutMismatch,
    NoPath,
    NotPrepared,
    NotYet,
    StateMismatch,
)
from weightdelta.receiver import Receiver
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore, Plan

NO_SCRUB = Config.of({"scrub_every": 0})


Follow = Callable[..., Receiver]


def _go(receiver: Receiver, version: int | None = None) -> None:
    receiver.prepare(version=version).wait()
    receiver.apply()


# -- attach ----------------------------------------------------------------------------------


def test_any_version_is_recognised(run: SmallRun, follow: Follow) -> None:
    for version in range(4):
        receiver = follow(run.model(version))
        assert (receiver.version, receiver.state, receiver.integrity) == (
            version, "CLEAN", "verified",
        )  # fmt: skip
        assert receiver.scrub() == version


def test_weights_of_no_version_are_refused_by_name(run: SmallRun, follow: Follow) -> None:
    model = run.model(1)
    edit(model["b"], 3, 1 << 20)
    with pytest.raises(StateMismatch, match=r"found none; \d of 5 tensors differ from base"):
        follow(model)
    only = run.model(0)
    edit(only["b"], 3, 1 << 20)
    with pytest.raises(StateMismatch, match="1 of 5 tensors differ from base, first 'b'"):
        follow(only)


def test_a_store_without_a_run_and_another_model_are_refused(run: SmallRun, follow: Follow) -> None:
    with pytest.raises(NotYet, match="no run has been opened"):
        follow(run.model(), store=Store("memory://nothing-here"))
    with pytest.raises(LayoutMismatch, match="'b' is published"):
        follow({k: v for k, v in run.model().items() if k != "b"})


def test_a_receiver_that_was_refused_leaves_no_thread_behind(run: SmallRun) -> None:
    model = run.model()
    edit(model["a"], 0)
    before = set(threading.enumerate())
    with pytest.raises(StateMismatch):
        Receiver(run.store, model)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


# -- prepare and apply -----------------------------------------------------------------------


def test_catching_up_forward_back_and_by_name(run: SmallRun, follow: Follow) -> None:
    run.writer.tag("eval", version=1)
    model = run.model()
    receiver = follow(model)
    stats = receiver.prepare().wait()
    assert (stats.from_version, stats.version, stats.hops) == (0, 3, 3)
    assert all_bits(model) == run.versions[0], "preparing writes nothing"
    applied = receiver.apply()
    assert (applied.from_version, applied.version, applied.integrity) == (0, 3, "verified")
    assert all_bits(model) == run.versions[3]
    receiver.prepare(ref="eval").wait()
    receiver.apply()
    assert all_bits(model) == run.versions[1]
    _go(receiver, 0)
    assert all_bits(model) == run.versions[0]
    _go(receiver, 2)
    assert all_bits(model) == run.versions[2]
    assert receiver.scrub() == receiver.version == 2


def test_every_pair_of_versions(run: SmallRun, follow: Follow) -> None:
    for start in range(4):
        for end in range(4):
            model = run.model(start)
            receiver = follow(model)
            _go(receiver, end)
            assert (receiver.version, all_bits(model)) == (end, run.versions[end])


def test_joining_late_from_base_under_other_plans(run: SmallRun, follow: Follow) -> None:
    run.open(config=Config.of({"values": "xor"}), ranks=3, max_bytes=32)
    run.step(7)
    run.open(ranks=1, max_bytes=4096)
    run.step(8)
    model = run.model()
    _go(follow(model))
    assert all_bits(model) == run.versions[5]


def test_modules_and_strided_parameters(tmp_path: Path, follow: Follow) -> None:
    layer = torch.nn.Linear(4, 3)
    base = {"weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()}
    run = SmallRun(tmp_path, weights=base)
    run.live["weight"] += 1
    run.publish()
    other = torch.nn.Linear(4, 3)
    other.weight = torch.nn.Parameter(base["weight"].T.contiguous().T)
    other.bias = torch.nn.Parameter(torch.stack([base["bias"], base["bias"]], 1)[:, 0])
    for model in (layer, other):
        _go(follow(model, store=run.store))
        assert all_bits(model.state_dict()) == run.versions[1]
    run.close()


def test_order_of_calls_is_enforced(run: SmallRun, follow: Follow) -> None:
    receiver = follow(run.model())
    with pytest.raises(NotPrepared, match="call prepare"):
        receiver.apply()
    with pytest.raises(NotPrepared, match="expected an apply to undo"):
        receiver.rollback()
    with pytest.raises(InputError, match="a version or a ref"):
        receiver.prepare(version=1, ref="eval")


def test_a_missing_version_or_ref(run: SmallRun, follow: Follow) -> None:
    receiver = follow(run.model())
    for options, message in (
        ({"version": 9}, "version 9 is not in the log"),
        ({"ref": "eval"}, "ref 'eval'"),
    ):
        with pytest.raises(NotYet, match=message):
            receiver.prepare(**options).wait()


@pytest.mark.parametrize("version", [-1, "3", 1.0, True])
def test_what_is_no_version_is_refused_at_once(run: SmallRun, follow: Follow, version: Any) -> None:
    with pytest.raises(InputError, match="expected a version from 0"):
        follow(run.model()).prepare(version=version)


def test_a_second_prepare_is_busy_until_the_first_has_ended(run: SmallRun, follow: Follow) -> None:
    store = FaultStore(run.store, timeout_s=60)
    receiver = follow(run.model(), store=store)
    store.plan = Plan("hang", ops=frozenset({"read"}))
    first = receiver.prepare()
    assert not first.done()
    with pytest.raises(Busy):
        receiver.prepare()
    with pytest.raises(TimeoutError):
        first.wait(0.01)
    store.release()
    first.wait()
    receiver.prepare(version=1).wait()
    receiver.apply()
    assert receiver.version == 1


def test_apply_waits_for_the_preparation(run: SmallRun, follow: Follow) -> None:
    store = FaultStore(run.store, timeout_s=60)
    model = run.model()
    receiver = follow(model, store=store)
    store.plan = Plan("hang", ops=frozenset({"read"}))
    receiver.prepare()
    waiting = threading.Thread(target=receiver.apply)
    waiting.start()
    assert receiver.version == 0, "reading the state does not wait"
    store.release()
    waiting.join(60)
    assert all_bits(model) == run.versions[3]


def test_weights_may_be_read_while_a_version_is_prepared(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add(tuple(all_bits(model).items()))

    reader = threading.Thread(target=read)
    reader.start()
    for version in (1, 2, 3, 2, 1):
        receiver.prepare(version=version).wait()
    stop.set()
    reader.join()
    assert seen == {tuple(run.versions[0].items())}


def test_no_version_is_seen_before_it_is_committed(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    edit(run.live["a"], 0)
    commit = run.upload()
    _go(receiver)
    assert receiver.version == 3
    with pytest.raises(NotYet):
        receiver.prepare(version=4).wait()
    commit()
    _go(receiver)
    assert (receiver.version, all_bits(model)) == (4, all_bits(run.live))


def test_a_version_in_which_nothing_changed(run: SmallRun, follow: Follow) -> None:
    run.publish()
    model = run.model(3)
    receiver = follow(model)
    assert receiver.version == 4, "the newest of the versions with the same weights"
    _go(receiver, 3)
    _go(receiver)
    assert (receiver.version, all_bits(model)) == (4, run.versions[4])


def test_chains_longer_than_allowed(run: SmallRun, follow: Follow) -> None:
    receiver = follow(run.model(), config=Config.of({"limits": {"max_chain": 2}}))
    with pytest.raises(NoPath, match="max_chain=2"):
        receiver.prepare().wait()
    _go(receiver, 2)
    _go(receiver, 3)
    assert receiver.version == 3


# -- rollback --------------------------------------------------------------------------------


def test_back_and_forward_again(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    _go(receiver, 1)
    _go(receiver)
    receiver.prepare(version=2).wait()
    back = receiver.rollback()
    assert (back.from_version, back.version) == (3, 1)
    assert all_bits(model) == run.versions[1]
    with pytest.raises(NotPrepared):
        receiver.apply()
    with pytest.raises(NotPrepared):
        receiver.rollback()
    _go(receiver)
    assert all_bits(model) == run.versions[3]


def test_applying_the_version_we_are_at_keeps_the_way_back(run: SmallRun, follow: Follow) -> None:
    model = run.model()
    receiver = follow(model)
    _go(receiver)
    _go(receiver)
    assert receiver.rollback().version == 0
    assert all_bits(model) == run.versions[0]


# -- partial ---------------------------------------------------------------------------------


def test_a_part_is_followed_and_never_called_verified(run: SmallRun, follow: Follow) -> None:
    whole = run.model()
    model = {"a": whole["a"], "s": whole["s"]}
    receiver = follow(model, partial=True)
    assert receiver.integrity == "partial"
    assert receiver.version == 0
    receiver.prepare().wait()
    assert receiver.apply().integrity == "partial"
    for name in model:
        assert all_bits(model)[name] == run.versions[3][name]
    assert receiver.scrub() == 3
    assert receiver.rollback().integrity == "partial"
    _go(receiver, 2)
    again = follow(model, partial=True)
    assert all(run.versions[again.version][n] == run.versions[2][n] for n in model)
    _go(again)
    assert all_bits(model) == {n: run.versions[3][n] for n in model}
    edit(model["a"], 1, 0x40)
    with pytest.raises(StateMismatch, match=r"[12] of 2 tensors differ"):
        follow(model, partial=True)


@pytest.mark.parametrize("part", [slice(5, None), slice(0, 60), slice(None)])
@pytest.mark.parametrize("use", ["never", "always"])
def test_a_model_whose_tensors_share_a_part_of_their_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: slice, use: str
) -> None:
    """Storing the one would change the other, and both would be told to be right."""
    monkeypatch.setenv("WEIGHTDELTA_DEVICE_KERNELS", "torch_ops")
    whole = torch.arange(120, dtype=torch.float32)
    base = {"qkv": whole, "v": whole[part].clone().reshape(-1, 5)}
    run = SmallRun(tmp_path, weights=base)
    run.live["v"] += 1
    run.publish()
    shared = whole.clone()
    model = {"qkv": shared, "v": shared[part].view(-1, 5)}
    with pytest.raises(LayoutMismatch, match="share a part of their memory"):
        Receiver(run.store, model, config=Config.of({"device": {"use": use}}))
    run.close()
