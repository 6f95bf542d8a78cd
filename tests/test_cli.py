"""The command line, in process and as a user starts it."""

import contextlib
import importlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console
from safetensors.torch import load_file
from small_runs import SmallRun, all_bits
from typer.testing import CliRunner

from weightdelta.cli import app, main
from weightdelta.config import Config
from weightdelta.errors import ConfigError, InputError, NotYet
from weightdelta.progress import progress
from weightdelta.record import data_name
from weightdelta.store import Store

RUNNER = CliRunner()
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    folder = tmp_path_factory.mktemp("cli")
    found = SmallRun(folder, store=Store(folder / "store", timeout_s=None, fsync=False))
    for seed in range(2):
        found.step(seed)
    found.writer.tag("eval", version=1)
    found.close()
    return found


def _command(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from weightdelta.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_log(run: SmallRun) -> None:
    table = RUNNER.invoke(app, ["log", run.store.url])
    assert table.exit_code == 0
    assert "version 2, writer epoch 1" in table.stdout
    rows = json.loads(RUNNER.invoke(app, ["log", run.store.url, "--json"]).stdout)
    assert [r["kind"] for r in rows] == ["open", "version", "version", "ref"]


def test_inspect(run: SmallRun) -> None:
    newest = json.loads(RUNNER.invoke(app, ["inspect", run.store.url, "--json"]).stdout)
    assert newest["version"] == 2
    first = ["inspect", run.store.url, "--version", "1"]
    assert json.loads(RUNNER.invoke(app, [*first, "--json"]).stdout)["version"] == 1
    table = RUNNER.invoke(app, first)
    assert "version 1 from 0" in table.stdout
    assert "of 5 tensors changed" in table.stdout
    for version in ("0", "3", "-1"):
        missing = RUNNER.invoke(app, ["inspect", run.store.url, "--version", version])
        assert isinstance(missing.exception, NotYet)


def test_inspect_one_frame(run: SmallRun) -> None:
    """Planes and segments add up to what the index says of the frame."""
    args = ["inspect", run.store.url, "--version", "eval"]
    rows = json.loads(RUNNER.invoke(app, [*args, "--json"]).stdout)["frames"]
    for row in rows:
        one = json.loads(RUNNER.invoke(app, [*args, "--frame", str(row["frame"]), "--json"]).stdout)
        assert (one["version"], one["blake3"], one["bytes"]) == (1, row["blake3"], row["bytes"])
        assert (one["object"], one["offset"]) == (row["object"], row["offset"])
        assert sum(plane["bytes"] for plane in one["planes"]) == row["bytes"]
        assert sum(segment["changed"] for segment in one["segments"]) == row["changed"]
        assert sum(segment["elements"] for segment in one["segments"]) == one["elements"]
        assert sum(one["chunks"].values()) in (0, len(one["segments"]))
        assert one["tensors"] == row["tensors"]
        table = RUNNER.invoke(app, [*args, "--frame", str(row["frame"])]).stdout
        assert all(plane["plane"] in table for plane in one["planes"])
        assert all(name in table for name in one["tensors"])
    for frame in (len(rows), -1):
        missing = RUNNER.invoke(app, [*args, "--frame", str(frame)])
        assert isinstance(missing.exception, InputError)


def test_inspect_a_frame_of_another_codec(tmp_path: Path) -> None:
    """Its planes go by that codec's names, and chunks have no forms."""
    config = Config.of({"codec": "lz4+zstd", "values": "xor"})
    store = Store(tmp_path / "store", timeout_s=None, fsync=False)
    run = SmallRun(tmp_path, store=store, config=config)
    run.step(0)
    run.close()
    args = ["inspect", store.url, "--frame", "0"]
    one = json.loads(RUNNER.invoke(app, [*args, "--json"]).stdout)
    assert (one["codec"], one["chunks"]) == ("lz4+zstd", {})
    assert {plane["plane"] for plane in one["planes"]} <= {"block sizes 0", "piece 0"}
    assert sum(plane["bytes"] for plane in one["planes"]) == one["bytes"] > 0
    assert sum(segment["changed"] for segment in one["segments"]) == one["changed"] > 0
    assert "chunks" not in RUNNER.invoke(app, args).stdout


def test_versions_by_ref(run: SmallRun) -> None:
    unknown = RUNNER.invoke(app, ["inspect", run.store.url, "--version", "evil"])
    assert isinstance(unknown.exception, NotYet)
    assert "(base, eval)" in str(unknown.exception)


def test_diff(run: SmallRun) -> None:
    args = ["diff", run.store.url, "base", "eval"]
    row = json.loads(RUNNER.invoke(app, [*args, "--json"]).stdout)
    assert (row["from"], row["to"], row["exact"]) == (0, 1, True)
    assert row["changed"] == run.writer.log.versions[1].changed
    table = RUNNER.invoke(app, args).stdout
    assert "version 0 to 1" in table
    assert "share of elements changed" in table
    assert "--limit 0 lists all" in RUNNER.invoke(app, [*args, "--limit", "1"]).stdout
    assert RUNNER.invoke(app, args[:-1]).exit_code == 2


def test_materialize(run: SmallRun, tmp_path: Path) -> None:
    args = ["materialize", run.store.url, "--base", str(run.checkpoint.parent), "--out"]
    made = RUNNER.invoke(app, [*args, str(tmp_path / "newest")])
    assert (made.exit_code, made.stdout.count("\n")) == (0, 1)
    assert "version 2" in made.stdout
    one = [*args, str(tmp_path / "one"), "--version", "1"]
    row = json.loads(RUNNER.invoke(app, [*one, "--json"]).stdout)
    assert (row["version"], row["digest"]) == (1, run.writer.log.digest(1))
    for name, version in (("newest", 2), ("one", 1)):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all_bits(found) == run.versions[version]
    assert isinstance(RUNNER.invoke(app, one).exception, InputError)


def test_export(run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    made = RUNNER.invoke(app, ["export", run.store.url, "--out", str(out)])
    assert (made.exit_code, made.stdout.count("\n")) == (0, 2)
    assert pq.read_table(out).num_rows == 2
    again = RUNNER.invoke(app, ["export", run.store.url, "--out", str(out), "--json"])
    row = json.loads(again.stdout)
    assert row["versions"] == str(out)
    assert pq.read_table(row["frames"]).num_rows == row["frame_rows"] > 0


def test_top_once(run: SmallRun, tmp_path: Path) -> None:
    """Where there is no terminal one look is printed, also without --once."""
    for args in (["--once"], []):
        screen = RUNNER.invoke(app, ["top", run.store.url, *args])
        assert screen.exit_code == 0
        assert "2, step 1" in screen.stdout
        assert "eval = 1" in screen.stdout
    row = json.loads(RUNNER.invoke(app, ["top", run.store.url, "--json"]).stdout)
    assert (row["version"], row["refs"], row["epoch"]) == (2, {"eval": 1}, 1)
    waiting = RUNNER.invoke(app, ["top", str(tmp_path / "later"), "--once"])
    assert waiting.exit_code == 0
    assert "no run has been opened here yet" in waiting.stdout


def test_top_on_a_terminal_until_interrupted(run: SmallRun) -> None:
    # Whoever runs the tests in the background may have made SIGINT one to ignore.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heed + "from weightdelta.cli import main; main()"
    leader, follower = pty.openpty()
    shown = subprocess.Popen(
        [sys.executable, "-c", code, "top", run.store.url, "--interval", "0.1"],
        cwd=ROOT, stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    try:
        text = b""
        while b"2, step 1" not in text:
            text += os.read(leader, 4096)
        shown.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal is gone when the command is
            while os.read(leader, 4096):
                pass
        assert shown.wait(60) == 0
    finally:
        shown.kill()
        shown.wait()
        os.close(leader)


def test_verify(run: SmallRun) -> None:
    deep = ["verify", run.store.url, "--deep", "--base", str(run.checkpoint)]
    assert RUNNER.invoke(app, deep).exit_code == 0
    found = RUNNER.invoke(app, [*deep, "--json"])
    parsed = json.loads(found.stdout)
    assert (parsed["ok"], parsed["versions"], parsed["problems"]) == (True, 2, [])
    alone = RUNNER.invoke(app, ["verify", run.store.url, "--base", str(run.checkpoint)])
    assert isinstance(alone.exception, InputError)


def _verbs() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_every_verb_explains_itself() -> None:
    """A line for the overview, help for every option, JSON, and settings."""
    overview = RUNNER.invoke(app, ["--help"]).stdout
    for name, verb in _verbs().items():
        assert f" {name} " in overview
        assert verb.help
        assert verb.get_short_help_str(200).endswith(".")
        options = [p for p in verb.params if p.param_type_name == "option"]
        assert all(p.help for p in options), name
        assert {"--json", "--config"} <= {o for p in options for o in p.opts}, name


def test_help_and_usage() -> None:
    assert set(_verbs()) == {
        "log", "top", "inspect", "diff", "verify", "materialize", "export",
    }  # fmt: skip
    assert RUNNER.invoke(app, ["log"]).exit_code == 2
    assert RUNNER.invoke(app, ["nonsense"]).exit_code == 2
    strange = RUNNER.invoke(app, ["log", "x", "--config", "nonsense"])
    assert isinstance(strange.exception, ConfigError)


def test_as_a_command(run: SmallRun, tmp_path: Path) -> None:
    """Exit codes 0, 1 and 2, errors as one line on stderr, JSON alone on stdout."""
    good = _command("verify", run.store.url, "--deep", "--json")
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True)

    folder = tmp_path / "damaged"
    damaged = Store(folder, timeout_s=None, fsync=False)
    for name in run.store.names(""):
        damaged.write(name, run.store.read(name))
    name = data_name(run.writer.log.versions[1].write_id, 0)
    damaged.write(name, damaged.read(name)[:-1])
    bad = _command("verify", str(folder), "--deep", "--json")
    assert bad.returncode == 1
    assert name in json.loads(bad.stdout)["problems"][0]

    unknown = _command("inspect", run.store.url, "--version", "7")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("not-yet: ")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["log", "{empty}"], 2, "expected a run's store, found no log"),
        (["inspect", "{empty}"], 2, "expected a run's store, found no log"),
        (["log", "s3://bucket/run"], 2, "s3"),
        (["log", "nonsense://x"], 2, "nonsense"),
        (["inspect", "{run}", "--version=--3"], 1, "found '--3'"),
        (["inspect", "{run}", "--version=" + "9" * 5000], 1, "expected a version or a ref"),
        (["materialize", "{run}", "--base", "{base}", "--out", "x" * 300], 2, "new folder"),
        (["log", "{empty}", "--config", "[/red].yaml"], 2, "[/red].yaml"),
    ],
)
def test_a_known_error_is_one_line(
    args: list[str],
    code: int,
    text: str,
    run: SmallRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if args[1].startswith("s3:"):
        # As where the extra is not installed; a test before this one may have loaded it.
        monkeypatch.setitem(sys.modules, "s3fs", None)
        loaded = importlib.import_module("fsspec.registry")._registry
        monkeypatch.delitem(loaded, "s3", raising=False)
    places = {"empty": tmp_path, "run": run.store.url, "base": run.checkpoint}
    monkeypatch.setattr(sys, "argv", ["weightdelta", *(a.format(**places) for a in args)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


# -- progress ----------------------------------------------------------------------------------


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_progress_is_shown_on_a_terminal_once_it_takes_long() -> None:
    console, out = _console(terminal=True)
    with progress(console, "reading", patience_s=0.0) as update:
        while "reading" not in out.getvalue():
            threading.Event().wait(0.005)
        update("version [1]", 3, 4)
        while "75%" not in out.getvalue():
            threading.Event().wait(0.005)
    assert "version [1]" in out.getvalue()


@pytest.mark.parametrize(("terminal", "patience_s"), [(True, 600.0), (False, 0.0)])
def test_progress_is_silent_else(terminal: bool, patience_s: float) -> None:
    console, out = _console(terminal=terminal)
    before = set(threading.enumerate())
    with progress(console, "reading", patience_s=patience_s) as update:
        update("version 1", 1, 2)
        started = set(threading.enumerate()) - before
        assert any(isinstance(thread, threading.Timer) for thread in started) == terminal
    assert "reading" not in out.getvalue()
    assert "version 1" not in out.getvalue()


def test_progress_ends_with_an_error() -> None:
    console, _ = _console(terminal=True)
    before = set(threading.enumerate())
    with pytest.raises(NotYet), progress(console, "x", patience_s=0.0):
        raise NotYet("x")
    for thread in set(threading.enumerate()) - before:  # rich does not wait for its own
        thread.join(10)
        assert not thread.is_alive()


def test_parsing_stays_quick() -> None:
    """What only one verb needs is loaded by that verb."""
    code = (
        "import sys, weightdelta.cli; "
        "print(sorted({'pyarrow', 'torch', 'numba', 'ray', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
