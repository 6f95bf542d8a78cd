"""Streams, pinned buffers and memory limits of a device; on a CPU all of it is trivial.

Pipelines are written once: on a CPU a lane runs its work at once and a mark is always passed.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.errors import DeviceLost, DeviceMemory

U8 = npt.NDArray[np.uint8]

#: Torch's types leave much of this module out.
_cuda: Final[Any] = torch.cuda

#: Buffers start at multiples of this in a larger one: enough for any element and vector load.
ALIGN: Final = 256
#: Pinned memory is taken in steps of this, so that slowly growing sizes do not take it anew.
_STEP: Final = 1 << 20


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of ``ALIGN``."""
    return -(-size // ALIGN) * ALIGN


class Mark:
    """A point in a lane's work; on a CPU it is always passed."""

    def __init__(self, stream: torch.cuda.Stream | None, *, timed: bool = False) -> None:
        self._event = _cuda.Event(enable_timing=timed) if stream else None
        if self._event and stream:
            self._event.record(stream)

    @property
    def event(self) -> torch.cuda.Event | None:
        """The CUDA event, if any."""
        return self._event

    def wait(self) -> None:
        """Block this thread until the work before the mark is done."""
        if self._event:
            self._event.synchronize()

    def until(self, later: "Mark") -> float:
        """Seconds from this mark to a later one, both timed and passed; 0 on a CPU."""
        if self._event is None or later.event is None:
            return 0.0
        return float(self._event.elapsed_time(later.event)) / 1e3


class Lane:
    """Work in order on one device, beside other lanes; entered around what it should do.

    Args:
        device: Where.
        low: Go before nothing else, such as a model that serves.
    """

    def __init__(self, device: torch.device, *, low: bool = False) -> None:
        self._stream = None
        if device.type == "cuda":
            # 0, what models run at, is the lowest there is.
            self._stream = _cuda.Stream(device, priority=0 if low else -1)
        self._inside: list[Any] = []

    def __enter__(self) -> Self:
        if self._stream:
            context = _cuda.stream(self._stream)
            context.__enter__()
            self._inside.append(context)
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream:
            self._inside.pop().__exit__(None, None, None)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream, if any, for libraries that are given one."""
        return self._stream

    def mark(self, *, timed: bool = False) -> Mark:
        """The point that the work handed in so far leads to."""
        return Mark(self._stream, timed=timed)

    def after(self, mark: Mark) -> None:
        """Do what follows only once another lane has passed ``mark``."""
        if self._stream and mark.event:
            self._stream.wait_event(mark.event)

    def after_caller(self) -> None:
        """Do what follows only after what the calling thread's current stream has been given."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def wait(self) -> None:
        """Block this thread until all of the lane's work is done."""
        if self._stream:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Lanes:
    """What works on a device for a receiver.

    Attributes:
        low: Preparations, beside a model that serves.
        pause: What happens while it stands still.
        link: Copies to the device.
        decoding: Decoders of raw blocks; nothing else runs in a pause, so low will do.
    """

    low: Lane
    pause: Lane
    link: Lane
    decoding: Lane

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """New ones."""
        low, decoding = Lane(device, low=True), Lane(device, low=True)
        return cls(low, Lane(device), Lane(device), decoding)

    @property
    def all(self) -> tuple[Lane, ...]:
        """All of them."""
        return self.low, self.pause, self.link, self.decoding

    def line_up(self, lane: Lane) -> None:
        """Let ``lane`` go on after all work that was handed in, and the feeding ones after it."""
        for other in self.all:
            lane.after(other.mark())
        for feeding in (self.link, self.decoding):
            feeding.after(lane.mark())

    def wait(self) -> None:
        """Block this thread until all of their work is done."""
        for lane in self.all:
            lane.wait()


@contextmanager
def on_device(device: torch.device, *, doing: str) -> Iterator[None]:
    """Make ``device`` this thread's current one; device errors become ours.

    Raises:
        DeviceMemory: No room was left, in device memory or in pinned memory.
        DeviceLost: A launch or copy failed.
    """
    with torch.cuda.device(device if device.type == "cuda" else -1):
        try:
            yield
        except torch.OutOfMemoryError as e:
            raise DeviceMemory(f"{doing}: no room left on {device} ({_first_line(e)})") from e
        except torch.AcceleratorError as e:
            if "out of memory" in str(e):  # pinned host memory has no error of its own
                raise DeviceMemory(f"{doing}: no room left ({_first_line(e)})") from e
            raise DeviceLost(
                f"{doing}: {device} failed ({_first_line(e)}); restart this process and load the "
                "weights anew"
            ) from e


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class HostBuffer:
    """One piece of host memory, pinned where there is a device, kept and grown for reuse."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def get(self, size: int) -> torch.Tensor:
        """uint8, ``size`` bytes of unknown content, until the next call."""
        if len(self._memory) < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # give back before taking more
            room = -(-size // _STEP) * _STEP
            self._memory = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:size]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self._memory)


_pinned: Final[dict[int, int]] = {}
_pinning = threading.Lock()


def pin(memory: U8) -> bool:
    """Lock the pages of existing host memory, so that a device copies at full speed beside work.

    It ends with the array. Without a device, or where the system refuses, the memory stays as
    it is: copies are then slower, not wrong.

    Returns:
        Whether it is pinned.
    """
    address = memory.ctypes.data
    if not len(memory) or not torch.cuda.is_available():
        return False
    with _pinning:
        if address in _pinned:
            return True
        runtime = _cuda.cudart()
        if int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
            return False
        _pinned[address] = memory.nbytes
    owner = memory
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    weakref.finalize(owner, _unpin, address)
    return True


def pin_if_used(memory: U8) -> bool:
    """Pin ``memory`` where this process has used CUDA already; starting it would cost more."""
    return bool(_cuda.is_initialized()) and pin(memory)


def _unpin(address: int) -> None:
    with _pinning:
        if _pinned.pop(address, None):
            _cuda.cudart().cudaHostUnregister(address)
