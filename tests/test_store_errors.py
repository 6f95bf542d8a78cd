"""Client libraries' errors as ours: what kind, whether again, and nothing secret in it."""

import errno
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from weightdelta.errors import MissingObject, StoreUnavailable, UnsafeStore
from weightdelta.store import Store
from weightdelta.store_backend import Transient
from weightdelta.store_errors import translate

SECRET = "hunter2-hunter2-hunter2"  # noqa: S105 - nobody's


def _boto(status: int, code: str, text: str = "said so") -> Exception:
    errors = pytest.importorskip("botocore.exceptions")
    response = {
        "Error": {"Code": code, "Message": text},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    found: Exception = errors.ClientError(response, "PutObject")
    return found


def _s3fs(status: int, code: str) -> Exception:
    errors = pytest.importorskip("s3fs.errors")
    found: Exception = errors.translate_boto_error(_boto(status, code))
    return found


def _named(library: str, name: str, *arguments: Any, **more: Any) -> Exception:
    module = pytest.importorskip(library)
    found: Exception = getattr(module, name)(*arguments, **more)
    return found


def _azure(status: int, kind: str = "HttpResponseError") -> Exception:
    error = _named("azure.core.exceptions", kind, "said so")
    error.status_code = status  # type: ignore[attr-defined]
    return error


CASES: list[tuple[Callable[[], Exception], int, bool]] = [
    (lambda: _s3fs(404, "NoSuchKey"), errno.ENOENT, False),
    (lambda: _s3fs(404, "NoSuchBucket"), errno.ENXIO, False),
    (lambda: _s3fs(403, "AccessDenied"), errno.EACCES, False),
    (lambda: _s3fs(403, "SignatureDoesNotMatch"), errno.EACCES, False),
    (lambda: _s3fs(412, "PreconditionFailed"), errno.EEXIST, False),
    (lambda: _s3fs(409, "ConditionalRequestConflict"), errno.EBUSY, True),
    (lambda: _s3fs(409, "OperationAborted"), errno.EBUSY, True),
    (lambda: _s3fs(409, "BucketNotEmpty"), errno.EBUSY, False),
    (lambda: _s3fs(404, "NoSuchUpload"), errno.ENOENT, True),
    (lambda: _s3fs(416, "InvalidRange"), errno.ERANGE, False),
    (lambda: _s3fs(500, "InternalError"), errno.EREMOTEIO, True),
    (lambda: _s3fs(503, "SlowDown"), errno.EBUSY, True),
    (lambda: _s3fs(400, "BadDigest"), errno.EINVAL, False),
    (lambda: _boto(503, "ServiceUnavailable"), errno.EIO, True),
    (lambda: _named("botocore.exceptions", "NoCredentialsError"), errno.EIO, False),
    (
        lambda: _named("botocore.exceptions", "EndpointConnectionError", endpoint_url="u"),
        errno.EIO,
        True,
    ),
    (
        lambda: _named("botocore.exceptions", "ReadTimeoutError", endpoint_url="u"),
        errno.EIO,
        True,
    ),
    (lambda: _named("aiohttp", "ServerDisconnectedError"), errno.EIO, True),
    (lambda: _named("aiohttp", "ClientPayloadError"), errno.EIO, True),
    (lambda: _azure(404, "ResourceNotFoundError"), errno.ENOENT, False),
    (lambda: _azure(412), errno.EEXIST, False),
    (lambda: _azure(403, "ClientAuthenticationError"), errno.EACCES, False),
    (lambda: _azure(503), errno.EIO, True),
    (lambda: _named("azure.core.exceptions", "ServiceRequestError", "x"), errno.EIO, True),
    (lambda: _named("gcsfs.retry", "HttpError", {"code": 416, "message": ""}), errno.ERANGE, False),
    (lambda: _named("gcsfs.retry", "HttpError", {"code": 503, "message": ""}), errno.EIO, True),
    (lambda: _named("gcsfs.retry", "HttpError", {"code": 401, "message": ""}), errno.EACCES, False),
    (lambda: _named("gcsfs.retry", "ChecksumError"), errno.EIO, True),
    (lambda: _named("google.auth.exceptions", "TransportError"), errno.EIO, True),
    (lambda: _named("google.auth.exceptions", "DefaultCredentialsError"), errno.EIO, False),
    (
        lambda: _named("obstore.exceptions", "GenericError", "returned status code: 416 Range"),
        errno.ERANGE,
        False,
    ),
    (
        lambda: _named("obstore.exceptions", "GenericError", "status code: 503 x\n\nDebug source"),
        errno.EIO,
        True,
    ),
    (lambda: ConnectionResetError(errno.ECONNRESET, "reset"), errno.ECONNRESET, True),
    (lambda: TimeoutError(), errno.ETIMEDOUT, True),
    (lambda: PermissionError("no"), errno.EACCES, False),
    (lambda: OSError("Forbidden: x"), errno.EIO, False),
    (lambda: ValueError("Bad Request"), errno.EIO, False),
    (lambda: RuntimeError("Session is closed"), errno.EIO, False),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_error_has_a_code_and_says_whether_it_may_pass(case: int) -> None:
    make, code, again = CASES[case]
    found = translate(make())
    assert (found.errno, isinstance(found, Transient)) == (code, again)
    assert found.strerror


def test_a_long_text_is_cut_and_its_secrets_struck_out() -> None:
    found = translate(ValueError(f"https://a:{SECRET}@host " + "x" * 5000))
    assert SECRET not in str(found)
    assert len(str(found)) < 500


class _Failing:
    """A backend that fails a number of times, then answers."""

    def __init__(self, error: Callable[[], OSError], times: int) -> None:
        self.error, self.left, self.calls = error, times, 0

    def _do(self, answer: Any) -> Any:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error()
        return answer

    def read(self, *_: object, **__: object) -> Any:
        return self._do(b"bytes")

    def size(self, *_: object) -> Any:
        return self._do(5)

    def put(self, *_: object, **__: object) -> None:
        self._do(None)

    def create(self, *_: object) -> Any:
        return self._do(True)

    def delete(self, *_: object) -> None:
        self._do(None)

    def names(self, *_: object) -> Any:
        return self._do(["a"])


def _store(backend: Any, *, retries: int, timeout_s: float | None = 30.0) -> Store:
    store = Store("memory://retries", retries=retries, timeout_s=timeout_s)
    store._backend = backend
    return store


def _passing() -> OSError:
    return Transient(errno.EBUSY, "slow down")


CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda s: s.read("a"),
    "read_all": lambda s: list(s.read_all(["a"], limit=5)),
    "size": lambda s: s.size("a"),
    "write": lambda s: s.write("a", b"1"),
    "hint": lambda s: s.hint("a", b"1"),
    "delete": lambda s: s.delete("a"),
    "names": lambda s: s.names(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_may_be_repeated_is(call: str) -> None:
    backend = _Failing(_passing, 2)
    CALLS[call](_store(backend, retries=2))
    assert backend.calls == 3
    backend = _Failing(_passing, 2)
    with pytest.raises(StoreUnavailable, match="slow down") as caught:
        CALLS[call](_store(backend, retries=1, timeout_s=None))
    assert (backend.calls, caught.value.errno) == (2, errno.EBUSY)


def test_jitter_leaves_the_random_numbers_of_the_process_alone() -> None:
    before = random.getstate()
    _store(_Failing(_passing, 2), retries=2).read("a")
    assert random.getstate() == before


def test_a_create_is_left_to_its_caller() -> None:
    backend = _Failing(_passing, 1)
    with pytest.raises(StoreUnavailable):
        _store(backend, retries=5).create("a", b"1")
    assert backend.calls == 1


def test_what_does_not_pass_is_not_repeated() -> None:
    for error, kind in ((errno.ENOSPC, StoreUnavailable), (errno.ENOENT, MissingObject)):
        backend = _Failing(lambda code=error: OSError(code, "no"), 1)  # type: ignore[misc]
        with pytest.raises(kind):
            _store(backend, retries=5).read("a")
        assert backend.calls == 1


def test_retries_end_with_the_bound() -> None:
    """The last try is made while somebody waits for it; nothing goes on behind his back."""
    backend = _Failing(_passing, 1 << 30)
    before = set(threading.enumerate())
    with pytest.raises((StoreUnavailable, TimeoutError)):
        _store(backend, retries=1 << 30, timeout_s=0.3).read("a")
    for late in set(threading.enumerate()) - before:
        late.join(30)
        assert not late.is_alive()


def test_no_error_carries_what_a_library_said_unredacted() -> None:
    """Neither itself nor through its cause or context, which tracebacks print."""

    def quoting() -> OSError:
        error = OSError(errno.EIO, f"could not reach https://me:{SECRET}@host")
        error.__cause__ = ValueError(f"secret={SECRET}")
        return error

    with pytest.raises(StoreUnavailable) as caught:
        _store(_Failing(quoting, 1), retries=0).read("a")
    error: BaseException | None = caught.value
    assert "could not read a: could not reach https://***@host" in str(error)
    while error is not None:
        assert SECRET not in f"{error!r}{error}"
        error = error.__cause__ or error.__context__


def test_the_cause_of_a_plain_error_is_kept() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        _store(_Failing(lambda: OSError(errno.EIO, "disk"), 1), retries=0).read("a")
    assert isinstance(caught.value.__cause__, OSError)


class _Overwriting:
    """An object store that ignores conditions, as rclone's does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create(self, name: str, parts: Any) -> bool:
        self._inner.put(name, parts, durable=True, live=lambda: True)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_single_writer_may_use_a_store_without_conditions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store("memory://single", single_writer=True)
    store._backend = _Overwriting(store._backend)
    with caplog.at_level(logging.WARNING):
        store.probe()
    assert not store.fenced
    assert "WITHOUT FENCING" in caplog.text
    assert store.create("log/1", b"1")
    assert not store.create("log/1", b"2")
    assert store.read("log/1") == b"1"
    other = Store("memory://single")
    other._backend = store._backend
    with pytest.raises(UnsafeStore):
        other.probe()


def test_a_single_writer_on_a_good_store_is_fenced_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store("memory://single-good", single_writer=True)
    store.probe()
    assert store.fenced
    assert caplog.text == ""
