"""Compile before anything is measured: a first call takes seconds that no input is to blame for."""

import pytest

from fuzz.everything import targets


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    for target in targets().values():
        for seed in target.seeds:
            target.check(seed)
