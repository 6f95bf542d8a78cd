"""fetch: the frames of one delta that a receiver needs, verified, as they arrive."""

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import numpy as np

from weightdelta.delta import Arrived, Delta, DeltaReader, Item
from weightdelta.layout import Layout
from weightdelta.versions import Hop


@dataclass(frozen=True, slots=True)
class Part:
    """Frames that come with one request; ``job`` has them, and perhaps others."""

    numbers: tuple[int, ...]
    job: "Future[Arrived]"

    def arrived(self, numbers: Sequence[int] | None = None) -> Arrived:
        """The frames, or some of them (ascending), once they are there.

        Raises:
            DamagedObject, MissingObject, StoreUnavailable, StoreTimeout: They will not be.
        """
        return self.job.result().only(self.numbers if numbers is None else numbers)


class Frames:
    """Verified frames in order, each handed out once it is there; for any number of readers.

    Every reader meets the error that a request ended with, and the requests after it are dropped.

    Attributes:
        parts: What comes together.
        ended: When the last request so far ended, by ``time.monotonic``.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.ended = time.monotonic()
        for part in parts:
            part.job.add_done_callback(self._note)

    def __iter__(self) -> Iterator[Item]:
        for part in self.parts:
            try:
                found = part.arrived().items()
            except BaseException:
                self.drop()
                raise
            yield from found

    def only(self, numbers: Collection[int]) -> "Frames":
        """Some of the frames, from the same requests."""
        kept = (Part(tuple(n for n in p.numbers if n in numbers), p.job) for p in self.parts)
        return Frames([part for part in kept if part.numbers])

    def drop(self) -> None:
        """Cancel the requests that have not begun."""
        for part in self.parts:
            part.job.cancel()

    def _note(self, _: object) -> None:
        self.ended = time.monotonic()


@dataclass(frozen=True, slots=True)
class Fetched:
    """One hop's delta and the encoded bytes of its wanted, changed frames.

    Attributes:
        frames: ``(frame id, bytes)``, every one checked against the index; reading it waits for
            what has not arrived.
        began: When it was asked for, by ``time.monotonic``.
    """

    hop: Hop
    delta: Delta
    frames: Frames
    began: float

    @property
    def nbytes(self) -> int:
        """Encoded bytes fetched, or to be fetched."""
        lengths = self.delta.index.lengths
        return sum(int(lengths[np.array(part.numbers)].sum()) for part in self.frames.parts)

    def holding(self, tensors: Iterable[int]) -> "Fetched":
        """The same with only the frames that hold a part of one of ``tensors``."""
        held = set(self.delta.plan.holding(np.array(list(tensors), np.int64)))
        return replace(self, frames=self.frames.only(held))


def fetch(
    reader: DeltaReader, hop: Hop, *, layout: Layout, tensors: Sequence[int], pool: Executor
) -> Fetched:
    """Read one hop's index; then only the frames that hold one of ``tensors`` are on their way.

    Raises:
        DamagedObject, MissingObject: Something is not what the log promises; also from reading
            the frames.
        StoreUnavailable, StoreTimeout: The store did not answer; likewise.
    """
    began = time.monotonic()
    delta = reader.delta(hop.entry, layout=layout)
    wanted = delta.plan.holding(np.asarray(tensors, np.int64))
    parts = [Part(numbers, job) for numbers, job in reader.arriving(delta, wanted, pool=pool)]
    return Fetched(hop, delta, Frames(parts), began)


def fetch_path(
    reader: DeltaReader,
    path: Sequence[Hop],
    *,
    layout: Layout,
    tensors: Sequence[int],
    pool: Executor,
    ahead: Executor,
) -> Generator[Fetched, None, None]:
    """Fetch a path hop by hop; the next one is asked for before the caller gets this one.

    Close it when done: requests that have not begun are then dropped.
    """

    def one(hop: Hop) -> Fetched:
        return fetch(reader, hop, layout=layout, tensors=tensors, pool=pool)

    coming = ahead.submit(one, path[0]) if path else None
    ready: Fetched | None = None
    try:
        for following in [*path[1:], None]:
            if coming is None:
                return
            ready = coming.result()
            coming = ahead.submit(one, following) if following else None
            yield ready
    finally:  # nobody wants what has not been asked for yet
        if ready:
            ready.frames.drop()
        if coming and not coming.cancel():
            coming.add_done_callback(_drop)


def _drop(coming: "Future[Fetched]") -> None:
    if not coming.exception():
        coming.result().frames.drop()


@dataclass(slots=True)
class Tally:
    """What has been fetched of a path.

    Attributes:
        nbytes: Encoded bytes.
        seconds: Time in which some of it was on its way.
    """

    nbytes: int = 0
    seconds: float = 0.0
    _until: float = 0.0

    def add(self, fetched: Fetched) -> None:
        """Count a hop whose frames have all been read."""
        self.nbytes += fetched.nbytes
        ended = fetched.frames.ended
        self.seconds += max(ended - max(fetched.began, self._until), 0.0)
        self._until = max(ended, self._until)
