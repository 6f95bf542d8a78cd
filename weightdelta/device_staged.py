"""Everything that a move stores on one device: lists, raw blocks, or both; all or none."""

from collections.abc import Sequence

from weightdelta.apply_blocks import BlockApply
from weightdelta.device_lists import StagedLists
from weightdelta.errors import StateMismatch
from weightdelta.site import Site


class DeviceStaged:
    """What is staged on one device, ready for the pause."""

    def __init__(self, site: Site, lists: StagedLists, blocks: Sequence[BlockApply] = ()) -> None:
        self._site, self._lists, self._blocks = site, lists, list(blocks)

    @property
    def site(self) -> Site:
        """The device."""
        return self._site

    @property
    def changed(self) -> int:
        """Changed elements."""
        return self._lists.changed + sum(update.changed for update in self._blocks)

    @property
    def raw_frames(self) -> int:
        """Frames that wait as raw blocks."""
        return sum(update.frames for update in self._blocks)

    @property
    def decoders(self) -> set[str]:
        """What decodes raw blocks in the pause."""
        return {update.engine for update in self._blocks if update.frames}

    @property
    def list_bytes(self) -> int:
        """Device memory that lists take, and what updates from blocks have beside their slots."""
        return self._lists.device_bytes + sum(update.own_bytes for update in self._blocks)

    @property
    def device_bytes(self) -> int:
        """The same, and the slots that raw blocks pass through."""
        slots = self._site.blocks.nbytes if self._site.blocks and self._blocks else 0
        return self.list_bytes + slots

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that streamed lists and raw blocks take."""
        return self._lists.pinned_bytes + sum(update.pinned_bytes for update in self._blocks)

    def clear(self) -> None:
        """Give all memory back; slots stay for the next."""
        self._lists.clear()
        for update in self._blocks:
            update.clear()
        self._blocks = []

    def spill(self) -> None:
        """Move lists to pinned host memory, where raw blocks are."""
        self._lists.spill()

    # -- the pause -----------------------------------------------------------------------------

    @property
    def _parts(self) -> list[StagedLists | BlockApply]:
        return [self._lists, *self._blocks]

    def begin(self, *, back: bool) -> None:
        """Start storing new values (``back``: old ones); ``finish`` has to follow.

        Raises:
            DeviceLost: A launch failed; the weights belong to no version.
        """
        for part in self._parts:
            part.begin(back=back)

    def finish(self, *, back: bool) -> None:
        """Wait until all is stored.

        Raises:
            StateMismatch: Some place held neither the old nor the new value; what had been
                stored was put back.
            DeviceLost: The device failed; the weights belong to no version.
            Dirty: What had been stored could not be put back.
        """
        for part in self._parts:
            try:
                part.finish(back=back)
            except StateMismatch:
                for other in self._parts:
                    if other is not part:  # it has put itself back
                        other.put_back(back=back)
                raise

    def put_back(self, *, back: bool) -> None:
        """Undo a ``begin(back=back)``, finished or not, wherever the values it stored are.

        Raises:
            DeviceLost: The device failed.
            Dirty: What had been stored could not be put back.
        """
        for part in self._parts:
            part.put_back(back=back)
