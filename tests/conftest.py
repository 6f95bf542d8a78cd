"""Hypothesis profiles and the guards every test runs under."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

#: A GPU is there when its driver's control file is: torch need not be loaded to know.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    # Triton reads this when kernels are defined; without a GPU nothing else could run them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: Time is no verdict on a shared machine, so no example has a deadline.
_COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _COMMON, max_examples=30)
settings.register_profile("ci", _COMMON, max_examples=100)
settings.register_profile("nightly", _COMMON, max_examples=2000)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
settings.load_profile(PROFILE)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the profile and the seed, so that a failure can be run again."""
    seed = config.getoption("--hypothesis-seed", default=None)
    return [f"hypothesis profile: {PROFILE}, seed: {seed if seed is not None else 'per test'}"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a server or a Ray stay in one process, the others go file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0].removeprefix("tests/").partition("/")[0]

    return ByFolder(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _local_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Ray and gloo on this host, silent and without a token file."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


# -- a small real run, and receivers that follow it: for the tests of the receiver -------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """A ``SmallRun`` of three versions."""
    from small_runs import SmallRun

    found = SmallRun(tmp_path)
    for seed in range(3):
        found.step(seed)
    yield found
    found.close()


@pytest.fixture
def follow(run: Any) -> Iterator[Callable[..., Any]]:
    """Makes receivers and closes them afterwards."""
    from weightdelta.receiver import Receiver

    made: list[Receiver] = []

    def make(model: Any, *, store: Any = None, **options: Any) -> Receiver:
        made.append(Receiver(store or run.store, model, **options))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()
