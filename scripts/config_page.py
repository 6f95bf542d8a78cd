"""Writes docs/configuration.md from the settings' own model: `scripts/docs [--check]`."""

import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from weightdelta.config import Config, Section, presets

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by scripts/docs from weightdelta/config.py and configs/. Do not edit. -->

Every entry point takes `config=`, every command `--config`: the name of a preset, the path of a
YAML file, or `wd.Config(...)`. What is not set keeps its default; an unknown key is refused and
the nearest known one named. Trainer and samplers need not agree: what a reader must know is in
the store.

```yaml
# mine.yaml
threads: 4
store:
  timeout_s: 30.0
```

"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Settings\n\n", *_section(Config, prefix="")]
    parts += ["## Presets\n\n", *_presets()]
    return "".join(parts).rstrip("\n") + "\n"


def _section(model: type[Section], *, prefix: str) -> list[str]:
    rows, nested = [], []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            nested += [f"### `{prefix}{name}`: {field.description}\n\n"]
            nested += _section(inner, prefix=f"{prefix}{name}.")
        else:
            rows.append(_row(prefix + name, field))
    head = "| key | unit | default | allowed | meaning |\n| --- | --- | --- | --- | --- |\n"
    return [head, *rows, "\n", *nested]


def _row(key: str, field: FieldInfo) -> str:
    meaning, unit = _unit(field.description or "")
    cells = (f"`{key}`", unit, f"`{_value(field)}`", _allowed(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _unit(description: str) -> tuple[str, str]:
    """A description and the unit that it ends in, in brackets."""
    found = re.fullmatch(r"(.*) \[(\w+)\]", description)
    return (found[1], found[2]) if found else (description, "")


def _value(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(field: FieldInfo) -> str:
    signs = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}"}
    limits = [
        text.format(getattr(item, sign))
        for item in field.metadata
        for sign, text in signs.items()
        if hasattr(item, sign)
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in inside)
    if origin is dict:
        return f"{_kind(inside[0])}: {_kind(inside[1])}"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    names |= {type(None): "nothing", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _presets() -> list[str]:
    rows = ["| preset | for | sets |\n| --- | --- | --- |\n"]
    for name, path in presets().items():
        text = path.read_text(encoding="utf-8")
        first = text.splitlines()[0].removeprefix("# ").rstrip(".")
        sets = ", ".join(f"`{key}: {value}`" for key, value in _flat(yaml.safe_load(text) or {}))
        rows.append(f"| [`{name}`](../configs/{path.name}) | {first} | {sets} |\n")
    return [*rows, "\nEach file says when to use it. To go on from one, copy it.\n"]


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, str(value).lower() if value in (True, False) else value))
    return found


def main() -> None:
    """Write the page, or with --check only say whether it is stale."""
    page = render()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != page:
            raise SystemExit(f"{PAGE.name} is stale: run scripts/docs")
        return
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
