"""From samples to figures: medians, inflation, balance, and where a dense broadcast loses."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

#: Links for which both are computed [B/s]; the last is about what NVLink gives one GPU.
LINKS = {"1 Gb/s": 125e6, "10 Gb/s": 1.25e9, "100 Gb/s": 12.5e9, "400 Gb/s": 50e9}

Times = Sequence[Sequence[Sequence[float]]]


def balance(nbytes: Sequence[int]) -> float:
    """The most that one rank has, over the mean; 1 is even."""
    return max(nbytes) / statistics.mean(nbytes) if any(nbytes) else 1.0


def step_seconds(steps: Times) -> float:
    """Median over the steps of the slowest rank's time."""
    return statistics.median(max(end - begin for begin, end in step) for step in steps)


def period_seconds(steps: Times) -> float:
    """Median time from one step's begin to the next one's, on the rank that began last."""
    begins = [max(begin for begin, _ in step) for step in steps]
    return statistics.median(b - a for a, b in pairwise(begins))


def crossover(*, dense_bytes: int, dense_s: float, payload: int, delta_s: float) -> float:
    """The link below which deltas are faster than a dense broadcast [B/s]; inf: on any.

    Over a link of ``b`` bytes a second a delta is taken to cost what it did here and its payload's
    time on the link, ``delta_s + payload / b``, and the broadcast the link's time for all bytes,
    ``dense_bytes / b``, but no less than it took here.
    """
    if delta_s + payload * dense_s / dense_bytes <= dense_s:
        return inf
    return (dense_bytes - payload) / delta_s


def over_link(
    bandwidth: float, *, dense_bytes: int, dense_s: float, payload: int, delta_s: float
) -> tuple[float, float]:
    """Seconds of a delta and of the dense broadcast over a link, by the same reckoning."""
    return delta_s + payload / bandwidth, max(dense_s, dense_bytes / bandwidth)


def dense_seconds(peer: dict[str, Any]) -> dict[str, float]:
    """Medians of the broadcast and of its parts.

    ``at best`` is the longer one of the parts by themselves: what two stages that overlap fully
    would take on GPUs that nothing else shares.
    """
    names = ("double-buffered", "one buffer", "gather alone", "broadcast alone")
    found = {name: statistics.median(peer[name]) for name in names}
    return {**found, "at best": max(found["gather alone"], found["broadcast alone"])}


def codec_row(run: dict[str, Any]) -> dict[str, Any]:
    """The figures of one codec; medians over its single steps, the slowest rank of each."""
    single, beside = run["single"], run["beside"]
    stats = [s["stats"] for s in single]

    def of_ranks(name: str) -> list[float]:
        return [max(r[name] for r in s["ranks"]) for s in single]

    def of_samplers(name: str) -> list[float]:
        return [max(u[name] for u in s["samplers"]) for s in single]

    middle = statistics.median
    alone, steps = run["alone"], beside["steps"]
    return {
        "codec": run["codec"],
        "changed": middle(s["changed"] / s["elements"] for s in stats),
        "payload_bytes": round(middle(s["payload_bytes"] for s in stats)),
        "index_bytes": round(middle(s["index_bytes"] for s in stats)),
        "step_s": step_seconds(alone),
        "step_beside_s": step_seconds(steps[1:]),
        "period_s": period_seconds(alone),
        "period_beside_s": period_seconds(steps),
        "call_s": middle(s["call_s"] for s in single),
        "capture_s": middle(of_ranks("capture_s")),
        "encode_s": middle(of_ranks("encode_s")),
        "hand_over_s": middle(of_ranks("hand_over_s")),
        "commit_s": middle(s["commit_s"] for s in stats),
        "prepare_s": middle(max(u["prepare"]["prepare_s"] for u in s["samplers"]) for s in single),
        "pause_s": middle(of_samplers("pause_s")),
        "end_to_end_s": middle(s["end_to_end_s"] for s in single),
        "end_to_end_beside_s": middle(v["end_to_end_s"] for v in beside["versions"][1:]),
        "balance": balance(run["owned_bytes"]),
        "payload_balance": middle(
            balance([r["payload_bytes"] for r in s["ranks"]]) for s in single
        ),
        "attach_s": run["attach_s"],
        "comparisons": run["comparisons"],
        "compared_bytes": run["compared_bytes"],
    }


def rank_rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of every rank by itself."""
    names = ("capture_s", "encode_s", "hand_over_s", "payload_bytes", "changed")
    ranks = sorted({r["rank"] for s in run["single"] for r in s["ranks"]})
    mine = {k: [r for s in run["single"] for r in s["ranks"] if r["rank"] == k] for k in ranks}
    return [
        {
            "codec": run["codec"],
            "rank": rank,
            "owned_bytes": run["owned_bytes"][rank],
            **{name: statistics.median(r[name] for r in mine[rank]) for name in names},
        }
        for rank in ranks
    ]


def crossings(
    row: dict[str, Any], dense: dict[str, float], *, dense_bytes: int
) -> list[dict[str, Any]]:
    """The computed comparison of one codec with the broadcast, as measured and at best."""
    payload = row["payload_bytes"] + row["index_bytes"]
    found = []
    for name in ("double-buffered", "at best"):
        known: dict[str, Any] = {
            "dense_bytes": dense_bytes, "dense_s": dense[name], "payload": payload,
            "delta_s": row["end_to_end_s"],
        }  # fmt: skip
        limit = crossover(**known)
        links = {link: over_link(speed, **known) for link, speed in LINKS.items()}
        found.append(
            {"codec": row["codec"], "broadcast": name, "computed": True, "links": links}
            | {"deltas_below": None if limit == inf else limit, "deltas_always": limit == inf}
        )
    return found
