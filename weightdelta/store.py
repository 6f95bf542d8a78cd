"""Named immutable bytes behind a URL, with bounds on everything.

- ``create`` has exactly one winner for a name; a reader sees a whole object or none.
- No call blocks longer than ``timeout_s``: it runs in a thread of its own, and a thread that
  hangs is left behind. What it was doing may still take effect, as with any lost answer.
- An answer is certain, an error is not: after ``StoreUnavailable`` or ``StoreTimeout`` the
  operation may or may not have happened.
- Listing exists for people and garbage collection; nothing correct rests on it.

>>> store = Store("memory://example")
>>> store.create("greeting", b"hello"), store.create("greeting", b"again")
(True, False)
>>> store.read("greeting")
b'hello'
"""

import contextlib
import errno
import itertools
import logging
import math
import os
import random
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from weightdelta.errors import (
    ConfigError,
    DamagedObject,
    InputError,
    MissingObject,
    StoreTimeout,
    StoreUnavailable,
    UnsafeStore,
    WeightDeltaError,
)
from weightdelta.redact import redact
from weightdelta.store_backend import Backend, Buffer, Live, Transient
from weightdelta.store_feed import Feed
from weightdelta.store_fsspec import CONDITIONAL, connect
from weightdelta.store_obstore import with_obstore

if TYPE_CHECKING:
    from weightdelta.config import Config

__all__ = ["BLOCK", "MAX_HANGING", "PARALLEL", "Backend", "Buffer", "Live", "Store", "Upload"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Threads of one ``read_all``; hides the latency of a remote store.
PARALLEL: Final = 32
#: Most objects that one thread of ``read_all`` reads in a row, within one ``timeout_s``.
BLOCK: Final = 16
#: Hanging operations after which a store refuses to start more.
MAX_HANGING: Final = 64

_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}(/[A-Za-z0-9_][\w.-]{0,127}){0,7}", re.ASCII)
_PREFIX: Final = re.compile(rf"({_NAME.pattern}/?)?", re.ASCII)
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: Pauses before a request is sent again are drawn from 0 to this, doubled each time [s].
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
#: The process's own generator belongs to the trainer, whose runs must stay repeatable.
_JITTER: Final = random.SystemRandom()


def _run(job: "Future[T]", operation: Callable[[], T]) -> None:
    try:
        job.set_result(operation())
    except BaseException as e:  # noqa: BLE001 - carried to the caller, in another thread
        job.set_exception(e)


