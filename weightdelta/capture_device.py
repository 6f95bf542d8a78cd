"""mask on a device: weights in device memory are compared there, window by window.

A window's live elements are gathered into one buffer, cast to the wire dtype; its old bytes come
down from the pinned baseline on a lane of their own, a few windows ahead; what changed goes up
on a third. Only planes ever leave the device.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from weightdelta.baseline import Baseline, EncodedFrame
from weightdelta.config import DeviceConfig
from weightdelta.device_memory import HostBuffer, Lane, Mark, on_device, padded, pin
from weightdelta.errors import DeviceLost, DeviceMemory
from weightdelta.fence import Token
from weightdelta.kernels.device import INTS, device_ops
from weightdelta.kernels.planes import UINTS, Planes
from weightdelta.live import FramePlanes, Live
from weightdelta.mirror import Mirror
from weightdelta.stats import CaptureCosts
from weightdelta.windows import Window, plan_windows, split_planes

#: Called with the planes of a window's frames as soon as they are on the host.
Sink = Callable[[list[FramePlanes]], None]


@dataclass(slots=True)
class _Old:
    """Old bytes of a window, on the device once ``ready`` is passed."""

    memory: torch.Tensor
    begun: Mark
    ready: Mark


@dataclass(slots=True)
class _Flight:
    """A window whose planes are on their way up.

    Attributes:
        parts: The device's tensors; kept until they have landed.
        landing: Where each arrives, uint8.
    """

    window: Window
    parts: list[torch.Tensor]
    landing: list[torch.Tensor]
    up: Mark
    times: tuple[Mark, Mark, Mark, Mark]


class DeviceCapture:
    """Compares what one device holds of a rank's frames with the rank's baseline.

    Attributes:
        costs: What the last capture took.
    """

    def __init__(self, baseline: Baseline, *, device: torch.device, config: DeviceConfig) -> None:
        self._baseline = baseline
        self._device = device
        self._ops = device_ops(device)
        # A baseline in device memory needs no slots: windows may take their room.
        held = config.baseline == "device"
        self._limit = config.window_bytes * (1 + config.slots if held else 1)
        self._lanes = self._down, self._work, self._up = Lane(device), Lane(device), Lane(device)
        self._slots: list[torch.Tensor] = []
        self._count = 0 if held else config.slots
        self._new = torch.empty(0, dtype=torch.uint8, device=device)
        self._landing = [HostBuffer(device) for _ in range(2)]
        self._windows: list[Window] = []
        self._planned: tuple[int, tuple[int, ...]] = (0, ())
        self._mirror = (
            None if self._count else Mirror(baseline, device=device, ops=self._ops)
        )  # fmt: skip
        self.costs = CaptureCosts()

    def capture(self, frames: Sequence[int], live: Live, *, token: Token, sink: Sink) -> None:
        """Hand the planes of ``frames``, ascending, to ``sink``, in this order.

        Raises:
            CaptureDropped: An optimizer step could not wait any longer.
            LayoutMismatch: A tensor changed its shape or dtype, or went away.
            DeviceMemory: Not even one frame fits in what the device has left.
            DeviceLost: The device failed.
        """
        self.costs = CaptureCosts()
        with on_device(self._device, doing="capture"):
            self._work.after_caller()  # the weights may still be being written
            if self._mirror:
                self._add(down_bytes=self._mirror.refresh(self._down))
            done = 0
            while done < len(frames):
                try:
                    for window in self._run(frames[done:], live, token, sink):
                        done += len(window.frames)
                except torch.OutOfMemoryError as e:
                    self._shrink(e)
                finally:
                    for lane in self._lanes:  # nobody may read live weights after this
                        lane.wait()
        self._sum_up()

    def advance(self, encoded: Sequence[EncodedFrame], *, start: int) -> None:
        """Move the copy in device memory, if there is one, along with the baseline.

        The version is committed by now. A copy that could not follow is filled anew by the next
        capture, which then says what is wrong with the device.
        """
        if self._mirror:
            with (
                suppress(DeviceMemory, DeviceLost),
                on_device(self._device, doing="advance of the baseline"),
            ):
                self._mirror.advance(encoded, start=start)

    # -- memory --------------------------------------------------------------------------------

    def _plan(self, frames: Sequence[int]) -> list[Window]:
        wanted = (self._limit, tuple(frames))
        if wanted != self._planned:
            self._windows = plan_windows(
                self._baseline, frames, limit=self._limit, device=self._device
            )
            self._planned = wanted
        self._reserve(padded(max(window.nbytes for window in self._windows)))
        return self._windows

    def _reserve(self, size: int) -> None:
        """Take the slots; they are kept for the captures to come."""
        if len(self._new) >= size:
            return
        self._release()
        slots = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(self._count)
        ]
        self._new = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._slots = slots
        if slots:
            pin(self._baseline.arena)

    def _release(self) -> None:
        self._slots = []
        self._new = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Give the slots back and halve the windows.

        Raises:
            DeviceMemory: They hold one frame each already.
        """
        self._release()
        torch.cuda.empty_cache()
        if all(len(window.frames) == 1 for window in self._windows):
            raise DeviceMemory(
                f"capture: {self._device} has no room for a window of one frame "
                f"({str(error).partition(chr(10))[0]}); free some device memory, or attach with "
                "smaller frame_bytes"
            ) from error
        self._limit = max(window.nbytes for window in self._windows) // 2

    # -- the pipeline --------------------------------------------------------------------------

    def _run(self, frames: Sequence[int], live: Live, token: Token, sink: Sink) -> Iterator[Window]:
        """Compare window after window; yields each whose planes have been handed over."""
        windows, count = self._plan(frames), max(self._count, 1)
        coming = deque(self._fetch(w, i, []) for i, w in enumerate(windows[:count]))
        flights: deque[_Flight] = deque()
        free: list[Mark] = []  # where each window's comparison ended
        for i, window in enumerate(windows):
            token.check()
            flights.append(self._compare(window, live, coming.popleft(), self._landing[i % 2]))
            free.append(flights[-1].times[-1])
            # Before this thread turns to what has landed: the link must not wait for it.
            following = windows[i + count : i + count + 1]
            coming.extend(self._fetch(w, i + count, free) for w in following)
            if len(flights) == len(self._landing):
                yield self._land(flights.popleft(), sink)
        while flights:
            yield self._land(flights.popleft(), sink)

    def _fetch(self, window: Window, number: int, free: Sequence[Mark]) -> _Old:
        """Start the copy of a window's old bytes into the slot of the one that is done."""
        part = slice(window.low, window.low + window.nbytes)
        if self._mirror:
            mark = self._down.mark(timed=True)
            return _Old(self._mirror.memory[part], mark, mark)
        slot = self._slots[number % self._count][: window.nbytes]
        if number >= self._count:
            self._down.after(free[number - self._count])
        begun = self._down.mark(timed=True)
        with self._down:
            slot.copy_(torch.from_numpy(self._baseline.arena[part]), non_blocking=True)
        self._add(down_bytes=window.nbytes)
        return _Old(slot, begun, self._down.mark(timed=True))

    def _compare(self, window: Window, live: Live, old: _Old, landing: HostBuffer) -> _Flight:
        begun = self._work.mark(timed=True)
        kind = INTS[window.width]
        with self._work:
            new = self._new[: window.nbytes]
            lows = [self._baseline.offsets[frame] - window.low for frame in window.frames]
            live.fill_all(window.specs, lows, out=new)
            self._work.after(old.ready)
            planes, change = self._ops.encode(
                old.memory.view(kind),
                new.view(kind),
                chunks=window.chunks,
                xor=self._baseline.values == "xor",
            )
        ended = self._work.mark(timed=True)
        self._up.after(ended)
        parts = [planes.counts, planes.gaps, planes.bitmap, planes.values, change]
        with self._up:
            landed = _copy_up(parts, landing)
        times = (old.begun, old.ready, begun, ended)
        return _Flight(window, parts, landed, self._up.mark(), times)

    def _land(self, flight: _Flight, sink: Sink) -> Window:
        flight.up.wait()
        window = flight.window
        counts, gaps, bitmap, values, change = (part.numpy() for part in flight.landing)
        planes = Planes(
            counts.view(np.uint32),
            gaps.view(np.uint16),
            bitmap,
            values.view(UINTS[window.width]),
        )
        sink(split_planes(window, planes, change.view(np.uint64)))
        begun_down, ended_down, begun, ended = flight.times
        self._add(
            windows=1,
            up_bytes=sum(len(part) for part in flight.landing),
            upload_s=begun_down.until(ended_down),
            compare_s=begun.until(ended),
        )
        planes_bytes = sum(part.nbytes for part in flight.parts)
        scratch = self._ops.scratch(len(window.chunks), width=window.width)
        self.costs = replace(
            self.costs, device_bytes=max(self.costs.device_bytes, 2 * planes_bytes + scratch)
        )
        return window

    # -- costs ---------------------------------------------------------------------------------

    def _add(self, **costs: float) -> None:
        found = {name: getattr(self.costs, name) + value for name, value in costs.items()}
        self.costs = replace(self.costs, **found)

    def _sum_up(self) -> None:
        buffers = [*self._slots, self._new]
        if self._mirror:
            buffers.append(self._mirror.memory)
        landing = sum(buffer.nbytes for buffer in self._landing)
        self._add(
            device_bytes=sum(buffer.nbytes for buffer in buffers),
            pinned_bytes=landing + self._baseline.arena.nbytes,
        )


def _copy_up(parts: Sequence[torch.Tensor], landing: HostBuffer) -> list[torch.Tensor]:
    """Start the copies of device tensors into one piece of host memory; uint8 views of it."""
    sizes = [part.nbytes for part in parts]
    ends = np.cumsum([padded(size) for size in sizes]).tolist()
    memory = landing.get(ends[-1])
    found = []
    for part, size, low in zip(parts, sizes, [0, *ends], strict=False):
        target = memory[low : low + size]
        target.copy_(part.reshape(-1).view(torch.uint8), non_blocking=True)
        found.append(target)
    return found
