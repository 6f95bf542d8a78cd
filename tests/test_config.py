"""Settings: defaults, presets, YAML, and what each mistake is answered with."""

from pathlib import Path
from typing import Any

import pytest

from weightdelta.config import Config, presets
from weightdelta.errors import ConfigError


def test_no_source_means_the_defaults() -> None:
    assert Config.load() == Config()


def test_a_config_passes_through() -> None:
    config = Config(threads=3)
    assert Config.load(config) is config


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_by_name(name: str) -> None:
    assert isinstance(Config.load(name), Config)


def test_presets_are_the_shipped_files() -> None:
    folder = Path(__file__).parents[1] / "configs"
    assert set(presets()) == {p.stem for p in folder.glob("*.yaml")}
    assert presets()


def test_yaml_reaches_nested_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("values: xor\nstore:\n  timeout_s: 5\n  options: {anon: true}\n")
    config = Config.load(path)
    assert (config.values, config.store.timeout_s) == ("xor", 5.0)
    assert config.store.options == {"anon": True}
    assert Config.load(str(path)) == config


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yml"
    path.write_text("# nothing set\n")
    assert Config.load(path) == Config()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"frame_byte": 1}, ["'frame_byte'", "did you mean 'frame_bytes'"]),
        ({"store": {"timeot_s": 1.0}}, ["'store.timeot_s'", "did you mean 'timeout_s'"]),
        ({"threads": 0}, ["threads", "found 0"]),
        ({"threads": "2"}, ["threads", "found '2'"]),
        ({"threads": True}, ["threads", "found True"]),
        ({"values": "sum"}, ["values", "'diff'", "'xor'"]),
        ({"codec": "gzip"}, ["codec", "sparse+zstd"]),
        ({"codec": "none"}, ["values", "'none'", "'xor'", "found 'diff'"]),
        ({"codec": "zstd", "values": "diff"}, ["values", "'zstd'", "'xor'"]),
        ({"codec_by_tensor": {"*": "lz4+zstd"}}, ["values", "'lz4+zstd'", "'xor'"]),
        ({"codec_by_ref": {"rollout": "zstd"}}, ["values", "'zstd'", "'xor'"]),
        ({"codec_by_ref": {"eval": "zstd"}, "values": "xor"}, ["codec_by_ref", "rollout"]),
        ({"codec_by_tensor": {"*": "lz4"}, "values": "xor"}, ["codec_by_tensor", "lz4+zstd"]),
        ({"self": 1}, ["unknown key 'self'"]),
        ({"frame_bytes": 1}, ["frame_bytes"]),
        ({"frame_bytes": 1 << 31}, ["frame_bytes"]),
        ({"store": 7}, ["store"]),
        ({"store": {"timeout_s": 0}}, ["store.timeout_s"]),
        ({"threads": 0, "nonsense": 1}, ["threads", "nonsense"]),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of(settings, where="job.yaml")
    assert all(word in str(caught.value) for word in ["job.yaml", *named])
    with pytest.raises(ConfigError) as direct:
        Config(**settings)
    assert str(caught.value) == f"job.yaml: {direct.value}"


def test_an_unknown_preset_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        Config.load("locel")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "a: [1\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        Config.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"values: \xff\n")
    for name in ("latin.yaml", "absent.yaml"):
        with pytest.raises(ConfigError, match=name):
            Config.load(tmp_path / name)


def test_the_nearest_choice_of_a_codec_counts() -> None:
    config = Config.of(
        {
            "values": "xor",
            "codec": "zstd",
            "codec_by_ref": {"rollout": "lz4+zstd"},
            "codec_by_tensor": {"head.*": "none", "*.bias": "sparse+zstd"},
        }
    )
    found = [config.codec_for(name) for name in ("head.bias", "body.bias", "body.weight", "head")]
    assert found == ["none", "sparse+zstd", "lz4+zstd", "lz4+zstd"]
    other = config.with_codec("snappy+zstd")
    assert [other.codec_for(n) for n in ("head.bias", "body.weight")] == ["none", "snappy+zstd"]
    groups = [config.codec_group(n) for n in ("head.bias", "x.bias", "y.bias", "a", "b")]
    assert len(set(groups)) == 3
    assert groups[1] == groups[2]
    assert groups[3] == groups[4]
    assert groups == [other.codec_group(n) for n in ("head.bias", "x.bias", "y.bias", "a", "b")]


def test_a_codec_that_does_not_fit_is_refused_for_one_publication_too() -> None:
    with pytest.raises(ConfigError, match=r"'lz4\+zstd' codes the XOR mask .* found 'diff'"):
        Config().with_codec("lz4+zstd")
    wrong: Any = "sparse"
    with pytest.raises(ConfigError, match=r"did you mean 'sparse\+zstd'"):
        Config().with_codec(wrong)
    assert Config().with_codec("sparse+zstd").codec == "sparse+zstd"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().threads = 4
