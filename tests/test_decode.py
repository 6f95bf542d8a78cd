"""The dry run: staged values are the trainer's, whatever path, values and plan they came by."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import SmallRun, Weights, bits, edit

from weightdelta.config import Config
from weightdelta.decode import Staged, Stager
from weightdelta.delta import DeltaReader
from weightdelta.errors import LayoutMismatch, StateMismatch
from weightdelta.fetch import fetch_path
from weightdelta.log import Log
from weightdelta.placement import Resident, place
from weightdelta.tensors import as_ints
from weightdelta.versions import find_path


@contextmanager
def _run(config: Config | None = None, weights: Weights | None = None) -> Iterator[SmallRun]:
    with TemporaryDirectory() as folder:
        found = SmallRun(Path(folder), config=config, weights=weights)
        try:
            yield found
        finally:
            found.close()


@dataclass
class _Sampler:
    run: SmallRun
    model: Weights
    residents: list[Resident]

    @classmethod
    def of(cls, run: SmallRun, version: int, model: Weights | None = None) -> "_Sampler":
        model = run.model(version) if model is None else model
        return cls(run, model, place(model, layout=run.writer.job.layout))

    def stage(self, start: int, end: int) -> list[Staged]:
        log = Log(self.run.store)
        log.refresh()
        reader = DeltaReader(self.run.store, config=Config())
        path = find_path(log, start=start, end=end, max_chain=100)
        layout = self.run.writer.job.layout
        with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(1) as ahead:
            stager = Stager(self.residents, pool=pool)
            held = [r.tensor for r in self.residents]
            for fetched in fetch_path(
                reader, path, layout=layout, tensors=held, pool=pool, ahead=ahead
            ):
                stager.add(fetched)
            return stager.finish()

    def stored(self, staged: Sequence[Staged]) -> dict[str, bytes]:
        """Bytes of all weights if what is staged were stored."""
        found = {}
        for resident in self.residents:
            elements = np.frombuffer(bits(resident.source), resident.memory.dtype).copy()
            for item in staged:
                if item.resident is resident:
                    assert np.array_equal(elements[item.index], item.old)
                    elements[item.index] = item.new
            found[resident.name] = elements.tobytes()
        return found


_STEP = st.tuples(
    st.sampled_from(["diff", "xor"]),
    st.sampled_from([16, 100, 4096]),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from("abm"), st.integers(0, 8), st.sampled_from([1, 0x40, 0xFF])),
        max_size=12,
    ),
)


@settings(max_examples=15)
@given(st.lists(_STEP, min_size=1, max_size=4), st.data())
def test_any_chain_stages_the_trainers_bytes_both_ways(
    steps: list[tuple[str, int, int, list[tuple[str, int, int]]]], data: st.DataObject
) -> None:
    """Values, plan and world size change from version to version within one chain."""
    with _run() as run:
        for values, max_bytes, ranks, edits in steps:
            run.open(config=Config.of({"values": values}), ranks=ranks, max_bytes=max_bytes)
            for name, at, mask in edits:
                edit(run.live[name], at, 1 if name == "m" else mask)
            run.publish()
        start = data.draw(st.integers(0, run.newest))
        for end in (0, run.newest, data.draw(st.integers(0, run.newest))):
            sampler = _Sampler.of(run, start)
            staged = sampler.stage(start, end)
            assert sampler.stored(staged) == run.versions[end]
            _check_staged(staged)


def _check_staged(staged: Sequence[Staged]) -> None:
    """Ascending, nothing that does not change, and the S law on every tensor."""
    assert [s.resident.tensor for s in staged] == sorted(s.resident.tensor for s in staged)
    for item in staged:
        assert (item.index[1:] > item.index[:-1]).all()
        assert (item.old != item.new).all()
        before = item.resident.digest()
        item.resident.memory[item.places] = item.new
        change = (item.resident.digest() - before) % 2**64
        item.resident.memory[item.places] = item.old
        assert change == item.digest_change


@pytest.mark.parametrize("values", ["diff", "xor"])
@pytest.mark.parametrize("ends", [(0, 1), (0, 3), (3, 0)])
def test_an_edit_of_any_touched_element_is_found(values: str, ends: tuple[int, int]) -> None:
    start, end = ends
    with _run(Config.of({"values": values})) as run:
        for seed in range(3):
            run.step(seed)
        for item in _Sampler.of(run, start).stage(start, end):
            for element in item.index.tolist():
                sampler = _Sampler.of(run, start)
                edit(sampler.model[item.resident.name], element, 1 if values == "diff" else 2)
                with pytest.raises(StateMismatch, match=f"'{item.resident.name}'.*digest"):
                    sampler.stage(start, end)


def test_a_value_that_comes_back_is_not_staged_but_is_checked() -> None:
    with _run() as run:
        edit(run.live["a"], 5)
        run.publish()
        edit(run.live["a"], 5)
        run.publish()
        assert run.versions[0] == run.versions[2]
        assert _Sampler.of(run, 0).stage(0, 2) == []


def test_nothing_is_staged_for_no_path_and_no_change() -> None:
    with _run() as run:
        run.publish()
        assert _Sampler.of(run, 0).stage(0, 1) == []
        assert _Sampler.of(run, 1).stage(1, 1) == []


def test_every_special_value_survives() -> None:
    """NaN payloads, infinities, -0, denormals and all ones are bits like any others."""
    patterns = [0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0001, 0xFFFF, 0x7F81, 0x0000]
    for values in ("diff", "xor"):
        with _run(Config.of({"values": values})) as run:
            ints = as_ints(run.live["a"]).reshape(-1)
            for shift in range(3):
                ints[: len(patterns)] = torch.from_numpy(
                    np.roll(np.array(patterns, np.uint16), shift).view(np.int16)
                )
                run.publish()
            for start, end in ((0, 3), (3, 0), (1, 3)):
                sampler = _Sampler.of(run, start)
                assert sampler.stored(sampler.stage(start, end)) == run.versions[end]


def test_two_published_tensors_in_one_memory_are_staged_only_while_equal() -> None:
    """A base that saved tied weights twice; a sampler ties them."""
    one = torch.arange(12, dtype=torch.float32)
    with _run(weights={"embed": one, "head": one.clone()}) as run:
        for name in ("embed", "head"):
            run.live[name][3] = 7
        run.publish()
        run.live["head"][4] = 9
        run.publish()
        shared = one.clone()
        sampler = _Sampler.of(run, 0, {"embed": shared, "head": shared})
        assert len(sampler.stage(0, 1)) == 2
        with pytest.raises(LayoutMismatch, match="'embed' and 'head' share memory"):
            sampler.stage(0, 2)
