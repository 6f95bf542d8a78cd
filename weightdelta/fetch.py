"""fetch: the frames of one delta that a receiver needs, verified, as they arrive."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from weightdelta.delta import Delta, DeltaReader
from weightdelta.layout import Layout
from weightdelta.versions import Hop


@dataclass(slots=True)
class Fetched:
    """One hop's delta and the encoded bytes of its wanted, changed frames.

    Attributes:
        frames: ``(frame id, bytes)``, every one checked against the index.
        seconds: Time spent on it.
    """

    hop: Hop
    delta: Delta
    frames: list[tuple[int, memoryview]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Encoded bytes fetched."""
        return sum(len(data) for _, data in self.frames)

    def holding(self, tensors: Iterable[int]) -> "Fetched":
        """The same with only the frames that hold a part of one of ``tensors``."""
        held = set(self.delta.plan.holding(np.array(list(tensors), np.int64)))
        return replace(self, frames=[item for item in self.frames if item[0] in held])


def fetch(
    reader: DeltaReader, hop: Hop, *, layout: Layout, tensors: Sequence[int], pool: Executor
) -> Fetched:
    """Read one hop's index, then only the frames that hold one of ``tensors``.

    Raises:
        DamagedObject, MissingObject: Something is not what the log promises.
        StoreUnavailable, StoreTimeout: The store did not answer.
    """
    started = time.monotonic()
    delta = reader.delta(hop.entry, layout=layout)
    wanted = delta.plan.holding(np.asarray(tensors, np.int64))
    frames = list(reader.frames(delta, wanted, pool=pool))
    return Fetched(hop, delta, frames, time.monotonic() - started)


def fetch_path(
    reader: DeltaReader,
    path: Sequence[Hop],
    *,
    layout: Layout,
    tensors: Sequence[int],
    pool: Executor,
    ahead: Executor,
) -> Iterator[Fetched]:
    """Fetch a path hop by hop, the next one while the caller works on the last."""

    def one(hop: Hop) -> Fetched:
        return fetch(reader, hop, layout=layout, tensors=tensors, pool=pool)

    coming = ahead.submit(one, path[0]) if path else None
    for following in [*path[1:], None]:
        if coming is None:
            return
        ready = coming.result()
        coming = ahead.submit(one, following) if following else None
        yield ready
