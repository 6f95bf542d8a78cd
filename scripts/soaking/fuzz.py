"""The long fuzz loop: one worker process, and a supervisor that outlives what kills it.

Input n follows from the seed and n alone, so a run can go on where it stood, and the input that
killed a worker is known from its number.
"""

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz.everything import FINDS, keep, targets
from fuzz.guard import SECONDS, TooMuch, guarded
from fuzz.target import Target, pick

#: Every input of this many has its allocations traced; all have their resident memory watched.
TRACED = 8
#: Address space that a worker may take beyond what it has after a first round [B].
ROOM = 2 << 30
#: Looks at a worker, this far apart [s], and how many of them without progress mean that it
#: hangs. They are counted, not timed: a machine that sleeps stops both sides.
LOOK_S = 5.0
HANGING = 36


@dataclass
class Progress:
    """Where a run stands. ``ends``: by target, how often its inputs were accepted or refused."""

    seed: int
    next: int = 0
    seconds: float = 0.0
    ends: dict[str, dict[str, int]] = field(default_factory=dict)
    most_cpu: dict[str, float] = field(default_factory=dict)
    most_memory: dict[str, int] = field(default_factory=dict)
    finds: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Progress":
        """Read it."""
        return cls(**json.loads(path.read_text()))

    def line(self) -> str:
        """One line for people."""
        ends: Counter[str] = Counter()
        for counts in self.ends.values():
            ends.update(counts)
        done = sum(ends.values())
        return (
            f"{done} inputs in {self.seconds:.0f} s, {ends['']} accepted, "
            f"{done - ends['']} refused, "
            f"{len(self.finds)} finds; most {max(self.most_cpu.values(), default=0):.3f} s of CPU, "
            f"{max(self.most_memory.values(), default=0) / 2**20:.1f} MiB"
        )


def choose(seed: int, number: int) -> tuple[Target, bytes]:
    """Input ``number`` of a run, and its target."""
    rng = random.Random(f"{seed} {number}")
    target = pick(rng, list(targets().values()))
    return target, target.make(rng.getrandbits(48))


# --- the worker -------------------------------------------------------------------------------


def work(path: Path, *, finds: Path | None) -> int:
    """Try inputs until the run has taken as many seconds as the environment says."""
    progress, goal = Progress.load(path), float(os.environ["SOAK_SECONDS"])
    _warm_up()
    counter = os.open(path.with_suffix(".now"), os.O_RDWR | os.O_CREAT)
    before, saved = progress.seconds, time.monotonic()
    started, parent = saved, os.getppid()
    while before + time.monotonic() - started < goal and os.getppid() == parent:
        os.pwrite(counter, progress.next.to_bytes(8, "little"), 0)
        _one(progress, finds or FINDS)
        progress.next += 1
        if time.monotonic() - saved > 5:
            saved = time.monotonic()
            progress.seconds = before + saved - started
            progress.save(path)
    progress.seconds = before + time.monotonic() - started
    progress.save(path)
    return 0


def _warm_up() -> None:
    """Compile every kernel, then bound the address space: a bomb must not take the machine."""
    for target in targets().values():
        for i in range(20):
            data = target.seeds[i % len(target.seeds)] if i < len(target.seeds) else target.make(i)
            guarded(target.check, data, declared=target.declared(data), trace=False)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _one(progress: Progress, finds: Path) -> None:
    target, data = choose(progress.seed, progress.next)
    ends = progress.ends.setdefault(target.name, {})
    declared = target.declared(data)
    try:
        outcome = guarded(target.check, data, declared=declared, trace=progress.next % TRACED == 0)
        cpu = outcome.cpu
        if cpu > SECONDS / 4:  # whatever else the machine did, the least of three counts
            again = (guarded(target.check, data, declared=declared, trace=False) for _ in range(2))
            cpu = min(cpu, *(o.cpu for o in again))
        if cpu > SECONDS:
            raise TooMuch(f"{cpu:.2f} s of processor time")
    except Exception as e:  # noqa: BLE001 - an escape is what is looked for
        where = keep(target.name, data, folder=finds)
        progress.finds.append(f"{progress.next} {where.name}: {type(e).__name__}: {str(e)[:200]}")
        print("find:", progress.finds[-1])
        ends["find"] = ends.get("find", 0) + 1
        return
    ends[outcome.error] = ends.get(outcome.error, 0) + 1
    name = target.name
    progress.most_cpu[name] = max(progress.most_cpu.get(name, 0.0), cpu)
    progress.most_memory[name] = max(progress.most_memory.get(name, 0), outcome.peak)


# --- the supervisor ---------------------------------------------------------------------------


def supervise(path: Path, *, minutes: float, finds: Path | None) -> int:
    """Keep a worker alive for ``minutes``; 0 when there were no finds."""
    goal = Progress.load(path).seconds + 60 * minutes
    while Progress.load(path).seconds < goal:
        _watch(path, goal, finds)
    progress = Progress.load(path)
    print("summary:", progress.line())
    for name, ends in sorted(progress.ends.items()):
        cpu, memory = progress.most_cpu.get(name, 0), progress.most_memory.get(name, 0)
        print(f"  {name}: {dict(sorted(ends.items()))}, {cpu:.3f} s, {memory / 2**20:.2f} MiB")
    print("\n".join(f"find: {find}" for find in progress.finds))
    return 1 if progress.finds else 0


def _watch(path: Path, goal: float, finds: Path | None) -> None:
    """One worker's life; what killed it is kept, and the next one goes on behind it."""
    command = [sys.executable, "-m", "soaking", "fuzz", "--worker", "--resume", str(path)]
    command += ["--finds", str(finds)] if finds else []
    # Compiled kernels check every index: a write outside an array becomes an error to be seen.
    cache = path.parent.resolve() / "numba-with-bounds"
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache), "SOAK_SECONDS": str(goal),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    worker = subprocess.Popen(command, env=environment)
    print(f"worker {worker.pid} goes on at {Progress.load(path).next}")
    seen, still, hung = -1, 0, False
    while worker.poll() is None:
        time.sleep(LOOK_S)
        now, still = Progress.load(path), still + 1
        if now.next != seen:
            seen, still = now.next, 0
            print(now.line())
        hung = still > HANGING
        if hung:
            worker.kill()
            worker.wait()
    if worker.returncode == 0:
        return
    _note_death(path, finds or FINDS, "hung" if hung else f"died with {worker.returncode}")


def _note_death(path: Path, finds: Path, how: str) -> None:
    progress, counter = Progress.load(path), path.with_suffix(".now")
    if not counter.exists():
        sys.exit(f"the worker {how} before its first input")
    number = int.from_bytes(counter.read_bytes(), "little")
    target, data = choose(progress.seed, number)
    where = keep(target.name, data, folder=finds)
    progress.finds.append(f"{number} {where.name}: the worker {how}")
    print("find:", progress.finds[-1])
    progress.next = number + 1
    progress.save(path)
