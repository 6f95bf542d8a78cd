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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weightdelta.errors import CaptureDropped
from weightdelta.state import State, StateSource, read_state
from weightdelta.tensors import is_dtensor

Guard = Callable[[], AbstractContextManager[Any]]


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
        steps: Optimizer steps that ended since the fence was made.
        delay_s: Longest time a step has waited for a capture [s].
    """

    def __init__(self, *, max_step_delay_s: float, clock: Callable[[], float]) -> None:
        self.steps = 0
        self.delay_s = 0.0
        self._bound = max_step_delay_s
        self._clock = clock
        self._changed = threading.Condition()
        # Id of the frame that runs a step -> its thread. A step inside a step has its own.
        self._stepping: dict[int, int] = {}
        self._capture: Token | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
            tops = sys._current_frames()
            self._stepping = {
                frame: thread
                for frame, thread in self._stepping.items()
                if _is_on_stack(frame, tops.get(thread))
            }

    def _leave(self, token: Token) -> None:
        with self._changed:
            token.check()

    def _forget(self, token: Token) -> None:
        with self._changed:
            if self._capture is token:
                self._capture = None
                self._changed.notify_all()

    def optimizer_step(self) -> int | None:
        """The step count that an optimizer which stepped here keeps, as Adam does, if any does.

        It survives checkpoints, so it tells where a restarted rank is. The largest count, since
        parameters without a gradient (experts that saw no token) stay behind.
        """
        states = [s for o in list(self._optimizers) for s in list(o.state.values())]
        return _largest([s["step"] for s in states if "step" in s])

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers.add(optimizer)
        started, caller = self._clock(), id(sys._getframe(1))
        with self._changed:
            if not self._changed.wait_for(lambda: self._capture is None, timeout=self._bound):
                token, self._capture = self._capture, None
                if token is not None:
                    token.dropped = True
            self._stepping[caller] = threading.get_ident()
            self.delay_s = max(self.delay_s, self._clock() - started)

    def _after_step(self, *_: Any) -> None:
        with self._changed:
            self._stepping.pop(id(sys._getframe(1)), None)
            self.steps += 1
            self._changed.notify_all()


def _largest(counts: Sequence[Any]) -> int | None:
    """The largest of many step counts: reading each from a GPU would wait for it each time."""
    tensors = [c.detach().reshape(()) for c in counts if isinstance(c, torch.Tensor)]
    found = [int(c) for c in counts if not isinstance(c, torch.Tensor)]
    for kind in {(t.device, t.dtype) for t in tensors}:
        alike = [t for t in tensors if (t.device, t.dtype) == kind]
        found.append(int(torch.stack(alike).max()))
    return max(found, default=None)


def _is_on_stack(frame: int, top: FrameType | None) -> bool:
    while top is not None:
        if id(top) == frame:
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
    stepped = {_storage(p) for p in _stepped()}
    return [
        name
        for name, tensor in read_state(state).items()
        if name not in frozen and _storage(tensor) not in stepped and tensor.numel()
    ]


def _stepped() -> Iterator[torch.Tensor]:
    """Every parameter that an optimizer of this process holds."""
    for candidate in gc.get_objects():
        # Not isinstance(): lazy proxies answer it by importing whole packages.
        if issubclass(type(candidate), Optimizer):
            for group in candidate.param_groups:
                yield from group["params"]


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.untyped_storage().data_ptr()
