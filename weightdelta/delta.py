"""Committed objects, read and verified: layouts, plans, digest tables, indexes, frames.

Nothing is parsed or decoded before its BLAKE3 equals the one that names it. A log entry names
the index and the plan, the plan names the layout, the index names every frame.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from weightdelta.codecs.blocks import Blocks, Inner
from weightdelta.codecs.names import IDS, Codec, takes
from weightdelta.codecs.registry import decode_frame
from weightdelta.codecs.transcode import transcode
from weightdelta.config import Config
from weightdelta.digest import U64
from weightdelta.errors import DamagedObject, UnsupportedFormat
from weightdelta.frame import Frame, FramePlan, Segment, chunks_of
from weightdelta.hashing import I64, U8, hash_pieces
from weightdelta.index import HASH_BYTES, Index
from weightdelta.kernels import ops
from weightdelta.kernels.planes import Chunks, Elements, Planes
from weightdelta.layout import MOST_BYTES, Layout
from weightdelta.record import (
    VersionEntry,
    data_name,
    index_name,
    layout_name,
    plan_name,
    table_name,
)
from weightdelta.store import Store

#: A frame's number and its encoded bytes.
Item = tuple[int, memoryview]

#: Frames at most this far apart in an object are fetched by one request.
GAP = 64 * 1024
#: Bytes that one request asks for at most, unless a single frame is larger.
SPAN = 8 << 20


@dataclass(frozen=True, slots=True)
class Arrived:
    """Verified frames that came with one request.

    Attributes:
        frames: Their numbers, ascending.
        data: Memory that holds them.
        start: int64, where each begins.
        size: int64, bytes of each.
    """

    frames: tuple[int, ...]
    data: bytes
    start: I64
    size: I64

    def only(self, frames: Sequence[int]) -> "Arrived":
        """Some of them; ``frames`` are ascending."""
        if len(frames) == len(self.frames):
            return self
        at = np.searchsorted(np.array(self.frames), np.array(frames))
        return Arrived(tuple(frames), self.data, self.start[at], self.size[at])

    def items(self) -> list[Item]:
        """The frames one by one."""
        view = memoryview(self.data)
        bounds = zip(self.start.tolist(), (self.start + self.size).tolist(), strict=True)
        return [(f, view[low:high]) for f, (low, high) in zip(self.frames, bounds, strict=True)]


@dataclass(frozen=True, slots=True)
class Delta:
    """One committed delta: log entry, plan and index."""

    entry: VersionEntry
    layout: Layout
    plan: FramePlan
    index: Index

    def where(self, frame: int) -> str:
        """A frame's place, for messages."""
        return f"{self.object_of(frame)} frame {frame}"

    def object_of(self, frame: int) -> str:
        """Name of the object that holds a frame."""
        return data_name(self.entry.write_id, int(self.plan.owner[frame]))

    def decode(self, frame: int, data: bytes | memoryview) -> Planes:
        """Planes of a frame whose bytes have been verified."""
        spec = self.plan.frame(frame)
        planes = decode_frame(
            data,
            self.index.sizes_of(frame),
            codec=self.index.codec_of(frame),
            chunks=chunks_of(spec, layout=self.layout),
            width=spec.width,
            values=self.entry.values,
            where=self.where(frame),
        )
        self.check_changed(frame, planes)
        return planes

    def check_changed(self, frame: int, planes: Planes) -> None:
        """Check that a frame has as many changes as the index says; work is shared out by that.

        Raises:
            DamagedObject: It has not.
        """
        wanted = int(self.index.changed[frame])
        if planes.changed != wanted:
            raise DamagedObject(
                f"{self.where(frame)}: expected {wanted} changed elements as the index says, "
                f"found {planes.changed}; the object is damaged"
            )

    def blocks(self, frame: int, data: bytes | memoryview, *, inner: Inner) -> Blocks:
        """A verified frame's XOR mask as raw Snappy or LZ4 blocks, for a device decoder.

        Raises:
            InputError: The delta's values are differences.
        """
        spec = self.plan.frame(frame)
        return transcode(
            data,
            self.index.sizes_of(frame),
            codec=self.index.codec_of(frame),
            inner=inner,
            chunks=chunks_of(spec, layout=self.layout),
            width=spec.width,
            values=self.entry.values,
            where=self.where(frame),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """One range request: bytes ``[start, end)`` of an object, and the frames inside."""

    name: str
    start: int
    end: int
    frames: tuple[int, ...]


def spans(delta: Delta, frames: Sequence[int]) -> list[Span]:
    """The range requests that fetch ``frames``; unchanged frames need none."""
    found: list[Span] = []
    at = np.asarray(frames, np.int64)
    lengths, offsets = delta.index.lengths[at].tolist(), delta.index.offsets[at].tolist()
    owners = delta.plan.owner[at].tolist()
    names = {owner: data_name(delta.entry.write_id, owner) for owner in set(owners)}
    name, begin, end, inside = "", 0, 0, list[int]()
    for frame, owner, start, length in zip(at.tolist(), owners, offsets, lengths, strict=True):
        if not length:
            continue
        joins = name == names[owner] and 0 <= start - end <= GAP and start + length - begin <= SPAN
        if inside and not joins:
            found.append(Span(name, begin, end, tuple(inside)))
            inside = []
        if not inside:
            name, begin = names[owner], start
        inside.append(frame)
        end = start + length
    if inside:
        found.append(Span(name, begin, end, tuple(inside)))
    return found


class DeltaReader:
    """Reads what log entries name, and checks every byte of it.

    Raises (from every method):
        MissingObject: A named object is not there.
        DamagedObject: Bytes differ from the hash that names them.
        UnsupportedFormat: Written by another format version.
    """

    def __init__(self, store: Store, *, config: Config) -> None:
        self.store = store
        self._limits = config.limits
        self._layouts: dict[str, Layout] = {}
        self._plans: dict[str, FramePlan] = {}

    def layout(self, digest: str) -> Layout:
        """The layout of a content digest."""
        if digest not in self._layouts:
            name = layout_name(digest)
            limit = min(self._limits.max_layout_bytes, MOST_BYTES)
            data = self._hashed(name, digest, limit=limit)
            self._layouts[digest] = Layout.from_bytes(data, name=name)
        return self._layouts[digest]

    def plan(self, digest: str, *, layout: Layout) -> FramePlan:
        """The frame plan of a content digest."""
        if digest not in self._plans:
            name = plan_name(digest)
            data = self._hashed(name, digest, limit=self._limits.max_layout_bytes)
            self._plans[digest] = FramePlan.from_bytes(data, layout=layout, where=name)
        plan = self._plans[digest]
        if plan.layout != layout.digest:  # kernels index by it without looking
            raise DamagedObject(
                f"{plan_name(digest)}: the plan is for layout {plan.layout}, expected "
                f"{layout.digest}"
            )
        return plan

    def table(self, digest: str, *, layout: Layout) -> U64:
        """The table of tensor digests whose hash is a version's digest."""
        name = table_name(digest)
        size = 8 * len(layout.tensors)
        data = self._hashed(name, digest, limit=self._limits.max_layout_bytes, size=size)
        return np.frombuffer(data, "<u8").astype(np.uint64)

    def delta(self, entry: VersionEntry, *, layout: Layout) -> Delta:
        """The delta that a version entry commits."""
        known = _codecs(entry)
        name = index_name(entry.write_id)
        limit = self._limits.max_index_bytes
        data = self._hashed(name, entry.index, limit=limit, size=entry.index_bytes)
        plan = self.plan(entry.plan, layout=layout)
        index = Index.from_bytes(data, plan=plan, layout=layout, where=name)
        if (index.version, index.parent) != (entry.version, entry.parent):
            raise DamagedObject(
                f"{name}: expected the index of {entry.parent} -> {entry.version}, "
                f"found {index.parent} -> {index.version}"
            )
        if not set(index.codec_names) <= known:
            raise DamagedObject(
                f"{name}: expected frames of {entry.codec}, found {', '.join(index.codec_names)}"
            )
        return Delta(entry, layout, plan, index)

    def frames(self, delta: Delta, frames: Sequence[int]) -> Iterator[Item]:
        """Encoded bytes of the changed ones among ``frames``, each checked by its hash."""
        for span in spans(delta, frames):
            yield from self._read(delta, span).items()

    def arriving(
        self, delta: Delta, frames: Sequence[int], *, pool: Executor
    ) -> "list[tuple[tuple[int, ...], Future[Arrived]]]":
        """What ``frames`` gives, all of it on its way: numbers and a future for each request."""
        return [(s.frames, pool.submit(self._read, delta, s)) for s in spans(delta, frames)]

    def _read(self, delta: Delta, span: Span) -> Arrived:
        data = self._span(span)
        index, at = delta.index, np.array(span.frames)
        found = Arrived(span.frames, data, index.offsets[at] - span.start, index.lengths[at])
        hashes = hash_pieces(np.frombuffer(data, np.uint8), found.start, found.size)
        _require_equal(hashes[:, :HASH_BYTES], index.hashes[at], delta, span)
        return found

    def _span(self, span: Span) -> bytes:
        data = self.store.read(
            span.name, start=span.start, end=span.end, limit=span.end - span.start
        )
        if len(data) != span.end - span.start:
            raise DamagedObject(
                f"{span.name}: expected bytes {span.start} to {span.end}, found {len(data)} of "
                f"{span.end - span.start}; the object was cut short"
            )
        return data

    def _hashed(self, name: str, digest: str, *, limit: int, size: int | None = None) -> bytes:
        """An object's bytes, of which never more than ``limit`` or a known ``size`` are read."""
        if size is not None and size > limit:
            raise DamagedObject(f"{name}: {size} bytes, more than the {limit} bytes allowed")
        data = self.store.read(name, limit=limit if size is None else size)
        if size is not None and len(data) != size:
            raise DamagedObject(f"{name}: expected {size} bytes, found {len(data)}")
        found = blake3(data).hexdigest()
        if found != digest:
            raise DamagedObject(f"{name}: expected BLAKE3 {digest}, found {found}")
        return data


def _require_equal(found: U8, expected: U8, delta: Delta, span: Span) -> None:
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if len(wrong):
        i = int(wrong[0])
        raise DamagedObject(
            f"{delta.where(span.frames[i])}: expected BLAKE3 {bytes(expected[i]).hex()}, "
            f"found {bytes(found[i]).hex()}; the object is damaged"
        )


def _codecs(entry: VersionEntry) -> set[Codec]:
    """The codecs that a version's frames may have.

    Raises:
        UnsupportedFormat: One of them is unknown here, or cannot carry the entry's values.
    """
    known: dict[str, Codec] = {name: name for name in IDS}
    names = entry.codec.split(",")
    bad = [n for n in names if n not in known or not takes(known[n], entry.values)]
    if bad:
        raise UnsupportedFormat(
            f"version {entry.version}: codec {bad[0]!r} with values {entry.values!r}, this reader "
            f"knows {', '.join(IDS)} (all but the first with 'xor' only): use a newer weightdelta"
        )
    return {known[n] for n in names}


def canonical(
    delta: Delta, frame: int, data: bytes | memoryview
) -> list[tuple[Segment, U64, Elements]]:
    """A frame's changes by segment: canonical element indices (uint64) and values."""
    spec = delta.plan.frame(frame)
    planes = delta.decode(frame, data)
    return spread(spec, planes, chunks=chunks_of(spec, layout=delta.layout))


def spread(spec: Frame, planes: Planes, *, chunks: Chunks) -> list[tuple[Segment, U64, Elements]]:
    """A decoded frame's changes by segment: canonical element indices (uint64) and values."""
    positions = ops().expand(planes, chunks=chunks)
    ends = np.cumsum([segment.numel for segment in spec.segments])
    cuts = np.searchsorted(positions, ends)
    parts, low, at = [], 0, 0
    for segment, high, end in zip(spec.segments, cuts.tolist(), ends.tolist(), strict=True):
        if high > low:
            local = positions[low:high].astype(np.uint64) - np.uint64(at)
            parts.append((segment, canonical_index(local, segment), planes.values[low:high]))
        low, at = high, end
    return parts


def canonical_index(local: U64, segment: Segment) -> U64:
    """Canonical indices of a segment's elements given by their place in it."""
    if segment.rows == 1:
        return local + np.uint64(segment.first)
    row, column = np.divmod(local, np.uint64(segment.run))
    return row * np.uint64(segment.stride) + column + np.uint64(segment.first)


def locate(
    index: U64, segment: Segment
) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Which canonical indices lie in a segment, and at which place of it."""
    relative = index.astype(np.int64) - segment.first
    row, column = np.divmod(relative, segment.stride if segment.rows > 1 else segment.run)
    hit = (row >= 0) & (row < segment.rows) & (column < segment.run)
    return hit, (row * segment.run + column)[hit]
