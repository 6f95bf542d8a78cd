"""The view of a running job: what it shows, and that nothing but a damaged log ends it."""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import SmallRun

from weightdelta.config import Config
from weightdelta.errors import DamagedObject, StoreTimeout, StoreUnavailable
from weightdelta.log import Log
from weightdelta.record import log_name
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore, Plan
from weightdelta.top import WINDOW, Sight, Watch, duration, live, look, render


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    found = SmallRun(tmp_path, config=Config(measure_bound=True))
    yield found
    found.close()


def _text(view: Any, *, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view)
    return out.getvalue()


def _spaced(sight: Sight, *, seconds: float) -> Sight:
    """As if versions had followed each other by ``seconds``; small runs stand still in time."""
    recent = tuple(replace(e, time=seconds * e.version) for e in sight.recent)
    return replace(sight, recent=recent)


def test_what_it_shows(run: SmallRun) -> None:
    for seed in range(3):
        run.step(seed)
    run.writer.tag("eval", version=2)
    sight = _spaced(look(Log(run.store), clock=lambda: 100.0), seconds=20.0)
    assert (sight.version, sight.epoch, dict(sight.refs)) == (3, 1, {"eval": 2})
    newest = run.writer.log.versions[3]
    assert sight.newest is not None
    assert sight.newest.digest == newest.digest
    assert sight.per_minute == pytest.approx(3.0)
    sizes = [run.writer.log.versions[v].payload_bytes for v in (2, 3)]
    assert sight.bytes_per_s == pytest.approx(sum(sizes) / 40)
    assert sight.age(90.0) == pytest.approx(30.0)
    text = _text(render(sight, now=90.0))
    for part in (
        "3, step 2, 30 s ago",
        "3 versions/min",
        "eval = 2",
        "epoch 1",
        "x of the entropy",
    ):
        assert part in text, part
    assert "not seen" not in text


def test_json_is_complete(run: SmallRun) -> None:
    run.step(0)
    row = look(Log(run.store)).as_dict(50.0)
    assert json.loads(json.dumps(row)) == row
    entry = run.writer.log.versions[1]
    assert row["payload_bytes"] == entry.payload_bytes
    assert row["bound_ratio"] == entry.payload_bytes / entry.bound_bytes
    assert (row["step"], row["age_s"], row["versions_per_minute"]) == (0, 50.0, None)
    assert (row["trouble"], len(row["recent"])) == (None, 1)


def test_before_the_first_version(run: SmallRun, tmp_path: Path) -> None:
    empty = look(Log(Store(tmp_path / "empty", timeout_s=None)))
    assert (empty.version, empty.age(1.0)) == (None, None)
    assert "no run has been opened here yet" in _text(render(empty, now=1.0))
    opened = look(Log(run.store))
    assert (opened.version, opened.newest, opened.age(7.0)) == (0, None, 7.0)
    assert "too few versions yet" in _text(render(opened, now=7.0))
    assert opened.as_dict(7.0)["payload_bytes"] is None


def test_only_the_newest_are_kept(run: SmallRun) -> None:
    for _ in range(WINDOW + 3):
        run.publish()
    sight = look(Log(run.store))
    assert [e.version for e in sight.recent] == list(range(4, WINDOW + 4))
    assert sight.per_minute is None, "a clock that stands still gives no rate"
    lines = [line for line in _text(render(sight, now=1.0)).splitlines() if "\u2502" in line]
    assert [line.split()[1] for line in lines] == [str(WINDOW + 3 - i) for i in range(8)]


def test_a_look_reads_on(run: SmallRun) -> None:
    log = Log(run.store)
    assert look(log).version == 0
    run.step(0)
    assert look(log).version == 1


