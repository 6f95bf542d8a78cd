"""One Ray for all tests of this folder, and trainers that tests share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import rayjobs
from rayjobs import Gate

import weightdelta as wd

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private Ray on this host, whose workers find the package and these helpers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # other tests run beside these
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [HERE.parents[1], HERE.parent, HERE])))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base checkpoint."""
    return rayjobs.save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that opens at the end: whatever failed, nobody stays behind."""
    made = Gate.at(tmp_path / "gate")
    yield made
    made.open()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Where ``attach`` publishes to by default."""
    return str(tmp_path / "store")


Trainers = Callable[[str], list[Any]]


@pytest.fixture(scope="session")
def trainers(cluster: None, base: Path) -> Trainers:  # noqa: ARG001 (starts Ray)
    """Two ranks of a kind, sync, threaded or asyncio: started once, back at the base's weights."""
    made: dict[str, list[Any]] = {}

    def get(kind: str) -> list[Any]:
        if kind not in made:
            made[kind] = rayjobs.start(kind, base, ranks=2, max_restarts=-1)
        ray.get([h.put.remote(0) for h in made[kind]])
        return made[kind]

    return get


Attach = Callable[..., wd.TrainerGroup]


@pytest.fixture
def attach(base: Path, tmp_path: Path) -> Iterator[Attach]:
    """``wd.attach`` to a store of this test; what it attached is closed at the end."""
    groups: list[wd.TrainerGroup] = []

    def run(handles: list[Any], **settings: Any) -> wd.TrainerGroup:
        settings.setdefault("state", rayjobs.live)
        settings.setdefault("store", str(tmp_path / "store"))
        settings.setdefault("base", base)
        config = wd.Config.of({**rayjobs.SETTINGS, **settings.pop("config", {})})
        groups.append(wd.attach(handles, config=config, **settings))
        return groups[-1]

    yield run
    for group in groups:
        group.close()
