"""mask: compare live wire bytes with the baseline and keep only what changed.

``SnapshotCapture`` works with any optimizer: it reads each owned frame of the live state, cast
to the wire dtype, compares it with the baseline and returns the frame's planes. It holds one
window a thread, never a second copy of the shard.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from glob import escape

import numpy as np
import torch

from weightdelta.baseline import Baseline, EncodedFrame
from weightdelta.capture_device import DeviceCapture, Sink
from weightdelta.config import DeviceConfig
from weightdelta.errors import LayoutMismatch
from weightdelta.fence import Token
from weightdelta.frame import Frame
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import TensorSpec, castable
from weightdelta.live import FramePlanes as FramePlanes
from weightdelta.live import Live
from weightdelta.sharding.dtensor import local_shard
from weightdelta.sharding.explicit import LocalShard
from weightdelta.state import State, Tensors, find_aliases, reading
from weightdelta.stats import CaptureCosts
from weightdelta.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank holds: its shards by canonical name, and its second names.

    Attributes:
        shards: One per canonical tensor that the rank holds a part of.
        aliases: Canonical name by second name.
    """

    shards: tuple[LocalShard, ...]
    aliases: Mapping[str, str]


def take_inventory(
    state: State, *, base: Mapping[str, TensorSpec], exclude: Iterable[str] = ()
) -> Inventory:
    """Compare a rank's state with the base checkpoint.

    Raises:
        LayoutMismatch: A tensor that base lacks and nothing excludes, or one whose shape or
            dtype differs.
        UnsupportedSharding: A placement that cannot be mapped.
    """
    with reading(state) as tensors:
        whole = state if isinstance(state, torch.nn.Module) else tensors
        return _inventory(tensors, find_aliases(whole), base=base, exclude=tuple(exclude))


def _inventory(
    tensors: Tensors,
    groups: Iterable[tuple[str, ...]],
    *,
    base: Mapping[str, TensorSpec],
    exclude: tuple[str, ...],
) -> Inventory:
    second = {
        name: next((n for n in group if n in base), "")
        for group in groups
        for name in group
        if name not in base
    }
    aliases = {name: target for name, target in second.items() if target}
    shards = []
    for name, tensor in tensors.items():
        if name in aliases or any(fnmatchcase(name, p) for p in exclude):
            continue
        shards.append(_checked(name, tensor, base))
    return Inventory(tuple(shards), aliases)


def _checked(name: str, tensor: torch.Tensor, base: Mapping[str, TensorSpec]) -> LocalShard:
    spec = base.get(name)
    if spec is None:
        raise LayoutMismatch(
            f"tensor {name!r} is in the trainer's state but not in base; leave it out with "
            f"exclude=[{escape(name)!r}] or publish against a base that has it"
        )
    shard, _ = local_shard(name, tensor, dtype=dtype_name(tensor, name=name))
    if shard.extent != spec.extent:
        raise LayoutMismatch(
            f"tensor {name!r}: expected shape {spec.extent} as in base, found {shard.extent}"
        )
    if not castable(shard.dtype, to=spec.dtype):
        raise LayoutMismatch(
            f"tensor {name!r}: expected dtype {spec.dtype} as in base, found {shard.dtype}; only "
            "plain floats are cast, and never between the two halves; convert it first"
        )
    return LocalShard(name, spec.dtype, shard.extent, shard.box)


