"""What a store is built on: the few operations that a backend offers, and how they fail."""

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
#: Asked just before an effect becomes visible: is the caller still waiting for it?
Live = Callable[[], bool]


class Transient(OSError):
    """The request failed in a way that may be over when it is sent again."""


class GivenUp(TimeoutError):
    """The caller stopped waiting, so nothing was written: its buffers may have been reused."""


class Backend(Protocol):
    """Named bytes; raises OSErrors, FileNotFoundError for an absent object.

    ``put`` writes or replaces, all at once for readers, unless no longer ``live``; its parts may
    still be on their way, and can be read again from the start; ``create`` writes unless there is
    one, and says whether it did; the rest is as in ``Store``.
    """

    def read(self, name: str, *, start: int, end: int | None) -> bytes: ...  # noqa: D102
    def put(self, name: str, parts: Iterable[Buffer], *, durable: bool, live: Live) -> None: ...  # noqa: D102
    def create(self, name: str, parts: Sequence[Buffer]) -> bool: ...  # noqa: D102
    def size(self, name: str) -> int: ...  # noqa: D102
    def names(self, folder: str) -> list[str]: ...  # noqa: D102
    def delete(self, name: str) -> None: ...  # noqa: D102


def refuse_dead(live: Live) -> None:
    """Stop a write that nobody waits for.

    Raises:
        GivenUp: Nobody does.
    """
    if not live():
        raise GivenUp(errno.ETIMEDOUT, "given up by the caller")
