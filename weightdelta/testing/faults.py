"""A store whose k-th operation goes wrong: the seam through which tests inject faults.

The fault sits below the store's own bounds and translation of errors, so a test meets what a
caller would meet. The loop is always the same: k = 1, 2, ... until a run ends without firing.

>>> from weightdelta.store import Store
>>> store = FaultStore(Store("memory://faults-example"), Plan("after", at=1))
>>> store.create("x", b"1")
Traceback (most recent call last):
weightdelta.errors.StoreUnavailable: store memory://faults-example: could not create x: ...
>>> store.read("x"), store.fired
(b'1', 1)
"""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

from weightdelta.errors import ConfigError
from weightdelta.store import Backend, Buffer, Live, Store

T = TypeVar("T")

Fault = Literal[
    "before", "after", "cut", "hang", "enospc", "erofs", "eacces", "kill", "kill-after"
]  # fmt: skip
Op = Literal["read", "write", "hint", "create", "size", "names", "delete"]

#: Every fault that leaves the process alive.
SURVIVABLE: Final[tuple[Fault, ...]] = (
    "before", "after", "cut", "hang", "enospc", "erofs", "eacces",
)  # fmt: skip
OPS: Final[frozenset[Op]] = frozenset(get_args(Op))
_MUTATING: Final[frozenset[Op]] = frozenset({"write", "hint", "create", "delete"})
_CODES: Final[dict[Fault, int]] = {
    "enospc": errno.ENOSPC,
    "erofs": errno.EROFS,
    "eacces": errno.EACCES,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong, and when.

    ====================  ======================================================================
    fault                 effect
    ====================  ======================================================================
    before                fails without having done anything (EIO)
    after                 done, but the answer is lost (ECONNRESET)
    cut                   a read returns its first half; a write leaves its first half behind and
                          fails; anything else fails as ``before`` (stores do not tear a create)
    hang                  waits for ``release()``, then does it
    enospc erofs eacces   a mutation fails with that code, a read works (except eacces)
    kill, kill-after      SIGKILL to this process, before or after
    ====================  ======================================================================

    Attributes:
        fault: The kind of fault.
        at: The operation it hits, from 1, counted among ``ops``.
        forever: Whether all later ones are hit too.
        ops: The operations that count.
    """

    fault: Fault
    at: int = 1
    forever: bool = False
    ops: frozenset[Op] = OPS

    def __post_init__(self) -> None:
        if self.fault not in get_args(Fault) or self.at < 1 or not self.ops <= OPS:
            raise ConfigError(f"not a plan for faults: {self}")


class FaultStore(Store):
    """``inner`` with a plan; the plan may be replaced at any time.

    The store's bound is ``inner``'s unless ``timeout_s`` gives another, in seconds.
    """

    def __init__(
        self, inner: Store, plan: Plan | None = None, *, timeout_s: float | None = None
    ) -> None:
        self._bad = _FaultBackend(inner._backend)
        bound = inner.timeout_s if timeout_s is None else timeout_s
        self._setup(
            inner.url, self._bad, inner._conditional, timeout_s=bound, retries=inner._retries
        )
        self.fenced, self._single_writer = inner.fenced, inner._single_writer
        self.plan = plan

    @property
    def plan(self) -> Plan | None:
        """What goes wrong; setting it starts the count anew."""
        return self._bad.plan

    @plan.setter
    def plan(self, plan: Plan | None) -> None:
        self._bad.plan, self._bad.count, self._bad.fired = plan, 0, 0

    @property
    def calls(self) -> list[tuple[Op, str]]:
        """Every operation so far, as (operation, object name)."""
        return self._bad.calls

    @property
    def count(self) -> int:
        """Operations that counted since the plan was set."""
        return self._bad.count

    @property
    def fired(self) -> int:
        """How often the fault struck since the plan was set."""
        return self._bad.fired

    def release(self) -> None:
        """Let everything that hangs go on, now and in the future."""
        self._bad.released.set()


class _FaultBackend:
    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.plan: Plan | None = None
        self.calls: list[tuple[Op, str]] = []
        self.count = 0
        self.fired = 0
        self.released = threading.Event()
        self._lock = threading.Lock()

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        fault = self._next("read", name)
        data = self._do("read", fault, lambda: self.inner.read(name, start=start, end=end))
        return data[: len(data) // 2] if fault == "cut" else data

    def put(self, name: str, parts: Iterable[Buffer], *, durable: bool, live: Live) -> None:
        op: Op = "write" if durable else "hint"
        fault = self._next(op, name)
        if fault == "cut":
            whole = b"".join(parts)
            half = (whole[: len(whole) // 2],)
            self.inner.put(name, half, durable=durable, live=live)
            raise OSError(errno.EIO, "injected: cut short", name)
        self._do(op, fault, lambda: self.inner.put(name, parts, durable=durable, live=live))

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        fault = self._next("create", name)
        return self._do("create", fault, lambda: self.inner.create(name, parts))

    def size(self, name: str) -> int:
        return self._do("size", self._next("size", name), lambda: self.inner.size(name))

    def names(self, folder: str) -> list[str]:
        return self._do("names", self._next("names", folder), lambda: self.inner.names(folder))

    def delete(self, name: str) -> None:
        self._do("delete", self._next("delete", name), lambda: self.inner.delete(name))

    def _next(self, op: Op, name: str) -> Fault | None:
        """Count an operation; the fault that strikes it, if any."""
        with self._lock:
            self.calls.append((op, name))
            plan = self.plan
            if plan is None or op not in plan.ops:
                return None
            self.count += 1
            if self.count != plan.at and not (plan.forever and self.count > plan.at):
                return None
            self.fired += 1
            return plan.fault

    def _do(self, op: Op, fault: Fault | None, operation: Callable[[], T]) -> T:
        if fault == "before" or (fault == "cut" and op != "read"):
            raise OSError(errno.EIO, "injected: failed before")
        if fault in _CODES and (op in _MUTATING or fault == "eacces"):
            raise OSError(_CODES[fault], f"injected: {os.strerror(_CODES[fault])}")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            self.released.wait()
        try:
            return operation()
        finally:  # also when it failed: that answer is lost as well
            if fault == "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "after":
                raise OSError(errno.ECONNRESET, "injected: answer lost")
