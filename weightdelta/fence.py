"""The step fence: an optimizer step and a capture never overlap in one process.

A capture reads live weights inside the call that starts it. On an actor that runs its calls in
order nothing else can run meanwhile; on threaded and asyncio actors an optimizer step can. The
fence hooks every ``torch.optim.Optimizer`` of the process: a step that is about to start waits
for a running capture, at most ``max_step_delay_s``, then the capture is dropped and the step
goes on. A capture that is about to start waits for a running step in the same way.
"""

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weightdelta.errors import CaptureDropped
from weightdelta.state import State, StateSource, read_state
from weightdelta.steps import StepCounter, Steps, parameters
from weightdelta.tensors import storage_of

Guard = Callable[[], AbstractContextManager[Any]]

#: Whoever looks at frames; a signal handler may do so in the middle of it.
_collecting = threading.RLock()


@dataclass(eq=False, slots=True)
class Token:
    """One running capture; ``dropped`` is set when a step could not wait any longer."""

    dropped: bool = False

    def check(self) -> None:
        """Stop early when the capture has been dropped.

        Raises:
            CaptureDropped: An optimizer step went on while this capture was running.
        """
        if self.dropped:
            raise CaptureDropped(
                "capture: an optimizer step had waited max_step_delay_s; the capture was dropped, "
                "the next publication covers the span"
            )


class StepFence:
    """Keeps captures and optimizer steps apart; ``close`` removes its hooks.

    Attributes:
        delay_s: Longest time a step has waited for a capture [s].
    """

    def __init__(self, *, max_step_delay_s: float, clock: Callable[[], float]) -> None:
        self.delay_s = 0.0
        self._bound = max_step_delay_s
        self._clock = clock
        self._changed = threading.Condition()
        # Id of the frame that runs a step -> its thread and its code, by which it is told from a
        # later frame at the same address; the frame itself would keep all its callers' memory.
        # A step inside a step has its own.
        self._stepping: dict[int, tuple[int, CodeType]] = {}
        self._capture: Token | None = None
        self._steps = StepCounter()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Remove the optimizer hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def capturing(self, *, guard: Guard | None = None) -> Iterator[Token]:
        """Hold the fence for one capture.

        Args:
            guard: Entered around the capture, for weights that something besides torch
                optimizers writes.

        Raises:
            CaptureDropped: A step was running and did not end in time, or one had to go on
                before the capture ended.
        """
        token = Token()
        with guard() if guard else nullcontext():
            self._enter(token)
            try:
                yield token
                self._leave(token)
            finally:
                self._forget(token)

    def _enter(self, token: Token) -> None:
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, timeout=self._bound):
                raise CaptureDropped(
                    "capture: expected no optimizer step and no other capture to be running, "
                    f"found one that lasted over {self._bound} s; call publish() after the "
                    "step's result"
                )
            self._capture = token

    def _is_quiet(self) -> bool:
        self._drop_raised()
        return not self._stepping and self._capture is None

    def _drop_raised(self) -> None:
        """Forget steps that raised: no hook tells of their end, but their frame has left."""
        if self._stepping:
            with _no_collection():
                tops = sys._current_frames()
                self._stepping = {
                    frame: (thread, code)
                    for frame, (thread, code) in self._stepping.items()
                    if _is_on_stack(frame, code, tops.get(thread))
                }

    def _leave(self, token: Token) -> None:
        with self._changed:
            token.check()

    def _forget(self, token: Token) -> None:
        with self._changed:
            if self._capture is token:
                self._capture = None
                self._changed.notify_all()

    def now(self) -> Steps:
        """How far the optimizers of this process are."""
        with self._changed:
            return self._steps.now()

    def since(self, before: Steps, now: Steps, *, published: Collection[int]) -> int:
        """See ``StepCounter.since``."""
        with self._changed:
            return self._steps.since(before, now, published=published)

    def own_count(self, *, published: Collection[int]) -> int | None:
        """See ``StepCounter.own``."""
        with self._changed:
            return self._steps.own(published=published)

    def _before_step(self, *_: Any) -> None:
        started, caller = self._clock(), sys._getframe(1)
        with self._changed:
            if not self._changed.wait_for(lambda: self._capture is None, timeout=self._bound):
                token, self._capture = self._capture, None
                if token is not None:
                    token.dropped = True
            self._stepping[id(caller)] = (threading.get_ident(), caller.f_code)
            self.delay_s = max(self.delay_s, self._clock() - started)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        with self._changed:
            self._stepping.pop(id(sys._getframe(1)), None)
            self._steps.ended(optimizer)
            self._changed.notify_all()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python 3.11 from collecting garbage while another thread's frames are looked at.

    It does so when it makes the object of a frame, and lets other threads run, also the one whose
    frame it is; what it then links to may be no frame any more. Later versions collect between
    instructions only.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _collecting:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _is_on_stack(frame: int, code: CodeType, top: Any) -> bool:
    while top is not None:
        if not isinstance(top, FrameType):  # see above; a step that may run counts as running
            return True
        if id(top) == frame and top.f_code is code:
            return True
        top = top.f_back
    return False


def unfenced(state: State) -> list[str]:
    """Names of weights that no torch optimizer of this process steps.

    The fence sees optimizer steps only. On an actor that runs calls at the same time, any other
    writer could change weights in mid-capture: a forward pass writes buffers. Frozen parameters
    of a module have no writer.
    """
    frozen: set[str] = set()
    if isinstance(state, torch.nn.Module):
        frozen = {
            n for n, p in state.named_parameters(remove_duplicate=False) if not p.requires_grad
        }
    if isinstance(state, StateSource):
        return []  # its prepare() is the caller's own fence
    # Not isinstance(): lazy proxies answer it by importing whole packages.
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    stepped = {storage_of(p) for o in optimizers if _is_hooked(o) for p in parameters(o)}
    stepped -= {storage_of(p) for o in optimizers if not _is_hooked(o) for p in parameters(o)}
    return [
        name
        for name, tensor in read_state(state).items()
        if name not in frozen and storage_of(tensor) not in stepped and tensor.numel()
    ]


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether torch's step hooks run; not where a wrapper skips ``Optimizer.__init__``."""
    return bool(getattr(type(optimizer).step, "hooked", False))
