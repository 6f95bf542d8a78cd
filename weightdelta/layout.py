"""The canonical tensors of a model: what they are called, how wide, how large, in what order.

Names, dtypes and shapes are those of the base checkpoint's safetensors files. The order is by
name; every table in the format is in that order.

A tensor is seen as *elements* of a fixed width of 1, 2, 4 or 8 bytes. Types narrower than a
byte (F4) count in bytes, so two packed values make one element.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from blake3 import blake3

from weightdelta.errors import DamagedObject, LayoutMismatch, UnsupportedFormat

FORMAT: Final = 1
#: Most bytes of a layout: about half a million tensors. Parsing JSON takes many times its size.
MOST_BYTES: Final = 32 << 20
#: Most dimensions of a tensor; a product of more is no size but a way to burn time.
MOST_DIMS: Final = 64
#: No size of a tensor reaches this.
MOST_SIZE: Final = 1 << 60

#: Width in bytes of one element, by safetensors dtype name.
WIDTHS: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

#: Plain floating-point types, between which a transform may cast.
PLAIN_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


def castable(dtype: str, *, to: str) -> bool:
    """Whether live weights may be cast to the wire dtype: equal, or plain floats of two widths.

    Half and bfloat16 are refused: neither holds the other's values, so a mistaken base would
    round every weight without a word.
    """
    if dtype == to:
        return True
    return {dtype, to} <= PLAIN_FLOATS and WIDTHS[dtype] != WIDTHS[to]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, safetensors dtype and logical shape.

    A checkpoint may hold tensors of a dtype that weightdelta does not support, which the caller
    excludes. ``Layout`` refuses them, and so does everything that asks for their width.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_DIMS or any(not 0 <= n < MOST_SIZE for n in self.shape):
            raise LayoutMismatch(
                f"tensor {self.name!r}: expected at most {MOST_DIMS} sizes in 0..2^60 - 1, found "
                f"{len(self.shape)}: {self.shape[:MOST_DIMS]}"
            )
        if self.dtype == "F4" and (not self.shape or self.shape[-1] % 2):
            raise LayoutMismatch(f"tensor {self.name!r}: F4 needs an even last dimension")

    def require_dtype(self) -> None:
        """Refuse a dtype that is not supported.

        Raises:
            LayoutMismatch: It is none of ``WIDTHS``.
        """
        if self.dtype not in WIDTHS:
            raise LayoutMismatch(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not supported; expected one of "
                f"{', '.join(sorted(WIDTHS))}; convert it, or leave it out with exclude="
            )

    @property
    def width(self) -> int:
        """Bytes of one element.

        Raises:
            LayoutMismatch: The dtype is not supported.
        """
        self.require_dtype()
        return WIDTHS[self.dtype]

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape counted in elements: the logical shape, its last size halved for F4."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.width


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned block of a tensor, in elements: where it starts and how large it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, extent: tuple[int, ...]) -> "Box":
        """The box that covers a tensor of ``extent`` elements."""
        return cls((0,) * len(extent), extent)

    @property
    def numel(self) -> int:
        """Number of elements inside."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, by dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def inside(self, extent: tuple[int, ...]) -> bool:
        """Whether the box lies within a tensor of ``extent`` elements."""
        return (
            len(self.offset) == len(self.shape) == len(extent)
            and min((*self.offset, *self.shape), default=0) >= 0
            and all(e <= n for e, n in zip(self.end, extent, strict=True))
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The common block, or None when the two share no element."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(map(min, self.end, other.end))
        shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None


@dataclass(frozen=True)
class Layout:
    """All canonical tensors, sorted by name, and second names of some of them (tied weights)."""

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            tensor.require_dtype()
        names = [t.name for t in self.tensors]
        if any(a >= b for a, b in pairwise(names)):
            raise LayoutMismatch("layout: tensor names must be sorted and unique")
        if any(a >= b for a, b in pairwise(alias for alias, _ in self.aliases)):
            raise LayoutMismatch("layout: aliases must be sorted and unique")
        for alias, target in self.aliases:
            if alias in self.index or target not in self.index:
                raise LayoutMismatch(f"layout: alias {alias!r} -> {target!r} is not a second name")

    @classmethod
    def of(
        cls, tensors: Iterable[TensorSpec], *, aliases: Mapping[str, str] | None = None
    ) -> "Layout":
        """A layout of ``tensors`` in any order."""
        ordered = tuple(sorted(tensors, key=lambda t: t.name))
        return cls(ordered, tuple(sorted((aliases or {}).items())))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each canonical name in ``tensors``."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def alias_of(self) -> Mapping[str, str]:
        """Canonical name by alias."""
        return dict(self.aliases)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the layout's bytes, in hex."""
        return blake3(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical JSON (FORMAT.md, "Layout")."""
        document = {
            "format": FORMAT,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "aliases": [list(pair) for pair in self.aliases],
        }
        return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "layout") -> "Layout":
        """Parse bytes whose hash has been checked.

        Raises:
            UnsupportedFormat: Written by another format version.
            DamagedObject: Not the JSON that ``to_bytes`` writes.
        """
        if len(data) > MOST_BYTES:
            raise DamagedObject(f"{name}: expected at most {MOST_BYTES} bytes, found {len(data)}")
        try:
            document: dict[str, Any] = json.loads(data)
            if document["format"] != FORMAT:
                raise UnsupportedFormat(
                    f"{name}: layout format {document['format']}, this reader knows {FORMAT}"
                )
            found = cls(
                tuple(_spec(item) for item in document["tensors"]),
                tuple((_name(alias), _name(target)) for alias, target in document["aliases"]),
            )
            canonical = found.to_bytes()
        except UnsupportedFormat:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
            raise DamagedObject(f"{name}: not a layout ({e})") from e
        if canonical != data:  # a second spelling would be a second name for the same layout
            raise DamagedObject(f"{name}: not the canonical form of a layout")
        return found


def _spec(item: Any) -> TensorSpec:
    """A tensor from its JSON form; types are exact."""
    name, dtype, sizes = item
    if any(type(n) is not int for n in sizes):
        raise ValueError(f"tensor {name!r:.80}: sizes are not all integers")
    return TensorSpec(_name(name), dtype, tuple(sizes))


def _name(name: Any) -> str:
    """A name that can be used: digests are seeded with its UTF-8, which lone surrogates lack."""
    if type(name) is not str:
        raise ValueError(f"not a name: {name!r:.80}")
    name.encode()
    return name
