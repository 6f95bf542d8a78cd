"""Torch tensors as unsigned elements: dtype names, and numpy views of the same memory."""

import sys
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import torch

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import WIDTHS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NAMES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip

#: Torch dtype by safetensors name; a type that this torch lacks is left out.
TORCH: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, attr) for name, attr in _NAMES.items() if hasattr(torch, attr)
}
SAFETENSORS: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH.items()}

#: Integers that stand for elements of each width: bit patterns, whose arithmetic wraps.
INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(tensor: torch.Tensor, *, name: str) -> str:
    """The safetensors dtype of a tensor.

    Raises:
        LayoutMismatch: safetensors has no such dtype.
    """
    try:
        return SAFETENSORS[tensor.dtype]
    except KeyError:
        raise LayoutMismatch(f"tensor {name!r}: {tensor.dtype} has no safetensors dtype") from None


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor; asking does not load them, which takes most of a second."""
    # Another thread may be loading them just now; until the class is there, nothing is one.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is a view of; of its own part, for a DTensor."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.untyped_storage().data_ptr()


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width; strides are kept."""
    width = tensor.element_size()
    if tensor.dtype == torch.complex64:
        return torch.view_as_real(tensor.resolve_conj()).view(torch.int64).squeeze(-1)
    return tensor.view(INTS[width])


def storage_view(tensor: torch.Tensor, *, name: str) -> Elements:
    """The elements of a tensor's memory, from its first to its last, as a 1-D unsigned array.

    Element ``(i, j, ..)`` of the tensor lies at ``i * stride[0] + j * stride[1] + ..``; writing
    to the array writes to the tensor.

    Raises:
        InputError: The tensor is not in host memory.
    """
    if tensor.device.type != "cpu":
        raise InputError(f"tensor {name!r} is on {tensor.device}; this receiver needs host memory")
    ints = as_ints(tensor.detach())
    span = 1 + sum((n - 1) * s for n, s in zip(ints.shape, ints.stride(), strict=True))
    flat = torch.as_strided(ints, (span if tensor.numel() else 0,), (1,), ints.storage_offset())
    array: Elements = flat.numpy().view(UINTS[tensor.element_size()])
    return array


def wire_view(buffer: np.ndarray[Any, Any], *, dtype: str) -> torch.Tensor:
    """A 1-D uint8 array seen as a torch tensor of a safetensors dtype, same memory."""
    tensor = torch.from_numpy(buffer)
    # Packed and byte-wide types move as bytes: copies between equal bits need no conversion.
    return tensor.view(TORCH[dtype]) if WIDTHS[dtype] > 1 else tensor
