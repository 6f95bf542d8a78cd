"""The Zstd that the package ``zstandard`` brings along, by address: for compiled loops.

Every call of the package takes the interpreter's lock back, for planes of a few KiB; a compiled
loop that calls the library itself takes it once for hundreds of them.
"""

import ctypes
import importlib.util
import threading
import weakref
from functools import cache
from typing import Final

#: Version from which on a context can be used for one frame after the other in this way.
_OLDEST: Final = 10400


@cache
def _library() -> ctypes.CDLL | None:
    """The shared object that holds it; None where the package was built without."""
    found = importlib.util.find_spec("zstandard._cffi")
    if found is None or not found.origin:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        version = library.ZSTD_versionNumber()
        functions = (library.ZSTD_createDCtx, library.ZSTD_freeDCtx, library.ZSTD_decompressDCtx)
    except (OSError, AttributeError):  # cannot be loaded by itself, or hides the library
        return None
    if version < _OLDEST:
        return None
    create, free, decompress = functions
    create.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    decompress.restype = ctypes.c_size_t
    return library


class _Context:
    """A decompression context, freed with this object."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.address: int | None = library.ZSTD_createDCtx()
        if self.address:
            weakref.finalize(self, library.ZSTD_freeDCtx, self.address)


class _Contexts(threading.local):
    """One context a thread, which goes with the thread."""

    def __init__(self) -> None:
        library = _library()
        self.own = _Context(library) if library else None


_contexts: Final = _Contexts()


def decompressor() -> tuple[int, int] | None:
    """Addresses of ``ZSTD_decompressDCtx`` and of this thread's context; None where there is none.

    The context must not be used by another thread.
    """
    library, own = _library(), _contexts.own
    if library is None or own is None or not own.address:
        return None
    function = ctypes.cast(library.ZSTD_decompressDCtx, ctypes.c_void_p).value
    return (function, own.address) if function else None
