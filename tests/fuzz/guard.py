"""What must hold for every input, whatever it is: typed errors, bounded memory, bounded time."""

import resource
import signal
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from weightdelta.errors import WeightDeltaError

#: Memory that may be taken beyond what an object declares.
MARGIN = 64 << 20
#: Processor time that one input may take [s].
SECONDS = 1.0
#: Processor time after which it is cut off [s]: far beyond what a busy machine can add.
ABORT_S = 20


class TooMuch(AssertionError):
    """An input took more memory or time than it may."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input.

    Attributes:
        error: Kind of the error it was refused with, empty when it was accepted.
        peak: Most memory allocated on the way [B]; 0 when not traced.
        cpu: Processor time [s].
    """

    error: str
    peak: int
    cpu: float


def _cut_off(_: int, __: FrameType | None) -> None:
    raise TooMuch(f"an input took more than {ABORT_S} s of processor time")


def guarded(
    check: Callable[[bytes], object], data: bytes, *, declared: int, trace: bool = True
) -> Outcome:
    """Run ``check(data)``, which may only return or raise a ``WeightDeltaError``.

    Args:
        check: Parses, and asserts what holds for a value that was accepted.
        data: The hostile input.
        declared: Bytes that the reader knows of before it reads this object.
        trace: Whether Python's and numpy's allocations are traced; they are slower then.

    Raises:
        TooMuch: Memory or time went beyond the bounds.
        Exception: Whatever else escapes.
    """
    before = signal.signal(signal.SIGPROF, _cut_off)
    signal.setitimer(signal.ITIMER_PROF, ABORT_S)
    if trace:
        tracemalloc.start()
    resident = _most_resident()
    held = tracemalloc.get_traced_memory()[0] if trace else 0
    started = time.process_time()
    error = ""
    try:
        try:
            check(data)
        except WeightDeltaError as e:
            error = e.kind
            str(e)
        cpu = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1] - held if trace else 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if trace:
            tracemalloc.stop()
    bound = declared + len(data) + MARGIN
    grown = _most_resident() - resident
    if max(peak, grown) > bound:
        raise TooMuch(f"{peak} B allocated, {grown} B resident; at most {bound} B are allowed")
    return Outcome(error, peak, cpu)


def _most_resident() -> int:
    """Most memory that this process ever had resident [B]."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
