"""The Zstd that the package ``zstandard`` brings along, by address: for compiled loops.

Every call of the package takes the interpreter's lock back, for planes of a few KiB; a compiled
loop that calls the library itself takes it once for hundreds of them.
"""

import ctypes
import importlib.util
import threading
import weakref
from functools import cache
from typing import Any, Final

from weightdelta.codecs.zstd import PARAMETERS

#: Version from which on a context can be used for one frame after the other in this way.
_OLDEST: Final = 10400
#: Numbers of ``ZSTD_cParameter`` (zstd.h), by the name that the package has for each.
_NUMBERS: Final = {
    "window_log": 101,
    "hash_log": 102,
    "chain_log": 103,
    "search_log": 104,
    "min_match": 105,
    "target_length": 106,
    "strategy": 107,
    "write_content_size": 200,
    "write_checksum": 201,
    "write_dict_id": 202,
}


@cache
def _library() -> ctypes.CDLL | None:
    """The shared object that holds it; None where the package was built without."""
    found = importlib.util.find_spec("zstandard._cffi")
    if found is None or not found.origin:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        version = library.ZSTD_versionNumber()
        creators = library.ZSTD_createDCtx, library.ZSTD_createCCtx
        others = library.ZSTD_freeDCtx, library.ZSTD_freeCCtx, library.ZSTD_CCtx_setParameter
        _ = library.ZSTD_decompressDCtx, library.ZSTD_compress2
    except (OSError, AttributeError):  # cannot be loaded by itself, or hides the library
        return None
    if version < _OLDEST:
        return None
    for function in creators:
        function.restype = ctypes.c_void_p
    for function in others:
        function.restype = ctypes.c_size_t
    return library


class _Context:
    """A context of the library, freed with this object."""

    def __init__(self, create: Any, free: Any) -> None:
        self.address: int | None = create()
        if self.address:
            gone = weakref.finalize(self, free, ctypes.c_void_p(self.address))
            gone.atexit = False  # a daemon may still be using it then


def _is_set_up(library: ctypes.CDLL, address: int) -> bool:
    """Give a compression context the settings of ``zstd.compress``; whether it took them all."""
    put = library.ZSTD_CCtx_setParameter
    found: list[int] = [
        put(ctypes.c_void_p(address), number, getattr(PARAMETERS, name))
        for name, number in _NUMBERS.items()
    ]
    return max(found) < 1 << 32  # errors are numbers near 2^64


class _Contexts(threading.local):
    """Contexts of one thread, which go with it."""

    def __init__(self) -> None:
        self.decompressor: _Context | None = None
        self.compressor: _Context | None = None
        library = _library()
        if library is None:
            return
        self.decompressor = _Context(library.ZSTD_createDCtx, library.ZSTD_freeDCtx)
        self.compressor = _Context(library.ZSTD_createCCtx, library.ZSTD_freeCCtx)
        if not (self.compressor.address and _is_set_up(library, self.compressor.address)):
            self.compressor = None


_contexts: Final = _Contexts()


def _addresses(name: str, context: _Context | None) -> tuple[int, int] | None:
    library = _library()
    if library is None or context is None or not context.address:
        return None
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return (function, context.address) if function else None


def decompressor() -> tuple[int, int] | None:
    """Addresses of ``ZSTD_decompressDCtx`` and of this thread's context; None where there is none.

    The context must not be used by another thread.
    """
    return _addresses("ZSTD_decompressDCtx", _contexts.decompressor)


def compressor() -> tuple[int, int] | None:
    """The same of ``ZSTD_compress2``; frames are those that ``zstd.compress`` makes."""
    return _addresses("ZSTD_compress2", _contexts.compressor)
