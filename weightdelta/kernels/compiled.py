"""What the compiled kernels share: the compiler's switches, scratch memory, bits and hashes."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weightdelta.digest import C1, C2, M1, M2
from weightdelta.kernels.code_cache import keep_code

C1_64: Final = np.uint64(C1)
C2_64: Final = np.uint64(C2)
_M1, _M2 = np.uint64(M1), np.uint64(M2)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
ZERO: Final = np.uint64(0)
ONE: Final = np.uint64(1)

#: Entries that a kernel takes through its steps at once where nothing else sets a block's size.
BLOCK: Final = 4096


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first call; keep the code on disk where some directory can be written."""
    kernel: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # no cache directory: read-only install and no writable home
        keep_code(kernel)
    return kernel


class _Scratch(threading.local):
    """A thread's work arrays, by name; fresh pages would cost more than the work itself."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.uint8]] = {}

    def get(self, name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``count`` entries of unknown content, good until the next request for ``name``."""
        size = count * np.dtype(dtype).itemsize
        held = self._arrays.get(name)
        if held is None or len(held) < size:
            held = self._arrays[name] = np.empty(size, np.uint8)
        return held[:size].view(dtype)


scratch: Final = _Scratch()


def _vector(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """LLVM code that loads 64 elements of ``array`` from element ``at``."""
    lanes = ir.VectorType(ir.IntType(kind.dtype.bitwidth), 64)
    first = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    return builder.load(builder.bitcast(first, lanes.as_pointer()), align=1)


def _changed64(_: Any, old: Any, new: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = _vector(context, builder, signature.args[0], args[0], args[2])
        right = _vector(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(old, new, at), generate


def _popcount(_: Any, bits: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(bits), generate


def _lowest(_: Any, bits: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(bits), generate


#: ``changed64(old, new, at)``: bit j of the result is ``old[at + j] != new[at + j]``. All 64
#: elements must exist. One or a few vector compares on any machine that has them.
changed64: Final[Any] = intrinsic(_changed64)
#: Set bits of a uint64.
popcount: Final[Any] = intrinsic(_popcount)
#: Number of the lowest set bit of a uint64; 64 for zero.
lowest: Final[Any] = intrinsic(_lowest)


@jit
def mix(x: Any) -> Any:
    """The digest's mixer on one uint64; see ``reference.mix64``."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@jit
def hash_change(term: Any, old: Any, new: Any) -> Any:
    """Sum of h(new) - h(old), uint64; ``term`` holds the index terms."""
    total = ZERO
    for i in range(len(term)):
        t = term[i] * C1_64
        total += mix(t ^ (np.uint64(new[i]) * C2_64)) - mix(t ^ (np.uint64(old[i]) * C2_64))
    return total


@jit
def copy(source: Any, out: Any) -> None:
    """``out[:len(source)] = source``; numba takes seconds to compile a slice assignment."""
    for i in range(len(source)):
        out[i] = source[i]


@jit
def gather(source: Any, position: Any, out: Any) -> None:
    """``out[i] = source[position[i]]``."""
    for i in range(len(position)):
        out[i] = source[position[i]]
