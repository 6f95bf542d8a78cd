"""The dense broadcast between actors: timed as the peer, and used to compare every byte."""

from typing import Any

from bench_gpus.cluster import Cluster
from bench_gpus.limits import Budget


class Differs(Exception):
    """Weights of a sampler are not the trainers'."""


#: Buffers of the double-buffered broadcast.
TWO = 2


def compare(cluster: Cluster, budget: Budget, *, nbytes: int, what: str) -> int:
    """Every byte of every sampler against the trainers' own; bytes compared.

    Raises:
        Differs: A tensor differs, or not all bytes were there to compare.
    """
    sending = cluster.all_trainers("broadcast", gathers=True, sends=True, buffers=TWO)
    found = budget.get(cluster.all_samplers("compare", buffers=TWO))
    budget.get(sending)
    for sampler, (compared, wrong) in enumerate(found):
        if wrong or compared != nbytes:
            raise Differs(
                f"{what}: sampler {sampler} differs in {wrong[:5]} ({len(wrong)} tensors); "
                f"{compared} of {nbytes} bytes compared"
            )
    return sum(compared for compared, _ in found)


def peer(
    cluster: Cluster, budget: Budget, *, nbytes: int, tokens: tuple[int, int], repeats: int
) -> dict[str, Any]:
    """The dense broadcast: all of it, and its parts by themselves; seconds of each repeat."""
    budget.get(cluster.all_trainers("step", 0, tokens) + cluster.all_samplers("blank"))
    found: dict[str, Any] = {}
    for name, gathers, sends, buffers in (
        ("double-buffered", True, True, TWO),
        ("one buffer", True, True, 1),
        ("gather alone", True, False, TWO),
        ("broadcast alone", False, True, TWO),
    ):
        times = [
            _transfer(cluster, budget, gathers=gathers, sends=sends, buffers=buffers)
            for _ in range(1 + repeats)
        ][1:]  # the first makes the buffers
        found[name] = times
        budget.say(f"broadcast, {name}: {min(times):.3f} to {max(times):.3f} s")
    found["compared_bytes"] = compare(cluster, budget, nbytes=nbytes, what="dense broadcast")
    budget.get(cluster.all_trainers("forget_lanes") + cluster.all_samplers("forget_lanes"))
    return found


def _transfer(
    cluster: Cluster, budget: Budget, *, gathers: bool, sends: bool, buffers: int
) -> float:
    """From when all are ready until the last sampler, or rank, has everything [s]."""
    sending = cluster.all_trainers("broadcast", gathers=gathers, sends=sends, buffers=buffers)
    taking = cluster.all_samplers("accept", buffers=buffers, stores=gathers) if sends else []
    arrived = budget.get(taking)
    times = budget.get(sending)
    ended = max([*arrived, *(end for _, end in times)])
    return float(ended - times[0][0])


def warm_up(cluster: Cluster, budget: Budget, *, folder: str) -> None:
    """Write the base checkpoint, load it, and form the broadcast group."""
    cluster.join()
    budget.say("broadcast group formed")
    budget.get(cluster.all_trainers("save_base", folder))
    budget.say("base written")


def memory(cluster: Cluster, budget: Budget) -> list[int]:
    """Most device memory that each actor's torch held [B]."""
    found: list[int] = budget.get(cluster.all_trainers("memory") + cluster.all_samplers("memory"))
    return found
