"""Lent blocks come back by themselves, when the last array in them has gone, and no sooner."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from weightdelta import lent_memory
from weightdelta.lent_memory import BLOCK, LentMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> LentMemory:
    """Two blocks at most, of host memory."""
    monkeypatch.setattr(lent_memory, "BLOCKS", 2)
    return LentMemory(torch.device("cpu"))


def test_a_block_is_lent_to_one_at_a_time(memory: LentMemory) -> None:
    one, other = memory.take(100), memory.take(BLOCK)
    assert one is not None
    assert other is not None
    assert memory.take(1) is None
    one[:], other[:] = 1, 2
    assert one.sum() == 100
    assert not np.shares_memory(one, other)


def test_a_view_of_any_kind_keeps_its_block(memory: LentMemory) -> None:
    whole = memory.take(64)
    assert whole is not None
    view = whole[8:24].view(np.uint16)[1:]
    kept = torch.from_numpy(whole[:4])
    other = memory.take(1)
    assert other is not None
    del whole
    gc.collect()
    assert memory.take(1) is None
    del view
    assert memory.take(1) is None
    del kept
    assert memory.take(1) is not None


@pytest.mark.parametrize("nbytes", [0, BLOCK + 1])
def test_nothing_and_too_much_are_not_lent(memory: LentMemory, nbytes: int) -> None:
    assert memory.take(nbytes) is None


def test_without_pinned_memory_there_is_none(
    memory: LentMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(lent_memory.torch, "empty", full)
        assert memory.take(1) is None
        assert memory.take(1) is None
        assert memory.take(1) is None
    assert memory.take(1) is not None


def test_a_collection_in_the_middle_of_lending_gives_back(memory: LentMemory) -> None:
    """It may run in the very thread that holds the lock, which would wait for itself."""
    whole = memory.take(16)
    assert whole is not None
    held = [whole]
    del whole
    collected: list[bool] = []

    def collect(frame: Any, event: str, _: object) -> Any:
        if memory._lock.locked() and held and frame.f_code.co_name == "take":
            held.clear()
            collected.append(event == "line")
        return collect

    def lend() -> None:
        sys.settrace(collect)
        try:
            taken.append(memory.take(16))
        finally:
            sys.settrace(None)

    taken: list[Any] = []
    thread = threading.Thread(target=lend, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert collected
    assert taken[0] is not None
    assert memory._free or memory.take(16) is not None


def test_many_threads(memory: LentMemory) -> None:
    def once(number: int) -> bool:
        block = memory.take(1 << 16)
        if block is None:
            return True
        block[:] = number % 251
        return bool((block == number % 251).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(once, range(2000)))
    assert len(memory._free) == memory._made <= 2
