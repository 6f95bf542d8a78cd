"""Named bytes: one winner, whole or nothing, and no call that never returns."""

import errno
import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from weightdelta.errors import (
    ConfigError,
    DamagedObject,
    InputError,
    MissingObject,
    StoreUnavailable,
    UnsafeStore,
)
from weightdelta.store import Buffer, Store
from weightdelta.testing.faults import Op

MUTATIONS: tuple[Op, ...] = ("write", "hint", "create")


def make_store(kind: str, folder: Path) -> Store:
    if kind == "memory":
        return Store(f"memory://{uuid.uuid4().hex}")
    return Store(folder / "run", fsync=False)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return make_store(request.param, tmp_path)


def mutate(store: Store, op: Op, data: bytes) -> None:
    """Put ``data`` under the name ``x/y`` by one of the three ways."""
    {"write": store.write, "hint": store.hint, "create": store.create}[op]("x/y", data)


def run(code: str, *arguments: str) -> Any:
    """What a new interpreter prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def test_what_was_written_is_read(store: Store) -> None:
    store.write("data/a", [b"01", bytearray(b"234"), memoryview(b"56789")])
    store.write("empty", b"")
    assert store.read("data/a") == b"0123456789"
    assert store.read("data/a", start=3, end=5) == b"34"
    assert store.read("data/a", start=8) == b"89"
    assert store.read("data/a", start=8, end=1 << 60) == b"89"
    assert store.read("data/a", start=11, end=12) == b""
    assert store.read("empty") == b""
    assert (store.size("data/a"), store.size("empty")) == (10, 0)
    store.write("data/a", b"again")
    assert store.read("data/a") == b"again"


def test_a_limit_is_never_passed(store: Store) -> None:
    store.write("x", b"0123456789")
    assert store.read("x", limit=10) == b"0123456789"
    assert store.read("x", start=5, limit=5) == b"56789"
    assert store.read("x", end=4, limit=4) == b"0123"
    for start, end, limit in ((0, None, 9), (1, None, 8), (0, 5, 4), (0, None, 0)):
        with pytest.raises(DamagedObject, match=f"x has more than the {limit} bytes"):
            store.read("x", start=start, end=end, limit=limit)
    with pytest.raises(DamagedObject):
        list(store.read_all(["x"], limit=9))
    for start, end in ((-1, None), (5, 4)):
        with pytest.raises(InputError, match="not a range"):
            store.read("x", start=start, end=end)


def test_what_is_not_there_is_missing(store: Store) -> None:
    store.write("a/b", b"1")
    for name in ("a", "c", "a/c", "a/b/c"):
        with pytest.raises(MissingObject, match=f"no object {name}$"):
            store.read(name)
        with pytest.raises(MissingObject):
            store.size(name)
    assert store.names("c/") == []
    store.delete("c")
    store.delete("a/b")
    with pytest.raises(MissingObject):
        store.read("a/b")


def test_names_are_listed_by_prefix(store: Store) -> None:
    assert store.names() == []
    for name in ("log/1", "log/2", "data/a/1", "head"):
        store.write(name, b"x")
    assert store.names() == ["data/a/1", "head", "log/1", "log/2"]
    assert store.names("log/") == store.names("lo") == ["log/1", "log/2"]
    assert store.names("data/a") == ["data/a/1"]


@pytest.mark.parametrize("count", [0, 1, 31, 33, 700])
def test_many_are_read_in_order(store: Store, count: int) -> None:
    names = [f"n/{i}" for i in range(count)]
    for i in range(0, count, 3):
        store.write(names[i], str(i).encode())
    expected = [None if i % 3 else str(i).encode() for i in range(count)]
    assert list(store.read_all(names, limit=9)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a/..", "./a", "a//b", "a/", "~/a",
        ".tmp/x", "a/.hidden", "-rf", "a\\b", "a\0b", "a\n", "a b", "C:x", "a%2e", "\u00e9", "a*",
        "x" * 129, "a/" * 9 + "a", "memory://a", "\uff0e\uff0e/a", "\u0661",
    ],
)  # fmt: skip
def test_no_name_leaves_the_root(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "run", fsync=False)
    for call in (store.read, store.size, store.delete):
        with pytest.raises(InputError, match="is not like"):
            call(name)
    for put in (store.write, store.create, store.hint):
        with pytest.raises(InputError):
            put(name, b"x")
    with pytest.raises(InputError):
        list(store.read_all(["fine", name], limit=1))
    if name not in ("", "a/"):
        with pytest.raises(InputError):
            store.names(name)
    assert files(tmp_path) == []


def test_create_is_once(store: Store) -> None:
    assert store.create("log/1", b"first")
    assert not store.create("log/1", b"second")
    assert store.read("log/1") == b"first"
    store.probe()
    assert store.names() == ["log/1"]


class _Forgetful:
    """A backend that ignores conditions, as some object stores do."""

    def __init__(self, inner: Any, *, lies: bool) -> None:
        self._inner = inner
        self._lies = lies

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._inner.put(name, parts, durable=True, live=lambda: True)
        return not self._lies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("lies", [False, True])
def test_a_store_that_ignores_conditions_is_refused(store: Store, lies: bool) -> None:
    store._backend = _Forgetful(store._backend, lies=lies)
    with pytest.raises(UnsafeStore, match="ignores conditional puts"):
        store.probe()
    assert store.names() == []


class _LooksThenWrites(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    protocol: str | tuple[str, ...] = "wd-plain"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012


class _Vague(_LooksThenWrites):
    """Says EINVAL for a lost condition, as s3fs does with servers that do not name it."""

    protocol = ("wd-vague", "s3a")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        try:
            super().pipe_file(path, value, mode=mode)
        except FileExistsError:
            raise OSError(errno.EINVAL, "PreconditionFailed") from None


fsspec.register_implementation("wd-plain", _LooksThenWrites, clobber=True)
fsspec.register_implementation("wd-vague", _Vague, clobber=True)


def test_a_file_system_without_atomic_create_is_refused() -> None:
    store = Store("wd-plain://x")
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    with pytest.raises(UnsafeStore, match="looks and then writes"):
        store.probe()


def test_a_vague_refusal_counts_only_when_there_is_an_object() -> None:
    store = Store("wd-vague://y")
    store.probe()
    assert store.create("a/b", b"1")
    assert not store.create("a/b", b"2")
    assert (store.read("a/b", start=0, end=1), store.size("a/b")) == (b"1", 1)
    assert store.names("a/") == ["a/b"]
    with pytest.raises(MissingObject):
        store.size("a")
    store.delete("a/b")
    store._backend.fs.pipe_file = _always_invalid  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="create a/b: bad request"):
        store.create("a/b", b"1")


def _always_invalid(*_: Any, **__: Any) -> None:
    raise OSError(errno.EINVAL, "bad request")


@pytest.mark.parametrize(
    "url", ["", "simplecache::memory://x", "nosuch://x"], ids=["empty", "chained", "unknown"]
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^store"):
        Store(url)


def test_a_bound_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="timeout_s must be positive"):
        Store("memory://x", timeout_s=0)


def test_without_a_bound_there_is_no_thread(tmp_path: Path) -> None:
    ran: list[threading.Thread] = []

    class Spy:
        def put(self, *_: object, **__: object) -> None:
            ran.append(threading.current_thread())

    for bound in (None, 5.0):
        store = Store(tmp_path, timeout_s=bound)
        store._backend = Spy()  # type: ignore[assignment]
        store.write("x", b"1")
    assert ran[0] is threading.current_thread()
    assert ran[1] is not ran[0]
    assert ran[1].daemon


def test_errors_of_our_own_code_are_not_dressed_up(store: Store) -> None:
    with pytest.raises(TypeError):
        store.write("x/y", ["text"])  # type: ignore[list-item]
