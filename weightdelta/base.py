"""Version 0: the safetensors files of the base checkpoint, mapped, never copied whole."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from safetensors import SafetensorError, safe_open

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.frame import Segment
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import TensorSpec

INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie: file, first byte, description."""

    file: Path
    start: int
    spec: TensorSpec


@dataclass(frozen=True)
class Base:
    """A base checkpoint: a folder of safetensors files, or one such file.

    Raises:
        InputError: The path holds no readable safetensors file.
        LayoutMismatch: Two files hold a tensor of the same name.
    """

    path: Path

    def __reduce__(self) -> tuple[type["Base"], tuple[Path]]:
        return Base, (self.path,)  # never the mappings

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Every tensor's place by name."""
        found: dict[str, Place] = {}
        for file in _files(self.path):
            for name, place in _places(file).items():
                if name in found:
                    raise LayoutMismatch(f"base {file}: {name!r} is also in {found[name].file}")
                found[name] = place
        return found

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All tensors, by name."""
        return tuple(self.places[n].spec for n in sorted(self.places))

    def elements(self, name: str) -> Elements:
        """A tensor's elements as a read-only 1-D mapping of its file."""
        place = self.places[name]
        dtype = UINTS[place.spec.width]
        if not place.spec.numel:
            return np.empty(0, dtype)
        part = self._map(place.file)[place.start : place.start + place.spec.nbytes]
        if len(part) != place.spec.nbytes:  # strided reads below are not bounds-checked
            raise InputError(f"base {place.file}: {name!r} is cut short; the file was replaced")
        # Old writers do not align their header, so the mapping may be unaligned.
        return (
            part.view(dtype) if part.ctypes.data % place.spec.width == 0 else _realign(part, dtype)
        )

    def read(self, name: str, segment: Segment, *, out: Elements) -> None:
        """Copy one segment of a tensor, in C order, into ``out`` (1-D, segment.numel elements)."""
        rows = as_strided(
            self.elements(name)[segment.first :],
            (segment.rows, segment.run),
            (segment.stride * out.itemsize, out.itemsize),
            writeable=False,
        )
        out.reshape(segment.rows, segment.run)[...] = rows

    def _map(self, file: Path) -> Any:
        if file not in self._maps:
            try:
                self._maps[file] = np.memmap(file, np.uint8, "r")
            except (OSError, ValueError) as e:
                raise InputError(f"base {file}: cannot be mapped ({e})") from e
        return self._maps[file]

    @cached_property
    def _maps(self) -> dict[Path, Any]:
        return {}


def _realign(part: Any, dtype: Any) -> Elements:
    copy: Elements = np.frombuffer(part.tobytes(), dtype)
    return copy


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        try:
            weight_map = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            strange = [name for name in names if Path(name).name != name or name == ".."]
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        ) as e:  # fmt: skip
            raise InputError(f"base {path / INDEX}: not an index of shards ({e!r})") from e
        if strange:  # whoever loads a copy of this index would be led out of its folder
            raise InputError(
                f"base {path / INDEX}: expected names of files beside it, found {strange[0]!r}"
            )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"base {path}: expected a folder with *.safetensors files, found none")
    return files


def _places(file: Path) -> dict[str, Place]:
    """Tensors of one file. ``safe_open`` checks the header; it offers no offsets, so read them."""
    try:
        with safe_open(file, "numpy"), file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
    except (SafetensorError, OSError, ValueError) as e:  # a name may be one of no file at all
        raise InputError(f"base {file}: not a readable safetensors file ({e})") from e
    header.pop("__metadata__", None)
    return {
        name: Place(
            file,
            8 + length + item["data_offsets"][0],
            TensorSpec(name, item["dtype"], tuple(item["shape"])),
        )
        for name, item in header.items()
    }