class SnapshotCapture:
    """Compares live state with a baseline, frame by frame.

    Attributes:
        storages: Addresses of the memory that the last capture's tensors are views of.
    """

    def __init__(
        self, baseline: Baseline, *, pool: ThreadPoolExecutor, config: DeviceConfig | None = None
    ) -> None:
        self._baseline = baseline
        self._pool = pool
        self._config = config or DeviceConfig()
        self._devices: dict[torch.device, DeviceCapture] = {}
        self._local = threading.local()
        self.storages: frozenset[int] = frozenset()

    @property
    def costs(self) -> CaptureCosts:
        """What the last capture took in device memory and on the link, all devices together."""
        found = [device.costs for device in self._devices.values()]
        return CaptureCosts(
            **{f.name: sum(getattr(costs, f.name) for costs in found) for f in fields(CaptureCosts)}
        )

    def advance(self, encoded: Sequence[EncodedFrame], *, start: int) -> None:
        """Follow the baseline, which these frames have moved on from version ``start``."""
        for device in self._devices.values():
            device.advance(encoded, start=start)

    def capture(
        self, state: State, *, token: Token, sink: Sink = lambda _: None
    ) -> list[FramePlanes]:
        """Planes of every owned frame, in frame order.

        ``sink`` is given those of frames in device memory as soon as they are on the host.

        Raises:
            CaptureDropped: An optimizer step could not wait any longer.
            LayoutMismatch: A tensor changed its shape or dtype, or went away.
            DeviceMemory: A device has no room for even one frame.
            DeviceLost: A device failed.
        """
        with reading(state) as tensors:
            live = Live(tensors, self._baseline.layout)
            found = self._capture(live, token, sink)
            self.storages = live.storages
        return [found[frame] for frame in self._baseline.frames]

    def _capture(self, live: Live, token: Token, sink: Sink) -> dict[int, FramePlanes]:
        jobs: dict[int, Future[FramePlanes]] = {}
        away: dict[torch.device, list[int]] = {}
        found: dict[int, FramePlanes] = {}
        try:
            for frame in self._baseline.frames:
                device = self._place(frame, live)
                if device is None:
                    jobs[frame] = self._pool.submit(self._compare, frame, live, token)
                else:
                    away.setdefault(device, []).append(frame)
            for device, frames in away.items():
                found |= self._on_device(device, frames, live, token, sink)
            return found | {frame: job.result() for frame, job in jobs.items()}
        finally:
            # Nobody may read live weights once the fence and the source have been released.
            wait([job for job in jobs.values() if not job.cancel()])

    def _place(self, frame: int, live: Live) -> torch.device | None:
        """The device that compares an owned frame; None is this host."""
        use, plan = self._config.use, self._baseline.plan
        device = live.device(plan.tensor[plan.bounds[frame] : plan.bounds[frame + 1]].tolist())
        stays = use == "never" or (use == "auto" and device.type != "cuda")
        return None if stays else device

    def _on_device(
        self, device: torch.device, frames: Sequence[int], live: Live, token: Token, sink: Sink
    ) -> dict[int, FramePlanes]:
        if device not in self._devices:
            self._devices[device] = DeviceCapture(
                self._baseline, device=device, config=self._config
            )
        found: dict[int, FramePlanes] = {}

        def take(items: list[FramePlanes]) -> None:
            found.update((item.frame, item) for item in items)
            sink(items)

        self._devices[device].capture(frames, live, token=token, sink=take)
        return found

    def _compare(self, frame: int, live: Live, token: Token) -> FramePlanes:
        token.check()
        spec = self._baseline.plan.frame(frame)
        new = live.view(spec)
        if new is None:
            new = self._window(spec)
            live.fill(spec, out=torch.from_numpy(new.view(np.uint8)))
            if live.device(segment.tensor for segment in spec.segments).type != "cpu":
                torch.cuda.synchronize()  # asked not to use device kernels
        planes, digest = ops().encode(
            self._baseline.frames[frame],
            new,
            chunks=self._baseline.chunks(frame),
            xor=self._baseline.values == "xor",
        )
        return FramePlanes(frame, planes, digest)

    def _window(self, spec: Frame) -> Elements:
        """This thread's window: pages are touched once, not once a frame."""
        size = spec.numel * spec.width
        window = getattr(self._local, "window", None)
        if window is None or len(window) < size:
            window = self._local.window = np.empty(size, np.uint8)
        elements: Elements = window[:size].view(UINTS[spec.width])
        return elements
