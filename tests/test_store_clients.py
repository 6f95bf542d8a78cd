"""How fsspec's clients are set up and asked: bounds, caches, ranges, parts."""

import errno
from typing import Any

import pytest

from weightdelta.errors import ConfigError, MissingObject, StoreUnavailable
from weightdelta.store import Store
from weightdelta.store_fsspec import PIECE, WHOLE, FsspecBackend


def _client(url: str, **more: Any) -> Any:
    return Store(url, **more)._backend.fs  # type: ignore[attr-defined]


def test_an_s3_client_has_bounds_and_no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    fs = _client("s3://bucket/x", timeout_s=7.0, retries=1)
    assert fs.dircache.use_listings_cache is False
    assert (fs.config_kwargs["read_timeout"], fs.config_kwargs["connect_timeout"]) == (7.0, 7.0)
    assert fs.config_kwargs["retries"] == {"mode": "standard", "max_attempts": 1}
    assert fs.retries == 1
    assert _client("s3://bucket/x", timeout_s=7.0, retries=1) is not fs


def test_options_go_over_the_defaults() -> None:
    pytest.importorskip("s3fs")
    options = {"config_kwargs": {"read_timeout": 3}, "endpoint_url": "http://127.0.0.1:9"}
    fs = _client("s3://bucket/x", timeout_s=20.0, options=options)
    assert fs.config_kwargs["read_timeout"] == 3
    assert fs.config_kwargs["connect_timeout"] == 10.0
    assert fs.endpoint_url == "http://127.0.0.1:9"


def test_gcs_and_azure_clients_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    pytest.importorskip("adlfs")
    gcs = _client("gs://bucket/x", timeout_s=7.0, options={"token": "anon"})
    assert gcs.requests_timeout == 7.0
    assert gcs.dircache.use_listings_cache is False
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        "AccountName=a;AccountKey=bm9ib2R5;BlobEndpoint=http://127.0.0.1:9/a",
    )
    azure = _client("abfs://container/x", timeout_s=7.4)
    assert azure._timeout_kwargs == {"connection_timeout": 7, "read_timeout": 7}
    assert azure.dircache.use_listings_cache is False


class _Remote:
    """A client that does several requests at a time, and remembers which."""

    async_impl = True

    def __init__(self, data: bytes, *, extra: bytes = b"") -> None:
        self.data, self.extra = data, extra
        self.asked: list[Any] = []

    def info(self, path: str) -> dict[str, Any]:
        self.asked.append(("info", path))
        return {"type": "file", "size": len(self.data)}

    def cat_file(self, path: str, version: object = None, *, start: int, end: int) -> bytes:
        assert version is None
        self.asked.append((path, start, end))
        if start >= len(self.data):
            raise OSError(errno.ERANGE, "range")
        return self.data[start:end] + self.extra

    def cat_ranges(
        self,
        paths: list[str],
        starts: list[int],
        ends: list[int],
        *,
        batch_size: int,
        on_error: str,
    ) -> list[bytes]:
        assert (batch_size, on_error) == (3, "raise")
        self.asked += zip(paths, starts, ends, strict=True)
        parts = [self.data[s:e] for s, e in zip(starts, ends, strict=True)]
        return [*parts[:-1], parts[-1] + self.extra]


def test_a_small_read_is_one_request() -> None:
    fs = _Remote(b"0123456789")
    backend = FsspecBackend(fs, "root", threads=3)
    assert backend.read("a", start=2, end=5) == b"234"
    assert fs.asked == [("root/a", 2, 5)]
    assert backend.read("a", start=10, end=12) == b""


def test_a_large_read_is_cut_into_ranges_that_cover_it() -> None:
    data = bytes(2 * PIECE) + b"the end"
    fs = _Remote(data)
    backend = FsspecBackend(fs, "root", threads=3)
    assert backend.read("a", start=5, end=1 << 40) == data[5:]
    assert fs.asked == [
        ("info", "root/a"),
        ("root/a", 5, 5 + PIECE),
        ("root/a", 5 + PIECE, 5 + 2 * PIECE),
        ("root/a", 5 + 2 * PIECE, len(data)),
    ]


def test_an_empty_range_asks_only_whether_the_object_is_there() -> None:
    fs = _Remote(b"0123456789")
    assert FsspecBackend(fs, "root").read("a", start=4, end=4) == b""
    assert fs.asked == [("info", "root/a")]


@pytest.mark.parametrize("size", [10, PIECE + 10])
def test_a_server_that_ignores_ranges_is_found_out(size: int) -> None:
    fs = _Remote(bytes(size), extra=b"more")
    with pytest.raises(OSError, match=rf"asked for {size} bytes, got {size + 4}"):
        FsspecBackend(fs, "root", threads=3).read("a", start=0, end=size)


class _Upload:
    def __init__(self, *, fails: bool) -> None:
        self.parts: list[bytes] = []
        self.closed = self.ended = self.discarded = False
        self._fails = fails

    def write(self, part: bytes) -> None:
        if self._fails and len(self.parts) == 2:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        self.parts.append(part)

    def close(self) -> None:
        self.closed = self.ended = True

    def discard(self) -> None:
        self.discarded = True


@pytest.mark.parametrize("fails", [False, True])
def test_a_large_write_is_streamed_and_ended_only_when_whole(fails: bool) -> None:
    fs, upload = _Remote(b""), _Upload(fails=fails)
    fs.open = lambda *_, **__: upload  # type: ignore[attr-defined]
    parts = [bytes(WHOLE // 4)] * 5
    store = Store("memory://upload", retries=0)
    store._backend = FsspecBackend(fs, "root")
    if fails:
        with pytest.raises(StoreUnavailable, match="could not write a: reset"):
            store.write("a", parts)
    else:
        store.write("a", parts)
    assert upload.parts == parts[: 2 if fails else 5]
    assert (upload.ended, upload.discarded) == (not fails, fails)
    # fsspec's files end the upload when they are collected, unless they count as closed.
    assert upload.closed


def test_obstore_is_for_object_stores(tmp_path: Any) -> None:
    for url in ("memory://x", tmp_path):
        with pytest.raises(ConfigError, match="bulk=obstore needs one of"):
            Store(url, bulk="obstore")


def test_obstore_looks_where_fsspec_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobodys-secret")
    options = {
        "endpoint_url": "http://127.0.0.1:9",
        "client_kwargs": {"region_name": "eu-north-1"},
        "anon": True,
    }
    bulk = Store("s3://bucket/x", bulk="obstore", options=options)._backend.bulk  # type: ignore[attr-defined]
    assert bulk.config["endpoint"] == "http://127.0.0.1:9"
    assert bulk.config["region"] == "eu-north-1"
    assert "nobodys-secret" not in repr(bulk)


def test_a_missing_object_under_a_client_is_missing() -> None:
    fs = _Remote(b"")
    fs.info = lambda _: {"type": "directory", "size": 0}  # type: ignore[method-assign]
    store = Store("memory://y")
    store._backend = FsspecBackend(fs, "root")
    with pytest.raises(MissingObject):
        store.size("a")
