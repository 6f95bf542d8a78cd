"""All ranks come to the same plan, or all refuse for the same reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import save

from weightdelta.base import Base
from weightdelta.capture import Inventory, take_inventory
from weightdelta.config import Config
from weightdelta.errors import LayoutMismatch, OwnershipError
from weightdelta.job import Job, base_specs, plan_job
from weightdelta.layout import Box
from weightdelta.sharding.explicit import LocalShard


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Three tensors of two widths."""
    return save(
        tmp_path,
        {"w": torch.zeros(8, 600), "b": torch.zeros(600), "h": torch.zeros(7).bfloat16()},
    )


def _shard(name: str, shape: tuple[int, ...], low: int, high: int) -> LocalShard:
    box = Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    return LocalShard(name, "BF16" if name == "h" else "F32", shape, box)


def _rank(rows: tuple[int, int], *, aliases: dict[str, str] | None = None) -> Inventory:
    """Rows of the matrix; the other two tensors whole."""
    whole = (_shard("b", (600,), 0, 600), _shard("h", (7,), 0, 7))
    return Inventory((_shard("w", (8, 600), *rows), *whole), aliases or {})


def _plan(base: Base, *ranks: Inventory, config: Config | None = None) -> Job:
    return plan_job(ranks, base=base, config=config or Config())


def test_every_element_has_one_owner_that_holds_it(base: Base) -> None:
    job = _plan(base, _rank((0, 3)), _rank((3, 8)))
    assert [t.name for t in job.layout.tensors] == ["b", "h", "w"]
    assert int(job.plan.numel.sum()) == sum(t.numel for t in job.layout.tensors)
    assert job.elements == {4: 8 * 600 + 600, 2: 7}
    assert sum(job.owned_bytes()) == job.layout.nbytes
    for rank, (low, high) in enumerate([(0, 3), (3, 8)]):
        for frame in job.plan.owned(rank):
            for segment in job.plan.frame(frame).segments:
                if job.layout.tensors[segment.tensor].name == "w":
                    assert low * 600 <= segment.first < high * 600
    balance = job.owned_bytes()
    assert balance[1] - balance[0] == 2 * 600 * 4 - 600 * 4 - 14  # rank 0 takes the shared ones


def test_every_rank_plans_alike(base: Base) -> None:
    """Each rank computes it for itself, and lists its tensors in its own order."""
    ranks = [_rank((0, 3)), _rank((3, 8))]
    turned = [Inventory(r.shards[::-1], {}) for r in ranks]
    assert _plan(base, *ranks).plan.digest == _plan(base, *turned).plan.digest
    copy = Base(base.path / "model.safetensors")
    assert _plan(copy, *ranks).plan.digest == _plan(base, *ranks).plan.digest


def test_ranks_that_hold_the_same_share_the_work(base: Base) -> None:
    job = _plan(base, *[_rank((0, 8))] * 3)
    assert max(job.owned_bytes()) - min(job.owned_bytes()) <= 4096
    assert min(job.owned_bytes()) > 0


def test_frames_respect_the_setting(base: Base) -> None:
    config = Config(frame_bytes=64 * 1024)
    job = _plan(base, _rank((0, 8)), config=config)
    assert job.plan.max_bytes == 64 * 1024
    assert job.config is config


def test_tensors_with_a_codec_of_their_own_get_frames_of_their_own(base: Base) -> None:
    def frames(**settings: Any) -> list[list[str]]:
        job = _plan(base, _rank((0, 8)), config=Config.of({"values": "xor", **settings}))
        spans = (job.plan.frame(i).segments for i in range(len(job.plan)))
        return [[job.layout.tensors[s.tensor].name for s in span] for span in spans]

    assert frames() == frames(codec="zstd") == [["h"], ["b", "w"]]
    assert frames(codec_by_tensor={"[bh]": "none"}) == [["h"], ["w"], ["b"]]


def test_aliases_of_all_ranks_are_joined(base: Base) -> None:
    ranks = [_rank((0, 3), aliases={"head": "w"}), _rank((3, 8), aliases={"tail": "b"})]
    assert _plan(base, *ranks).layout.alias_of == {"head": "w", "tail": "b"}


def test_ranks_that_disagree_on_a_second_name_are_refused(base: Base) -> None:
    ranks = [_rank((0, 3), aliases={"head": "w"}), _rank((3, 8), aliases={"head": "b"})]
    with pytest.raises(LayoutMismatch, match=r"rank 1: 'head' is a second name of 'b'.*'w'"):
        _plan(base, *ranks)


def test_a_tensor_on_no_rank_is_named(base: Base) -> None:
    ranks = [Inventory(r.shards[:1], {}) for r in (_rank((0, 3)), _rank((3, 8)))]
    with pytest.raises(LayoutMismatch, match="'b' is in base but on none of the 2 ranks"):
        _plan(base, *ranks)


@pytest.mark.parametrize(
    ("rows", "ranks"), [([(0, 3), (4, 8)], ""), ([(0, 5), (4, 8)], "0.*1"), ([(0, 3), (3, 9)], "1")]
)
def test_gaps_and_overlaps_are_named(base: Base, rows: list[tuple[int, int]], ranks: str) -> None:
    with pytest.raises(OwnershipError, match=f"'w'.*{ranks}"):
        _plan(base, *[_rank(r) for r in rows])


def test_a_tensor_whose_shards_are_all_empty_is_a_gap(base: Base) -> None:
    ranks = [_rank((0, 0)), _rank((8, 8))]
    with pytest.raises(OwnershipError, match="'w'"):
        _plan(base, *ranks)


def test_excluded_tensors_are_in_no_plan(base: Base) -> None:
    assert set(base_specs(base, exclude=["b", "h*"])) == {"w"}
    assert set(base_specs(base, exclude=["[wb]"])) == {"h"}
    live = {"w": torch.zeros(8, 600), "b": torch.zeros(600), "h": torch.zeros(7)}
    mine = take_inventory(live, base=base_specs(base, exclude=["b"]), exclude=["b"])
    job = plan_job([mine], base=base, config=Config(), exclude=["b"])
    assert [t.name for t in job.layout.tensors] == ["h", "w"]


def test_a_model_of_empty_tensors_alone_has_a_plan(tmp_path: Path) -> None:
    live = {"e": torch.zeros(0, 3)}
    base = save(tmp_path, live)
    job = _plan(base, take_inventory(live, base=base_specs(base)))
    assert (len(job.plan), job.owned_bytes(), job.elements) == (0, [0], {4: 0})
