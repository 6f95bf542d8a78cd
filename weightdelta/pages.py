"""Pages of host memory made ready for stores ahead of a pause; their content stays as it is.

Weights that were mapped from a checkpoint, or that a fork shares, are copied page by page on the
first store, which belongs into the preparation.
"""

import ctypes
import mmap
import sys
from functools import cache
from typing import Any, Final

import numpy as np

from weightdelta.digest import U64
from weightdelta.kernels.planes import Elements

#: Linux 5.14, madvise(2): populate page tables writable, as if every page were written to.
_POPULATE_WRITE: Final = 23
#: Pages at most this far apart are made ready by one call.
_NEAR: Final = 64


@cache
def _madvise() -> Any:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def make_writable(memory: Elements, places: U64) -> bool:
    """Take the page faults that storing to ``memory[places]`` would take.

    Args:
        memory: 1-D.
        places: uint64, where values will be stored; any order.

    Returns:
        Whether the system can do this; without it the first store is slower, nothing else.
    """
    if not sys.platform.startswith("linux") or not len(places):
        return not len(places)
    first = memory.ctypes.data
    pages = (first + places.astype(np.int64) * memory.itemsize) // mmap.PAGESIZE
    if bool((pages[1:] < pages[:-1]).any()):
        pages.sort()
    cuts = np.flatnonzero(np.diff(pages) > _NEAR) + 1
    starts = pages[np.concatenate([[0], cuts])] * mmap.PAGESIZE
    ends = (pages[np.concatenate([cuts - 1, [len(pages) - 1]])] + 1) * mmap.PAGESIZE
    return all(
        _madvise()(start, end - start, _POPULATE_WRITE) == 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )
