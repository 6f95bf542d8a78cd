"""``wd.Publisher`` on three gloo ranks: every publication ends alike on all of them."""

import datetime
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn

import weightdelta as wd
from weightdelta.config import Config
from weightdelta.errors import WeightDeltaError
from weightdelta.fence import StepFence
from weightdelta.log import Log
from weightdelta.record import OpenEntry
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore, Plan
from weightdelta.verify import verify

pytestmark = pytest.mark.slow

WORLD = 3
LONG = 120.0
SETTINGS: dict[str, Any] = {"store": {"fsync": False}, "max_step_delay_s": 0.2}
WRITES = frozenset({"write"})
SHAPES = {"a": (9, 5), "b": (4,)}


#: Which codec a tensor gets depends on which pattern stands first.
FIRST: list[tuple[str, str]] = [("a*", "lz4+zstd"), ("*", "zstd")]


def save_base(folder: Path, **more: tuple[int, ...]) -> Path:
    folder.mkdir()
    shapes = {**SHAPES, **more}
    save_file(
        {n: torch.zeros(s).bfloat16() for n, s in shapes.items()}, str(folder / "m.safetensors")
    )
    return folder


class Rank:
    """One process: its weights, and how each publication ended here."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.weights = {n: torch.zeros(s) for n, s in SHAPES.items()}
        self.optimizer = torch.optim.SGD(list(self.weights.values()), lr=1.0)
        self.store = FaultStore(Store(str(folder / "store"), fsync=False))
        self.fail: Exception | None = None
        self.mark = 0
        self.found: list[Any] = []

    def state(self) -> dict[str, torch.Tensor]:
        """The live weights, or an error."""
        if self.fail:
            raise self.fail
        return self.weights

    def open(
        self, *, config: str = "", base: str = "base", marked: bool = False, **settings: Any
    ) -> wd.Publisher:
        """Open the run together with the other ranks."""
        return wd.Publisher(
            self.store,
            self.state,
            base=self.folder / base,
            config=config or Config.of({**SETTINGS, **settings}),
            mark=(lambda: self.mark) if marked else None,
        )

    def step(self) -> None:
        """One optimizer step, the same on all ranks."""
        for w in self.weights.values():
            w.grad = -torch.ones_like(w)
        self.optimizer.step()

    def note(self, call: Callable[[], Any]) -> None:
        """Take down how something ended."""
        try:
            self.found.append(call())
        except (WeightDeltaError, ArithmeticError) as e:
            self.found.append(getattr(e, "kind", type(e).__name__))

    def publish(self, publisher: wd.Publisher, *, step: Any = None) -> None:
        """Publish, wait, take down."""

        def call() -> Any:
            stats = publisher.publish(step=step).wait(LONG)
            return [stats.committed, stats.version]

        self.note(call)


def hooks() -> int:
    """Optimizer hooks of ours in this process."""
    from torch.optim import optimizer

    found = optimizer._global_optimizer_pre_hooks.values()
    return sum(isinstance(getattr(h, "__self__", None), StepFence) for h in found)


def play(me: Rank) -> None:
    """The whole story on one rank; ``STORY`` knows how each part has to end."""
    me.fail = ArithmeticError("not yet loaded") if me.rank == 1 else None
    me.note(me.open)
    me.fail = None
    kept, me.weights = (
        me.weights,
        {**me.weights, "extra": torch.zeros(1)} if me.rank == 2 else me.weights,
    )
    me.note(me.open)
    me.weights = kept
    one = me.rank == 1
    me.note(lambda: me.open(values="xor" if one else "diff"))
    me.note(lambda: me.open(codec_by_tensor=dict(FIRST if one else FIRST[::-1]), values="xor"))
    me.note(lambda: me.open(config="absent.yaml" if one else ""))
    me.note(lambda: me.open(base="absent" if one else "base"))
    me.note(lambda: me.open(base="larger" if one else "base"))
    me.found.append(hooks())

    first = me.open(on_busy="skip")
    me.step()
    me.publish(first)

    me.step()
    me.store.plan = Plan("enospc", ops=WRITES) if me.rank == 1 else None
    me.publish(first)
    me.store.plan = None

    me.fail = ArithmeticError("reshuffled") if me.rank == 2 else None
    me.publish(first)
    me.fail = None
    me.publish(first)

    me.step()
    if me.rank == 1:
        me.step()
    me.publish(first)
    if me.rank != 1:
        me.step()
    me.publish(first)

    # All are busy: one rank's upload hangs.
    me.step()
    me.store.plan = Plan("hang", ops=WRITES) if me.rank == 0 else None
    running = first.publish()
    skipped = first.publish()
    me.store.release()
    me.found.append([running.wait(LONG).version, skipped.wait(LONG).committed])
    # One is busy: its baseline is still moving.
    held = first._session._turn if me.rank == 1 else threading.Lock()
    with held:
        me.publish(first)
    me.publish(first)

    second = me.open(on_busy="error", marked=True)
    me.publish(first)  # fenced
    held = second._session._turn if me.rank == 1 else threading.Lock()
    with held:
        me.publish(second)
    second._last.settled(LONG)  # rank 1 raised at once, and still takes part
    me.publish(second, step=1.5 if one else None)
    second._last.settled(LONG)
    me.mark = 7 if one else 8
    me.publish(second)
    me.mark = 9
    me.step()
    me.publish(second)
    first.close()

    if me.rank == 2:
        return
    me.publish(second)  # without rank 2


STORY: list[tuple[str, Any]] = [
    ("a state that fails on one rank at the start", "publication-lost"),
    ("a tensor too many on one rank", "layout-mismatch"),
    ("another form of values on one rank", "config"),
    ("another order of patterns on one rank", "config"),
    ("a configuration that one rank cannot read", "config"),
    ("a base that one rank cannot read", "input"),
    ("a tensor too many in one rank's base", "layout-mismatch"),
    ("hooks left behind by those", 0),
    ("a publication", [True, 1]),
    ("no space for one rank", "store-unavailable"),
    (
        "a state that fails on one rank",
        {0: "publication-lost", 1: "publication-lost", 2: "ArithmeticError"},
    ),
    ("the next one covers the span", [True, 2]),
    ("one rank is a step ahead", "capture-skew"),
    ("the others have caught up", [True, 3]),
    ("one publication while another runs", [4, False]),
    ("one rank alone is busy", [False, 4]),
    ("nothing changed since", [True, 5]),
    ("the older of two publishers", "fenced"),
    ("one rank alone is busy, on_busy=error", "busy"),
    ("a step that is none on one rank", "input"),
    ("marks that differ", "capture-skew"),
    ("a publication of the newer", [True, 6]),
    ("a rank has gone away", {0: "publication-lost", 1: "publication-lost", 2: None}),
]


def rank_main(rank: int, folder: str) -> None:
    """One spawned process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", WORLD)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=LONG),  # a rank that waits for nothing has to fail
    )
    me = Rank(rank, Path(folder))
    play(me)
    (Path(folder) / f"found-{rank}").write_text(json.dumps(me.found))
    os._exit(0)  # as a crash would: the peers' sockets close under them


