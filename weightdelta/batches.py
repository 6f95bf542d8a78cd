"""A delta's frames in bounded memory: a few range requests ahead of whoever uses them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future

from weightdelta.delta import Delta, DeltaReader, spans

#: Called with what is being done, how much of it is, and how much there is (0: not known).
Progress = Callable[[str, int, int], None]

Batch = list[tuple[int, memoryview]]


def batches(
    reader: DeltaReader, delta: Delta, frames: Sequence[int], *, pool: Executor, ahead: int
) -> Iterator[Batch]:
    """The changed ones among ``frames`` with their verified bytes, one request's worth at a time.

    Args:
        reader: Where to read.
        delta: Whose frames.
        frames: Numbers of the frames wanted, ascending.
        pool: Runs the requests.
        ahead: Requests under way or waiting to be used at most, each of at most
            ``delta.SPAN`` bytes or one frame.

    Raises:
        DamagedObject, MissingObject: A frame is not what the index names.
        StoreUnavailable, StoreTimeout: The store did not answer.
    """
    flying: deque[Future[Batch]] = deque()

    def fetch(wanted: Sequence[int]) -> Batch:
        return list(reader.frames(delta, wanted))

    try:
        for span in spans(delta, frames):
            flying.append(pool.submit(fetch, span.frames))
            if len(flying) >= ahead:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    finally:
        for waiting in flying:
            waiting.cancel()
