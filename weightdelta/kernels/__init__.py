"""Element kernels: what turns two weight buffers into a list of changes, and back.

``reference`` (numpy) is the readable definition; ``cpu_ops`` (numba) gives the same bits at
memory speed. :func:`ops` picks one of them once. Importing this package loads neither numba
nor any kernel.
"""

import importlib
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from weightdelta.errors import ConfigError
from weightdelta.kernels.planes import Chunks, Elements, Planes

#: Environment variable that overrides the choice of :func:`ops`.
VARIABLE: Final = "WEIGHTDELTA_KERNELS"

_U8 = npt.NDArray[np.uint8]
_U64 = npt.NDArray[np.uint64]
_MODULES: Final = {
    "reference": "weightdelta.kernels.reference",
    "cpu": "weightdelta.kernels.cpu_ops",
}


class Ops(Protocol):
    """What every kernel module offers; ``kernels.reference`` documents each function.

    Elements are 1-D contiguous arrays of uint8, uint16, uint32 or uint64. Sums and digests are
    modulo 2^64. The functions check nothing about their input except where they say so.
    """

    def encode(
        self, old: Elements, new: Elements, *, chunks: Chunks, xor: bool
    ) -> tuple[Planes, _U64]:
        """What changed from ``old`` to ``new``, and each chunk's digest change."""
        ...

    def decode_into(self, target: Elements, planes: Planes, *, chunks: Chunks, xor: bool) -> _U64:
        """Apply changes to ``target`` in place; each chunk's digest change."""
        ...

    def expand(self, planes: Planes, *, chunks: Chunks) -> npt.NDArray[np.uint32]:
        """Offset in the frame's buffer of each change."""
        ...

    def check(self, planes: Planes, *, chunks: Chunks) -> int:
        """The first chunk whose positions are not sound, or -1."""
        ...

    def digest(self, values: Elements, *, key: int, skip: int, run: int, stride: int) -> int:
        """Sum of h over part of a segment."""
        ...

    def dry_run(
        self,
        resident: Elements,
        index: Elements,
        values: Elements,
        *,
        seed: int,
        offsets: Elements,
        xor: bool,
    ) -> tuple[Elements, Elements, int]:
        """Old and new values of changes to ``resident``, and the digest change."""
        ...

    def scatter(
        self, resident: Elements, offsets: Elements, *, expect: Elements, new: Elements
    ) -> int:
        """Store values where the expected ones are; -1, or the first entry that differs."""
        ...

    def merge(
        self,
        index: Elements,
        old: Elements,
        new: Elements,
        *,
        index2: Elements,
        old2: Elements,
        new2: Elements,
    ) -> tuple[Elements, Elements, Elements]:
        """Two change lists, one after the other, as one."""
        ...

    def pack_nibbles(self, values: Elements) -> tuple[_U8, Elements]:
        """Differences as nibbles and escapes."""
        ...

    def count_escapes(self, nibbles: _U8, *, count: int) -> int:
        """Escapes among ``count`` nibbles; -1 for bad padding."""
        ...

    def unpack_nibbles(self, nibbles: _U8, escapes: Elements, *, count: int) -> Elements:
        """Differences from nibbles and escapes."""
        ...

    def split(self, values: Elements) -> list[_U8]:
        """Byte planes of values, the lowest first."""
        ...

    def join(self, planes: Sequence[_U8 | None], *, width: int, count: int) -> Elements:
        """Values from byte planes; None is a plane of zeros."""
        ...

    def zero_runs(
        self,
        offsets: npt.NDArray[np.uint32],
        values: Elements,
        *,
        blocks: npt.NDArray[np.int64],
        size: int,
        lz4: bool,
    ) -> tuple[_U8, npt.NDArray[np.uint32]]:
        """Raw Snappy or LZ4 blocks of a XOR mask, and the bytes of each."""
        ...


def load(name: str) -> Ops:
    """The kernel module called ``name``: "reference" or "cpu".

    Raises:
        ConfigError: No such kernels.
        ImportError: Their compiler (numba) is not installed.
    """
    if name not in _MODULES:
        raise ConfigError(
            f"{VARIABLE}: unknown kernels {name!r}; expected one of {', '.join(_MODULES)}"
        )
    return cast(Ops, importlib.import_module(_MODULES[name]))


@cache
def ops() -> Ops:
    """The kernels of this process: numba's where numba imports, else numpy's. Chosen once.

    ``WEIGHTDELTA_KERNELS=reference`` or ``=cpu`` overrides the choice.

    Raises:
        ConfigError: The variable names no kernels.
        ImportError: The variable asks for "cpu" and numba cannot be imported.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        return load(wanted)
    try:
        return load("cpu")
    except ImportError:
        return load("reference")


def has_compiled() -> bool:
    """Whether ``ops`` are the compiled ones; then kernels of other modules are at hand as well."""
    return bool(cast(Any, ops()).__name__ == _MODULES["cpu"])
