"""The wire bytes of the last committed version, frame by frame, on the rank that owns them.

A baseline moves only forward and only after a commit, by decoding the frames that were
published: what receivers will hold is what the next comparison starts from. Each frame's digest
change is checked; a baseline whose check fails is unusable and is rebuilt from base and log.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from weightdelta.base import Base
from weightdelta.codecs.names import Codec, Values
from weightdelta.codecs.registry import decode_frame
from weightdelta.delta import Delta, DeltaReader, canonical, locate
from weightdelta.digest import MASK, U64
from weightdelta.errors import LayoutMismatch, NoPath, StateMismatch
from weightdelta.frame import FramePlan, Segment, chunks_of
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Chunks, Elements, Planes
from weightdelta.layout import Layout
from weightdelta.log import Log

#: Each frame starts at a multiple of this in the arena, and the arena at one of a page [B].
ALIGN: Final = 256
PAGE: Final = 4096


@dataclass(slots=True)
class EncodedFrame:
    """One owned frame of a publication, kept until the commit is known.

    Attributes:
        frame: Frame id in the plan.
        codec: How it is encoded.
        data: Encoded bytes; empty when nothing changed.
        sizes: uint32[15], bytes of each plane.
        digest: 16-byte BLAKE3 of ``data``.
        digest_change: ``sum h(new) - h(old)`` over the frame, modulo 2^64.
        changed: Changed elements.
        done: Whether the baseline has taken it.
    """

    frame: int
    codec: Codec
    data: bytes
    sizes: np.ndarray[tuple[int], np.dtype[np.uint32]]
    digest: bytes
    digest_change: int
    changed: int
    done: bool = False


@dataclass(slots=True)
class Baseline:
    """Wire bytes of the frames that one rank owns, at one version.

    Attributes:
        frames: 1-D unsigned array per owned frame id, segments one after the other.
        version: The version these bytes are.
        arena: The one piece of page-aligned memory in which all frames lie, in order, so that
            a device can be given many frames by one copy.
        offsets: Where in it each frame starts, at a multiple of ``ALIGN`` [B].
    """

    layout: Layout
    plan: FramePlan
    rank: int
    values: Values
    version: int = 0
    frames: dict[int, Elements] = field(default_factory=dict)
    usable: bool = True
    arena: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    offsets: dict[int, int] = field(default_factory=dict)
    _chunks: dict[int, Chunks] = field(default_factory=dict)
    _tensors: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def chunks(self, frame: int) -> Chunks:
        """Where the chunks of a frame lie."""
        if frame not in self._chunks:
            self._chunks[frame] = chunks_of(self.plan.frame(frame), layout=self.layout)
        return self._chunks[frame]

    def tensors(self, frame: int) -> npt.NDArray[np.int64]:
        """int64, the tensor that each chunk of a frame is of."""
        if frame not in self._tensors:
            plan = self.plan
            cut = slice(int(plan.bounds[frame]), int(plan.bounds[frame + 1]))
            ends = np.cumsum(plan.rows[cut] * plan.run[cut])
            segment = np.searchsorted(ends, self.chunks(frame).start, side="right")
            self._tensors[frame] = plan.tensor[cut][segment].astype(np.int64)
        return self._tensors[frame]

    def load(self, base: Base) -> None:
        """Fill every owned frame with version 0."""
        self._allocate()
        for frame in self.plan.owned(self.rank):
            spec = self.plan.frame(frame)
            low = self.offsets[frame]
            out = self.arena[low : low + spec.nbytes].view(UINTS[spec.width])
            at = 0
            for segment in spec.segments:
                name = self.layout.tensors[segment.tensor].name
                base.read(name, segment, out=out[at : at + segment.numel])
                at += segment.numel
            self.frames[frame] = out

    def _allocate(self) -> None:
        """Take the memory of all frames, once: loading again writes to the same."""
        owned = self.plan.owned(self.rank)
        if len(self.offsets) == len(owned):
            return
        sizes = (
            self.plan.numel[owned.start : owned.stop] * self.plan.width[owned.start : owned.stop]
        )
        room = -(-sizes // ALIGN) * ALIGN
        self.offsets = dict(zip(owned, (np.cumsum(room) - room).tolist(), strict=True))
        memory = np.empty(int(room.sum()) + PAGE, np.uint8)
        first = -memory.ctypes.data % PAGE
        self.arena = memory[first : first + int(room.sum())]

    def digests(self) -> U64:
        """Each tensor's digest over the owned elements: uint64, one per tensor of the layout."""
        table = np.zeros(len(self.layout.tensors), np.uint64)
        for frame, elements in self.frames.items():
            at = 0
            chunks = self.chunks(frame)
            for segment in self.plan.frame(frame).segments:
                part = elements[at : at + segment.numel]
                key = int(chunks.key[np.searchsorted(chunks.start, at)])
                value = ops().digest(part, key=key, skip=0, run=segment.run, stride=segment.stride)
                # A slice: adding scalars warns when they wrap around, arrays just do.
                table[segment.tensor : segment.tensor + 1] += np.uint64(value)
                at += segment.numel
        return table

    def advance(self, encoded: Iterable[EncodedFrame], *, version: int) -> None:
        """Move to a committed version with the frames that were published for it.

        Raises:
            StateMismatch: A frame's digest change is not the published one.
        """
        self.usable = False
        for item in encoded:
            if not item.done:
                self._advance(item)
                item.done = True
        self.version = version
        self.usable = True

    def _advance(self, item: EncodedFrame) -> None:
        if not item.changed:
            return
        target, chunks = self.frames[item.frame], self.chunks(item.frame)
        found = ops().decode_into(
            target, self.decode(item), chunks=chunks, xor=self.values == "xor"
        )
        where = f"baseline frame {item.frame} of rank {self.rank}"
        remedy = "rebuild it by attaching again"
        _check_change(found, expected=item.digest_change, where=where, remedy=remedy)

    def decode(self, item: EncodedFrame) -> Planes:
        """The changes in a frame that was encoded here."""
        return decode_frame(
            item.data,
            item.sizes,
            codec=item.codec,
            chunks=self.chunks(item.frame),
            width=self.frames[item.frame].itemsize,
            values=self.values,
            where=f"frame {item.frame} kept for the baseline",
        )

    def replay(self, delta: Delta, reader: DeltaReader) -> None:
        """Move one version forward along a committed delta, whatever its plan was."""
        if delta.entry.parent != self.version:
            raise NoPath(
                f"baseline of rank {self.rank} is at version {self.version}; "
                f"the delta leads from {delta.entry.parent}"
            )
        if delta.plan.digest == self.plan.digest:
            self._replay_same(delta, reader)
        else:
            self._replay_other(delta, reader)
        self.version = delta.entry.version

    def _replay_same(self, delta: Delta, reader: DeltaReader) -> None:
        xor = delta.entry.values == "xor"
        for frame, data in reader.frames(delta, self.plan.owned(self.rank)):
            planes = delta.decode(frame, data)
            found = ops().decode_into(
                self.frames[frame], planes, chunks=self.chunks(frame), xor=xor
            )
            _check_change(
                found,
                expected=int(delta.index.digest_change[frame]),
                where=f"version {delta.entry.version}, frame {frame}",
                remedy="this run was started from other base bytes",
            )

    def _replay_other(self, delta: Delta, reader: DeltaReader) -> None:
        """After a change of world size or sharding: go through canonical indices."""
        mine = self._segments()
        xor = delta.entry.values == "xor"
        tensors = np.fromiter(mine, np.int64, len(mine))
        for frame, data in reader.frames(delta, delta.plan.holding(tensors)):
            for segment, index, values in canonical(delta, frame, data):
                for target, at, own in mine.get(segment.tensor, ()):
                    hit, position = locate(index, own)
                    view = target[at : at + own.numel]
                    part = values[hit].astype(view.dtype, copy=False)
                    old = view[position]
                    view[position] = (old ^ part) if xor else (old + part)

    def _segments(self) -> dict[int, list[tuple[Elements, int, Segment]]]:
        found: dict[int, list[tuple[Elements, int, Segment]]] = {}
        for frame, elements in self.frames.items():
            at = 0
            for segment in self.plan.frame(frame).segments:
                found.setdefault(segment.tensor, []).append((elements, at, segment))
                at += segment.numel
        return found


