"""Settings: presets by name, YAML files, or ``Config(...)``; unknown keys are refused."""

import difflib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from weightdelta.codecs.names import DEFAULT, IDS, Codec, Values, takes
from weightdelta.errors import ConfigError
from weightdelta.redact import secret_options

MIB = 1 << 20
#: Most bytes and levels of a YAML file of settings.
MOST_YAML_BYTES = 32 * 1024
MOST_YAML_DEPTH = 16
#: Longest time that may be set [s]; what waits takes no longer ones.
MOST_SECONDS = 1e9


class Section(BaseModel):
    """A group of settings: immutable, strict about names and types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, float) and value > MOST_SECONDS:
            raise PydanticCustomError("too_long", "Input should be at most 1e9")
        return value


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
    retries: int = Field(
        default=4,
        ge=0,
        le=100,
        description="How often a request that failed in passing is sent again, within timeout_s",
    )
    fsync: bool = Field(default=True, description="Flush local files and directories to the device")
    threads: int = Field(
        default=8, ge=1, le=256, description="Parallel requests of a fetch or of a large object"
    )
    single_writer: bool = Field(
        default=False,
        description="Use a store that ignores create-once; there is no fencing then",
    )
    bulk: Literal["fsspec", "obstore"] = Field(
        default="fsspec", description="Client that moves data; obstore for object stores only"
    )
    # Not shown: whatever the check below lets pass, a message is no place for it.
    options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Passed to the fsspec filesystem (endpoint); credentials are refused here",
    )

    @field_validator("options")
    @classmethod
    def _without_credentials(cls, options: dict[str, Any]) -> dict[str, Any]:
        found = secret_options(options)
        if found:
            raise PydanticCustomError(
                "credentials",
                "{names} look like credentials; a configuration travels to every actor, so put "
                "them into the environment",
                {"names": ", ".join(found)},
            )
        return options


class Limits(Section):
    """What a reader accepts before it allocates anything."""

    max_chain: int = Field(default=10_000, ge=1, description="Deltas in one path")
    max_index_bytes: int = Field(default=1 << 30, ge=1, description="One delta's index [B]")
    max_layout_bytes: int = Field(
        default=1 << 30, ge=1, description="Layout, plan or table object [B]"
    )


class DeviceConfig(Section):
    """How weights in an accelerator's memory are handled."""

    use: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Device kernels: where tensors lie on a GPU, always (slow on a CPU), or never",
    )
    window_bytes: int = Field(
        default=128 * MIB,
        ge=64 * 1024,
        le=1 << 30,
        description="Raw bytes that a capture compares at once, and with a baseline in device "
        "memory as much again for each slot; one frame at least [B]",
    )
    slots: int = Field(
        default=2, ge=2, le=16, description="Windows of old bytes on their way to the device"
    )
    baseline: Literal["host", "device"] = Field(
        default="host",
        description="Where a capture reads old bytes: pinned host memory, or a copy in device "
        "memory beside it",
    )
    staging_bytes: int = Field(
        default=512 * MIB,
        ge=64 * 1024,
        description="Device memory for staged changes; what exceeds it is streamed in the pause "
        "[B]",
    )
    blocks: Literal["lists", "raw"] = Field(
        default="lists",
        description="How a receiver keeps frames of snappy+zstd and lz4+zstd for the pause: as "
        "lists of changes, decoded on the CPU (faster without a decompression engine), or as raw "
        "blocks in pinned memory that nvCOMP decodes in the pause",
    )


