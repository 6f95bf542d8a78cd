"""Fetched frames to planes, many at a time, on all threads."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weightdelta.chunk_table import ChunkTable, part
from weightdelta.codecs.batch import decode_block_frames, decode_frames
from weightdelta.codecs.blocks import INNER
from weightdelta.codecs.names import BY_ID, DEFAULT
from weightdelta.codecs.registry import decode_frame
from weightdelta.delta import Arrived
from weightdelta.fetch import Fetched, Part
from weightdelta.index import Index
from weightdelta.kernels.planes import Chunks, Planes, in_one_piece
from weightdelta.lent_memory import U8, LentMemory

#: Frames, encoded bytes and bytes of values that one task takes on at most, or one frame.
_FRAMES: Final = 128
_ENCODED: Final = 4 << 20
_VALUES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Decoded:
    """What changed in some frames of a table, ascending, of one element width.

    Attributes:
        lent: Whether all planes but the counts lie in memory that was lent for them.
    """

    frames: tuple[int, ...]
    planes: Planes
    lent: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        p = self.planes
        return p.counts.nbytes + p.gaps.nbytes + p.bitmap.nbytes + p.values.nbytes

    def split(self, table: ChunkTable) -> "Iterator[Decoded]":
        """The frames one by one."""
        if len(self.frames) == 1:
            yield self
            return
        length = _chunks(table, self.frames).length
        parts = self.planes.split(length, _bounds(table, self.frames))
        for frame, planes in zip(self.frames, parts, strict=True):
            yield Decoded((frame,), planes, self.lent)


def decode_all(
    fetched: Fetched, table: ChunkTable, *, pool: Executor, lent: LentMemory | None = None
) -> Iterator[Decoded]:
    """Planes of the fetched frames, in order; each task begins when its frames are there.

    Planes go to ``lent`` memory while there is some.

    Raises:
        DamagedObject: A frame cannot be what the index names.
        StoreUnavailable, StoreTimeout: One did not arrive.
    """
    index = fetched.delta.index
    jobs = deque(
        pool.submit(_decode, fetched, table, part, group, lent)
        for part in fetched.frames.parts
        for group in _groups(part.numbers, index, table)
    )
    try:
        while jobs:
            yield jobs.popleft().result()
    except BaseException:
        for job in jobs:
            job.cancel()
        fetched.frames.drop()
        raise


def _groups(frames: Sequence[int], index: Index, table: ChunkTable) -> Iterator[list[int]]:
    """Frames of one width, a task's worth each."""
    at = np.array(frames)
    columns = (index.lengths[at], index.changed[at] * table.width[at], table.width[at])
    group: list[int] = []
    encoded = values = before = 0
    for frame, size, changed, width in zip(frames, *(c.tolist() for c in columns), strict=True):
        encoded += size
        values += changed
        full = len(group) == _FRAMES or encoded > _ENCODED or values > _VALUES
        if group and (full or width != before):
            yield group
            group, encoded, values = [], size, changed
        group.append(frame)
        before = width
    if group:
        yield group


def _decode(
    fetched: Fetched,
    table: ChunkTable,
    part: Part,
    numbers: Sequence[int],
    lent: LentMemory | None,
) -> Decoded:
    arrived, frames = part.arrived(numbers), tuple(numbers)
    if len(frames) > 1:
        memory = _Memory(lent)
        planes = _batch(fetched, table, arrived, memory)
        if planes is not None:
            return Decoded(frames, planes, memory.lent)
    found = [_single(fetched, table, frame, data) for frame, data in arrived.items()]
    return found[0] if len(found) == 1 else _joined(found, int(table.width[frames[0]]), lent)


def _batch(
    fetched: Fetched, table: ChunkTable, arrived: Arrived, memory: "_Memory"
) -> Planes | None:
    """Many frames at once; None where that cannot be, or some frame is unsound."""
    index, frames, at = fetched.delta.index, arrived.frames, np.array(arrived.frames)
    codecs = set(index.codecs[at].tolist())
    codec = BY_ID[codecs.pop()] if len(codecs) == 1 else None
    values = fetched.delta.entry.values
    inner = INNER.get(codec) if codec and values == "xor" else None
    if codec != DEFAULT and not inner:
        return None
    data, sizes = np.frombuffer(arrived.data, np.uint8), index.sizes[at]
    where: Any = {
        "changed": index.changed[at].astype(np.int64),
        "chunks": _chunks(table, frames),
        "bounds": _bounds(table, frames),
        "width": int(table.width[frames[0]]),
        "memory": memory,
    }
    if inner:
        return decode_block_frames(data, arrived.start, sizes, inner=inner, **where)
    return decode_frames(data, arrived.start, sizes, values=values, **where)


def _joined(found: Sequence[Decoded], width: int, lent: LentMemory | None) -> Decoded:
    """Frames as one, so that nobody has to handle each."""
    planes, memory = [item.planes for item in found], _Memory(lent)
    counts = [sum(len(getattr(p, n)) for p in planes) for n in ("gaps", "bitmap", "values")]
    gaps, bitmap, values = in_one_piece(counts, width, memory)
    np.concatenate([p.gaps for p in planes], out=gaps)
    np.concatenate([p.bitmap for p in planes], out=bitmap)
    np.concatenate([p.values for p in planes], out=values)
    whole = Planes(np.concatenate([p.counts for p in planes]), gaps, bitmap, values)
    return Decoded(tuple(i for item in found for i in item.frames), whole, memory.lent)


class _Memory:
    """Memory for planes: lent, if there is some."""

    def __init__(self, lender: LentMemory | None) -> None:
        self._lender, self.lent = lender, False

    def __call__(self, nbytes: int) -> U8:
        found = self._lender.take(nbytes) if self._lender else None
        self.lent = found is not None
        return np.empty(nbytes, np.uint8) if found is None else found


def _single(fetched: Fetched, table: ChunkTable, frame: int, data: memoryview) -> Decoded:
    delta = fetched.delta
    planes = decode_frame(
        data,
        delta.index.sizes_of(frame),
        codec=delta.index.codec_of(frame),
        chunks=table.frame(frame),
        width=int(table.width[frame]),
        values=delta.entry.values,
        where=delta.where(frame),
    )
    delta.check_changed(frame, planes)
    return Decoded((frame,), planes)


def _chunks(table: ChunkTable, frames: Sequence[int]) -> Chunks:
    """The chunks of some frames, one after the other."""
    if frames[-1] - frames[0] + 1 == len(frames):
        return part(table.chunks, int(table.bounds[frames[0]]), int(table.bounds[frames[-1] + 1]))
    parts = [table.frame(frame) for frame in frames]
    return Chunks(*(np.concatenate([getattr(c, n) for c in parts]) for n in Chunks.__slots__))


def _bounds(table: ChunkTable, frames: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    at = np.array(frames)
    return np.concatenate([[0], np.cumsum(table.bounds[at + 1] - table.bounds[at])])
