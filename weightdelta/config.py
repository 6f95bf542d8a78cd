"""Settings: presets by name, YAML files, or ``Config(...)``; unknown keys are refused."""

import difflib
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightdelta.errors import ConfigError

MIB = 1 << 20


class Section(BaseModel):
    """A group of settings: immutable, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StoreConfig(Section):
    """How the object store is reached."""

    timeout_s: float = Field(
        default=60.0, gt=0, description="Longest time one operation may take [s]"
    )
    retry_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a log entry in doubt is resent before reporting [s]",
    )
    fsync: bool = Field(default=True, description="Flush local files and directories to the device")
    threads: int = Field(default=8, ge=1, le=256, description="Parallel reads")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the fsspec filesystem (credentials, endpoint)"
    )


class Limits(Section):
    """What a reader accepts before it allocates anything."""

    max_chain: int = Field(default=10_000, ge=1, description="Deltas in one path")
    max_index_bytes: int = Field(default=1 << 30, ge=1, description="One delta's index [B]")
    max_layout_bytes: int = Field(
        default=1 << 30, ge=1, description="Layout, plan or table object [B]"
    )


class Config(Section):
    """Everything that can be set; the defaults are safe.

    Raises:
        ConfigError: A key is unknown or a value out of range (from ``load`` and ``of``).
    """

    codec: Literal["sparse+zstd"] = Field(
        default="sparse+zstd", description="Inner and outer codec"
    )
    values: Literal["diff", "xor"] = Field(default="diff", description="Form of the changed values")
    frame_bytes: int = Field(
        default=16 * MIB, ge=64 * 1024, le=64 * MIB, description="Largest frame, raw [B]"
    )
    threads: int = Field(
        default=2, ge=1, le=256, description="Threads that compare, encode and decode"
    )
    on_busy: Literal["wait", "skip", "error"] = Field(
        default="wait", description="What publish() does while a publication is still running"
    )
    busy_wait_s: float = Field(default=10.0, ge=0, description="How long on_busy=wait waits [s]")
    max_step_delay_s: float = Field(
        default=1.0, ge=0, description="How long an optimizer step waits for a running capture [s]"
    )
    publish_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="After this a publication without all receipts is given up [s]",
    )
    heartbeat_s: float = Field(
        default=10.0,
        gt=0,
        description="A rank silent for this long mid-publication counts as lost [s]",
    )
    measure_bound: bool = Field(
        default=False, description="Also compute the entropy bound of each delta (one more pass)"
    )
    scrub_every: int = Field(
        default=16, ge=0, description="Full digest pass before every K-th preparation; 0 = never"
    )
    store: StoreConfig = Field(default_factory=StoreConfig, description="Store access")
    limits: Limits = Field(default_factory=Limits, description="Reader limits")

    @classmethod
    def of(cls, settings: dict[str, Any], *, where: str = "config") -> Self:
        """Check a plain dictionary."""
        try:
            return cls.model_validate(settings)
        except ValidationError as e:
            raise ConfigError(f"{where}: {_explain(e)}") from e

    @classmethod
    def load(cls, source: "str | Path | Config | None" = None) -> "Config":
        """A ``Config``, the name of a preset, the path of a YAML file, or None for defaults."""
        if source is None:
            return cls()
        if isinstance(source, Config):
            return source
        path = _find(source)
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
            raise ConfigError(f"{path}: cannot read this YAML file ({e})") from e
        if not isinstance(settings, dict | None):
            raise ConfigError(f"{path}: expected keys and values, found {type(settings).__name__}")
        return cls.of(settings or {}, where=str(path))


def presets() -> dict[str, Path]:
    """The presets that ship with the library, by name."""
    here = Path(__file__).parent
    folder = here / "presets" if (here / "presets").is_dir() else here.parent / "configs"
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def _find(source: str | Path) -> Path:
    known = presets()
    if str(source) in known:
        return known[str(source)]
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        return path
    raise ConfigError(
        f"config {str(source)!r}: expected a preset ({', '.join(known)}) or a .yaml file"
        + _nearest(str(source), known)
    )


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _explain(error: ValidationError) -> str:
    """One line per problem, unknown keys with the nearest known one."""
    lines = []
    for item in error.errors():
        path = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {path!r}" + _nearest(str(item["loc"][-1]), _keys(item)))
        else:
            lines.append(f"{path}: {item['msg']}, found {item['input']!r}")
    return "; ".join(lines)


def _keys(item: Any) -> list[str]:
    section: Any = Config
    for part in item["loc"][:-1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
