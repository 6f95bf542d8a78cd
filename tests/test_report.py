"""Tables and rows about a run."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import SmallRun

from weightdelta import report
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader
from weightdelta.log import Log
from weightdelta.verify import Findings


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    found = SmallRun(tmp_path, config=Config(measure_bound=True))
    found.step(1)
    found.publish()
    found.writer.tag("eval", version=1)
    found.writer.tag("start", version=0)
    yield found
    found.close()


def _text(table: Any, *, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1024, "1 KiB"),
        (1023 * 1024, "0.999 MiB"), (999.7 * 1024, "0.976 MiB"), (5 << 30, "5 GiB"),
        (3000 << 40, "3e+03 TiB"),
    ],
)  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert report.size(nbytes) == text


def test_log_rows_are_json_and_complete(run: SmallRun) -> None:
    rows = report.log_rows(run.writer.log)
    assert json.loads(json.dumps(rows)) == rows
    assert [r["kind"] for r in rows] == ["open", "version", "version", "ref", "ref"]
    assert [r["seq"] for r in rows] == [0, 1, 2, 3, 4]
    first, second = rows[1], rows[2]
    assert 0 < first["changed_fraction"] < 1
    assert first["bound_ratio"] == first["payload_bytes"] / run.writer.log.versions[1].bound_bytes
    assert (second["changed_fraction"], second["bound_ratio"], second["payload_bytes"]) == (
        0.0, None, 0,
    )  # fmt: skip
    assert (rows[3]["name"], rows[3]["version"]) == ("eval", 1)


def test_log_table(run: SmallRun) -> None:
    text = _text(report.log_table(run.writer.log, url="file://x[/]y"))
    assert "file://x[/]y: version 2, writer epoch 1" in text
    lines = {line.split()[1]: line for line in text.splitlines() if "│" in line}
    assert "base, start" in lines["0"]
    assert "eval" in lines["1"]
    assert "0.000 %" in lines["2"]
    assert run.writer.log.digest(2)[:16] in lines["2"]


def _delta(run: SmallRun, version: int) -> Delta:
    log = Log(run.store)
    log.refresh()
    reader = DeltaReader(run.store, config=Config())
    layout = reader.layout(run.writer.job.layout.digest)
    return reader.delta(log.versions[version], layout=layout)


def test_delta_rows_tell_where_every_byte_lies(run: SmallRun) -> None:
    delta = _delta(run, 1)
    rows = report.delta_rows(delta)
    assert json.loads(json.dumps(rows)) == rows
    assert sum(r["bytes"] for r in rows) == delta.entry.payload_bytes
    assert sum(r["changed"] for r in rows) == delta.entry.changed
    assert sum(r["raw_bytes"] for r in rows) == delta.entry.raw_bytes
    assert {n for r in rows for n in r["tensors"]} == {"a", "b", "m", "s"}
    for row in rows:
        size = run.store.size(row["object"])
        assert row["offset"] + row["bytes"] <= size
    table = _text(report.delta_table(delta))
    assert "version 1 from 0, sparse+zstd, values diff" in table
    assert delta.object_of(0) in table
    narrow = "".join(_text(report.delta_table(delta), width=60).split())
    assert "…" not in narrow, "an object's name is of use only as a whole"
    assert report.tensors_changed(delta) > report.tensors_changed(_delta(run, 2)) == 0


def test_findings_survive_markup_in_names() -> None:
    """A tensor may be called ``[/red]``; that is a name, not a colour."""
    found = Findings(versions=2, frames=3, problems=["damaged-object: [/red][bold]w[0] is bad"])
    text = _text(report.findings_table(found, url="s3://b/[x]"))
    assert "[/red][bold]w[0] is bad" in text
    assert "s3://b/[x]: 2 versions, 3 frames: 1 problem(s)" in " ".join(text.split())
    assert "ok" in _text(report.findings_table(Findings(), url="x"))
