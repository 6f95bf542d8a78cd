"""Blocks of pinned memory that threads fill and a device copies from, lent one by one."""

import ctypes
import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]

#: Bytes of a block, and blocks at most: 192 MiB in all.
BLOCK: Final = 8 << 20
BLOCKS: Final = 24


class LentMemory:
    """Blocks for one device, pinned if it is one; for any number of threads.

    A block comes back by itself once no array lies in it any more, whatever became of its user. Who
    starts a copy from it has to keep the array until that has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._made = 0

    def take(self, nbytes: int) -> U8 | None:
        """uint8, ``nbytes`` of unknown content; None for 0, for too many, or when all are lent.

        Nobody may wait for one: the lender may be waiting for what the asker makes.
        """
        if not 0 < nbytes <= BLOCK:
            return None
        with self._lock:
            if not self._free and self._made == BLOCKS:
                return None
            self._made += not self._free
            block = self._free.pop() if self._free else None
        if block is None:
            block = self._new()
        if block is None:
            return None
        # An array's base is never another array, so this is what all views keep alive.
        raw: Any = (ctypes.c_uint8 * nbytes).from_address(block.data_ptr())
        weakref.finalize(raw, self._back, block).atexit = False
        return np.frombuffer(raw, np.uint8)

    def _new(self) -> torch.Tensor | None:
        try:
            return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self._pinned)
        except (RuntimeError, MemoryError):  # then without; CUDA's errors are of the first kind
            with self._lock:
                self._made -= 1
            return None

    def _back(self, block: torch.Tensor) -> None:
        # Without the lock: a collection may call this in a thread that holds it. Appending is one
        # step, and only ``take`` removes.
        self._free.append(block)
