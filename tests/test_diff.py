"""What lies between two versions, held against the weights of both."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import SmallRun, edit

from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.diff import Difference, _change, _Fold, _fold_group, _groups, diff
from weightdelta.errors import DamagedObject, NoPath, NotYet
from weightdelta.kernels.planes import UINTS
from weightdelta.layout import Layout, TensorSpec
from weightdelta.log import Log
from weightdelta.record import data_name

WIDTH = {"a": 2, "b": 4, "e": 4, "m": 1, "s": 8}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    """Version 3 is another plan, with other ranks; version 5 takes 4 back."""
    found = SmallRun(tmp_path)
    found.step(0)
    found.step(1, share=0.5)
    found.open(ranks=3, max_bytes=32)
    found.step(2)
    for _ in range(2):
        edit(found.live["a"], 17)
        found.publish()
    yield found
    found.close()


def _diff(run: SmallRun, start: int, end: int, *, config: Config | None = None) -> Difference:
    log = Log(run.store)
    log.refresh()
    return diff(log, start=start, end=end, config=config or Config())


def _elements(run: SmallRun, version: int, name: str) -> np.ndarray:
    return np.frombuffer(run.versions[version][name], UINTS[WIDTH[name]])


def _changed(run: SmallRun, start: int, end: int) -> dict[str, int]:
    """Elements that differ, by the weights themselves."""
    return {
        name: int((_elements(run, start, name) != _elements(run, end, name)).sum())
        for name in WIDTH
    }


def test_all_pairs_are_what_the_weights_say(run: SmallRun) -> None:
    for start in range(6):
        for end in range(6):
            found = _diff(run, start, end)
            assert {t.name: t.changed for t in found.tensors} == _changed(run, start, end)
            assert (found.hops, found.exact) == (abs(end - start), True)
            assert found.changed_bytes == sum(t.changed * WIDTH[t.name] for t in found.tensors)
    assert _diff(run, 3, 5).differing == (), "5 takes back what 4 did"
    assert _diff(run, 3, 5).fetched_bytes > 0
    assert _diff(run, 2, 2).fetched_bytes == 0


def test_steps_of_one_are_told_in_both_directions(run: SmallRun) -> None:
    for start, end in ((0, 3), (3, 0), (1, 2)):
        for tensor in _diff(run, start, end).tensors:
            old, new = (_elements(run, v, tensor.name) for v in (start, end))
            distance = new - old
            one = (distance == 1) | (distance + distance.dtype.type(1) == 0)
            assert tensor.one_step == int(one.sum())


def test_a_run_that_changed_its_form_of_values(run: SmallRun) -> None:
    """Exact where no element was touched in both forms; else never too few, and said so."""
    run.open(config=Config.of({"values": "xor"}), ranks=1)
    edit(run.live["b"], 0)
    edit(run.live["b"], 6)
    run.publish()
    assert all(t.one_step is None for t in _diff(run, 5, 6).differing)
    assert _diff(run, 5, 6).exact
    run.open(ranks=2)
    edit(run.live["b"], 6)  # back again, in the other form
    edit(run.live["b"], 3)
    run.publish()
    found = _diff(run, 5, 7)
    assert _changed(run, 5, 7)["b"] == 2
    assert (found.exact, {t.name: t.changed for t in found.differing}) == (False, {"b": 3})
    run.open(config=Config.of({"values": "xor"}))
    edit(run.live["a"], 0)
    run.publish()
    found = _diff(run, 6, 8)
    assert found.exact, "two forms, but no element has both"
    assert {t.name: t.changed for t in found.tensors} == _changed(run, 6, 8)


def test_histogram_covers_every_tensor_once(run: SmallRun) -> None:
    found = _diff(run, 0, 2)
    classes = found.histogram()
    assert sum(c.tensors for c in classes) == len(found.tensors) == 5
    assert sum(c.changed for c in classes) == found.changed
    assert classes[0].tensors == sum(not t.changed for t in found.tensors)
    assert classes[-1].high == 1.0
    for tensor in found.differing:
        assert [c.low < tensor.density <= c.high for c in classes].count(True) == 1


def test_order_and_json(run: SmallRun) -> None:
    found = _diff(run, 0, 2)
    counts = [t.changed for t in found.differing]
    assert counts == sorted(counts, reverse=True)
    row = found.as_dict()
    assert json.loads(json.dumps(row)) == row
    assert (row["from"], row["to"], row["changed"]) == (0, 2, found.changed)
    assert [t["name"] for t in row["tensors"]] == [t.name for t in found.differing]


def test_tensors_are_folded_group_by_group() -> None:
    specs = [TensorSpec(f"t{i}", "U8", (n << 28,)) for i, n in enumerate((1, 2, 3, 9, 1, 1))]
    groups = list(_groups(Layout.of(specs)))
    assert groups == [[0, 1], [2], [3], [4, 5]]
    assert list(_groups(Layout(()))) == []


def test_what_cannot_be_compared(run: SmallRun) -> None:
    for start, end in ((0, 6), (-1, 2)):
        with pytest.raises(NotYet):
            _diff(run, start, end)
    with pytest.raises(NoPath, match="max_chain=2"):
        _diff(run, 0, 3, config=Config.of({"limits": {"max_chain": 2}}))
    name = data_name(run.writer.log.versions[2].write_id, 0)
    run.store.write(name, b"x" * run.store.size(name))
    with pytest.raises(DamagedObject, match=name):
        _diff(run, 0, 3)
    _diff(run, 3, 5)


_changes = st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 255)), max_size=5)


@given(_changes, st.booleans())
def test_a_fold_is_one_step_after_the_other(steps: list[dict[int, int]], xor: bool) -> None:
    fold, expected = _Fold.empty(1), np.zeros(10, np.uint8)
    for step in steps:
        index = np.array(sorted(step), np.uint64)
        values = np.array([step[i] for i in sorted(step)], np.uint8)
        fold = fold.then(_Fold.of(index, values, xor=xor))
        expected[index] = expected[index] ^ values if xor else expected[index] + values
    found = np.zeros(10, np.uint8)
    found[fold.index] = fold.xor if xor else fold.total
    assert found.tolist() == expected.tolist()
    assert not fold.mixed


def test_there_and_back_again_is_nothing(run: SmallRun) -> None:
    """A path may turn: the same delta forward and back cancels out."""
    reader, log = DeltaReader(run.store, config=Config()), run.writer.log
    layout = reader.layout(run.writer.job.layout.digest)
    delta = reader.delta(log.versions[1], layout=layout)
    group = list(range(len(layout.tensors)))
    path = [(True, delta), (False, delta)]
    folds = _fold_group(reader, path, group, config=Config())
    assert folds
    assert not any(fold.total.any() or fold.xor.any() for fold in folds.values())


def test_an_element_of_both_forms_counts_even_where_both_cancel() -> None:
    """3 + 1 = 4, xor 7 is 3, - 1 is 2, xor 7 is 5."""
    at, fold = np.zeros(1, np.uint64), _Fold.empty(1)
    for value, xor in ((1, False), (7, True), (255, False), (7, True)):
        fold = fold.then(_Fold.of(at, np.array([value], np.uint8), xor=xor))
    assert (fold.total[0], fold.xor[0], fold.mixed) == (0, 0, True)
    assert _change(TensorSpec("w", "U8", (4,)), fold).changed == 1


def test_an_fp8_run(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(64, dtype=torch.float8_e4m3fn)}
    run = SmallRun(tmp_path, weights=weights)
    edit(run.live["w"], 3, mask=7)
    edit(run.live["w"], 4)
    run.publish()
    run.close()
    (tensor,) = _diff(run, 0, 1).tensors
    assert (tensor.changed, tensor.changed_bytes, tensor.one_step) == (2, 2, 1)