class Store:
    """Objects under a URL.

    Every operation raises ``StoreUnavailable`` when the store fails, ``StoreTimeout`` when it does
    not answer within the bound, and ``InputError`` for what is not an object name.

    Args:
        url: A directory, or any URL that fsspec knows (``s3://bucket/run``, ``memory://run``).
        options: Passed to the fsspec file system.
        timeout_s: Longest that one operation may take, in seconds; None runs operations in the
            caller's thread with no bound.
        fsync: Whether objects in a directory must survive a power loss.
        retries: How often a request that failed in passing is sent again within ``timeout_s``.
            A ``create`` never is: its caller has to look who won.
        threads: Requests that one large read or write has under way at a time.
        single_writer: The caller vouches that there is one writer at a time: a store that does
            not honour create-once is then used, without fencing.
        bulk: The client that moves data; ``obstore`` for object stores only.

    Attributes:
        fenced: Whether two writers would be kept apart, as far as is known; ``probe`` finds out.

    Raises:
        ConfigError: The URL or the bound makes no sense, holds a credential, or the protocol's
            package is missing.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = 60.0,
        fsync: bool = True,
        retries: int = 4,
        threads: int = 8,
        single_writer: bool = False,
        bulk: Literal["fsspec", "obstore"] = "fsspec",
    ) -> None:
        at = os.fspath(url)
        client: dict[str, Any] = {
            "options": options or {},
            "timeout_s": timeout_s,
            "retries": retries,
            "threads": threads,
        }
        backend, conditional = connect(at, fsync=fsync, **client)
        if bulk == "obstore":
            backend = with_obstore(at, backend, **client)
        self._setup(at, backend, conditional, timeout_s=timeout_s, retries=retries)
        self._single_writer = single_writer

    @classmethod
    def of(cls, url: str | os.PathLike[str], *, config: "Config") -> "Store":
        """The store that a configuration describes."""
        c = config.store
        return cls(
            url,
            options=c.options,
            timeout_s=c.timeout_s,
            fsync=c.fsync,
            retries=c.retries,
            threads=c.threads,
            single_writer=c.single_writer,
            bulk=c.bulk,
        )

    def _setup(
        self,
        url: str,
        backend: Backend,
        conditional: bool,
        *,
        timeout_s: float | None,
        retries: int = 4,
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"store {url}: timeout_s must be positive, found {timeout_s}")
        self.url = url
        self.timeout_s = timeout_s
        self.fenced = conditional
        self._retries = retries
        self._single_writer = False
        self._backend = backend
        self._conditional = conditional
        self._hanging = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def read(
        self, name: str, *, start: int = 0, end: int | None = None, limit: int | None = None
    ) -> bytes:
        """Bytes ``[start, end)`` of an object, fewer where it ends earlier.

        Args:
            name: The object.
            start: First byte.
            end: One past the last byte; None for the object's end.
            limit: Most bytes to return; neither the store nor this process handles more.

        Raises:
            MissingObject: There is no such object.
            DamagedObject: There are more than ``limit`` bytes.
        """
        if start < 0 or (end is not None and end < start):
            raise InputError(f"store {self.url}: {name!r}: not a range: [{start}, {end})")
        get = partial(self._get, self._valid(name), start=start, end=end, limit=limit)
        return self._wait(self._start(name, get), "read", (name,))

    def read_all(self, names: Iterable[str], *, limit: int) -> Iterator[bytes | None]:
        """Whole objects in the order of ``names``, None for an absent one, several at a time.

        Raises:
            DamagedObject: An object has more than ``limit`` bytes.
        """
        todo = [self._valid(name) for name in names]
        # A thread for each small read would cost more than a local read; few names get one each.
        step = max(1, min(BLOCK, len(todo) // PARALLEL))
        flying: deque[tuple[list[str], list[bytes | None], Future[None]]] = deque()
        for i in range(0, len(todo), step):
            block, found = todo[i : i + step], list[bytes | None]()
            job = self._start(block[0], partial(self._read_block, block, limit, found))
            flying.append((block, found, job))
            while len(flying) >= (PARALLEL if i + step < len(todo) else 1):
                block, found, job = flying.popleft()
                self._wait(job, "read", block, found)
                yield from found

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        """Write an object under a name that nobody else uses, or whose bytes follow from the name.

        Buffers may be reused once this returns or raises. Writing the same again is harmless.
        """
        self._put(name, data, durable=True)

    def begin(self, name: str) -> "Upload":
        """Start to write an object, as ``write`` does, while its parts are still being made."""
        feed = Feed()
        put = partial(self._backend.put, self._valid(name), feed, durable=True, live=feed.is_wanted)
        guarded = partial(self._guard, "write", name, put, absent=False, feed=feed)
        job = self._start(name, guarded, apart=True)
        return Upload(feed, lambda: self._wait(job, "write", (name,)))

    def hint(self, name: str, data: Buffer) -> None:
        """Overwrite a small object that readers do not trust; it need not survive a power loss."""
        self._put(name, data, durable=False)

    def create(self, name: str, data: bytes | Sequence[bytes]) -> bool:
        """Write an object unless there is one already; whether it was written.

        False may mean one's own, from an attempt whose answer was lost: read it back to know.
        """
        if not self.fenced and self._single_writer and self._exists(name):
            return False
        create = partial(self._backend.create, name, _parts(data))
        return self._call("create", name, create, absent=False, again=False)

    def size(self, name: str) -> int:
        """Bytes in an object.

        Raises:
            MissingObject: There is no such object.
        """
        return self._call("size", name, lambda: self._backend.size(name))

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names that start with ``prefix``, as listed by the store: no proof of absence."""
        if not _PREFIX.fullmatch(prefix):
            raise InputError(f"store {self.url}: {prefix!r} is not the start of an object name")
        folder, found = prefix.rpartition("/")[0], list[str]()
        with contextlib.suppress(MissingObject):
            found = self._call("list", folder or "all", lambda: self._backend.names(folder))
        return sorted(name for name in found if name.startswith(prefix) and _NAME.fullmatch(name))

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine."""
        with contextlib.suppress(MissingObject):
            self._call("delete", name, lambda: self._backend.delete(name))

    def probe(self) -> None:
        """Check that a second create of the same name is refused.

        With ``single_writer`` it is a warning in the log that it is not, and ``fenced`` is False:
        creates then look first, which keeps apart only writers that come one after the other.

        Raises:
            UnsafeStore: It is not, or the protocol is not known to do it in one step.
        """
        problem = self._probe()
        self.fenced = not problem
        if problem and not self._single_writer:
            raise UnsafeStore(f"store {self.url}: {problem}")
        if problem:
            logger.warning(
                "store %s: %s; single_writer is set, so it is used WITHOUT FENCING: a second "
                "writer would not be noticed",
                self.url,
                problem,
            )

    def _probe(self) -> str:
        """Why creates cannot be trusted; empty if they can."""
        if not self._conditional:
            return (
                "its file system looks and then writes, so two writers could both win; use a "
                f"directory or one of {', '.join(sorted(CONDITIONAL))}"
            )
        name, create = f"probe/{secrets.token_hex(16)}", self._backend.create
        try:
            for data in (b"first", b"second"):
                again = self._call("create", name, partial(create, name, (data,)), absent=False)
            found = self.read(name, limit=16)
        finally:
            with contextlib.suppress(WeightDeltaError):
                self.delete(name)
        if not again and found == b"first":
            return ""
        return (
            f"{name} could be created twice (its bytes are now {found!r}); it ignores "
            "conditional puts and cannot keep two writers apart"
        )

    def _exists(self, name: str) -> bool:
        try:
            self.size(name)
        except MissingObject:
            return False
        return True

    def _put(self, name: str, data: Buffer | Sequence[Buffer], *, durable: bool) -> None:
        wanted = threading.Event()
        wanted.set()
        put = partial(self._backend.put, name, _parts(data), durable=durable, live=wanted.is_set)
        try:
            self._call("write", name, put, absent=False)
        except StoreTimeout:
            wanted.clear()  # from here on the buffers may change
            raise

    def _get(self, name: str, *, start: int, end: int | None, limit: int | None) -> bytes:
        most = None if limit is None else start + limit + 1  # one more tells that there is more
        stop = min((s for s in (end, most) if s is not None), default=None)
        data = self._guard("read", name, lambda: self._backend.read(name, start=start, end=stop))
        if limit is not None and len(data) > limit:
            raise DamagedObject(f"store {self.url}: {name} has more than the {limit} bytes allowed")
        return data

    def _read_block(self, names: list[str], limit: int, found: list[bytes | None]) -> None:
        """Append each object to ``found``, which tells a waiting caller how far this got."""
        for name in names:
            try:
                found.append(self._get(name, start=0, end=None, limit=limit))
            except MissingObject:
                found.append(None)

    def _valid(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise InputError(f"store {self.url}: {name!r} is not like {_NAME.pattern}")
        return name

    def _call(
        self,
        verb: str,
        name: str,
        operation: Callable[[], T],
        *,
        absent: bool = True,
        again: bool = True,
    ) -> T:
        guarded = partial(
            self._guard, verb, self._valid(name), operation, absent=absent, again=again
        )
        return self._wait(self._start(name, guarded), verb, (name,))

    def _start(self, name: str, operation: Callable[[], T], *, apart: bool = False) -> Future[T]:
        if self._hanging >= MAX_HANGING:
            raise StoreTimeout(
                f"store {self.url}: {name} not tried, {self._hanging} earlier operations still hang"
            )
        job: Future[T] = Future()
        if self.timeout_s is None and not apart:
            _run(job, operation)
        else:  # a daemon: a hanging disk must not keep the interpreter from exiting
            threading.Thread(target=_run, args=(job, operation), daemon=True).start()
        return job

    def _wait(
        self, job: Future[T], verb: str, names: Sequence[str], found: Sequence[object] = ()
    ) -> T:
        if not wait([job], timeout=self.timeout_s).done:
            with self._lock:
                self._hanging += 1
            job.add_done_callback(self._ended)
            name = names[min(len(found), len(names) - 1)]
            raise StoreTimeout(
                f"store {self.url}: {verb} {name} took over {self.timeout_s} s; it may yet happen"
            )
        return job.result()

    def _guard(
        self,
        verb: str,
        name: str,
        operation: Callable[[], T],
        *,
        absent: bool = True,
        again: bool = True,
        feed: Feed | None = None,
    ) -> T:
        """Its errors in our terms; ``absent``: to find no such file means there is no object."""
        try:
            return self._repeat(operation, feed) if again else operation()
        except WeightDeltaError:
            raise
        except OSError as e:
            if absent and isinstance(e, _ABSENT):
                failure: WeightDeltaError = MissingObject(
                    f"store {self.url}: there is no object {name}"
                )
            else:
                why = f"store {self.url}: could not {verb} {name}: {redact(e.strerror or str(e))}"
                failure = StoreUnavailable(e.errno or errno.EIO, why)
            # An error with a history comes from a client library, which may have quoted a secret.
            failure.__cause__ = e if e.__cause__ is None and e.__context__ is None else None
        # Outside of the handler, or Python would keep what was handled as its context.
        raise failure

    def _repeat(self, operation: Callable[[], T], feed: Feed | None) -> T:
        """Send it again while it fails in passing, after longer and longer pauses with jitter."""
        bound = math.inf if self.timeout_s is None else self.timeout_s
        begun = time.monotonic()
        for tries in itertools.count():
            try:
                return operation()
            except Transient:
                stop = (feed.ended_at if feed else begun) + bound
                pause = _JITTER.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**tries))
                late = time.monotonic() + pause >= stop
                if late or tries >= self._retries:
                    raise
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _ended(self, _: Future[T]) -> None:
        with self._lock:
            self._hanging -= 1


class Upload:
    """An object that is being written while its parts are still being made.

    Nothing of it appears before ``finish``. Made by ``Store.begin``.
    """

    def __init__(self, feed: Feed, wait_for_it: Callable[[], None]) -> None:
        self._feed = feed
        self._wait = wait_for_it

    def add(self, part: Buffer) -> None:
        """Hand in the next part; it must stay as it is until ``finish`` or ``abandon``."""
        self._feed.add(part)

    def finish(self) -> None:
        """There are no more parts; returns once the object is written.

        Raises:
            StoreUnavailable, StoreTimeout: As for ``write``; the bound counts from here.
        """
        self._feed.end()
        try:
            self._wait()
        except BaseException:
            self._feed.give_up()
            raise

    def abandon(self) -> None:
        """Write nothing after all."""
        self._feed.give_up()


def _parts(data: Buffer | Sequence[Buffer]) -> tuple[Buffer, ...]:
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else tuple(data)
