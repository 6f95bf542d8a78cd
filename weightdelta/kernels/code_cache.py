"""Compiled kernels on disk: one file a signature, named by all that went into its code.

numba's own cache keeps an index beside numbered files. Two processes that compile different
signatures of a function at once can give both the same number, and from then on every process may
run the code of one with the arguments of the other (numba issues 4807 and 10128; here it gave
wrong sums without a word). It also knows only the file of the function that is called, not the
functions and constants compiled into it. Here nothing is shared between two signatures, and the
name covers every function and constant that a kernel reaches, as they are in this process.
"""

import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import llvmlite
import numba
import numpy as np
from blake3 import blake3
from numba.core import serialize
from numba.core.caching import FunctionCache

_HASH: Final = 32
#: Pickles what numba makes; untyped.
_dumps: Final[Any] = serialize.dumps
_log: Final = logging.getLogger(__name__)


def content(function: Any) -> bytes:
    """A digest of a function's code and of all functions and constants of ours that it reaches.

    Args:
        function: A function, or one that numba has wrapped; what it names has to be defined.
    """
    versions = f"{numba.__version__} {llvmlite.__version__} {np.__version__}"
    found = blake3(versions.encode())
    for word in _words(function, set()):
        found.update(len(word).to_bytes(8, "little") + word)
    return bytes(found.digest())


def _words(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What a global or a constant stands for; functions each once."""
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    if isinstance(function, FunctionType):
        if id(function) not in seen:
            seen.add(id(function))
            yield repr((function.__defaults__, function.__kwdefaults__)).encode()
            yield from _code_words(function.__code__, function.__globals__, seen)
            for cell in function.__closure__ or ():
                yield from _words(cell.cell_contents, seen)
    elif isinstance(value, np.ndarray):
        yield repr((value.dtype, value.shape)).encode() + value.tobytes()
    elif isinstance(value, ModuleType):
        yield value.__name__.encode()
    else:
        text = repr(value)
        yield (type(value).__qualname__ if " at 0x" in text else text).encode()


def _code_words(code: CodeType, names: dict[str, Any], seen: set[int]) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_words(constant, names, seen)
        else:
            yield repr(constant).encode()
    for name in code.co_names:
        if name in names:
            yield from _words(names[name], seen)


class CodeFiles:
    """The compiled code of one function, by key.

    Args:
        folder: Where its files lie.
        prefix: What their names begin with: the function's own.
        stamp: Gives what the code depends on beside its key, once it is wanted.
    """

    def __init__(self, folder: Path, *, prefix: str, stamp: Callable[[], bytes]) -> None:
        self._folder, self._prefix, self._stamp = folder, prefix, cache(stamp)

    def path(self, key: object) -> Path:
        """Where the code for ``key`` lies, once some process has compiled it."""
        return self._folder / f"{self._start(key)}{self._stamp().hex()[:32]}.nbk"

    def _start(self, key: object) -> str:
        return f"{self._prefix}.{blake3(repr(key).encode()).hexdigest(length=8)}-"

    def load(self, key: object) -> Any:
        """The code for ``key``; None where there is none that is whole and its own."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            _log.warning("a kept kernel cannot be read, so it is compiled again: %s", e)
            return None
        if _seal(path, data[_HASH:]) != data[:_HASH]:
            return None
        found, code = pickle.loads(data[_HASH:])  # noqa: S301 (a local file, as numba's own)
        return code if found == key else None

    def save(self, key: object, code: object) -> None:
        """Keep the code for ``key``, and none of other stamps.

        Who reads meanwhile sees all of it or nothing.

        Raises:
            OSError: It cannot be kept.
        """
        data, path = _dumps((key, code)), self.path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            part.write_bytes(_seal(path, data) + data)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):  # a file cut short, if there is one, is read by nobody
                part.unlink()
            raise
        for other in self._folder.glob(f"{self._start(key)}*.nbk"):
            if other != path:
                other.unlink(missing_ok=True)

    def flush(self) -> None:
        """Forget the code of every key, and what processes that were killed left half written."""
        for path in self._folder.glob(f"{self._prefix}.*.nbk*"):
            path.unlink(missing_ok=True)


def _seal(path: Path, data: bytes) -> bytes:
    return bytes(blake3(path.name.encode() + b"\0" + data).digest())


class _CodeCache(FunctionCache):
    """numba's cache of a function over ``CodeFiles``; trouble with files never ends a call."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        prefix, folder = self._impl.filename_base, Path(self._cache_path)
        files: Any = CodeFiles(folder, prefix=prefix, stamp=lambda: content(function))
        self._cache_file = files

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if that can be."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as e:
            _log.warning("a kernel cannot be kept, so every process compiles it: %s", e)


def keep_code(kernel: Any) -> None:
    """Give a function of numba's, not compiled yet, a cache of one file a signature.

    One that is not compiled at all (``NUMBA_DISABLE_JIT``) needs none.

    Raises:
        RuntimeError: No directory for it can be written.
    """
    if hasattr(kernel, "py_func"):
        kernel._cache = _CodeCache(kernel.py_func)  # what njit(cache=True) sets
