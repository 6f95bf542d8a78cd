"""fsspec's file systems as a store's backend: S3, GCS, Azure, memory and others."""
# ruff: noqa: D102 (``Backend`` says what each method does)

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec

from weightdelta.errors import ConfigError
from weightdelta.redact import redact, refuse_credentials
from weightdelta.store_backend import Backend, Buffer, Live, Transient, refuse_dead
from weightdelta.store_errors import translated
from weightdelta.store_local import LocalBackend

# Their fsspec classes turn mode="create" into one conditional request. The default of fsspec is
# to look and then write, which two writers can both win.
CONDITIONAL: Final = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
#: Largest object that is sent by one request; larger ones are streamed.
WHOLE: Final = 32 << 20
#: Bytes of one part of a streamed upload; a multiple of 256 KiB, as GCS demands.
PART: Final = 16 << 20
#: Bytes of one request of a large read; the requests of one read run side by side.
PIECE: Final = 8 << 20
_CONNECT_S: Final = 10.0
# Every instance of fsspec's memory file system shares one dict, so they share one lock.
_MEMORY_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class FsspecBackend:
    """Any fsspec file system whose ``pipe_file(mode="create")`` is one conditional put.

    Attributes:
        threads: Requests of one large read that are under way at a time.
    """

    fs: Any
    root: str
    threads: int = 8

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        if end is None or end - start > PIECE or end <= start:
            size = self.size(name)  # requests beyond the end would each be refused
            end = size if end is None else min(end, size)
        if end <= start:
            return b""
        try:
            with translated():
                data = self._fetch(self._path(name), start, end)
        except OSError as e:
            if e.errno == errno.ERANGE:  # the object ends before ``start``
                return b""
            raise
        if len(data) > end - start:
            raise OSError(errno.EIO, f"asked for {end - start} bytes, got {len(data)}")
        return data

    def _fetch(self, path: str, start: int, end: int) -> bytes:
        # By keyword: the second positional argument of s3fs is a version id.
        if end - start <= PIECE or not self._is_remote():
            data: bytes = self.fs.cat_file(path, start=start, end=end)
            return data
        starts = list(range(start, end, PIECE))
        ends = [*starts[1:], end]
        found = self.fs.cat_ranges(
            [path] * len(starts), starts, ends, batch_size=self.threads, on_error="raise"
        )
        data = b"".join(found)
        if len(data) != end - start:
            raise Transient(errno.EIO, f"asked for {end - start} bytes, got {len(data)}")
        return data

    def put(self, name: str, parts: Iterable[Buffer], *, durable: bool, live: Live) -> None:  # noqa: ARG002 - object stores are durable
        big, parts = is_big(parts)
        if big and self._is_remote():
            self._stream(name, parts, live)
            return
        data = b"".join(parts)
        refuse_dead(live)
        with translated():
            self.fs.pipe_file(self._path(name), data)

    def _stream(self, name: str, parts: Iterable[Buffer], live: Live) -> None:
        """Upload in parts, of which readers see nothing before the last one is there."""
        with translated():
            file = self.fs.open(self._path(name), "wb", block_size=PART)
            try:
                for part in parts:
                    refuse_dead(live)
                    file.write(part)
                refuse_dead(live)
                file.close()
            except BaseException:
                # Before anything else: a file that is still open ends the upload when it is
                # collected, and a truncated object would appear.
                file.closed = True
                with contextlib.suppress(Exception):
                    file.discard()
                raise

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        path, data = self._path(name), b"".join(parts)
        try:
            with translated():
                self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as e:
            # Some servers refuse the condition without saying that this was it.
            if e.errno == errno.EINVAL and self._exists(name):
                return False
            raise
        return True

    def _exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        with translated():
            info = self.fs.info(self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "not an object", name)
        return int(info["size"])

    def names(self, folder: str) -> list[str]:
        skip = len(self.root) + 1
        with translated():
            self.fs.invalidate_cache()
            found = self.fs.find(self._path(folder) if folder else self.root)
        return [path[skip:] for path in found]

    def delete(self, name: str) -> None:
        with translated():
            self.fs.rm_file(self._path(name))

    def _is_remote(self) -> bool:
        """Whether it is one of the clients that do several requests at a time."""
        return bool(getattr(self.fs, "async_impl", False))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


class MemoryBackend(FsspecBackend):
    """fsspec's memory file system. It looks and then writes, so a lock makes that one step."""

    __slots__ = ()

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        data = b"".join(parts)
        with _MEMORY_LOCK, translated():
            if self.fs.isfile(self._path(name)):
                return False
            self.fs.pipe_file(self._path(name), data)
            return True


def connect(
    url: str,
    *,
    options: Mapping[str, Any],
    fsync: bool,
    timeout_s: float | None,
    retries: int,
    threads: int,
) -> tuple[Backend, bool]:
    """The backend for ``url``, and whether its create is one step.

    Raises:
        ConfigError: The URL makes no sense, holds credentials, or its package is missing.
    """
    if not url or "::" in url:
        raise ConfigError(f"store: {redact(url)!r} is not a directory or a plain URL")
    refuse_credentials(url, options)
    scheme = url.partition("://")[0] if "://" in url else "file"
    defaults = _defaults(scheme, timeout_s=timeout_s, retries=retries)
    try:
        fs, root = fsspec.core.url_to_fs(url, **_merged(defaults, options))
    except Exception as e:  # noqa: BLE001 (a client that cannot be set up, for whatever reason)
        raise ConfigError(f"store {url}: {redact(f'{type(e).__name__}: {e}')}") from None
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & {"file", "local"}:
        return LocalBackend(Path(root), fsync=fsync), True
    if "memory" in protocols:
        return MemoryBackend(fs, root), True
    if "s3" in protocols:
        fs.retries = 1  # botocore's own retries know which errors pass, and have jitter
    backend = FsspecBackend(fs, root.rstrip("/"), threads=threads)
    return backend, bool(protocols & CONDITIONAL)


def _defaults(scheme: str, *, timeout_s: float | None, retries: int) -> dict[str, Any]:
    """Options that bound a client's requests and keep it from remembering listings."""
    if scheme not in CONDITIONAL - {"memory"}:
        return {}
    common = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in {"s3", "s3a"}:
        config: dict[str, Any] = {
            "retries": {"mode": "standard", "max_attempts": min(retries, 2)},
            "max_pool_connections": 64,
        }
        if timeout_s is not None:
            config |= {"connect_timeout": min(_CONNECT_S, timeout_s), "read_timeout": timeout_s}
        return common | {"config_kwargs": config}
    if timeout_s is None:
        return common
    if scheme in {"gs", "gcs"}:
        return common | {"requests_timeout": timeout_s}
    return common | {
        "connection_timeout": max(1, round(min(_CONNECT_S, timeout_s))),
        "read_timeout": max(1, round(timeout_s)),
    }


def _merged(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options over the defaults, one level deep."""
    found = dict(defaults)
    for key, value in options.items():
        below = found.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        found[key] = {**below, **value} if both else value  # type: ignore[dict-item]
    return found


def is_big(parts: Iterable[Buffer]) -> tuple[bool, Iterable[Buffer]]:
    """Whether an object is larger than ``WHOLE``, known as soon as that much of it has come.

    Returns:
        The answer, and all the parts.
    """
    coming, first, size = iter(parts), list[Buffer](), 0
    for part in coming:
        first.append(part)
        size += memoryview(part).nbytes
        if size > WHOLE:
            return True, itertools.chain(first, coming)
    return False, first
