"""The command line, in process and as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import SmallRun
from typer.testing import CliRunner

from weightdelta.cli import app, main
from weightdelta.errors import ConfigError, InputError, NotYet
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
    assert [r["kind"] for r in rows] == ["open", "version", "version"]


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


def test_verify(run: SmallRun) -> None:
    deep = ["verify", run.store.url, "--deep", "--base", str(run.checkpoint)]
    assert RUNNER.invoke(app, deep).exit_code == 0
    found = RUNNER.invoke(app, [*deep, "--json"])
    parsed = json.loads(found.stdout)
    assert (parsed["ok"], parsed["versions"], parsed["problems"]) == (True, 2, [])
    alone = RUNNER.invoke(app, ["verify", run.store.url, "--base", str(run.checkpoint)])
    assert isinstance(alone.exception, InputError)


def test_help_and_usage() -> None:
    assert "verify" in RUNNER.invoke(app, ["--help"]).stdout
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
        (["log", "{empty}", "--config", "[/red].yaml"], 2, "[/red].yaml"),
    ],
)
def test_a_known_error_is_one_line(
    args: list[str],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if args[1].startswith("s3:"):
        monkeypatch.setitem(sys.modules, "s3fs", None)  # as where the extra is not installed
    monkeypatch.setattr(sys, "argv", ["weightdelta", *(a.format(empty=tmp_path) for a in args)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
