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
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import fsspec

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

if TYPE_CHECKING:
    from weightdelta.config import Config

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
#: Asked just before an effect becomes visible: is the caller still waiting for it?
Live = Callable[[], bool]

#: Threads of one ``read_all``; hides the latency of a remote store.
PARALLEL: Final = 32
#: Most objects that one thread of ``read_all`` reads in a row, within one ``timeout_s``.
BLOCK: Final = 16
#: Hanging operations after which a store refuses to start more.
MAX_HANGING: Final = 64

_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}(/[A-Za-z0-9_][\w.-]{0,127}){0,7}", re.ASCII)
_PREFIX: Final = re.compile(rf"({_NAME.pattern}/?)?", re.ASCII)
_TMP: Final = ".tmp"  # no object name starts with a dot
# Their fsspec classes turn mode="create" into one conditional request. The default of fsspec is
# to look and then write, which two writers can both win.
_CONDITIONAL: Final = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Every instance of fsspec's memory file system shares one dict, so they share one lock.
_MEMORY_LOCK: Final = threading.Lock()


class Backend(Protocol):
    """What a store is built on; raises OSErrors, FileNotFoundError for an absent object.

    ``put`` writes or replaces, all at once for readers, unless no longer ``live``; ``create``
    writes unless there is one, and says whether it did; the rest is as in ``Store``.
    """

    def read(self, name: str, *, start: int, end: int | None) -> bytes: ...  # noqa: D102
    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool, live: Live) -> None: ...  # noqa: D102
    def create(self, name: str, parts: Sequence[Buffer]) -> bool: ...  # noqa: D102
    def size(self, name: str) -> int: ...  # noqa: D102
    def names(self, folder: str) -> list[str]: ...  # noqa: D102
    def delete(self, name: str) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _Local:
    """A directory. Objects are written aside, synced, then linked or renamed into place."""

    root: Path
    fsync: bool = True
    _synced: set[Path] = field(default_factory=set)

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        with (self.root / name).open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            f.seek(start)
            # Held against the file's size first: read(n) allocates n bytes before it reads.
            return f.read(max(0, min(size, size if end is None else end) - start))

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool, live: Live) -> None:
        with self._aside(parts, sync=durable and self.fsync) as temporary:
            folder = self._folder(name)
            # The caller may have reused the buffers since it stopped waiting.
            if not live():
                raise TimeoutError(errno.ETIMEDOUT, "given up by the caller")
            os.replace(temporary, self.root / name)
            if durable:
                self._sync(folder)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        with self._aside(parts, sync=self.fsync) as temporary:
            folder = self._folder(name)
            try:
                os.link(temporary, self.root / name)
                return True
            except FileExistsError:
                return False
            finally:
                # Also when it existed: an earlier attempt of ours may have failed right here.
                self._sync(folder)

    def size(self, name: str) -> int:
        path = self.root / name
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory", name)
        return path.stat().st_size

    def names(self, folder: str) -> list[str]:
        found = []
        for at, folders, files in os.walk(self.root / folder):
            folders[:] = [f for f in folders if f != _TMP]
            found += [(Path(at) / f).relative_to(self.root).as_posix() for f in files]
        return found

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    @contextlib.contextmanager
    def _aside(self, parts: Sequence[Buffer], *, sync: bool) -> Iterator[Path]:
        """A temporary file that holds ``parts``; gone afterwards."""
        folder = self.root / _TMP
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / secrets.token_hex(16)
        try:
            with path.open("xb") as f:
                for part in parts:
                    f.write(part)
                f.flush()
                if sync:
                    os.fsync(f.fileno())
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _folder(self, name: str) -> Path:
        """The object's folder, made if need be, its own entry durable up to the root's."""
        folder = (self.root / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        if self.fsync and folder not in self._synced:
            up = folder
            while up != self.root:
                up = up.parent
                self._sync(up)
            with contextlib.suppress(PermissionError):  # nobody promised us the folder above
                self._sync(self.root.parent)
            self._synced.add(folder)
            while len(self._synced) > 256:
                self._synced.pop()
        return folder

    def _sync(self, folder: Path) -> None:
        if not self.fsync:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Fsspec:
    """Any other fsspec file system whose ``pipe_file(mode="create")`` is one conditional put."""

    fs: Any
    root: str

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        # By keyword: the second positional argument of s3fs is a version id.
        data: bytes = self.fs.cat_file(self._path(name), start=start, end=end)
        return data

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool, live: Live) -> None:  # noqa: ARG002 - object stores are durable
        data = b"".join(parts)
        if not live():
            raise TimeoutError(errno.ETIMEDOUT, "given up by the caller")
        self.fs.pipe_file(self._path(name), data)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        path, data = self._path(name), b"".join(parts)
        try:
            self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as e:
            # s3fs turns a failed condition that the server does not name into EINVAL.
            if e.errno == errno.EINVAL and self.fs.exists(path):
                return False
            raise
        return True

    def size(self, name: str) -> int:
        info = self.fs.info(self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "not an object", name)
        return int(info["size"])

    def names(self, folder: str) -> list[str]:
        skip = len(self.root) + 1
        self.fs.invalidate_cache()
        return [path[skip:] for path in self.fs.find(self._path(folder) if folder else self.root)]

    def delete(self, name: str) -> None:
        self.fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


