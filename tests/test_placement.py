"""Where canonical elements lie in a model's memory."""

import ast
import math
import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import bits

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.kernels.planes import UINTS
from weightdelta.layout import Layout, TensorSpec
from weightdelta.placement import Resident, place
from weightdelta.tensors import SAFETENSORS, TORCH, as_ints


def _layout(aliases: Mapping[str, str] | None = None, **tensors: torch.Tensor) -> Layout:
    specs = []
    for name, tensor in tensors.items():
        dtype, shape = SAFETENSORS[tensor.dtype], tuple(tensor.shape)
        if dtype == "F4":
            shape = (*shape[:-1], 2 * shape[-1])
        specs.append(TensorSpec(name, dtype, shape))
    return Layout.of(specs, aliases=aliases)


def _one(tensor: torch.Tensor) -> Resident:
    (found,) = place({"t": tensor}, layout=_layout(t=tensor))
    return found


def _check(resident: Resident, tensor: torch.Tensor) -> None:
    """Every canonical index leads to its element, and writing there writes to the tensor."""
    index = np.arange(tensor.numel(), dtype=np.uint64)
    there = resident.memory[resident.offsets(index)]
    assert there.tobytes() == bits(tensor)
    plain = _one(as_ints(tensor).contiguous().view(tensor.dtype).clone())
    assert resident.digest() == plain.digest()
    if tensor.numel():
        resident.memory[resident.offsets(index[-1:])] = UINTS[tensor.element_size()](1)
        assert as_ints(tensor).reshape(-1)[-1] == 1


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = max(torch.empty(0, dtype=dtype).element_size(), 1)
    raw = torch.arange(math.prod(shape) * size, dtype=torch.int64) * 37 % 251
    if dtype == torch.bool:
        return (raw % 2 == 0).reshape(shape)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", TORCH.values(), ids=list(TORCH))
def test_every_dtype_is_reached(dtype: torch.dtype) -> None:
    tensor = _filled((3, 4), dtype)
    _check(_one(tensor), tensor)


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    """Sliced, stepped and permuted views into a larger tensor."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64]))
    tensor = _filled(tuple(shape), dtype)
    for d in range(len(shape)):
        start = draw(st.integers(0, shape[d]))
        tensor = tensor.narrow(d, start, shape[d] - start)
        tensor = tensor[(slice(None),) * d + (slice(None, None, draw(st.integers(1, 3))),)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@given(_views())
def test_views_are_patched_in_place(tensor: torch.Tensor) -> None:
    _check(_one(tensor), tensor)


def test_zero_dimensional_empty_and_parameters() -> None:
    single = torch.tensor(2.5)
    _check(_one(single), single)
    empty = _one(torch.zeros(0, 4))
    assert len(empty.memory) == 0
    assert empty.digest() == 0
    parameter = torch.nn.Parameter(torch.ones(3))
    _one(parameter).memory[1] = 0
    assert parameter.tolist() == [1, 0, 1]


def test_an_index_past_the_end_never_leaves_the_tensor() -> None:
    """The plan's bounds are the kernels' bounds, so the shape has to be the layout's."""
    layout = _layout(t=torch.zeros(8))
    for wrong in (torch.zeros(7), torch.zeros(2, 4), torch.zeros(8, 1), torch.zeros(())):
        with pytest.raises(LayoutMismatch, match=r"'t': expected shape \(8,\)"):
            place({"t": wrong}, layout=layout)


def test_missing_extra_and_dtype_are_named() -> None:
    layout = _layout(a=torch.zeros(2), b=torch.zeros(3))
    whole = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(LayoutMismatch, match=r"'b' is published but not in this model \(1 missing"):
        place({"a": whole["a"]}, layout=layout)
    with pytest.raises(LayoutMismatch, match="'c' is in this model but not published"):
        place({**whole, "c": torch.zeros(1)}, layout=layout)
    with pytest.raises(LayoutMismatch, match="'b': expected dtype F32, found F16"):
        place({**whole, "b": torch.zeros(3).half()}, layout=layout)
    with pytest.raises(LayoutMismatch, match="has no safetensors dtype"):
        place({**whole, "b": torch.zeros(3, dtype=torch.complex128)}, layout=layout)
    found = place({**whole, "cache.k": torch.zeros(1)}, layout=layout, exclude=["cache.*"])
    assert [r.name for r in found] == ["a", "b"]


@pytest.mark.parametrize("name", ["cache", "blocks[0].cache", "a*b", "[[]"])
def test_the_pattern_that_a_message_offers_excludes_that_name(name: str) -> None:
    layout, model = _layout(a=torch.zeros(2)), {"a": torch.zeros(2), name: torch.zeros(1)}
    with pytest.raises(LayoutMismatch) as caught:
        place(model, layout=layout)
    (offered,) = re.findall(r"exclude=(\[.*\])", str(caught.value))
    assert [r.name for r in place(model, layout=layout, exclude=ast.literal_eval(offered))] == ["a"]


def test_a_part_is_a_part_in_layout_order() -> None:
    layout = _layout(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(1))
    found = place({"c": torch.zeros(1), "a": torch.zeros(2)}, layout=layout, partial=True)
    assert [(r.tensor, r.name) for r in found] == [(0, "a"), (2, "c")]


def test_second_names_of_the_trainer_or_of_this_model() -> None:
    shared = torch.zeros(3)
    layout = _layout({"head": "embed"}, embed=shared)
    for model in ({"embed": shared, "head": shared}, {"head": shared}, {"embed": shared}):
        (found,) = place(model, layout=layout)
        assert found.memory.ctypes.data == shared.data_ptr()
    (found,) = place(
        {"embed": shared, "lm": shared}, layout=_layout(embed=shared), aliases=[("embed", "lm")]
    )
    assert found.name == "embed"
    with pytest.raises(LayoutMismatch, match="'lm' is in this model but not published"):
        place({"embed": shared, "lm": shared}, layout=_layout(embed=shared))


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
def test_weights_tied_in_the_trainer_and_apart_here_are_refused(order: tuple[str, str]) -> None:
    """One of the two would silently keep its old values."""
    layout = _layout({"head": "embed"}, embed=torch.zeros(3))
    model = {name: torch.zeros(3) for name in order}
    with pytest.raises(LayoutMismatch, match="one tensor in the trainer but two in this model"):
        place(model, layout=layout)


def test_memory_that_elements_share_or_that_is_lazy_is_refused() -> None:
    expanded = torch.zeros(1).expand(4)
    overlapping = torch.zeros(5).as_strided((3, 3), (1, 1))
    conjugated = torch.zeros(2, dtype=torch.complex64).conj()
    for tensor in (expanded, overlapping, conjugated):
        with pytest.raises(InputError, match="replace it by a copy"):
            _one(tensor)
    with pytest.raises(InputError, match="plain dense tensor"):
        _one(torch.eye(2).to_sparse())
    with pytest.raises(InputError, match="needs host memory"):
        _one(torch.zeros(2, device="meta"))


def test_a_tensor_is_recognised_where_it_was_placed() -> None:
    tensor = torch.zeros(4, 4)
    resident = _one(tensor)
    assert resident.is_at(tensor)
    assert resident.is_at(tensor.detach())
    for other in (None, tensor.clone(), tensor.T, tensor[:2], tensor.view(torch.int32)):
        assert not resident.is_at(other)
    # Nor can the memory be freed under the receiver, as engines do while they sleep.
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    assert resident.is_at(tensor)
