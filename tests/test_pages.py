"""Pages made ready for stores: no fault is left for the pause, and no byte changes."""

import mmap
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from weightdelta.pages import make_writable

PAGES = 2000
LINUX = sys.platform.startswith("linux")
RELEASE = tuple(int(n) for n in re.findall(r"\d+", platform.release())[:2])
populates = pytest.mark.skipif(not (LINUX and RELEASE >= (5, 14)), reason="needs Linux 5.14")
Memory = npt.NDArray[np.uint16]


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Memory]:
    """A private mapping of a file, as a checkpoint is loaded; every page has been read."""
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).bytes(PAGES * mmap.PAGESIZE))
    with path.open("rb") as f:
        memory = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    found = np.frombuffer(memory, np.uint16)
    assert found.sum()
    yield found
    del found


def _each_page() -> npt.NDArray[np.uint64]:
    step = mmap.PAGESIZE // 2
    return np.arange(PAGES, dtype=np.uint64) * np.uint64(step) + np.uint64(7)


def _faults(memory: Memory, places: npt.NDArray[np.uint64]) -> int:
    """Page faults of storing to ``places``."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[places] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@populates
@pytest.mark.parametrize("backwards", [False, True])
def test_stores_take_no_faults_and_nothing_changes(mapped: Memory, backwards: bool) -> None:
    before, places = mapped.copy(), _each_page()
    assert make_writable(mapped, places[::-1] if backwards else places)
    assert np.array_equal(mapped, before)
    assert _faults(mapped, places) < PAGES / 10


@pytest.mark.skipif(not LINUX, reason="counts faults as Linux does")
def test_without_it_every_page_takes_one(mapped: Memory) -> None:
    assert _faults(mapped, _each_page()) > PAGES / 20


@populates
def test_few_places_cost_few_pages(mapped: Memory) -> None:
    places = _each_page()
    assert make_writable(mapped, places[:: PAGES // 2])
    assert _faults(mapped, places) > PAGES / 40


def test_nothing_to_store_is_nothing_to_do(mapped: Memory) -> None:
    assert make_writable(mapped, np.empty(0, np.uint64))