class _Memory(_Fsspec):
    """fsspec's memory file system. It looks and then writes, so a lock makes that one step."""

    __slots__ = ()

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        data = b"".join(parts)
        with _MEMORY_LOCK:
            if self.fs.isfile(self._path(name)):
                return False
            self.fs.pipe_file(self._path(name), data)
            return True


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

    Raises:
        ConfigError: The URL or the bound makes no sense, or the protocol's package is missing.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = 60.0,
        fsync: bool = True,
    ) -> None:
        backend, conditional = _backend(os.fspath(url), options or {}, fsync)
        self._setup(os.fspath(url), backend, conditional, timeout_s=timeout_s)

    @classmethod
    def of(cls, url: str | os.PathLike[str], *, config: "Config") -> "Store":
        """The store that a configuration describes."""
        c = config.store
        return cls(url, options=c.options, timeout_s=c.timeout_s, fsync=c.fsync)

    def _setup(
        self, url: str, backend: Backend, conditional: bool, *, timeout_s: float | None
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"store {url}: timeout_s must be positive, found {timeout_s}")
        self.url = url
        self.timeout_s = timeout_s
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

    def hint(self, name: str, data: Buffer) -> None:
        """Overwrite a small object that readers do not trust; it need not survive a power loss."""
        self._put(name, data, durable=False)

    def create(self, name: str, data: bytes | Sequence[bytes]) -> bool:
        """Write an object unless there is one already; whether it was written.

        False may mean one's own, from an attempt whose answer was lost: read it back to know.
        """
        create = partial(self._backend.create, name, _parts(data))
        return self._call("create", name, create, absent=False)

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

        Raises:
            UnsafeStore: It is not, or the protocol is not known to do it in one step.
        """
        if not self._conditional:
            raise UnsafeStore(
                f"store {self.url}: its file system looks and then writes, so two writers could "
                f"both win; use a directory or one of {', '.join(sorted(_CONDITIONAL))}"
            )
        name = f"probe/{secrets.token_hex(16)}"
        try:
            self.create(name, b"first")
            again = self.create(name, b"second")
            found = self.read(name, limit=16)
        finally:
            with contextlib.suppress(WeightDeltaError):
                self.delete(name)
        if again or found != b"first":
            raise UnsafeStore(
                f"store {self.url}: {name} could be created twice (its bytes are now {found!r}); "
                "it ignores conditional puts and cannot keep two writers apart"
            )

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

    def _call(self, verb: str, name: str, operation: Callable[[], T], *, absent: bool = True) -> T:
        guarded = partial(self._guard, verb, self._valid(name), operation, absent=absent)
        return self._wait(self._start(name, guarded), verb, (name,))

    def _start(self, name: str, operation: Callable[[], T]) -> Future[T]:
        if self._hanging >= MAX_HANGING:
            raise StoreTimeout(
                f"store {self.url}: {name} not tried, {self._hanging} earlier operations still hang"
            )
        job: Future[T] = Future()
        if self.timeout_s is None:
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

    def _guard(self, verb: str, name: str, operation: Callable[[], T], *, absent: bool = True) -> T:
        """Its errors in our terms; ``absent``: to find no such file means there is no object."""
        try:
            return operation()
        except WeightDeltaError:
            raise
        except OSError as e:
            if absent and isinstance(e, _ABSENT):
                raise MissingObject(f"store {self.url}: there is no object {name}") from e
            why = f"store {self.url}: could not {verb} {name}: {e.strerror or e}"
            raise StoreUnavailable(e.errno or errno.EIO, why) from e

    def _ended(self, _: Future[T]) -> None:
        with self._lock:
            self._hanging -= 1


def _parts(data: Buffer | Sequence[Buffer]) -> tuple[Buffer, ...]:
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else tuple(data)


def _backend(url: str, options: Mapping[str, Any], fsync: bool) -> tuple[Backend, bool]:
    """The backend for ``url``, and whether its create is one step."""
    if not url or "::" in url:
        raise ConfigError(f"store: {url!r} is not a directory or a plain URL")
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as e:
        raise ConfigError(f"store {url}: {e}") from e
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & {"file", "local"}:
        return _Local(Path(root), fsync=fsync), True
    if "memory" in protocols:
        return _Memory(fs, root), True
    return _Fsspec(fs, root.rstrip("/")), bool(protocols & _CONDITIONAL)
