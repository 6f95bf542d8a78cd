"""Time limits: nothing here waits for ever, and what is over budget is left out and said so."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

T = TypeVar("T")


class Budget:
    """The time that a run may take.

    Args:
        seconds: From now to the end.
        wait: Longest wait for any one thing [s].
    """

    def __init__(self, seconds: float, *, wait: float) -> None:
        self._began = time.monotonic()
        self._seconds, self._wait = seconds, wait

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds to the end."""
        return self._seconds - self.spent

    @property
    def wait(self) -> float:
        """Longest that the next thing may take [s]."""
        return max(min(self._wait, self.left), 1.0)

    def get(self, refs: Any) -> Any:
        """``ray.get`` with a limit."""
        return ray.get(refs, timeout=self.wait)

    def within(self, call: Callable[[], T], *, doing: str, seconds: float | None = None) -> T:
        """The result of a call that has no limit of its own.

        Args:
            call: What to do, on a thread.
            doing: Its name in errors.
            seconds: Longest wait in place of the usual one.

        Raises:
            TimeoutError: It did not come; the call goes on on its thread.
        """
        future: Future[T] = Future()
        limit = self.wait if seconds is None else seconds

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as e:  # noqa: BLE001 (handed to the caller)
                future.set_exception(e)

        threading.Thread(target=work, name=doing, daemon=True).start()
        try:
            return future.result(limit)
        except TimeoutError as e:
            if future.done():
                raise
            raise TimeoutError(f"{doing}: not done within {limit:.0f} s") from e

    def say(self, line: str) -> None:
        """A line of progress, at once."""
        print(f"{self.spent:7.1f} s  {line}", flush=True)