# -- trouble -----------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["before", "eacces"])
def test_a_failing_store_is_waited_for(run: SmallRun, fault: Any) -> None:
    run.step(0)
    store = FaultStore(run.store, Plan("before", at=10**9))
    now = 100.0
    watch = Watch(Log(store), interval_s=1.0, clock=lambda: now)
    watch.step()
    assert (watch.sight.version, watch.sight.trouble) == (1, "")
    store = FaultStore(run.store, Plan(fault, forever=True, ops=frozenset({"read"})))
    watch._log.store = store
    run.step(1)
    now = 130.0
    watch.step()
    assert (watch.sight.version, watch.sight.looked) == (1, 100.0), "what was seen stays"
    text = _text(render(watch.sight, now=130.0))
    assert "not seen for 30 s: store-unavailable: " in text
    watch._log.store = run.store
    watch.step()
    assert (watch.sight.version, watch.sight.trouble) == (2, "")


@pytest.mark.fault
def test_a_hanging_store_does_not_hold_the_view(run: SmallRun) -> None:
    run.step(0)
    inner = Store(run.store.url, timeout_s=600)
    store = FaultStore(inner, Plan("hang", ops=frozenset({"read"})))
    watch = Watch(Log(store), interval_s=0.01, clock=lambda: 0.0)
    watch.start()
    assert watch.sight.version is None
    text = _text(render(watch.sight, now=20.0, patience_s=9.0))
    assert "not seen for 20 s: the store does not answer" in text
    assert "not seen" not in _text(render(watch.sight, now=8.0, patience_s=9.0))
    store.release()
    while watch.sight.version is None:
        threading.Event().wait(0.005)
    assert (watch.sight.version, watch.failed) == (1, None)
    watch.stop()


@pytest.mark.fault
def test_a_look_that_takes_too_long_is_trouble_too(run: SmallRun) -> None:
    store = FaultStore(Store(run.store.url, timeout_s=0.05), Plan("hang", ops=frozenset({"read"})))
    with pytest.raises(StoreTimeout):
        look(Log(store))
    watch = Watch(
        Log(FaultStore(run.store, Plan("before", ops=frozenset({"read"})))), interval_s=1.0
    )
    watch.step()
    assert watch.sight.trouble.startswith(StoreUnavailable.kind)
    assert watch.failed is None
    store.release()


@pytest.mark.fault
def test_the_screen_lives_through_failures_and_ends_with_a_damaged_log(run: SmallRun) -> None:
    """The whole loop, on a terminal: trouble, recovery, a new version, and the end."""
    run.step(0)
    store = FaultStore(run.store, Plan("before", at=1, ops=frozenset({"read"})))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    errors: list[BaseException] = []

    def show() -> None:
        try:
            live(Log(store), console=console, interval_s=0.01)
        except DamagedObject as e:
            errors.append(e)

    screen = threading.Thread(target=show, daemon=True)
    screen.start()
    while "1, step 0" not in out.getvalue():
        threading.Event().wait(0.01)
    assert store.fired == 1
    run.step(1)
    while "2, step 1" not in out.getvalue():
        threading.Event().wait(0.01)
    run.store.write(log_name(3), b"nonsense")
    screen.join(60)
    assert not screen.is_alive()
    assert [log_name(3) in str(e) for e in errors] == [True]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3.0, "0 s"), (0.9, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"),
        (3600, "1 h 0 min"), (47 * 3600 + 60, "47 h 1 min"), (48 * 3600, "2 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_names_are_not_markup(run: SmallRun) -> None:
    run.step(0)
    sight = replace(look(Log(run.store)), url="s3://b/[/red]", trouble="[/x] is bad")
    text = _text(render(sight, now=1.0))
    assert "s3://b/[/red]" in text
    assert "[/x] is bad" in text


def test_any_interval_can_be_waited_for(run: SmallRun) -> None:
    run.step(0)
    watch = Watch(Log(run.store), interval_s=float("inf"))
    watch.start()
    while watch.sight.version is None:
        threading.Event().wait(0.01)
    threading.Event().wait(0.1)
    assert watch._thread.is_alive()
    watch.stop()
    watch._thread.join(10)
    assert not watch._thread.is_alive()
