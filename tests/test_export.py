"""Parquet files of a run: every figure of its log and indexes, or no file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_runs import SmallRun

from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.errors import DamagedObject, InputError, StoreUnavailable
from weightdelta.export import Exported, export, frames_path
from weightdelta.log import Log
from weightdelta.record import index_name


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    found = SmallRun(tmp_path, config=Config(measure_bound=True))
    found.step(0)
    found.open(config=Config.of({"values": "xor"}), ranks=3, max_bytes=32)
    found.step(1)
    found.publish()
    found.writer.tag("eval", version=1)
    found.writer.tag("best", version=1)
    yield found
    found.close()


def _export(run: SmallRun, out: Path) -> Exported:
    log = Log(run.store)
    log.refresh()
    return export(log, out=out, config=Config())


def test_versions(run: SmallRun, tmp_path: Path) -> None:
    made = _export(run, tmp_path / "run.parquet")
    rows = pq.read_table(made.versions).to_pylist()
    assert made.version_rows == len(rows) == 3
    for row, entry in zip(rows, run.writer.log.versions.values(), strict=True):
        for name in (
            "version", "parent", "step", "epoch", "codec", "values", "changed", "elements",
            "raw_bytes", "payload_bytes", "index_bytes", "bound_bytes", "digest", "write_id",
            "plan",
        ):  # fmt: skip
            assert row[name] == getattr(entry, name), name
        assert row["time"].timestamp() == pytest.approx(entry.time)
    first = rows[0]
    assert first["bound_ratio"] == pytest.approx(first["payload_bytes"] / first["bound_bytes"])
    assert (rows[1]["bound_ratio"], rows[2]["step"]) == (None, None)
    assert [r["refs"] for r in rows] == [["best", "eval"], [], []]
    assert (rows[2]["frames_changed"], rows[2]["tensors_changed"]) == (0, 0)
    assert first["tensors_changed"] > 0


def test_frames_are_the_indexes(run: SmallRun, tmp_path: Path) -> None:
    made = _export(run, tmp_path / "run.parquet")
    assert made.frames == tmp_path / "run.frames.parquet"
    rows = pq.read_table(made.frames).to_pylist()
    assert made.frame_rows == len(rows)
    reader, log = DeltaReader(run.store, config=Config()), run.writer.log
    layout = reader.layout(run.writer.job.layout.digest)
    for version, entry in log.versions.items():
        delta = reader.delta(entry, layout=layout)
        mine = [r for r in rows if r["version"] == version]
        assert [r["frame"] for r in mine] == list(range(len(delta.plan)))
        for row in mine:
            i, frame = row["frame"], delta.plan.frame(row["frame"])
            assert (row["object"], row["owner"]) == (delta.object_of(i), frame.owner)
            assert (row["offset"], row["bytes"]) == (delta.index.offset(i), delta.index.length(i))
            assert (row["raw_bytes"], row["width"]) == (frame.nbytes, frame.width)
            assert (row["elements"], row["segments"]) == (frame.numel, len(frame.segments))
            assert row["codec"] == delta.index.codec_of(i)
            assert row["changed"] == delta.index.changed[i]
            assert row["digest_change"] == delta.index.digest_change[i]
            assert row["blake3"] == delta.index.hash_of(i)
            assert row["planes"] == delta.index.sizes_of(i).tolist()
            assert row["tensor"] == layout.tensors[frame.segments[0].tensor].name
        assert sum(r["bytes"] for r in mine) == entry.payload_bytes
    assert np.uint64(max(r["digest_change"] for r in rows)) >> np.uint64(63), "unsigned survives"


def test_a_run_without_versions(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.close()
    made = _export(run, tmp_path / "run.parquet")
    assert (made.version_rows, made.frame_rows) == (0, 0)
    assert pq.read_table(made.versions).num_rows == 0
    assert "digest" in pq.read_table(made.versions).column_names


def test_both_files_are_replaced_or_none(run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    _export(run, out)
    before = [p.read_bytes() for p in (out, frames_path(out))]
    entry = run.writer.log.versions[2]
    run.store.write(index_name(entry.write_id), b"x" * entry.index_bytes)
    with pytest.raises(DamagedObject, match="index"):
        _export(run, out)
    assert [p.read_bytes() for p in (out, frames_path(out))] == before
    assert not list(tmp_path.glob(".*")), "drafts are gone"


def test_where_it_cannot_write(run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.parquet"):
        _export(run, tmp_path / "run.csv")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        _export(run, tmp_path / "nowhere" / "run.parquet")


def test_the_latest_time_that_an_entry_may_have(run: SmallRun, tmp_path: Path) -> None:
    log = Log(run.store)
    log.refresh()
    log.versions[1] = replace(log.versions[1], time=9e15)
    export(log, out=tmp_path / "run.parquet", config=Config())
    assert pq.read_table(tmp_path / "run.parquet")["time"].cast("int64")[0].as_py() == 2**63 - 1