class Config(Section):
    """Everything that can be set; the defaults are safe.

    Raises:
        ConfigError: A key is unknown or a value out of range.
    """

    codec: Codec = Field(default=DEFAULT, description="Inner and outer codec of what is published")
    codec_by_ref: dict[Literal["rollout"], Codec] = Field(
        default_factory=dict,
        description="Codec of the deltas that lead to a ref; rollout is every new version",
    )
    codec_by_tensor: dict[str, Codec] = Field(
        default_factory=dict,
        description="Codec by pattern of tensor names; the first that fits goes before all others",
    )
    # After the codecs: its check looks at them.
    values: Values = Field(
        default="diff",
        validate_default=True,
        description="Form of the changed values; every codec but sparse+zstd needs xor",
    )
    frame_bytes: int = Field(
        default=16 * MIB, ge=64 * 1024, le=64 * MIB, description="Largest frame, raw [B]"
    )
    threads: int = Field(
        default=2, ge=1, le=256, description="Threads that compare, encode and decode"
    )
    on_busy: Literal["wait", "skip", "error"] = Field(
        default="wait", description="What publish() does while a publication is still running"
    )
    busy_wait_s: float = Field(default=1.0, ge=0, description="How long on_busy=wait waits [s]")
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
    device: DeviceConfig = Field(default_factory=DeviceConfig, description="Weights on a GPU")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Store access")
    limits: Limits = Field(default_factory=Limits, description="Reader limits")

    @field_validator("values")
    @classmethod
    def _fit_for_all_codecs(cls, values: Values, info: ValidationInfo) -> Values:
        named = (
            info.data.get("codec", DEFAULT),
            *info.data.get("codec_by_ref", {}).values(),
            *info.data.get("codec_by_tensor", {}).values(),
        )
        for codec in named:
            if not takes(codec, values):
                raise PydanticCustomError("codec", _misfit(codec))
        return values

    def codec_for(self, tensor: str, *, ref: Literal["rollout"] = "rollout") -> Codec:
        """The codec of a tensor's changes in deltas that lead to ``ref``."""
        return self._codec_of(tensor) or self.codec_by_ref.get(ref, self.codec)

    def codec_group(self, tensor: str) -> int:
        """A number that tensors share whose codec is always the same, whatever a call overrides."""
        own = self._codec_of(tensor)
        return 0 if own is None else 1 + IDS[own]

    def with_codec(self, codec: Codec) -> "Config":
        """These settings for one publication in ``codec``; patterns of tensors still count.

        Raises:
            ConfigError: No such codec, or one that does not take these values.
        """
        if codec not in IDS:
            raise ConfigError(
                f"codec {codec!r}: expected one of {', '.join(IDS)}" + _nearest(codec, IDS)
            )
        if not takes(codec, self.values):
            raise ConfigError(f"values: {_misfit(codec)}, found {self.values!r}")
        return self.model_copy(update={"codec": codec, "codec_by_ref": {}})

    if not TYPE_CHECKING:  # checkers keep the parameters that pydantic gives it

        def __init__(self, /, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as e:
                raise ConfigError(_explain(e)) from e

    def _codec_of(self, tensor: str) -> Codec | None:
        fits = (c for pattern, c in self.codec_by_tensor.items() if fnmatchcase(tensor, pattern))
        return next(fits, None)

    @classmethod
    def of(cls, settings: dict[str, Any], *, where: str = "config") -> Self:
        """Check a plain dictionary."""
        try:
            return cls(**{str(name): value for name, value in settings.items()})
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e.__cause__

    @classmethod
    def load(cls, source: "str | Path | Config | None" = None) -> "Config":
        """A ``Config``, the name of a preset, the path of a YAML file, or None for defaults."""
        if source is None:
            return cls()
        if isinstance(source, Config):
            return source
        path = _find(source)
        settings = _read_yaml(path)
        if not isinstance(settings, dict | None):
            raise ConfigError(f"{path}: expected keys and values, found {type(settings).__name__}")
        return cls.of(settings or {}, where=str(path))


def _read_yaml(path: Path) -> Any:
    """What a YAML file holds, once its size and depth are known to be bounded.

    Aliases are refused, since a few lines of them stand for more than any memory holds, and so
    are tags, whose constructors raise whatever they like.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_YAML_BYTES + 1)
        if len(data) > MOST_YAML_BYTES:
            raise ConfigError(f"{path}: expected at most {MOST_YAML_BYTES} bytes of settings")
        text = data.decode("utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            plain = not isinstance(event, yaml.AliasEvent) and getattr(event, "tag", None) is None
            if not plain or depth > MOST_YAML_DEPTH:
                raise ConfigError(
                    f"{path}: settings are plain YAML at most {MOST_YAML_DEPTH} levels deep, "
                    f"without aliases and tags; line {event.start_mark.line + 1} is not"
                )
        return yaml.safe_load(text)
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as e:  # dates and numbers raise ValueErrors
        raise ConfigError(f"{path}: cannot read this YAML file ({e})") from e


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


def _misfit(codec: str) -> str:
    return f"codec '{codec}' codes the XOR mask and needs values 'xor'"


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
        elif item["loc"][:2] == ("store", "options"):
            lines.append(f"{path}: {item['msg']}")  # what was found may be a credential
        else:
            lines.append(f"{path}: {item['msg']}, found {item['input']!r:.200}")
    return "; ".join(lines)


def _keys(item: Any) -> list[str]:
    section: Any = Config
    for part in item["loc"][:-1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