def _check_change(found: U64, *, expected: int, where: str, remedy: str) -> None:
    change = int(found.sum(dtype=np.uint64)) & MASK
    if change != expected:
        raise StateMismatch(
            f"{where}: expected digest change {expected:#018x}, found {change:#018x}; {remedy}"
        )


def rebuild(
    baseline: Baseline, *, base: Base, log: Log, reader: DeltaReader, versions: Sequence[int]
) -> None:
    """Load version 0 and replay ``versions``, which must follow each other from 1.

    Raises:
        LayoutMismatch: The log is that of another model.
        StateMismatch: The run was started from other base bytes.
    """
    baseline.usable = False
    if log.opened and log.opened.layout != baseline.layout.digest:
        raise LayoutMismatch(
            f"store {log.store.url}: expected layout {baseline.layout.digest[:16]}, found a run "
            f"of layout {log.opened.layout[:16]}; use another store or the same base and exclude"
        )
    baseline.load(base)
    baseline.version = 0
    replay(baseline, log=log, reader=reader, versions=versions)


def replay(baseline: Baseline, *, log: Log, reader: DeltaReader, versions: Sequence[int]) -> None:
    """Move along committed deltas, one version after the other."""
    baseline.usable = False
    for version in versions:
        entry = log.versions[version]
        baseline.replay(reader.delta(entry, layout=baseline.layout), reader)
    baseline.usable = True
