"""DTensor placements as boxes: by the definition of chunk, and in real groups of four ranks."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.spawn import spawn

from weightdelta.errors import UnsupportedSharding
from weightdelta.frame import FramePlan
from weightdelta.layout import Box, Layout, TensorSpec
from weightdelta.ownership import assign, collect
from weightdelta.sharding.dtensor import local_shard, placed_box
from weightdelta.sharding.explicit import LocalShard

WORLD = 4


def part_of(index: torch.Tensor, *, dim: int, ways: int, at: int) -> torch.Tensor:
    """What ``torch.chunk`` gives to part ``at``; parts that it leaves out are empty."""
    parts = index.chunk(ways, dim=dim)
    return parts[at] if at < len(parts) else index.narrow(dim, 0, 0)


@settings(max_examples=200)
@given(data=st.data(), extent=st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple))
def test_boxes_are_nested_chunks(data: st.DataObject, extent: tuple[int, ...]) -> None:
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dims = st.one_of(st.none(), st.integers(-len(extent), len(extent) - 1))
    drawn = data.draw(st.lists(dims, min_size=len(mesh), max_size=len(mesh)))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in mesh)
    placements: tuple[Placement, ...] = tuple(Replicate() if d is None else Shard(d) for d in drawn)
    found = placed_box("w", extent, mesh=mesh, coordinate=at, placements=placements)
    index = torch.arange(Box.whole(extent).numel).reshape(extent)
    expected = index
    for d, ways, place in zip(drawn, mesh, at, strict=True):
        if d is not None:
            expected = part_of(expected, dim=d, ways=ways, at=place)
    assert found.shape == tuple(expected.shape)
    assert found.inside(extent)
    slices = tuple(slice(o, e) for o, e in zip(found.offset, found.end, strict=True))
    assert torch.equal(index[slices], expected)


@pytest.mark.parametrize(
    ("placement", "word"),
    [
        (Partial(), "Partial"),
        (_StridedShard(0, split_factor=2), "_StridedShard"),
        (Shard(2), "Shard"),
        (Shard(-3), "Shard"),
    ],
    ids=str,
)
def test_other_placements_are_refused_by_name(placement: Placement, word: str) -> None:
    with pytest.raises(UnsupportedSharding, match=rf"tensor 'q.w': placement {word}.*\(4, 4\)"):
        placed_box("q.w", (4, 4), mesh=(2,), coordinate=(0,), placements=(placement,))


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 2)])
def test_a_plain_tensor_is_held_whole_and_shares_memory(shape: tuple[int, ...]) -> None:
    tensor = nn.Parameter(torch.ones(shape))
    shard, local = local_shard("w", tensor, dtype="F32")
    assert shard == LocalShard("w", "F32", shape, Box.whole(shape))
    assert local.data_ptr() == tensor.data_ptr()
    assert not local.requires_grad


# --- four ranks -------------------------------------------------------------------------------


class Rows(nn.Module):
    """Parameters whose first dimension divides evenly by 4, unevenly, and leaves ranks empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.even = nn.Linear(6, 8)
        self.five = nn.Linear(6, 5)
        self.three = nn.Linear(6, 3)
        self.one = nn.Linear(6, 1, bias=False)
        self.norm = nn.Parameter(torch.randn(12))
        self.experts = nn.Parameter(torch.randn(6, 2, 4))


def check(tensors: dict[str, torch.Tensor]) -> list[LocalShard]:
    """Compare every shard with its slice of the gathered tensor, and all shards as a cover."""
    held = []
    for name, tensor in tensors.items():
        shard, local = local_shard(name, tensor, dtype="F32")
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        box = shard.box
        assert shard.extent == tuple(full.shape), name
        assert tuple(local.shape) == box.shape, name
        place = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
        assert torch.equal(full[place], local), name
        assert not isinstance(local, DTensor), name
        held.append(shard)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, held)
    layout = Layout.of(TensorSpec(s.name, s.dtype, s.extent) for s in held)
    owners = assign(collect(every, layout=layout), layout=layout, world_size=WORLD)
    digests: list[Any] = [None] * WORLD
    dist.all_gather_object(digests, FramePlan.build(owners, layout=layout, max_bytes=64).digest)
    assert len(set(digests)) == 1
    return held


