"""The step fence in one process: no capture beside a step, and no step waits for long."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from weightdelta.errors import CaptureDropped
from weightdelta.fence import StepFence, Token, _is_on_stack, unfenced
from weightdelta.state import StateSource

#: Bound that a test never waits out unless it is about the bound [s].
LONG = 60.0
SHORT = 0.05
#: What a broken fence is given to show itself [s].
MOMENT = 0.2


class Tearing(torch.optim.Optimizer):
    """Writes the two halves of each parameter apart; ``between`` runs in the middle."""

    def __init__(self, params: Any, between: Callable[[], None] = lambda: None) -> None:
        super().__init__(params, {})
        self.between = between

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
        """Add one to everything."""
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p[: len(p) // 2] += 1
                self.between()
                p[len(p) // 2 :] += 1


@contextmanager
def fence(bound: float = LONG) -> Iterator[StepFence]:
    made = StepFence(max_step_delay_s=bound, clock=time.monotonic)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def thread(work: Callable[[], Any]) -> Iterator[threading.Thread]:
    """Run ``work`` beside the block, and join it."""
    running = threading.Thread(target=work, daemon=True)
    running.start()
    try:
        yield running
    finally:
        running.join(LONG)
        assert not running.is_alive()


def capture(f: StepFence, work: Callable[[Token], Any], *, guard: Any = None) -> None:
    """Do ``work`` as one capture."""
    with f.capturing(guard=guard) as token:
        work(token)


def total(f: StepFence) -> int:
    """Steps of all optimizers."""
    return sum(f.now().values())


def weights() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(8))


def torn(seen: torch.Tensor) -> bool:
    return len(set(seen.tolist())) > 1


@pytest.mark.parametrize("hooked", [True, False])
def test_a_capture_waits_for_a_running_step(hooked: bool) -> None:
    """Without the hooks the same interleaving reads half a step."""
    w = weights()
    halfway, go, read = threading.Event(), threading.Event(), threading.Event()
    seen: list[torch.Tensor] = []

    def between() -> None:
        halfway.set()
        assert go.wait(LONG)

    def look(_: Token) -> None:
        seen.append(w.detach().clone())
        read.set()

    with fence() as f:
        if not hooked:
            f.close()
        with thread(Tearing([w], between).step):
            assert halfway.wait(LONG)
            with thread(lambda: capture(f, look)):
                assert read.wait(MOMENT if hooked else LONG) is not hooked
                go.set()
        assert total(f) == int(hooked)
    assert torn(seen[0]) is not hooked


@pytest.mark.parametrize("hooked", [True, False])
def test_a_step_waits_for_a_running_capture(hooked: bool) -> None:
    w = weights()
    halfway = threading.Event()
    with fence() as f:
        if not hooked:
            f.close()
        with f.capturing():
            first = w[:4].detach().clone()
            stepping = threading.Thread(target=Tearing([w], halfway.set).step, daemon=True)
            stepping.start()
            if hooked:
                assert not halfway.wait(MOMENT)
            else:
                stepping.join(LONG)
            second = w[4:].detach().clone()
        stepping.join(LONG)
        assert total(f) == int(hooked)
    assert torn(torch.cat([first, second])) is not hooked
    assert w.detach().tolist() == [1.0] * 8


def test_a_step_waits_its_bound_then_drops_the_capture() -> None:
    w = weights()
    optimizer = Tearing([w])

    def stay(token: Token) -> None:
        with thread(optimizer.step):
            pass  # the step has ended, in the middle of the capture
        assert w.detach().tolist() == [1.0] * 8
        assert token.dropped

    with fence(SHORT) as f:
        with pytest.raises(CaptureDropped, match="next publication covers"):
            capture(f, stay)
        assert total(f) == 1
        assert f.delay_s >= SHORT
        with f.capturing() as token:  # and the fence is as before
            assert not token.dropped


def test_a_dropped_capture_cannot_end_the_next_one() -> None:
    w = weights()
    optimizer = Tearing([w])
    entered, proceed = threading.Event(), threading.Event()

    def linger(_: Token) -> None:
        entered.set()
        assert proceed.wait(LONG)

    def late() -> None:
        with pytest.raises(CaptureDropped):
            capture(f, linger)

    def stay(token: Token) -> None:
        proceed.set()
        running.join(LONG)  # the late one leaves within this one, which keeps the fence
        assert not token.dropped
        optimizer.step()
        assert token.dropped

    with fence(SHORT) as f, thread(late) as running:
        assert entered.wait(LONG)
        optimizer.step()  # drops it
        with pytest.raises(CaptureDropped):
            capture(f, stay)


def test_a_capture_gives_up_on_a_step_that_does_not_end() -> None:
    w = weights()
    halfway, go = threading.Event(), threading.Event()

    def between() -> None:
        halfway.set()
        assert go.wait(LONG)

    optimizer = Tearing([w], between)
    with fence(SHORT) as f, thread(optimizer.step):
        assert halfway.wait(LONG)
        with pytest.raises(CaptureDropped, match="after the step's result"), f.capturing():
            pytest.fail("captured beside a step")
        go.set()


def test_two_captures_never_overlap() -> None:
    with fence(SHORT) as f, f.capturing(), pytest.raises(CaptureDropped), f.capturing():
        pytest.fail("two captures at once")


def test_a_step_that_raised_is_over() -> None:
    """No hook tells of it, so its frame does; on whichever thread it was."""
    w = weights()

    def explode() -> None:
        raise ArithmeticError("overflow")

    optimizer = Tearing([w], explode)

    def attempt() -> None:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        raised.set()
        assert go.wait(LONG)  # the thread lives on, as a pool's does

    raised, go = threading.Event(), threading.Event()
    with fence(SHORT) as f, thread(attempt):
        assert raised.wait(LONG)
        with f.capturing() as token:
            assert not token.dropped
        go.set()
    assert total(f) == 0


def test_a_step_inside_a_step_does_not_open_the_fence() -> None:
    inner_weights, w = weights(), weights()
    inner = Tearing([inner_weights])
    refused: list[bool] = []

    def between() -> None:
        inner.step()

        def try_capture() -> None:
            try:
                with f.capturing():
                    refused.append(False)
            except CaptureDropped:
                refused.append(True)

        with thread(try_capture):
            pass

    with fence(SHORT) as f:
        Tearing([w], between).step()
        with f.capturing():
            pass
    assert refused == [True]
    assert total(f) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(enabled: bool) -> None:
    """Many captures look at the frames of a step that runs, and of one that raised."""

    def fail() -> None:
        raise KeyError("step")

    def try_capture() -> None:
        with fence(SHORT) as other, suppress(CaptureDropped), other.capturing():
            pass
        with suppress(CaptureDropped), f.capturing():
            pass

    def between() -> None:
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(thread(try_capture))

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with fence(SHORT) as f:
            with pytest.raises(KeyError):
                Tearing([weights()], fail).step()
            Tearing([weights()], between).step()
            with f.capturing():
                pass
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_no_frame_counts_as_a_step_that_runs() -> None:
    """Python 3.11 has given a function as the caller of another thread's frame."""
    code = sys._getframe().f_code
    assert _is_on_stack(id(sys._getframe()), code, sys._getframe())
    assert not _is_on_stack(0, code, sys._getframe())
    assert not _is_on_stack(0, code, None)
    assert _is_on_stack(0, code, len)


