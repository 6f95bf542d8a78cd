"""``weightdelta top``: what a run is doing, from its log alone.

The log is read in a thread of its own, so the view goes on while a store does not answer, and
says for how long it has not. Ages are measured against the trainer's clock in the log.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weightdelta.errors import RetryError, WeightDeltaError
from weightdelta.log import Log
from weightdelta.record import VersionEntry
from weightdelta.report import ratio, refs_by_version, size

#: Versions over which rates are measured, and of which the newest are listed.
WINDOW: Final = 20
LISTED: Final = 8
#: Screen updates a second.
FRAMES_PER_S: Final = 4


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look at a run's log has shown.

    Attributes:
        url: The store.
        looked: When it was looked at, Unix time in seconds.
        trouble: Why the last look failed; empty when it did not.
        version: Newest version; None before a run is opened.
        epoch: Writer epoch.
        opened: When the writer opened the run, Unix time.
        refs: Version by ref name.
        recent: The newest versions, oldest first.
    """

    url: str
    looked: float
    trouble: str = ""
    version: int | None = None
    epoch: int = 0
    opened: float = 0.0
    refs: tuple[tuple[str, int], ...] = ()
    recent: tuple[VersionEntry, ...] = ()

    @property
    def newest(self) -> VersionEntry | None:
        """The newest version's entry."""
        return self.recent[-1] if self.recent else None

    @property
    def seconds(self) -> float:
        """Time between the first and the last of the recent versions."""
        return self.recent[-1].time - self.recent[0].time if self.recent else 0.0

    @property
    def per_minute(self) -> float | None:
        """Versions a minute over the recent ones; None while there are too few."""
        return 60 * (len(self.recent) - 1) / self.seconds if self.seconds > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        """Payload a second over the recent versions; None while there are too few."""
        if self.seconds <= 0:
            return None
        return sum(e.payload_bytes for e in self.recent[1:]) / self.seconds

    def age(self, now: float) -> float | None:
        """Seconds since the newest version, or since the run was opened."""
        if self.version is None:
            return None
        return max(now - (self.newest.time if self.newest else self.opened), 0.0)

    def as_dict(self, now: float) -> dict[str, Any]:
        """JSON-ready values."""
        newest = self.newest
        return {
            "store": self.url,
            "trouble": self.trouble or None,
            "version": self.version,
            "step": newest.step if newest else None,
            "epoch": self.epoch,
            "age_s": self.age(now),
            "versions_per_minute": self.per_minute,
            "payload_bytes_per_s": self.bytes_per_s,
            "payload_bytes": newest.payload_bytes if newest else None,
            "changed_fraction": _share(newest) if newest else None,
            "bound_ratio": ratio(newest) if newest else None,
            "refs": dict(self.refs),
            "recent": [asdict(entry) for entry in self.recent],
        }


def _share(entry: VersionEntry) -> float:
    return entry.changed / entry.elements if entry.elements else 0.0


def look(log: Log, *, clock: Callable[[], float] = time.time) -> Sight:
    """Read on in a log and say what it shows.

    Raises:
        WeightDeltaError: The store failed, or the log is damaged.
    """
    log.refresh()
    seen = Sight(log.store.url, clock())
    if log.opened is None:
        return seen
    first = max(log.newest - WINDOW + 1, 1)
    return replace(
        seen,
        version=log.newest,
        epoch=log.epoch,
        opened=log.opened.time,
        refs=tuple(sorted(log.refs.items())),
        recent=tuple(log.versions[v] for v in range(first, log.newest + 1)),
    )


class Watch:
    """Looks at a log again and again, in the background.

    Attributes:
        sight: What was seen last, with the trouble since, if there is any.
        failed: An error that no waiting mends.
    """

    def __init__(
        self, log: Log, *, interval_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightdelta-top", daemon=True)
        self.sight = Sight(log.store.url, clock())
        self.failed: WeightDeltaError | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A look that hangs is left behind; the store bounds it."""
        self._stop.set()

    def step(self) -> None:
        """One look; a store that fails or is silent leaves what was seen, and a word on it."""
        try:
            self.sight = look(self._log, clock=self._clock)
        except RetryError as e:
            self.sight = replace(self.sight, trouble=f"{e.kind}: {e}")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except WeightDeltaError as e:
                self.failed = e
                return
            self._stop.wait(min(self._interval_s, threading.TIMEOUT_MAX))


def render(sight: Sight, *, now: float, patience_s: float = 0.0) -> Group:
    """One screen.

    Args:
        sight: What to show.
        now: Unix time, in seconds.
        patience_s: A look older than this, in seconds, is called silence of the store; 0: never.
    """
    parts: list[Any] = [_facts(sight, now=now)]
    if sight.recent:
        parts.append(_recent(sight, now=now))
    silent = now - sight.looked
    if sight.trouble or (patience_s and silent > patience_s):
        why = sight.trouble or "the store does not answer"
        parts.append(Text(f"not seen for {duration(silent)}: {why}", style="yellow"))
    return Group(*parts)


def _facts(sight: Sight, *, now: float) -> Table:
    table = Table(title=escape(sight.url), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    newest, age = sight.newest, sight.age(now)
    if sight.version is None:
        table.add_row("version", "no run has been opened here yet")
        return table
    step = "" if newest is None or newest.step is None else f", step {newest.step}"
    table.add_row("version", f"{sight.version}{step}, {duration(age or 0.0)} ago")
    table.add_row("rate", _rate(sight))
    if newest:
        bound = ratio(newest)
        table.add_row(
            "payload",
            f"{size(newest.payload_bytes)}, {100 * _share(newest):.3f} % of elements changed"
            + (f", {bound:.3f} x of the entropy bound" if bound is not None else ""),
        )
    names = ", ".join(f"{name} = {version}" for name, version in sight.refs)
    table.add_row("refs", escape(names) or "none")
    table.add_row("writer", f"epoch {sight.epoch}, opened {duration(now - sight.opened)} ago")
    return table


def _rate(sight: Sight) -> str:
    if sight.per_minute is None or sight.bytes_per_s is None:
        return "too few versions yet"
    return f"{sight.per_minute:.3g} versions/min, {size(sight.bytes_per_s)}/s of payload"


def _recent(sight: Sight, *, now: float) -> Table:
    table = Table()
    for column in ("version", "step", "changed", "payload", "x of bound", "age", "refs"):
        table.add_column(column, justify="left" if column == "refs" else "right")
    refs = refs_by_version(dict(sight.refs))
    for entry in sight.recent[: -LISTED - 1 : -1]:
        bound = ratio(entry)
        table.add_row(
            str(entry.version),
            "" if entry.step is None else str(entry.step),
            f"{100 * _share(entry):.3f} %",
            size(entry.payload_bytes),
            "" if bound is None else f"{bound:.3f}",
            duration(now - entry.time),
            escape(", ".join(refs.get(entry.version, []))),
        )
    return table


def duration(seconds: float) -> str:
    """Seconds for people: two units at most."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"


def live(log: Log, *, console: Console, interval_s: float) -> None:
    """Show a run until Ctrl-C.

    Raises:
        WeightDeltaError: Something that no waiting mends, such as a damaged log.
    """
    watch = Watch(log, interval_s=interval_s)
    watch.start()
    try:
        with Live(console=console, screen=False, auto_refresh=False) as view:
            while watch.failed is None:
                now = time.time()
                view.update(
                    render(watch.sight, now=now, patience_s=3 * interval_s + 3), refresh=True
                )
                time.sleep(1 / FRAMES_PER_S)
    except KeyboardInterrupt:
        return
    finally:
        watch.stop()
    raise watch.failed
