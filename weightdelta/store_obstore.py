"""Bulk bytes through obstore, a client in Rust; everything conditional stays with fsspec.

Reads and writes of data take about half of the processor time that s3fs needs, and parts of an
upload travel side by side. Names, creates, hints and deletes go through the backend beside it.
"""
# ruff: noqa: D102 (``Backend`` says what each method does)

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from weightdelta.errors import ConfigError
from weightdelta.redact import redact
from weightdelta.store_backend import Backend, Buffer, Live, refuse_dead
from weightdelta.store_errors import translated
from weightdelta.store_fsspec import PART, is_big

_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss"})


@dataclass(frozen=True, slots=True)
class ObstoreBackend:
    """Reads and writes through ``bulk``, the rest through ``inner``."""

    inner: Backend
    bulk: Any
    threads: int = 8

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        import obstore

        if end is None or end <= start:
            size = self.size(name)
            end = size if end is None else min(end, size)
            if end <= start:
                return b""
        try:
            with translated():
                return bytes(obstore.get_range(self.bulk, name, start=start, end=end))
        except OSError as e:
            if e.errno == errno.ERANGE:  # the object ends before ``start``
                return b""
            raise

    def put(self, name: str, parts: Iterable[Buffer], *, durable: bool, live: Live) -> None:
        if not durable:
            self.inner.put(name, parts, durable=durable, live=live)
            return
        import obstore

        big, parts = is_big(parts)
        body = _while_live(parts, live) if big else b"".join(parts)
        refuse_dead(live)
        with translated():
            obstore.put(
                self.bulk, name, body, use_multipart=big, chunk_size=PART,
                max_concurrency=self.threads,
            )  # fmt: skip

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        return self.inner.create(name, parts)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def names(self, folder: str) -> list[str]:
        return self.inner.names(folder)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


def with_obstore(
    url: str,
    inner: Backend,
    *,
    options: Mapping[str, Any],
    timeout_s: float | None,
    retries: int,
    threads: int,
) -> Backend:
    """``inner`` with obstore for bulk bytes; credentials from the environment.

    Of the fsspec options, those that say where and whether to sign are understood.

    Raises:
        ConfigError: obstore is not installed, or the URL is not one of an object store.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        raise ConfigError(f"store {url}: bulk=obstore needs one of {', '.join(sorted(_SCHEMES))}")
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            f"store {url}: bulk=obstore needs its package: pip install 'weightdelta[obstore]'"
        ) from None
    bound = timedelta(seconds=timeout_s) if timeout_s else None
    client: Any = {"allow_http": True} | ({"timeout": bound} if bound else {})
    retry: Any = {"max_retries": retries} | ({"retry_timeout": bound} if bound else {})
    try:
        bulk = from_url(url, client_options=client, retry_config=retry, **_where(options))
    except Exception as e:  # noqa: BLE001 (a client that cannot be set up, for whatever reason)
        raise ConfigError(f"store {url}: {redact(f'{type(e).__name__}: {e}')}") from None
    return ObstoreBackend(inner, bulk, threads=threads)


def _where(options: Mapping[str, Any]) -> dict[str, Any]:
    """Where fsspec's client would look, so that both look at the same place."""
    inner = options.get("client_kwargs", {})
    found = {
        "endpoint": options.get("endpoint_url") or inner.get("endpoint_url"),
        "region": inner.get("region_name"),
        "skip_signature": options.get("anon"),
    }
    return {key: value for key, value in found.items() if value}


def _while_live(parts: Iterable[Buffer], live: Live) -> Iterator[Buffer]:
    for part in parts:
        refuse_dead(live)
        yield part
