"""Copies of a box on several ranks must be the same bytes; a drifted copy is fatal at attach."""

import pytest
import torch

from weightdelta.capture import Inventory, take_inventory
from weightdelta.errors import ReplicaDivergence
from weightdelta.layout import Box, Layout, TensorSpec
from weightdelta.replicas import hash_shards, refuse_divergence, shared_boxes
from weightdelta.sharding.explicit import LocalShard
from weightdelta.state import StateSource

SPECS = {"a": TensorSpec("a", "BF16", (3, 4)), "b": TensorSpec("b", "F32", (5,))}
LAYOUT = Layout.of(SPECS.values())


def _state(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 4, generator=random), "b": torch.randn(5, generator=random)}


def _hashes(*states: dict[str, torch.Tensor]) -> list[dict]:
    shared = shared_boxes([take_inventory(s, base=SPECS) for s in states])
    return [dict(hash_shards(s, shared=shared, layout=LAYOUT)) for s in states]


def test_equal_replicas_pass() -> None:
    hashes = _hashes(_state(), _state(), _state())
    assert {name for name, _ in hashes[0]} == {"a", "b"}
    refuse_divergence(hashes)


def test_a_drifted_copy_is_named_with_its_ranks() -> None:
    drifted = _state()
    drifted["b"][3] += 1e-6
    with pytest.raises(ReplicaDivergence, match=r"'b'.*ranks 0 and 2"):
        refuse_divergence(_hashes(_state(), _state(), drifted))


def test_only_wire_bytes_count() -> None:
    near = _state()
    near["a"] = near["a"].bfloat16().float()  # another master, the same bf16
    refuse_divergence(_hashes(_state(), near))


def test_strides_do_not_count() -> None:
    turned = _state()
    turned["a"] = turned["a"].t().contiguous().t()
    refuse_divergence(_hashes(_state(), turned))


def test_boxes_of_one_rank_are_not_read() -> None:
    halves = [
        Inventory((LocalShard("b", "F32", (5,), Box((0,), (3,))),), {}),
        Inventory((LocalShard("b", "F32", (5,), Box((3,), (2,))),), {}),
    ]
    assert shared_boxes(halves) == frozenset()
    unreadable = StateSource(tensors=lambda: pytest.fail("must not be read"))
    assert hash_shards(unreadable, shared=frozenset(), layout=LAYOUT) == {}


def test_empty_boxes_are_not_shared() -> None:
    empty = Inventory((LocalShard("b", "F32", (5,), Box((5,), (0,))),), {})
    assert shared_boxes([empty, empty]) == frozenset()
