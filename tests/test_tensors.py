"""Torch tensors as unsigned elements: names, and views of the same memory."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from ranks import bits, random_tensor
from safetensors import safe_open
from safetensors.torch import save

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.layout import WIDTHS
from weightdelta.tensors import (
    SAFETENSORS,
    TORCH,
    as_ints,
    dtype_name,
    is_dtensor,
    storage_view,
    wire_view,
)


def sample(dtype: str, *shape: int) -> torch.Tensor:
    """Random bytes as a tensor of ``shape`` elements."""
    return random_tensor(dtype, shape, seed=3)


def test_this_torch_knows_every_dtype() -> None:
    assert set(TORCH) == set(WIDTHS)
    assert len(SAFETENSORS) == len(TORCH)


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_names_and_widths_are_those_that_safetensors_writes(
    dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("names") / "t.safetensors"
    tensor = sample(dtype, 2, 4)
    path.write_bytes(save({"t": tensor}))
    with safe_open(path, "pt") as f:
        assert f.get_slice("t").get_dtype() == dtype == dtype_name(tensor, name="t")
    assert tensor.element_size() == WIDTHS[dtype]


@pytest.mark.parametrize("dtype", sorted(TORCH))
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_integers_share_the_memory(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, *shape)
    ints = as_ints(tensor)
    assert ints.shape == tensor.shape
    assert ints.data_ptr() == tensor.data_ptr()
    assert ints.element_size() == WIDTHS[dtype]
    if len(shape) == 2:
        assert torch.equal(as_ints(tensor.t()), ints.t())


def test_a_conjugated_view_reads_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex64)
    assert torch.equal(as_ints(tensor.conj()), as_ints(tensor.conj().resolve_conj()))


def test_a_dtype_without_a_name_is_refused_by_tensor() -> None:
    with pytest.raises(LayoutMismatch, match=r"'w'.*complex128"):
        dtype_name(torch.zeros(1, dtype=torch.complex128), name="w")


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_writing_to_the_storage_writes_to_the_tensor(dtype: str) -> None:
    tensor = sample(dtype, 4, 3)
    view = storage_view(tensor, name="t")
    view[5] ^= view.dtype.type(1)
    assert np.array_equal(view, bits(tensor))


def test_a_strided_tensor_is_seen_with_the_memory_between() -> None:
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    part = whole[1:3, 2:4]
    view = storage_view(part, name="t")
    assert view.tolist() == list(range(8, 16))
    assert [view[i * 6 + j] for i in range(2) for j in range(2)] == part.reshape(-1).tolist()


@pytest.mark.parametrize(("shape", "length"), [((), 1), ((0, 3), 0), ((3, 0), 0)])
def test_scalars_and_empty_tensors_have_storage(shape: tuple[int, ...], length: int) -> None:
    assert storage_view(torch.zeros(shape), name="t").shape == (length,)


def test_storage_needs_host_memory() -> None:
    with pytest.raises(InputError, match=r"'w' is on meta"):
        storage_view(torch.zeros(2, device="meta"), name="w")


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_a_wire_view_shares_its_buffer(dtype: str) -> None:
    buffer = np.zeros(16, np.uint8)
    tensor = wire_view(buffer, dtype=dtype)
    assert tensor.element_size() == WIDTHS[dtype]
    as_ints(tensor)[0] = 1
    assert buffer[0] == 1


def test_tensors_are_told_apart_while_another_thread_loads_dtensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module is known before it is whole."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("half"))
    assert not is_dtensor(torch.zeros(2))
