"""One run: its actors, its folders, and its parts one after the other."""

import argparse
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench_gpus.cluster import OBJECTS, Cluster, Plan, start_ray
from bench_gpus.dense import memory, peer, warm_up
from bench_gpus.limits import Budget
from bench_gpus.options import MIB, settings_of
from bench_gpus.report import Report
from bench_gpus.rounds import CodecRun, Settings, alone
from weightdelta.codecs.names import Codec


@contextmanager
def folders(nbytes: int, given: Path | None) -> Iterator[tuple[Path, Path]]:
    """Where the base and the stores go: tmpfs, unless it has no room for the base."""
    memory = Path("/dev/shm")  # noqa: S108 (the store is to be in memory)
    free = shutil.disk_usage(memory).free if memory.is_dir() else 0
    # Room for Ray's objects and the deltas, and for the base beside them.
    beside = OBJECTS + nbytes // 8
    disk = Path(tempfile.gettempdir())
    place = given or (memory if free > nbytes + beside else disk)
    base = Path(tempfile.mkdtemp(prefix="weightdelta-base-", dir=place))
    stores = Path(
        tempfile.mkdtemp(prefix="weightdelta-runs-", dir=memory if free > beside else disk)
    )
    try:
        yield base, stores
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(stores, ignore_errors=True)


def run(chosen: argparse.Namespace, plan: Plan, report: Report, budget: Budget) -> None:
    """Everything, in the order of its weight: what comes last is left out first."""
    nbytes = report.document["dense_bytes"]
    settings, threads = settings_of(chosen, plan, nbytes)
    report.document["settings"] = asdict(settings)
    start_ray(plan, device=chosen.device, threads=threads, masked=chosen.masked)
    budget.say(f"Ray started; {plan}")
    cluster = Cluster(
        plan,
        device=chosen.device,
        masked=chosen.masked,
        shape=chosen.model,
        bucket=int(chosen.bucket_mib * MIB),
        seconds=chosen.wait,
        budget=budget,
    )
    report.document["places"] = cluster.places
    budget.say(f"actors are on {cluster.places}")
    with folders(nbytes, chosen.folder) as (base, stores):
        report.document["folders"] = {"base": str(base.parent), "store": str(stores.parent)}
        warm_up(cluster, budget, folder=str(base))
        alone(cluster, settings, budget)
        budget.say("first steps")
        _parts(
            cluster, settings, report, budget, _Parts(base, stores, chosen.codec, chosen.repeats)
        )
        report.document["device_bytes"] = memory(cluster, budget)


@dataclass(frozen=True)
class _Parts:
    """What the parts of a run are made of."""

    base: Path
    stores: Path
    codecs: Sequence[Codec]
    repeats: int


def _parts(
    cluster: Cluster, settings: Settings, report: Report, budget: Budget, given: _Parts
) -> None:
    """The first codec, the broadcast, then the other codecs."""

    def deltas(codec: Codec) -> None:
        store = given.stores / codec.replace("+", "-")
        found = CodecRun(cluster, settings, budget, codec=codec, store=store).measure(given.base)
        report.add_codec(found)
        shutil.rmtree(store, ignore_errors=True)

    def dense() -> None:
        nbytes, tokens = settings.nbytes, settings.tokens
        found = peer(cluster, budget, nbytes=nbytes, tokens=tokens, repeats=given.repeats)
        report.add_peer(found)

    parts: list[tuple[str, Callable[[], None]]] = [(c, partial(deltas, c)) for c in given.codecs]
    parts.insert(1, ("dense broadcast", dense))
    longest = 0.0
    for name, part in parts:
        if part is not dense and budget.left < 1.2 * longest:
            report.leave_out(f"{name}: {budget.left:.0f} s left, one takes {longest:.0f} s")
            continue
        began = budget.spent
        _alone(name, part, report)
        longest = max(longest, budget.spent - began)
        budget.say(f"{name}: ended after {budget.spent - began:.1f} s")


def _alone(name: str, part: Callable[[], None], report: Report) -> None:
    """Run a part; what goes wrong there must not cost the others, unless somebody hangs."""
    try:
        part()
    except TimeoutError:
        raise
    except Exception as e:  # noqa: BLE001 (noted, and shown by the exit status)
        traceback.print_exc()
        report.leave_out(f"{name}: {type(e).__name__}: {str(e)[:1000]}")
