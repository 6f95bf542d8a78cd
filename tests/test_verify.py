"""Verification of a whole run: clean, damaged, and rebuilt from base."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_runs import SmallRun, edit

from weightdelta.config import Config
from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.publish import Receipt
from weightdelta.record import HEAD, data_name, index_name, log_name
from weightdelta.store import Store
from weightdelta.verify import Findings, verify


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    found = SmallRun(tmp_path)
    for seed in range(2):
        found.step(seed)
    found.open(config=Config.of({"values": "xor"}), ranks=3, max_bytes=32)
    found.step(2)
    yield found
    found.close()


def _verify(run: SmallRun, *, deep: bool = True, base: Path | None = None) -> Findings:
    return verify(run.store, config=Config(), deep=deep, base=base)


def test_a_whole_run_is_whole(run: SmallRun) -> None:
    seen: list[str] = []
    found = verify(run.store, config=Config(), deep=True, base=run.checkpoint, progress=seen.append)
    assert (found.ok, found.versions, found.problems) == (True, 3, [])
    assert found.frames > 0
    assert seen == ["version 1", "version 2", "version 3"]
    shallow = _verify(run, deep=False)
    assert (shallow.ok, shallow.versions, shallow.frames) == (True, 3, 0)


def test_without_deep_frames_are_not_read(run: SmallRun) -> None:
    name = data_name(run.writer.log.versions[2].write_id, 0)
    data = bytearray(run.store.read(name))
    data[3] ^= 1
    run.store.write(name, bytes(data))
    assert _verify(run, deep=False).ok
    found = _verify(run)
    assert [name in p for p in found.problems] == [True]
    run.store.write(name, bytes(data) + b"x")
    (problem,) = _verify(run, deep=False).problems
    assert f"{name}: expected {len(data)} bytes, found {len(data) + 1}" in problem


def test_every_damage_is_reported_not_only_the_first(run: SmallRun) -> None:
    versions = run.writer.log.versions
    gone = [index_name(versions[1].write_id), data_name(versions[3].write_id, 1)]
    for name in gone:
        run.store.delete(name)
    found = _verify(run, base=run.checkpoint)
    assert found.versions == 3
    assert len(found.problems) == 2, "versions that cannot be rebuilt any more add no noise"
    for name, problem in zip(gone, found.problems, strict=True):
        assert problem.startswith("missing-object: ")
        assert name in problem


def test_versions_before_a_damaged_entry_are_still_checked(run: SmallRun) -> None:
    entry = run.writer.log.versions[3]
    run.store.write(log_name(entry.seq), b"{}\n")
    found = _verify(run)
    assert found.versions == 2
    assert any(log_name(entry.seq) in p for p in found.problems)


def test_a_lost_tail_is_noticed_by_the_hint(run: SmallRun) -> None:
    entry = run.writer.log.versions[3]
    run.store.delete(log_name(entry.seq))
    (problem,) = _verify(run).problems
    assert log_name(entry.seq) in problem
    run.store.delete(HEAD)
    found = _verify(run)
    assert found.ok, "without a hint the log just ends earlier"
    assert found.notes == ["head: missing; readers find the end of the log without it, only later"]
    run.store.hint(HEAD, b"")
    (problem,) = _verify(run).problems
    assert problem.startswith("damaged-object: head")


def test_a_hint_that_is_old_is_noted(run: SmallRun) -> None:
    assert _verify(run).notes == []
    run.store.hint(HEAD, b"1\n")
    found = _verify(run)
    assert found.ok
    (note,) = found.notes
    last = run.writer.log.next_seq - 1
    assert note.startswith(f"head: names entry 1, the log ends at {last};")
    run.store.hint(HEAD, b"%d" % last)
    assert "expected a number and a newline" in " ".join(_verify(run).notes)


def test_a_store_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing: expected a run's store, found no log"):
        verify(Store(tmp_path / "nothing"), config=Config())
    assert not (tmp_path / "nothing").exists(), "looking leaves no trace"


def test_weights_are_rebuilt_from_base(run: SmallRun, tmp_path: Path) -> None:
    """A base whose bytes differ is told apart even where every hash is right."""
    other = dict(run.base)
    other["b"] = other["b"].clone()
    edit(other["b"], 2)
    save_file(other, str(tmp_path / "other.safetensors"))
    found = _verify(run, base=tmp_path / "other.safetensors")
    assert [p.split(":")[0] for p in found.problems] == ["state-mismatch"]
    assert "version 1" in found.problems[0]


def test_an_index_that_lies_about_its_digest_change(run: SmallRun) -> None:
    def wrong(receipt: Receipt) -> Receipt:
        return replace(receipt, tensor_digest=receipt.tensor_digest + np.uint64(1))

    run.tamper = wrong
    run.step(9)
    (problem,) = _verify(run).problems
    assert "index of version 4: digest change of all frames" in problem


def test_an_unfit_base_is_the_callers_mistake(run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a folder"):
        _verify(run, base=tmp_path / "nowhere")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "foreign.safetensors"))
    with pytest.raises(LayoutMismatch, match="expected tensor 'a'"):
        _verify(run, base=tmp_path / "foreign.safetensors")
