"""Compiled kernels on disk: one file a signature, named by all that went into its code.

numba's own cache keeps an index beside numbered files. Two processes that compile different
signatures of a function at once can give both the same number, and from then on every process may
run the code of one with the arguments of the other (numba issues 4807 and 10128; here it gave
wrong sums without a word). It also knows only the file of the function that is called, not those
of the functions compiled into it. Here nothing is shared between two signatures, and the name
covers the sources of all kernels.
"""

import logging
import os
import pickle
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
from blake3 import blake3
from numba.core import serialize
from numba.core.caching import FunctionCache

_HASH: Final = 32
#: Modules beside this one that numba does not compile.
_OTHERS: Final = ("torch_", "triton_")
#: Pickles what numba makes; untyped.
_dumps: Final[Any] = serialize.dumps
_log: Final = logging.getLogger(__name__)


@cache
def sources() -> tuple[Path, ...]:
    """The files of ours that a compiled kernel may hold code or constants of."""
    here = Path(__file__).parent
    mine = (path for path in here.glob("*.py") if not path.name.startswith(_OTHERS))
    return (*sorted(mine), here.parent / "digest.py")


@cache
def _stamp() -> bytes:
    """The digest of the sources and of what compiles them."""
    found = blake3(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sources():
        found.update(blake3(path.read_bytes()).digest())
    return bytes(found.digest())


class CodeFiles:
    """The compiled code of one function, by key.

    Args:
        folder: Where its files lie.
        prefix: What their names begin with: the function's own.
        stamp: What the code depends on beside its key.
    """

    def __init__(self, folder: Path, *, prefix: str, stamp: bytes) -> None:
        self._folder, self._prefix, self._stamp = folder, prefix, stamp

    def path(self, key: object) -> Path:
        """Where the code for ``key`` lies, once some process has compiled it."""
        name = blake3(self._stamp + repr(key).encode()).hexdigest(length=16)
        return self._folder / f"{self._prefix}.{name}.nbk"

    def load(self, key: object) -> Any:
        """The code for ``key``; None where there is none that is whole and its own."""
        try:
            data = self.path(key).read_bytes()
        except OSError:  # not there, or not ours to read: it is compiled
            return None
        if blake3(data[_HASH:]).digest() != data[:_HASH]:
            return None
        found, code = pickle.loads(data[_HASH:])  # noqa: S301 (a local file, as numba's own)
        return code if found == key else None

    def save(self, key: object, code: object) -> None:
        """Keep the code for ``key``; who reads meanwhile sees all of it or nothing."""
        data, path = _dumps((key, code)), self.path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            part.write_bytes(blake3(data).digest() + data)
            os.replace(part, path)
        except OSError as e:
            with suppress(OSError):  # a file cut short, if there is one, is read by nobody
                part.unlink()
            _log.warning("kernels cannot be kept, every process compiles its own: %s", e)

    def flush(self) -> None:
        """Forget the code of every key."""
        for path in self._folder.glob(f"{self._prefix}.*.nbk"):
            path.unlink(missing_ok=True)


def keep_code(kernel: Any) -> None:
    """Give a function of numba's, not compiled yet, a cache of one file a signature.

    Raises:
        RuntimeError: No directory for it can be written.
    """
    made: Any = FunctionCache
    found = made(kernel.py_func)
    prefix = found._impl.filename_base
    found._cache_file = CodeFiles(Path(found.cache_path), prefix=prefix, stamp=_stamp())
    kernel._cache = found  # what njit(cache=True) sets
