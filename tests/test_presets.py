"""Presets do what their files say, and the page about settings says what the model does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_page import PAGE, render
from small_runs import SmallRun, all_bits, clone

from weightdelta.cli import main
from weightdelta.config import Config, Section, presets
from weightdelta.errors import ConfigError
from weightdelta.receiver import Receiver

NAMES = {"local", "s3", "gcs", "azure", "fp8", "resume", "large-moe", "bench"}


def _fields(model: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_all_are_there() -> None:
    assert set(presets()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_preset_says_when_to_use_it_and_sets_what_it_says(name: str) -> None:
    text = presets()[name].read_text(encoding="utf-8")
    assert "\n# When: " in text
    assert text.isascii()

    def compare(settings: dict[str, Any], found: Section) -> None:
        for key, value in settings.items():
            if isinstance(value, dict):
                compare(value, getattr(found, key))
            else:
                assert getattr(found, key) == value, key

    settings = yaml.safe_load(text)
    assert settings
    compare(settings, Config.load(name))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_run_works_with_every_preset(name: str, tmp_path: Path) -> None:
    run = SmallRun(tmp_path, config=Config.load(name))
    run.step(1)
    run.close()
    weights = clone(run.base)
    receiver = Receiver(run.store, weights, config=name)
    receiver.prepare().wait()
    receiver.apply()
    receiver.close()
    assert all_bits(weights) == run.versions[1]


@pytest.mark.parametrize(
    ("text", "found", "meant"),
    [
        ("store:\n  timeout: 3.0\n", "store.timeout", "timeout_s"),
        ("store: {thread: 3}\n", "store.thread", "threads"),
        ("limits:\n  max_chains: 3\n", "limits.max_chains", "max_chain"),
        ("limit: {max_chain: 3}\n", "limit", "limits"),
        ("Threads: 3\n", "Threads", "threads"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    text: str, found: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert f"unknown key {found!r}; did you mean {meant!r}?" in str(caught.value)


def test_the_command_refuses_it_as_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("store: {fsink: true}\n")
    arguments = ["weightdelta", "log", str(tmp_path), "--config", str(tmp_path / "mine.yaml")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "did you mean 'fsync'" in capsys.readouterr().err


# -- the page ----------------------------------------------------------------------------------


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/docs"


def test_every_setting_is_on_the_page_with_unit_default_and_meaning() -> None:
    rows = {}
    for line in render().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[cells[0].strip("`")] = cells
    for key, field in _fields():
        _, unit, default, allowed, meaning = rows.pop(key)
        assert all((default.strip("`"), allowed, meaning)), key
        expected = {"s": "s", "bytes": "B"}.get(key.rpartition("_")[2], "")
        assert unit == expected, f"{key}: end its description in [{expected}]"
        assert field.description, key
    assert not rows, "rows without a setting"


def test_the_page_names_every_preset() -> None:
    page = render()
    for name in NAMES:
        assert f"[`{name}`](../configs/{name}.yaml)" in page
