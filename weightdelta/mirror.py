"""A copy of a rank's baseline in device memory, so that old bytes need not cross the link."""

from collections.abc import Sequence

import torch

from weightdelta.baseline import Baseline, EncodedFrame
from weightdelta.device_memory import Lane, pin
from weightdelta.digest import MASK
from weightdelta.errors import DeviceMemory, StateMismatch
from weightdelta.kernels.device import INTS, DeviceChunks, DeviceOps, DevicePlanes


class Mirror:
    """Follows the baseline on the host; that stays the truth, and fills this one when it is lost.

    Attributes:
        memory: uint8, as the baseline's arena; good after ``refresh``.
    """

    def __init__(self, baseline: Baseline, *, device: torch.device, ops: DeviceOps) -> None:
        self._baseline = baseline
        self._device = device
        self._ops = ops
        self._version: int | None = None
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def refresh(self, lane: Lane) -> int:
        """Bring the copy to the baseline's version; returns the bytes sent to the device.

        Raises:
            DeviceMemory: There is no room for it.
        """
        arena = self._baseline.arena
        if self._version == self._baseline.version and len(self.memory) == len(arena):
            return 0
        self._version = None
        if len(self.memory) != len(arena):
            try:
                self.memory = torch.empty(len(arena), dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as e:
                raise DeviceMemory(
                    f"capture: {self._device} has no room for a baseline of {len(arena)} bytes; "
                    "set device.baseline: host"
                ) from e
        pin(arena)
        with lane:
            self.memory.copy_(torch.from_numpy(arena), non_blocking=True)
        lane.wait()
        self._version = self._baseline.version
        return len(arena)

    def advance(self, encoded: Sequence[EncodedFrame], *, start: int) -> None:
        """Apply the frames that have moved the baseline on from version ``start``.

        Raises:
            StateMismatch: A frame's digest change here is not the published one.
        """
        stale, self._version = self._version != start, None
        if stale:
            return  # filled anew when it is needed
        sums = [(item, self._apply(item)) for item in encoded if item.changed]
        for item, change in sums:
            found = int(change.sum()) & MASK
            if found != item.digest_change:
                raise StateMismatch(
                    f"baseline frame {item.frame} on {self._device}: expected digest change "
                    f"{item.digest_change:#018x}, found {found:#018x}; check this device"
                )
        self._version = self._baseline.version

    def _apply(self, item: EncodedFrame) -> torch.Tensor:
        baseline = self._baseline
        spec, chunks = baseline.plan.frame(item.frame), baseline.chunks(item.frame)
        low = baseline.offsets[item.frame]
        target = self.memory[low : low + spec.nbytes].view(INTS[spec.width])
        return self._ops.decode_into(
            target,
            DevicePlanes.of(baseline.decode(item), device=self._device),
            chunks=DeviceChunks.of(chunks, device=self._device),
            xor=baseline.values == "xor",
        )