def test_all_ranks_agree_on_how_each_publication_ends() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = save_base(folder / "base")
        save_base(folder / "larger", more=(4,))
        spawn(rank_main, args=(name,), nprocs=WORLD)  # type: ignore[no-untyped-call]
        for rank in range(WORLD):
            found = json.loads((folder / f"found-{rank}").read_text())
            for (what, expected), here in zip(STORY, [*found, None], strict=False):
                mine = expected[rank] if isinstance(expected, dict) else expected
                assert here == mine, f"rank {rank}: {what}"
            assert len(found) == len(STORY) - (rank == 2)
        check_store(Store(str(folder / "store")), base)


def check_store(store: Store, base: Path) -> None:
    """Six versions, each bit for bit what was live."""
    assert verify(store, config=Config(), deep=True, base=base).ok
    log = Log(store)
    log.refresh()
    assert len(log.versions) == 6
    assert sum(isinstance(e, OpenEntry) for e in log.entries) == 2
    model = load_file(str(base / "m.safetensors"))
    receiver = wd.Receiver(store, model)
    for version, level in ((1, 1), (2, 2), (3, 4), (4, 5), (5, 5), (6, 6)):
        receiver.prepare(version=version).wait(LONG)
        receiver.apply()
        assert all(torch.equal(t, torch.full_like(t, level)) for t in model.values()), version
    receiver.release()
