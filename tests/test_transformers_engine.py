"""Generation goes on while updates arrive at token boundaries."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SmallRun, all_bits, bits, clone

from weightdelta.engines import Engine
from weightdelta.engines.transformers import Gate, TransformersEngine
from weightdelta.errors import StateMismatch
from weightdelta.receiver import Receiver


@contextmanager
def _thread(target: Callable[[], Any]) -> Iterator[threading.Thread]:
    """A thread that must have ended when the block has."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as e:  # noqa: BLE001 - shown by the assertion below
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    assert errors == []


# -- the gate --------------------------------------------------------------------------------


def test_an_update_waits_for_the_boundary_and_holds_the_loop() -> None:
    gate = Gate()
    events: list[str] = []
    started, closing = threading.Event(), threading.Event()

    def loop() -> None:
        with gate.token():
            started.set()
            closing.wait(60)
            while not gate._closing:  # the update has asked
                pass
            events.append("token")
            gate.step()
            events.append("next token")

    with _thread(loop):
        started.wait(60)
        closing.set()
        with gate.closed():
            events.append("update")
            gate.step()  # a loop inside the pause, by the thread that holds it, goes on
    assert events == ["token", "update", "next token"]


def test_updates_do_not_starve_while_loops_come_and_go() -> None:
    gate = Gate()
    stop = threading.Event()
    inside = 0

    def loop() -> None:
        nonlocal inside
        while not stop.is_set():
            with gate.token():
                for _ in range(3):
                    inside += 1
                    gate.step()

    with _thread(loop), _thread(loop), _thread(loop):
        for _ in range(50):
            with gate.closed():
                before = inside
                assert inside == before
        stop.set()
    assert gate._running == gate._closing == 0


def test_no_token_is_computed_while_two_updates_overlap() -> None:
    gate = Gate()
    first_in, second_in, go = threading.Event(), threading.Event(), threading.Event()

    def update(entered: threading.Event) -> None:
        with gate.closed():
            entered.set()
            go.wait(60)

    tokens: list[bool] = []

    def loop() -> None:
        with gate.token():
            tokens.append(go.is_set())

    with _thread(lambda: update(first_in)), _thread(lambda: update(second_in)):
        first_in.wait(60)
        second_in.wait(60)
        with _thread(loop):
            go.set()
    assert tokens == [True]


class _Interrupt(BaseException):
    pass


class _Condition(threading.Condition):
    """Interrupted, as by Ctrl-C, at the next wait."""

    armed = False

    def wait(self, timeout: float | None = None) -> bool:
        if self.armed:
            self.armed = False
            raise _Interrupt
        return super().wait(timeout)


def _gate() -> tuple[Gate, _Condition]:
    gate = Gate()
    condition = gate._changed = _Condition()
    return gate, condition


def _usable(gate: Gate) -> None:
    def both() -> None:
        with gate.token():
            gate.step()
        with gate.closed():
            pass

    with _thread(both):
        pass
    assert gate._running == gate._closing == 0


def test_errors_leave_the_gate_open() -> None:
    gate, condition = _gate()
    with pytest.raises(ValueError, match="in a token"), gate.token():
        raise ValueError("in a token")
    with pytest.raises(ValueError, match="in a pause"), gate.closed():
        raise ValueError("in a pause")
    _usable(gate)

    started, end = threading.Event(), threading.Event()

    def loop() -> None:
        with gate.token():
            started.set()
            end.wait(60)

    with _thread(loop):
        started.wait(60)
        condition.armed = True
        with pytest.raises(_Interrupt), gate.closed():
            pytest.fail("entered with a token under way")
        end.set()
    _usable(gate)


def test_a_loop_interrupted_at_the_boundary_is_not_counted_twice() -> None:
    gate, condition = _gate()
    closed, end = threading.Event(), threading.Event()
    caught: list[str] = []

    def update() -> None:
        with gate.closed():
            closed.set()
            end.wait(60)

    def loop() -> None:
        try:
            with gate.token():
                started.set()
                while not gate._closing:
                    pass
                condition.armed = True
                gate.step()
        except _Interrupt:
            caught.append("interrupted")

    started = threading.Event()
    with _thread(loop):
        started.wait(60)
        with _thread(update):
            end.set()
    assert caught == ["interrupted"]
    _usable(gate)


def test_a_thread_never_waits_for_itself() -> None:
    """A callback between two tokens may generate, or update, in the same thread."""
    gate = Gate()

    def nested() -> None:
        with gate.token():
            with gate.token():
                gate.step()
            with gate.closed(), gate.closed(), gate.token():
                gate.step()
            gate.step()
        with gate.closed(), gate.token():
            gate.step()

    with _thread(nested), _thread(nested), _thread(nested):
        pass
    _usable(gate)


# -- generation ------------------------------------------------------------------------------


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def run(model: Any, tmp_path: Path) -> Iterator[SmallRun]:
    base = {k: v for k, v in clone(model.state_dict()).items() if k != "lm_head.weight"}
    found = SmallRun(tmp_path, weights=base, max_bytes=4096)
    found.step(1)
    found.step(2)
    yield found
    found.close()


