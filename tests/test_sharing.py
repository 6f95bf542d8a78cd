"""Tensors that share memory: tied as a whole is fine, a shared part is refused."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.errors import LayoutMismatch
from weightdelta.sharing import Place, refuse_overlaps

BUFFER = 240  # bytes


def _bytes(tensor: torch.Tensor) -> set[int]:
    """Addresses of all bytes of a tensor, one element after the other."""
    found: set[int] = set()
    for at in np.ndindex(*tensor.shape):
        first = tensor[at].data_ptr()
        found |= set(range(first, first + tensor.element_size()))
    return found


@st.composite
def views(draw: Any, memory: torch.Tensor) -> torch.Tensor:
    """Some strided part of a piece of memory, none of whose elements lie in each other."""
    kind = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32]))
    typed = memory.view(kind)
    inner = draw(st.integers(1, 4))
    step = draw(st.integers(inner, 8))
    rows = draw(st.integers(1, 4))
    span = (rows - 1) * step + inner
    start = draw(st.integers(0, max(len(typed) - span, 0)))
    if start + span > len(typed):
        return typed[start:]
    view = torch.as_strided(typed, (rows, inner), (step, 1), start)
    return view.T if draw(st.booleans()) else view


@given(data=st.data())
def test_only_a_part_in_common_is_refused(data: st.DataObject) -> None:
    memory = torch.zeros(BUFFER, dtype=torch.uint8)
    found = [data.draw(views(memory)) for _ in range(data.draw(st.integers(2, 4)))]
    tensors = {str(i): tensor for i, tensor in enumerate(found)}
    clashes = {
        (a, b)
        for a, b in combinations(tensors, 2)
        if Place.of(tensors[a]) != Place.of(tensors[b]) and _bytes(tensors[a]) & _bytes(tensors[b])
    }
    if not clashes:
        refuse_overlaps(tensors)
        return
    with pytest.raises(LayoutMismatch, match="share a part of their memory") as caught:
        refuse_overlaps(tensors)
    first, second = str(caught.value).split("'")[1:4:2]
    assert _bytes(tensors[first]) & _bytes(tensors[second])
    assert Place.of(tensors[first]) != Place.of(tensors[second])


def test_equal_places_are_one_tensor() -> None:
    whole = torch.zeros(4, 6)
    refuse_overlaps({"a": whole, "b": whole, "c": whole[:], "d": whole.detach()})
    assert Place.of(whole[:1]) == Place.of(torch.as_strided(whole, (1, 6), (1, 1)))


@pytest.mark.parametrize("shape", [(24,), (6, 4), (24, 1), (2, 12)])
def test_another_shape_of_the_same_memory_is_refused(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(4, 6)
    with pytest.raises(LayoutMismatch, match="'a' and 'b'"):
        refuse_overlaps({"a": whole, "b": whole.view(shape)})


def test_interleaved_parts_of_one_tensor_are_fine() -> None:
    qkv = torch.zeros(8, 3, 4)
    refuse_overlaps({"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2]})
    with pytest.raises(LayoutMismatch, match="'qkv' and 'k'"):
        refuse_overlaps({"qkv": qkv, "k": qkv[:, 1]})


def test_empty_tensors_share_nothing() -> None:
    whole = torch.zeros(4)
    refuse_overlaps({"a": whole, "b": whole[1:1], "c": whole[:0]})