def fsdp() -> None:
    model = Rows()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    held = {s.name: s.box for s in check(model.state_dict())}
    rank = dist.get_rank()
    # torch.chunk of 5 rows by 4: 2, 2, 1, 0.
    assert held["five.weight"] == Box((min(2 * rank, 5), 0), ((2, 2, 1, 0)[rank], 6))
    assert held["one.weight"].shape == ((1, 6) if rank == 0 else (0, 6))


def hsdp() -> None:
    model = Rows()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard")))
    held = {s.name: s.box for s in check(model.state_dict())}
    half = dist.get_rank() % 2
    assert held["three.weight"] == Box((2 * half, 0), (2 - half, 6))


def grids() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    placements: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(1), Shard(1)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Replicate(), Shard(-1)],
        [Replicate(), Replicate()],
    ]
    tensors: dict[str, torch.Tensor] = {}
    for shape in ((5, 7), (1, 3), (3, 5, 2)):
        for i, placement in enumerate(placements):
            tensors[f"{shape}.{i}"] = distribute_tensor(torch.randn(shape), mesh, placement)
    tensors["plain"] = torch.ones(3, 2)
    tensors["scalar"] = distribute_tensor(torch.tensor(2.0), mesh, [Replicate(), Replicate()])
    check(tensors)
    _, local = local_shard("t", tensors["(5, 7).5"], dtype="F32")
    assert local.numel() == 5 * (4 if dist.get_rank() % 2 == 0 else 3)


def no_collectives() -> None:
    """One rank alone may ask; with a collective inside it would wait for the others."""
    mesh = init_device_mesh("cpu", (WORLD,))
    tensor = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    if dist.get_rank() == 2:
        shard, local = local_shard("t", tensor, dtype="F32")
        assert shard.box == Box((6,), (3,))
        assert local.tolist() == [6.0, 7.0, 8.0]
    dist.barrier()


def shared_memory_and_strides() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    local = torch.arange(12.0).reshape(4, 3).t()
    assert not local.is_contiguous()
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    shard, found = local_shard("t", tensor, dtype="F32")
    assert shard.box == Box((3 * dist.get_rank(), 0), (3, 4))
    assert found.data_ptr() == local.data_ptr()
    assert found.stride() == (1, 3)


def refused(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(UnsupportedSharding, match=rf"tensor 'layer.w'.*{word}"):
        local_shard("layer.w", tensor, dtype="F32")


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    check(dict(model.state_dict()))
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    # Rowwise weights stay plain; colwise ones are sharded twice along rows, with a stride.
    check({name: t for name, t in state.items() if name.startswith("1.")})
    refused(state["0.weight"], "_StridedShard")


def partial() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    refused(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]), "Partial")
    rows = torch.ones(3, 2)
    size = torch.Size((20, 2))
    lying = DTensor.from_local(rows, mesh, [Shard(0)], shape=size, stride=(2, 1))
    refused(lying, r"\(5, 2\), found \(3, 2\)")


def outside_the_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    shard, local = local_shard("w", tensor, dtype="F32")
    inside = dist.get_rank() < 2
    assert shard.box.numel == local.numel() == (4 if inside else 0)
    assert shard.extent == (4, 2)
    assert tuple(local.shape) == shard.box.shape


SCENES: tuple[Callable[[], None], ...] = (
    fsdp,
    hsdp,
    grids,
    no_collectives,
    shared_memory_and_strides,
    tensor_parallel,
    partial,
    outside_the_mesh,
)


def rank_main(rank: int, folder: str) -> None:
    """Play every scene; the first failure ends the rank, and spawn reports it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for scene in SCENES:
        scene()
        (Path(folder) / f"{scene.__name__}.{rank}").touch()
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_four_real_ranks_are_slices_of_the_full_tensors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(folder,), nprocs=WORLD)  # type: ignore[no-untyped-call]
        played = {p.name for p in Path(folder).iterdir()}
        assert {f"{s.__name__}.{r}" for s in SCENES for r in range(WORLD)} <= played