PROMPT = torch.tensor([[1, 2, 3]])


def _same(model: Any, expected: dict[str, bytes]) -> bool:
    found = all_bits({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    return found == expected


def test_generation_goes_on_over_updates(model: Any, run: SmallRun) -> None:
    engine = TransformersEngine(model)
    assert isinstance(engine, Engine)
    receiver = Receiver(run.store, engine)
    tokens: list[int] = []
    first, stop = threading.Event(), threading.Event()

    def watch(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        tokens.append(ids.shape[1])
        first.set()
        return torch.full((1,), stop.is_set())

    def generate() -> None:
        engine.generate(PROMPT, max_new_tokens=4000, do_sample=False, stopping_criteria=[watch])

    with _thread(generate):
        first.wait(60)
        for version in (1, 2, 1, 0, 2):
            receiver.prepare(version=version).wait()
            with engine.paused():
                count = len(tokens)
                assert not stop.wait(0.02)
                assert len(tokens) == count, "no token is computed in a pause"
            assert receiver.apply().version == version
            assert _same(model, run.versions[version])
        seen = len(tokens)
        while len(tokens) < seen + 2:
            assert not stop.wait(0.001)
        stop.set()
    assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), "one sequence, unbroken"
    receiver.close()


def test_an_update_changes_what_is_generated_and_a_rollback_restores_it(
    model: Any, run: SmallRun
) -> None:
    engine = TransformersEngine(model)
    receiver = Receiver(run.store, engine)

    def logits() -> bytes:
        with torch.no_grad():
            return bits(model(PROMPT).logits)

    before = logits()
    receiver.prepare().wait()
    receiver.apply()
    assert logits() != before
    receiver.rollback()
    assert logits() == before
    receiver.close()


def test_tied_weights_are_one_tensor(model: Any, run: SmallRun) -> None:
    engine = TransformersEngine(model)
    assert engine.aliases() == [("lm_head.weight", "model.embed_tokens.weight")]
    receiver = Receiver(run.store, engine)
    receiver.prepare().wait()
    receiver.apply()
    assert bits(model.lm_head.weight) == run.versions[2]["model.embed_tokens.weight"]
    receiver.close()


def test_an_error_in_the_pause_lets_generation_go_on(model: Any, run: SmallRun) -> None:
    engine = TransformersEngine(model)
    receiver = Receiver(run.store, engine)
    receiver.prepare().wait()
    with torch.no_grad():
        model.model.norm.weight += 1
    with pytest.raises(StateMismatch):
        receiver.apply()
    out = engine.generate(PROMPT, max_new_tokens=2, do_sample=False, stopping_criteria=None)
    assert out.shape == (1, 5)
    with pytest.raises(ValueError, match=r"max_new_tokens|must be"):
        engine.generate(PROMPT, max_new_tokens=-1)
    with engine.paused():
        pass
    receiver.close()


def test_a_callback_between_tokens_may_apply(model: Any, run: SmallRun) -> None:
    """A sampler with one thread updates from its own stopping criterion."""
    engine = TransformersEngine(model)
    receiver = Receiver(run.store, engine)
    receiver.prepare().wait()
    versions: list[int] = []

    def update(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        if not versions:
            receiver.apply()
        versions.append(receiver.version)
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    def generate() -> None:
        engine.generate(PROMPT, max_new_tokens=3, do_sample=False, stopping_criteria=[update])

    with _thread(generate):
        pass
    assert versions == [2, 2, 2]
    assert _same(model, run.versions[2])
    receiver.close()


class _Held:
    """An engine of plain tensors whose gate is real, and whose ``tensors`` can be held up."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.gate = Gate()
        self.paused_once = threading.Event()
        self.asked, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    def tensors(self) -> Any:
        self.asked.set()
        self.answer.wait(60)
        return self.weights

    def aliases(self) -> list[tuple[str, ...]]:
        return []

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.gate.closed():
            self.paused_once.set()
            yield


def test_prepare_from_within_a_token_does_not_deadlock_an_apply(run: SmallRun) -> None:
    engine = _Held(run.model())
    receiver = Receiver(run.store, engine)
    receiver.prepare(version=1).wait()
    with engine.gate.token():
        with _thread(receiver.apply):
            while not engine.gate._closing:  # the apply stands at the gate, held by this token
                pass
            receiver.prepare(version=2).wait(60)  # must not wait for that apply
            engine.gate.step()  # the boundary: the apply goes through, with the newer one
        assert receiver.version == 2
    receiver.close()


def test_an_apply_waits_for_a_scrub_without_holding_the_engine(run: SmallRun) -> None:
    engine = _Held(run.model())
    receiver = Receiver(run.store, engine)
    receiver.prepare().wait()
    engine.asked.clear()
    engine.answer.clear()
    with _thread(receiver.scrub):
        assert engine.asked.wait(60)  # the scrub is in the middle of its work
        with _thread(receiver.apply):
            assert not engine.paused_once.wait(0.3)
            engine.answer.set()
    assert engine.paused_once.is_set()
    assert receiver.version == run.newest
    receiver.close()
