"""Hugging Face Transformers as a sampler: generation that yields at every token boundary."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightdelta.state import find_aliases, read_state


class TransformersEngine:
    """A Transformers model that keeps generating while updates arrive.

    ``generate`` holds a gate while a token is computed and opens it between tokens; ``paused``
    takes the gate, so an update waits for at most one token and stops generation only for as
    long as it lasts. KV caches made before an update are kept, as in in-flight updates.

    Example:
        >>> engine = TransformersEngine(model)          # doctest: +SKIP
        >>> receiver = weightdelta.Receiver(url, engine)  # doctest: +SKIP
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._gate = Gate()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Live weights by name."""
        return read_state(self.model)

    def aliases(self) -> list[tuple[str, ...]]:
        """Groups of names that are one tensor."""
        return find_aliases(self.model)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is computed inside."""
        with self._gate.closed():
            yield

    @contextmanager
    def token(self) -> Iterator[None]:
        """One token of a generation loop of the caller's own; updates happen between two."""
        with self._gate.token():
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` with the gate as one more stopping criterion.

        Args:
            *args: As for ``model.generate``.
            **kwargs: As for ``model.generate``; its ``stopping_criteria`` are kept.
        """
        criteria = [*(kwargs.pop("stopping_criteria", None) or ()), self._boundary]
        with self._gate.token(), torch.no_grad():
            return self.model.generate(*args, stopping_criteria=criteria, **kwargs)  # type: ignore[operator]

    def _boundary(self, input_ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        """Called by ``generate`` after every token; stops nothing."""
        self._gate.step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Gate:
    """A lock that token loops hold and open between tokens; an update never starves.

    A loop may be entered again, and closed, by the thread that runs it (a callback between two
    tokens): that thread is at a boundary, and never waits for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closing = 0
        self._own = threading.local()

    @contextmanager
    def token(self) -> Iterator[None]:
        """Entered around a token loop."""
        depth = self._depth
        with self._changed:
            if not depth:
                self._changed.wait_for(lambda: self._closing == 0 or self._own_closing)
                self._running += 1
            self._own.depth = depth + 1
        try:
            yield
        finally:
            with self._changed:
                self._own.depth = depth
                self._running -= not depth
                self._changed.notify_all()

    def step(self) -> None:
        """Between two tokens: let a waiting update through."""
        if not self._closing or self._own_closing:
            return
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closing == 0)
            finally:  # interrupted or not, the loop's end takes off what is put back here
                self._running += 1

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Wait for the token boundary of every other loop, then hold them there."""
        within = self._own_closing
        mine = bool(self._depth) and not within
        with self._changed:
            self._closing += 1
            self._running -= mine
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._running == 0)
            self._own.closing = True
            yield
        finally:
            self._own.closing = within
            self._open(mine)

    def _open(self, mine: bool) -> None:
        with self._changed:
            self._closing -= 1
            self._changed.notify_all()
            try:
                if mine:
                    self._changed.wait_for(lambda: self._closing == 0)
            finally:
                self._running += mine

    @property
    def _depth(self) -> int:
        """Loops that the calling thread is in."""
        depth: int = getattr(self._own, "depth", 0)
        return depth

    @property
    def _own_closing(self) -> bool:
        """Whether the calling thread holds the gate closed."""
        closing: bool = getattr(self._own, "closing", False)
        return closing
