"""A preparation under way, and what comes of it: a move from one version to another."""

import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass

from weightdelta.digest import U64
from weightdelta.errors import NotPrepared
from weightdelta.staging import Staging
from weightdelta.stats import PrepareStats


@dataclass(slots=True)
class Step:
    """A prepared move from one version to another, and the tensor digests of both."""

    start: int
    end: int
    staged: Staging
    before: U64
    after: U64
    stats: PrepareStats

    @property
    def changed(self) -> int:
        """Changed elements."""
        return self.staged.changed


class Preparation:
    """A preparation under way; ``wait`` returns its stats."""

    def __init__(self, pool: Executor, work: Callable[[], Step]) -> None:
        self._future: Future[Step] = pool.submit(_lightly, work)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> PrepareStats:
        """Block until the delta is staged.

        Raises:
            WeightDeltaError: Why it failed; the weights were not touched.
            NotPrepared: ``release``, ``rollback``, ``attach`` or ``close`` dropped it.
            TimeoutError: Not ready within ``timeout`` seconds; it goes on.
        """
        return self.step(timeout).stats

    def step(self, timeout: float | None = None) -> Step:
        """The move; raises as ``wait``."""
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise NotPrepared("this preparation was dropped before it started") from None

    def cancel(self) -> bool:
        """Drop it if it has not started; whether that was so."""
        return self._future.cancel()

    def end(self) -> None:
        """Block until it has ended, well or not."""
        if not self._future.done():  # ``wait`` knows of a cancelled one when a thread gets to it
            wait([self._future])

    def drop(self) -> None:
        """Forget it; one that runs reads the weights, so it has to end first."""
        if not self.cancel() and self._future.exception() is None:
            # The caller may keep this object; it must not keep the staged values.
            self._future.result().staged.clear()


def _lightly(work: Callable[[], Step]) -> Step:
    """Run ``work``; an error keeps nothing of what its frames held, for it may be kept itself."""
    try:
        return work()
    except BaseException as error:
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        raise
