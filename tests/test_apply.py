"""Storing staged values: all or none, again as often as you like."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import Weights, all_bits, clone, edit

from weightdelta.apply import store_values
from weightdelta.decode import Staged
from weightdelta.errors import StateMismatch
from weightdelta.kernels.reference import BLOCK
from weightdelta.layout import Layout, TensorSpec
from weightdelta.placement import place

SIZES = {"a": 3 * BLOCK, "b": 5, "c": BLOCK + 1}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


def _model() -> Weights:
    return {name: torch.arange(n, dtype=torch.int32) for name, n in SIZES.items()}


def _staged(model: Weights) -> list[Staged]:
    """Every element goes up by one; tensor ``c`` lies backwards in steps of two."""
    layout = Layout.of(TensorSpec(n, "I32", (s,)) for n, s in SIZES.items())
    found = []
    for resident in place(model, layout=layout):
        index = np.arange(resident.spec.numel, dtype=np.uint64)
        old = resident.memory[resident.offsets(index)].copy()
        found.append(Staged(resident, index, old, old + np.uint32(1)))
    return found


def test_stores_and_goes_back(pool: ThreadPoolExecutor) -> None:
    model = _model()
    model["c"] = torch.arange(2 * SIZES["c"], dtype=torch.int32)[::2]
    before = all_bits(model)
    staged = _staged(model)
    for _ in range(2):  # again: stored values are absolute
        store_values(staged, pool=pool)
        assert model["b"].tolist() == [1, 2, 3, 4, 5]
        assert int(model["c"][-1]) == 2 * SIZES["c"] - 1
    for _ in range(2):
        store_values(staged, pool=pool, back=True)
        assert all_bits(model) == before
    store_values([], pool=pool)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        (name, at)
        for name, size in SIZES.items()
        for at in sorted({0, BLOCK - 1, BLOCK, size // 2, size - 1})
        if at < size
    ],
)
def test_one_edit_anywhere_and_not_a_byte_is_stored(
    pool: ThreadPoolExecutor, name: str, at: int, back: bool
) -> None:
    model = _model()
    staged = _staged(model)
    if back:
        store_values(staged, pool=pool)
    edit(model[name], at, 1 << 30)
    edited = all_bits(model)
    with pytest.raises(StateMismatch, match=f"'{name}', element {at}:.*edited after prepare"):
        store_values(staged, pool=pool, back=back)
    assert all_bits(model) == edited


def test_what_was_interrupted_anywhere_is_finished_by_doing_it_again(
    pool: ThreadPoolExecutor,
) -> None:
    whole = _model()
    store_values(_staged(whole), pool=pool)
    rng = np.random.default_rng(0)
    for _ in range(5):
        model = _model()
        staged = _staged(model)
        for item in staged:
            some = rng.random(len(item.index)) < rng.random()
            item.resident.memory[item.places[some]] = item.new[some]
        half = clone(model)
        store_values(staged, pool=pool)
        assert all_bits(model) == all_bits(whole)
        assert all_bits(half) != all_bits(whole)


def test_a_scatter_cannot_leave_a_foreign_value_in_place(pool: ThreadPoolExecutor) -> None:
    """Neither the old nor the new value: found, also when it is another tensor's block."""
    model = _model()
    staged = _staged(model)
    model["b"][2] = 3  # just the new value: as if this had been stored already
    store_values(staged, pool=pool)
    assert model["b"].tolist() == [1, 2, 3, 4, 5]


class _Gated(ThreadPoolExecutor):
    """Its tasks stop at a gate before they run."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gate = threading.Event()
        self.jobs: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As in the base, behind the gate."""

        def task() -> Any:
            self.gate.wait(60)
            return fn(*args, **kwargs)

        self.jobs.append(super().submit(task))
        return self.jobs[-1]


@pytest.fixture
def heed_interrupts() -> Iterator[None]:
    """Whoever runs the tests in the background may have made SIGINT one to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heed_interrupts")
def test_an_interrupt_leaves_nothing_being_stored() -> None:
    """Else the values would go on changing behind whoever looks at them next."""
    model = _model()
    staged = _staged(model)
    with _Gated() as pool:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        threading.Timer(0.4, pool.gate.set).start()
        with pytest.raises(KeyboardInterrupt):
            store_values(staged, pool=pool, workers=2)
        assert len(pool.jobs) == 2
        assert all(job.done() for job in pool.jobs)
