"""The codecs by name: how a frame's changes become bytes (FORMAT.md, "Frame")."""

from collections.abc import Mapping
from typing import Final, Literal

#: ``inner+outer``: what a receiver's GPU or CPU turns into weights, and what is taken off before.
Codec = Literal["sparse+zstd", "snappy+zstd", "lz4+zstd", "zstd", "none"]
#: Form of a changed element's value: ``new - old`` or ``new xor old``.
Values = Literal["diff", "xor"]

DEFAULT: Final[Codec] = "sparse+zstd"

#: Number of each codec in an index. Stored: never reorder.
IDS: Final[Mapping[Codec, int]] = {
    "sparse+zstd": 0,
    "snappy+zstd": 1,
    "lz4+zstd": 2,
    "zstd": 3,
    "none": 4,
}
#: Name of each number.
BY_ID: Final[Mapping[int, Codec]] = {number: name for name, number in IDS.items()}


def takes(codec: Codec, values: Values) -> bool:
    """Whether a codec can carry values of this form: all but the sparse one code the XOR mask."""
    return codec == DEFAULT or values == "xor"
