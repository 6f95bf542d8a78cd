"""`scripts/bench gpus` in small, over gloo, and the arithmetic behind its computed rows."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_gpus.cluster import check_places, plan_gpus
from bench_gpus.link import Link, meeting_place
from bench_gpus.model import SHAPES, wire
from bench_gpus.packed import ITEM, Lanes, plan_buckets, send
from bench_gpus.results import balance, crossover, over_link, period_seconds, step_seconds
from bench_gpus.sampler import Sampler

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
#: Bytes of a bucket, small enough that the tiny model has several.
BUCKET = 1 << 16


@pytest.mark.ray
@pytest.mark.timeout(600)  # a job of its own, beside other tests on few cores
def test_small_run_compares_all_bytes_and_has_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    options = {
        "--device": "cpu", "--model": "tiny", "--codec": "sparse+zstd", "--steps": "2",
        "--length": "16", "--repeats": "2", "--bucket-mib": str(BUCKET / (1 << 20)),
        "--frame-mib": "1", "--seconds": "500", "--wait": "240", "--json": str(file),
    }  # fmt: skip
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench_gpus",
            "gpus",
            *(w for pair in options.items() for w in pair),
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    document = json.loads(file.read_text())
    assert document["left_out"] == []
    nbytes = document["dense_bytes"]
    (codec,) = document["codecs"]
    # The base, three single steps, and the last of three more.
    assert (codec["comparisons"], codec["compared_bytes"]) == (5, 5 * nbytes)
    assert 0 < codec["changed"] < 1
    assert 0 < codec["payload_bytes"] < nbytes
    assert all(codec[name] > 0 for name in codec if name.endswith("_s"))
    assert 1 <= codec["balance"] < 1.1
    assert [r["rank"] for r in document["ranks"]] == [0, 1]
    assert sum(r["owned_bytes"] for r in document["ranks"]) == nbytes
    assert document["raw"]["peer"]["compared_bytes"] == nbytes
    dense = {row["name"]: row["computed"] for row in document["dense"]}
    assert dense == {
        "double-buffered": False, "one buffer": False, "gather alone": False,
        "broadcast alone": False, "at best": True,
    }  # fmt: skip
    assert [r["broadcast"] for r in document["computed"]] == ["double-buffered", "at best"]
    versions = [v["version"] for v in document["raw"]["sparse+zstd"]["beside"]["versions"]]
    assert versions == [4, 5, 6]
    table = file.with_suffix(".md").read_text()
    assert table in found.stdout + "\n"
    assert "`sparse+zstd`" in table


def sent_to(
    sampler: Sampler, take: Callable[[Sampler], Any], weights: dict[str, torch.Tensor]
) -> Any:
    """What ``take`` returns in the sampler while a sender of one process sends ``weights``."""
    meeting, store = meeting_place(30.0)
    sampler.meeting = meeting
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(sampler.join, 1, 2)
        link = Link(meeting, rank=0, size=2, device=CPU)
        link.meet()
        joining.result(30)
        taking = pool.submit(take, sampler)
        link.meet()
        lanes = Lanes(sampler.buckets, device=CPU, count=2)
        send(sampler.buckets, lanes=lanes, gather=weights.__getitem__, link=link)
        found = taking.result(30)
    del store  # kept until nobody asks it any more
    return found


def test_broadcast_stores_every_weight_and_one_bit_is_found() -> None:
    meeting, _ = meeting_place(30.0)
    sampler = Sampler(meeting, shape="tiny", device="cpu", bucket=BUCKET)
    assert len(sampler.buckets) > 4
    source = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randint(-(1 << 15), 1 << 15, shape, generator=source, dtype=torch.int16)
        .view(torch.bfloat16)  # every bit pattern, also of values that are not numbers
        for name, shape in wire(SHAPES["tiny"]).items()
    }  # fmt: skip
    sent_to(sampler, lambda s: s.accept(buffers=2, stores=True), weights)
    assert all(
        torch.equal(sampler.weights[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in weights.items()
    )
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    assert sent_to(sampler, lambda s: s.compare(buffers=2), weights) == (nbytes, [])
    name = "layers.1.down.weight"
    sampler.weights[name].view(torch.int16)[-1, -1] ^= 1
    assert sent_to(sampler, lambda s: s.compare(buffers=2), weights) == (nbytes, [name])


@pytest.mark.parametrize("limit", [1, 1000, BUCKET, 1 << 30])
def test_buckets_hold_every_element_once(limit: int) -> None:
    names = wire(SHAPES["tiny"])
    buckets = plan_buckets(names, limit=limit)
    assert [slot.name for bucket in buckets for slot in bucket] == list(names)
    for bucket in buckets:
        ends = [0, *(slot.stop for slot in bucket)]
        assert [slot.start for slot in bucket] == ends[:-1]
        assert all(slot.stop - slot.start == prod(names[slot.name]) for slot in bucket)
        assert ends[-1] * ITEM <= limit or len(bucket) == 1


def test_shapes_are_of_the_sizes_in_their_names() -> None:
    sizes = {name: sum(map(prod, wire(shape).values())) / 1e9 for name, shape in SHAPES.items()}
    assert sizes["7b"] == pytest.approx(7.6, abs=0.1)
    assert sizes["0.5b"] == pytest.approx(0.63, abs=0.02)  # the head is no second name here
    assert sizes["tiny"] < 1e-3


def test_plan_gives_samplers_gpus_of_their_own_where_it_can() -> None:
    two, four, eight = plan_gpus(2), plan_gpus(4), plan_gpus(8)
    assert (two.trainers, two.samplers, two.members, two.shared) == ((0, 1), (1,), (0,), (1,))
    assert (four.trainers, four.samplers, four.shared) == ((0, 1), (2, 3), ())
    assert (eight.members, eight.link_size) == ((0, 1, 2, 3), 8)
    assert plan_gpus(4, trainers=3, samplers=2).members == (0, 1)
    for wrong in ({"gpus": 1}, {"gpus": 2, "samplers": 2}, {"gpus": 2, "trainers": 3}):
        with pytest.raises(SystemExit, match="expected"):
            plan_gpus(**wrong)


def test_actors_elsewhere_than_planned_are_refused() -> None:
    plan = plan_gpus(2)
    check_places(plan, ["a", "b"], ["b"])
    for trainers, samplers in ((["a", "a"], ["a"]), (["a", "b"], ["a"]), (["a", "b"], ["c"])):
        with pytest.raises(SystemExit, match="not where they were planned"):
            check_places(plan, trainers, samplers)


def test_balance_is_the_most_over_the_mean() -> None:
    assert balance([3, 1]) == 1.5
    assert balance([2, 2, 2]) == 1
    assert balance([0, 0]) == 1


def test_steps_are_timed_by_the_slowest_rank() -> None:
    steps = [[(0.0, 1.0), (0.0, 2.0)], [(3.0, 4.0), (3.5, 5.0)], [(6.0, 9.0), (6.0, 8.0)]]
    assert step_seconds(steps) == 2.0
    assert period_seconds(steps) == 3.0


@pytest.mark.parametrize("payload", [10_000_000, 150_000_000])
@pytest.mark.parametrize("delta_s", [0.02, 0.5, 3.0])
def test_crossover_is_where_both_take_equally_long(payload: int, delta_s: float) -> None:
    known: dict[str, Any] = {
        "dense_bytes": 15_000_000_000, "dense_s": 0.1, "payload": payload, "delta_s": delta_s,
    }  # fmt: skip
    limit = crossover(**known)
    if limit == inf:
        for bandwidth in (1e6, 1e9, 1e12):
            delta, dense = over_link(bandwidth, **known)
            assert delta < dense
        return
    delta, dense = over_link(limit, **known)
    assert delta == pytest.approx(dense)
    assert over_link(limit / 2, **known)[0] < over_link(limit / 2, **known)[1]
    assert over_link(limit * 2, **known)[0] > over_link(limit * 2, **known)[1]
