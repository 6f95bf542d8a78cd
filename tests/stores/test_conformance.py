"""The shipped checks on every backend: directories, memory, and real servers where installed."""
# ruff: noqa: D101, D102 (a class says by its name what it opens)

import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers import BUCKET, Server

from weightdelta.store import Store
from weightdelta.testing.conformance import StoreConformance, conformance


class TestMemory(StoreConformance):
    def open_store(self, prefix: str) -> Store:
        return Store(f"memory://{prefix}")


class TestLocal(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_store(self, prefix: str) -> Store:
        return Store(self.folder / prefix, fsync=False)


@pytest.mark.usefixtures("s3")
class TestSeaweed(StoreConformance):
    def open_store(self, prefix: str) -> Store:
        return Store(f"s3://{BUCKET}/{prefix}")


@pytest.mark.skipif(not find_spec("obstore"), reason="needs obstore")
@pytest.mark.usefixtures("s3")
class TestSeaweedThroughObstore(StoreConformance):
    def open_store(self, prefix: str) -> Store:
        return Store(f"s3://{BUCKET}/{prefix}", bulk="obstore")

    # Creates and names do not pass through obstore.
    test_racing_creates_have_one_winner = None  # type: ignore[assignment]
    test_any_valid_name_works = None  # type: ignore[assignment]


@pytest.mark.usefixtures("azure")
class TestAzurite(StoreConformance):
    def open_store(self, prefix: str) -> Store:
        return Store(f"abfs://{BUCKET}/{prefix}")


@pytest.mark.usefixtures("gcs")
class TestFakeGcs(StoreConformance):
    def open_store(self, prefix: str) -> Store:
        return Store(f"gs://{BUCKET}/{prefix}", options={"token": "anon"})


class _Careless(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Writes whether or not there is an object, whatever was asked."""

    protocol = ("wd-careless", "s3a")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:  # noqa: ARG002
        super().pipe_file(path, value)


def test_a_row_names_what_does_not_hold() -> None:
    import fsspec

    fsspec.register_implementation("wd-careless", _Careless, clobber=True)
    row = conformance("careless", lambda prefix: Store(f"wd-careless://{prefix}"))
    assert not row.ok
    assert {"create is once", "racing creates have one winner"} <= set(row.failed)
    assert "what was written is read" in row.passed
    assert "UnsafeStore" in row.failed["the probe passes and leaves nothing"]
    line = row.markdown()
    assert line.startswith("| careless | ")
    assert "not: " in line


def test_a_row_of_a_good_store(tmp_path: Path) -> None:
    row = conformance("a directory", lambda prefix: Store(tmp_path / prefix, fsync=False))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    assert row.ok
    assert row.markdown() == f"| a directory | 12 of 12 | {today} |"


def test_servers_listen_on_this_host_alone(s3: Server) -> None:
    """The fixture must not open ports to the network."""
    tcp = Path("/proc/net/tcp")
    assert s3.process is not None
    if not tcp.exists():
        pytest.skip("needs /proc")
    links = [p.resolve(strict=False) for p in Path(f"/proc/{s3.process.pid}/fd").iterdir()]
    inodes = {
        str(link).partition("socket:[")[2].rstrip("]") for link in links if "socket:[" in str(link)
    }
    lines = [
        *tcp.read_text().splitlines()[1:],
        *Path("/proc/net/tcp6").read_text().splitlines()[1:],
    ]
    listening = [f for f in (line.split() for line in lines) if f[3] == "0A" and f[9] in inodes]
    assert listening
    assert {f[1].partition(":")[0] for f in listening} == {"0100007F"}
