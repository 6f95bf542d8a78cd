"""Staging for all of a receiver's memory: tensors on the host and on any number of devices."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weightdelta.apply import rehearse, store_values
from weightdelta.config import DeviceConfig
from weightdelta.decode import Staged, Stager
from weightdelta.device_staged import DeviceStaged
from weightdelta.errors import ConfigError, NotPrepared, StateMismatch
from weightdelta.fetch import Fetched, Tally
from weightdelta.layout import Layout
from weightdelta.placement import Resident
from weightdelta.site import Site
from weightdelta.stage_device import DeviceStager
from weightdelta.stats import PrepareStats


def sites_of(residents: Sequence[Resident], *, layout: Layout, config: DeviceConfig) -> list[Site]:
    """The devices that patch some of ``residents`` themselves.

    Raises:
        ConfigError: Raw blocks are asked for, and there is no device, or none that decodes them.
    """
    groups: dict[torch.device, list[Resident]] = {}
    for resident in residents:
        if resident.on_device:
            groups.setdefault(resident.source.device, []).append(resident)
    if config.blocks == "raw" and not groups:
        raise ConfigError(
            "device.blocks is 'raw', but no weights of this model are patched by device kernels "
            "(none lie on a GPU, or device.use is 'never'); set device.blocks to 'lists'"
        )
    return [Site(g, device=d, layout=layout, config=config) for d, g in groups.items()]


@dataclass(slots=True)
class Staging:
    """Everything that a move stores, wherever it lies; ``stage_s`` is what devices took for it."""

    host: list[Staged] = field(default_factory=list)
    devices: list[DeviceStaged] = field(default_factory=list)
    stage_s: float = 0.0
    _cleared: bool = False

    def stats(self, *, hops: int, start: int, end: int, tally: Tally, began: float) -> PrepareStats:
        """What it took to stage this, from ``began`` (``time.monotonic``) until now."""
        took = time.monotonic() - began
        return PrepareStats(
            from_version=start,
            version=end,
            hops=hops,
            fetched_bytes=tally.nbytes,
            changed=self.changed,
            fetch_s=tally.seconds,
            decode_s=max(took - tally.seconds - self.stage_s, 0.0),
            stage_s=self.stage_s,
            prepare_s=took,
            device_bytes=self.device_bytes,
            pinned_bytes=self.pinned_bytes,
            raw_frames=self.raw_frames,
            decoder=self.decoder,
        )

    @property
    def changed(self) -> int:
        """Changed elements."""
        host = sum(len(item.index) for item in self.host)
        return host + sum(part.changed for part in self.devices)

    @property
    def device_bytes(self) -> int:
        """Device memory that staged values take."""
        return sum(part.device_bytes for part in self.devices)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that staged values take."""
        return sum(part.pinned_bytes for part in self.devices)

    @property
    def raw_frames(self) -> int:
        """Frames that wait as raw blocks."""
        return sum(part.raw_frames for part in self.devices)

    @property
    def decoder(self) -> str:
        """What decodes raw blocks in the pause; "" where none wait."""
        return "; ".join(sorted(set().union(*(part.decoders for part in self.devices))))

    def clear(self) -> None:
        """Give all memory back; nothing can be stored any more."""
        self._cleared = True
        self.host = []
        for part in self.devices:
            part.clear()
        self.devices = []

    def store(self, *, pool: Executor, workers: int, back: bool) -> None:
        """Store the new values (``back``: the old ones), all or none.

        Raises:
            StateMismatch: Some place held neither; what had been stored was put back.
            DeviceLost: A device failed; the weights belong to no version.
            NotPrepared: It was given back.
            Dirty: What had been stored could not be put back.
        """
        if self._cleared:
            raise NotPrepared("what was staged has been given back; prepare() it again")
        begun: list[DeviceStaged] = []
        with _undone(begun, back=back):
            for part in self.devices:
                begun.append(part)
                part.begin(back=back)
            store_values(self.host, pool=pool, workers=workers, back=back)
            with _undone_on_host(self.host, pool, workers, back=back):
                for part in list(begun):
                    begun.remove(part)  # one that finds a mismatch puts itself back
                    part.finish(back=back)
                    begun.append(part)


@contextmanager
def _undone(begun: Sequence[DeviceStaged], *, back: bool) -> Iterator[None]:
    """On a mismatch elsewhere, undo what devices have begun."""
    try:
        yield
    except StateMismatch:
        for part in begun:
            part.put_back(back=back)
        raise


@contextmanager
def _undone_on_host(
    host: Sequence[Staged], pool: Executor, workers: int, *, back: bool
) -> Iterator[None]:
    try:
        yield
    except StateMismatch:
        store_values(host, pool=pool, workers=workers, back=not back)
        raise


class Stagers:
    """Stages a path for host and devices alike."""

    def __init__(
        self,
        residents: Sequence[Resident],
        *,
        sites: Sequence[Site],
        pool: Executor,
        hops: int,
        older: Staging,
    ) -> None:
        """``older`` has device memory from the same budget, and gives way."""
        self._host = Stager([r for r in residents if not r.on_device], pool=pool)
        before = {part.site.device: part for part in older.devices}
        self._devices = [
            DeviceStager(site, pool=pool, hops=hops, older=before.get(site.device))
            for site in sites
        ]

    def add(self, fetched: Fetched) -> None:
        """Take one hop in; hops come in path order."""
        self._host.add(fetched)
        for stager in self._devices:
            stager.add(fetched)

    def clear(self) -> None:
        """Give all memory back: nothing will come of it."""
        for stager in self._devices:
            stager.clear()

    def finish(self) -> Staging:
        """Everything staged and checked, ready for the pause.

        Raises:
            StateMismatch: A tensor's digest would not change as the deltas say.
            LayoutMismatch: Two tensors that lie in the same memory change differently.
        """
        staged = self._host.finish()
        rehearse(staged)
        devices = [stager.finish() for stager in self._devices]
        return Staging(staged, devices, sum(stager.stage_s for stager in self._devices))
