"""Progress bars: on a terminal only, and only for what takes over a second."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from weightdelta.batches import Progress as Report

#: Seconds for which nothing is shown.
PATIENCE_S: Final = 1.0


@contextmanager
def progress(console: Console, what: str, *, patience_s: float = PATIENCE_S) -> Iterator[Report]:
    """Something to call with (what is being done, how much is, how much there is).

    Nothing is printed unless ``console`` is a terminal and the block runs for longer than
    ``patience_s``; what was shown is wiped when the block ends.
    """
    if not console.is_terminal:
        yield lambda *_: None
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(what, total=None)

    def update(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total or None)

    timer = threading.Timer(patience_s, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar right now
        bar.stop()