def test_guard_is_held_around_the_capture_and_left_on_errors() -> None:
    events: list[str] = []

    @contextmanager
    def guard() -> Iterator[None]:
        events.append("in")
        try:
            yield
        finally:
            events.append("out")

    def fail(_: Token) -> None:
        events.append("capture")
        raise KeyError("state")

    with fence() as f, pytest.raises(KeyError):
        capture(f, fail, guard=guard)
    assert events == ["in", "capture", "out"]


def test_closed_fence_sees_no_step() -> None:
    w = weights()
    with fence() as f:
        Tearing([w]).step()
    Tearing([w]).step()
    assert total(f) == 1


def failing(locals_: int, log: list[str], f: StepFence, step: Callable[[], None]) -> None:
    """A training loop with that many locals, which captures, then meets a step that raises."""
    names: dict[str, Any] = {}
    lines = [f"    v{i} = 0" for i in range(locals_)]
    code = ["def loop(attempt):", *lines, "    for _ in range(3):", "        attempt()"]
    exec("\n".join(code), names)  # noqa: S102 (frames of many sizes, to meet the one that was freed)

    def attempt() -> None:
        try:
            with f.capturing():
                log.append("captured")
        except CaptureDropped:
            log.append("dropped")
        step()

    names["loop"](attempt)


def test_a_step_that_raised_is_not_taken_for_another_frame_in_its_place() -> None:
    """Frames are freed and their addresses taken again, by the training loop's own among others."""
    w = weights()
    fail = [True]

    def between() -> None:
        if fail[0]:
            raise torch.OutOfMemoryError("no room")

    optimizer = Tearing([w], between)

    def step() -> None:
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            return

    log: list[str] = []
    with fence(SHORT) as f:
        for size in range(26):
            fail[0] = True
            step()
            fail[0] = False
            failing(size, log, f, step)
    assert set(log) == {"captured"}


def test_an_optimizer_that_skips_the_hooks_fences_nothing() -> None:
    """A wrapper writes after the inner step has ended, when the fence is open."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups
            self.state = inner.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
            """The inner step, and more."""
            self.inner.step()

    w, free = weights(), weights()
    inner = torch.optim.SGD([w, free], lr=1.0)
    state = {"w": w.detach(), "free": free.detach()}
    assert unfenced(state) == []
    wrapped = Wrapper(torch.optim.SGD([w], lr=1.0))
    assert unfenced(state) == ["w"]
    assert wrapped.inner is not inner


def test_unfenced_names_what_no_optimizer_steps() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weight, bias, scale, shift = model.parameters()
    bias.requires_grad_(False)
    optimizer = torch.optim.SGD([weight, scale], lr=1.0)
    running = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert unfenced(model) == ["1.bias", *running]
    optimizer.add_param_group({"params": [shift]})
    assert unfenced(model) == running  # a forward pass writes them


def test_unfenced_follows_views_and_leaves_sources_to_their_owner() -> None:
    w = weights()
    optimizer = torch.optim.SGD([w], lr=1.0)
    assert unfenced({"w": w.detach(), "half": w.detach()[4:]}) == []
    assert unfenced({"other": torch.zeros(2), "empty": torch.zeros(0)}) == ["other"]
    assert unfenced(StateSource(tensors=lambda: {"other": torch.zeros(2)})) == []
    assert optimizer.param_groups


def test_token_is_silent_until_dropped() -> None:
    Token().check()
    with pytest.raises(CaptureDropped):
        Token(dropped=True).check()
