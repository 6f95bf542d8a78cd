"""The parts of an object that is written while they are still being made."""

import errno
import math
import threading
import time
from collections.abc import Iterator
from typing import Literal

from weightdelta.store_backend import Buffer, GivenUp


class Feed:
    """Parts in order; reading waits for those to come.

    It can be read again from the start, so that a request that failed can be repeated. One
    thread adds, any number may read.

    Attributes:
        ended_at: When the last part was there, by the monotonic clock [s].
    """

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self._changed = threading.Condition()
        self._state: Literal["open", "ended", "given up"] = "open"
        self.ended_at = math.inf

    def add(self, part: Buffer) -> None:
        """Append a part; it must stay as it is until the object is written."""
        with self._changed:
            self._parts.append(part)
            self._changed.notify_all()

    def end(self) -> None:
        """There are no more parts."""
        self._become("ended")

    def give_up(self) -> None:
        """Nobody waits for this object any more: whoever reads gets ``GivenUp``."""
        self._become("given up")

    def is_wanted(self) -> bool:
        """Whether somebody still waits for the object."""
        return self._state != "given up"

    def __iter__(self) -> Iterator[Buffer]:
        at = 0
        while (part := self._part(at)) is not None:
            yield part
            at += 1

    def _part(self, at: int) -> Buffer | None:
        with self._changed:
            self._changed.wait_for(lambda: at < len(self._parts) or self._state != "open")
            if self._state == "given up":
                raise GivenUp(errno.ETIMEDOUT, "given up by the caller")
            return self._parts[at] if at < len(self._parts) else None

    def _become(self, state: Literal["ended", "given up"]) -> None:
        with self._changed:
            self.ended_at = min(self.ended_at, time.monotonic())
            self._state = state
            self._changed.notify_all()
