"""What publishing costs a trainer: step time with and without it, and memory."""

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import weightdelta as wd
from bench_cpu.training import Trainer

MIB = 1 << 20


@dataclass(frozen=True)
class Stall:
    """Medians over the steps, times in seconds, sizes in MiB.

    Attributes:
        step_s, publishing_s: A training step alone, and the step and ``publish`` call together.
        inflation: Their ratio.
        capture_s: How long ``publish`` held its caller.
        baseline_mib: Wire bytes of the model.
        peak_mib: How much larger the process got than in the steps without, baseline included.
        memory_ratio: Growth over wire bytes and payload together.
    """

    step_s: float
    publishing_s: float
    inflation: float
    capture_s: float
    encode_s: float
    commit_s: float
    prepare_s: float
    pause_s: float
    baseline_mib: float
    peak_mib: float
    memory_ratio: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def measure(trainer: Trainer, *, base: Path, steps: int) -> Stall:
    """Train steps that publish, between as many before and after that do not."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.step()
        with peak() as before:
            alone = [trainer.step() for _ in range(steps)]
        with peak() as after:
            # Longer than any commit, so that a wait for one shows in the step's time.
            config = wd.Config.of({"busy_wait_s": 600.0})
            publisher = wd.Publisher(folder, trainer.model, base=base, config=config)
            publisher.publish().wait()  # the first delta: everything since base
            results = [_publish(trainer, publisher, step) for step in range(steps)]
            publisher.close()
        follow = _follow(trainer, folder, base)
        alone += [trainer.step() for _ in range(steps)]
    stats = [r.publication.wait() for r in results]
    raw, grown = stats[0].raw_bytes, after[0] - before[0]
    payload = max(s.payload_bytes for s in stats)
    return Stall(
        step_s=statistics.median(alone),
        publishing_s=statistics.median(r.seconds for r in results),
        inflation=statistics.median(r.seconds for r in results) / statistics.median(alone),
        capture_s=statistics.median(s.capture_s for s in stats),
        encode_s=statistics.median(s.encode_s for s in stats),
        commit_s=statistics.median(s.commit_s for s in stats),
        prepare_s=follow[0].prepare_s,
        pause_s=follow[1].pause_s,
        baseline_mib=raw / MIB,
        peak_mib=grown / MIB,
        memory_ratio=grown / (raw + payload),
    )


@dataclass(frozen=True)
class _Step:
    seconds: float
    publication: Any


def _publish(trainer: Trainer, publisher: Any, step: int) -> _Step:
    """A step, under which the one before is encoded and committed, and the publish call."""
    started = time.perf_counter()
    trainer.step()
    publication = publisher.publish(step=step)
    return _Step(time.perf_counter() - started, publication)


def _follow(trainer: Trainer, store: str, base: Path) -> tuple[Any, Any]:
    """A receiver at the version before takes the newest; checked bit for bit."""
    sampler = type(trainer)(base, trainer.lr).model.to(torch.bfloat16)
    receiver = wd.Receiver(store, sampler)
    log_newest = receiver.prepare().wait().version
    receiver.apply()
    receiver.prepare(version=log_newest - 1).wait()
    receiver.apply()
    stats = receiver.prepare().wait(), receiver.apply()
    for name, live in trainer.model.state_dict().items():
        mine = sampler.state_dict()[name].view(torch.int16)
        if not torch.equal(mine, live.to(torch.bfloat16).view(torch.int16)):
            raise SystemExit(f"bench: {name} differs between trainer and receiver")
    return stats


@contextmanager
def peak() -> Iterator[list[int]]:
    """Largest resident memory of this process inside, in bytes: a list of one number."""
    process, stop, most = psutil.Process(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()
