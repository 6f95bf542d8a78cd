"""Staged changes of one device: what the pause stores, from device memory or through the link.

Lists that fit a budget wait in device memory. The others wait in pinned host memory and pass
through two slots while the model stands still; only positions and new values travel then, and
the digest change of every chunk tells whether they met the values they were made for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightdelta.device_memory import Lane, Mark, on_device, padded
from weightdelta.errors import StateMismatch
from weightdelta.kernels.device import ChunkLists
from weightdelta.site import SLOTS, PlacedWindow, Site


@dataclass(slots=True)
class Part:
    """The staged changes of one window.

    Attributes:
        lists: Counts, begins and positions, old and new values; the last three in device
            memory, or pinned host memory once ``streamed``.
        old: The old values once more, which are always there.
        change: int64 [chunks], digest change of each chunk.
    """

    window: PlacedWindow
    lists: ChunkLists
    old: torch.Tensor
    change: torch.Tensor
    changed: int
    streamed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values."""
        return self.changed * (2 + 2 * self.window.width)

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, old values, new values."""
        return self.lists.position, self.old, self.lists.new

    def with_columns(
        self, position: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor
    ) -> ChunkLists:
        """The lists with other memory for what is long."""
        return ChunkLists(self.lists.counts, self.lists.begin, position, old, new)

    def spill(self, lane: Lane) -> None:
        """Move the lists from device memory to pinned host memory, once ``lane`` gets there.

        What is in device memory was made on that lane, so what follows there may have its place.
        """
        if self.streamed:
            return
        pinned = self.lists.position.is_cuda
        with lane:
            host = [
                torch.empty(c.shape, dtype=c.dtype, pin_memory=pinned).copy_(c, non_blocking=True)
                for c in self.columns
            ]
        self.lists = self.with_columns(*host)
        self.old = host[1]
        self.streamed = True


class StagedLists:
    """All changes of one device that wait as lists, ready for the pause."""

    def __init__(self, site: Site, parts: Sequence[Part], *, careful: bool = False) -> None:
        """``careful`` compares streamed lists, too: some memory is stored to twice."""
        self._site = site
        self._parts = list(parts)
        #: Whether the new values are in the weights; None: perhaps some.
        self._held: bool | None = False
        self._careful = careful
        device = site.device
        with site.low:  # the lane that a pause comes after, whatever stream its caller is on
            self._sums = torch.zeros(0, dtype=torch.int64, device=device)
            self._found = torch.zeros(2, dtype=torch.int32, device=device)
        self._answer = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._take_slots()

    @property
    def site(self) -> Site:
        """The device."""
        return self._site

    @property
    def changed(self) -> int:
        """Changed elements."""
        return sum(part.changed for part in self._parts)

    @property
    def device_bytes(self) -> int:
        """Device memory that the lists take, the site's slots apart."""
        return sum(part.nbytes for part in self._parts if not part.streamed)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that streamed lists take."""
        return sum(part.nbytes for part in self._parts if part.streamed)

    def clear(self) -> None:
        """Give all memory back."""
        self._parts = []

    def spill(self) -> None:
        """Move everything to pinned host memory; what follows is streamed."""
        if all(part.streamed for part in self._parts):
            return
        with on_device(self._site.device, doing="prepare"):
            for part in self._parts:
                part.spill(self._site.low)
            self._site.low.wait()
            self._take_slots()

    def _take_slots(self) -> None:
        streamed = [part for part in self._parts if part.streamed]
        if streamed:
            self._site.reserve(max(sum(padded(c.nbytes) for c in p.columns) for p in streamed))

    def rehearse(self) -> None:
        """Compile and load ahead of the pause what it will launch; nothing is stored."""
        with on_device(self._site.device, doing="prepare"), self._site.low:
            for part in {p.window.width: p for p in self._parts}.values():
                counts = torch.zeros_like(part.lists.counts)
                position, old, new = (
                    torch.zeros(1, dtype=c.dtype, device=self._site.device) for c in part.columns
                )
                begin = counts.to(torch.int64)
                for kept in (old, None):
                    nothing = ChunkLists(counts, begin, position, kept, new)
                    self._scatter(part, nothing, back=False)
                self._scatter(part, ChunkLists(counts, begin, position, old, new), back=True)
            self._site.low.wait()

    # -- the pause -----------------------------------------------------------------------------

    def begin(self, *, back: bool) -> None:
        """Start storing new values (``back``: old ones); ``finish`` has to follow.

        Raises:
            DeviceLost: A launch failed; the weights belong to no version.
        """
        again, self._held = self._held is not back, None
        with on_device(self._site.device, doing="apply"):
            self._site.pause.after_caller()
            self._store(back=back, compare=again or self._careful)
            with self._site.pause:
                self._answer.copy_(self._found, non_blocking=True)

    def finish(self, *, back: bool) -> None:
        """Wait until all is stored.

        Raises:
            StateMismatch: Some place held neither the old nor the new value; what had been
                stored was put back.
            DeviceLost: The device failed; the weights belong to no version.
        """
        with on_device(self._site.device, doing="apply"):
            self._site.pause.wait()
        if not bool(self._answer.any()):
            self._held = not back
            return
        self.put_back(back=back)
        raise StateMismatch(
            f"weights on {self._site.device}: expected the values of the prepared version, found "
            f"others ({int(self._answer[0])} places, {int(self._answer[1])} pieces); they were "
            "edited after prepare(). What had been stored was put back; reload a checkpoint and "
            "attach()"
        )

    def put_back(self, *, back: bool) -> None:
        """Undo a ``begin(back=back)``, finished or not, wherever the values it stored are."""
        self._held = None
        with on_device(self._site.device, doing="apply"):
            self._store(back=not back, compare=True)
            self._site.pause.wait()

    def _store(self, *, back: bool, compare: bool) -> None:
        lane = self._site.pause
        # After what a pass before may still do with the same slots.
        self._site.lanes.line_up(lane)
        with lane:
            self._found.zero_()
            for part in self._parts:
                if not part.streamed:
                    self._scatter(part, part.lists, back=back)
        free: list[Mark] = []
        for part in (part for part in self._parts if part.streamed):
            lists = self._send(part, free, back=back, compare=compare)
            lane.after(self._site.link.mark())
            with lane:
                self._scatter(part, lists, back=back and compare)
                if not compare:
                    self._check(part, back=back)
            free.append(lane.mark())

    def _send(self, part: Part, free: Sequence[Mark], *, back: bool, compare: bool) -> ChunkLists:
        """Start the copy of a streamed part's lists into the next slot."""
        slot, link = self._site.slots[len(free) % SLOTS], self._site.link
        if len(free) >= SLOTS:
            link.after(free[-SLOTS])
        position, old, new = part.columns
        wanted = [position, old, new] if compare else [position, old if back else new]
        at, sent = 0, []
        with link:
            for column in wanted:
                target = slot[at : at + column.nbytes].view(column.dtype)
                sent.append(target.copy_(column, non_blocking=True))
                at += padded(column.nbytes)
        return part.with_columns(sent[0], sent[1] if compare else None, sent[-1])

    def _scatter(self, part: Part, lists: ChunkLists, *, back: bool) -> None:
        sums = None
        if lists.old is None:
            self._sums = sums = torch.zeros_like(part.change)
        self._site.ops.scatter(
            lists,
            chunks=part.window.chunks,
            placed=part.window.placed,
            width=part.window.width,
            wrong=self._found[:1],
            back=back,
            sums=sums,
        )

    def _check(self, part: Part, *, back: bool) -> None:
        """Note a chunk whose digest has not changed as it must."""
        expected = -part.change if back else part.change
        self._found[1:] += (self._sums != expected).any().to(torch.int32)
