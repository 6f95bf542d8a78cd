"""Version 0: safetensors files as they lie on disk, whole, sharded, odd or broken."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import bits, save
from safetensors.torch import save_file

from weightdelta.base import INDEX, Base
from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.frame import Segment
from weightdelta.job import base_specs
from weightdelta.layout import WIDTHS, Layout, TensorSpec
from weightdelta.tensors import TORCH

Header = dict[str, Any]


def write(path: Path, header: Header, data: bytes, *, pad: int = 0) -> Base:
    """A file written by hand: ``pad`` spaces after the header decide its alignment."""
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return Base(path)


def entry(dtype: str, shape: list[int], start: int, end: int) -> Header:
    """A tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_every_dtype_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (6, 16), np.uint8))
    tensor = raw.view(TORCH[dtype])
    base = save(tmp_path, {"t": tensor})
    (spec,) = base.specs
    assert (spec.name, spec.dtype, spec.extent) == ("t", dtype, tuple(tensor.shape))
    assert np.array_equal(base.elements("t"), bits(tensor))


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    base = save(tmp_path, {"s": torch.tensor(3.0), "e": torch.zeros(0, 4)})
    assert base.specs == (TensorSpec("e", "F32", (0, 4)), TensorSpec("s", "F32", ()))
    assert base.elements("e").shape == (0,)
    assert base.elements("s").view(np.float32).tolist() == [3.0]


def test_a_file_serves_as_well_as_its_folder(tmp_path: Path) -> None:
    base = save(tmp_path, {"a": torch.arange(3)})
    assert Base(tmp_path / "model.safetensors").specs == base.specs


def test_elements_cannot_be_written(tmp_path: Path) -> None:
    base = save(tmp_path, {"a": torch.arange(3)})
    with pytest.raises(ValueError, match="read-only"):
        base.elements("a")[0] = 1


def _sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(2, 3) for name in "abcd"}
    files = {"m-1.safetensors": "ac", "m-2.safetensors": "bd"}
    for file, names in files.items():
        save_file({n: tensors[n] for n in names}, str(folder / file))
    weight_map = {n: file for file, names in files.items() for n in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    save_file({"a": torch.zeros(9)}, str(tmp_path / "adapter.safetensors"))  # not in the index
    base = Base(tmp_path)
    assert [s.name for s in base.specs] == list("abcd")
    assert all(np.array_equal(base.elements(n), bits(t)) for n, t in tensors.items())


def test_shards_without_an_index(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert {s.name for s in Base(tmp_path).specs} == set(tensors)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in "xy":
        save_file({"twice": torch.zeros(1)}, str(tmp_path / f"{file}.safetensors"))
    with pytest.raises(LayoutMismatch, match=r"y\.safetensors.*'twice'.*x\.safetensors"):
        _ = Base(tmp_path).specs


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        _ = Base(tmp_path).specs


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"m-2\.safetensors"):
        _ = Base(tmp_path).specs


@pytest.mark.parametrize("path", ["", "absent", "absent.safetensors"])
def test_a_path_without_weights_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        _ = Base(tmp_path / path).specs


@pytest.mark.parametrize("pad", range(8))
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
def test_headers_need_not_be_aligned(dtype: str, pad: int, tmp_path: Path) -> None:
    size = 6 * WIDTHS[dtype]
    data = np.random.default_rng(pad).integers(0, 256, size, np.uint8).tobytes()
    header = {"__metadata__": {"format": "pt"}, "t": entry(dtype, [2, 3], 0, size)}
    base = write(tmp_path / "m.safetensors", header, data, pad=pad)
    assert base.elements("t").tobytes() == data
    out = np.zeros(2, base.elements("t").dtype)
    base.read("t", Segment(tensor=0, first=1, rows=2, run=1, stride=3), out=out)
    assert out.tolist() == base.elements("t")[[1, 4]].tolist()


_GOOD = {"t": entry("U8", [4], 0, 4)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{{",
        struct.pack("<Q", 20) + b"{}",
    ],
)
def test_bytes_that_are_no_header_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"odd\.safetensors"):
        _ = Base(path).specs


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (_GOOD, 3),
        (_GOOD, 5),
        ({"t": entry("U8", [5], 0, 4)}, 4),
        ({"t": entry("U8", [4], 1, 5)}, 5),
        ({"t": entry("U8", [4], 4, 0)}, 4),
        ({"t": entry("U8", [-4], 0, 4)}, 4),
        ({"t": entry("U8", [2**40, 2**40], 0, 4)}, 4),
        ({"t": entry("Q7", [4], 0, 4)}, 4),
        ({"t": {"dtype": "U8", "shape": [4]}}, 4),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6),
    ],
)
def test_a_header_that_lies_is_refused(header: Header, size: int, tmp_path: Path) -> None:
    base = write(tmp_path / "odd.safetensors", header, bytes(size))
    with pytest.raises(InputError, match=r"odd\.safetensors"):
        _ = base.specs


def test_a_dtype_that_weightdelta_lacks_is_named(tmp_path: Path) -> None:
    header = {"six": entry("F6_E2M3", [4], 0, 3)}
    base = write(tmp_path / "m.safetensors", header, bytes(3))
    with pytest.raises(LayoutMismatch, match=r"'six'.*F6_E2M3"):
        Layout.of(base.specs)
    with pytest.raises(LayoutMismatch, match=r"'six'.*F6_E2M3"):
        base.elements("six")


def test_a_dtype_that_weightdelta_lacks_can_be_excluded(tmp_path: Path) -> None:
    header = {"six": entry("F6_E2M3", [4], 0, 3), "t": entry("U8", [4], 3, 7)}
    base = write(tmp_path / "m.safetensors", header, bytes(range(7)))
    specs = base_specs(base, exclude=["six"])
    assert Layout.of(specs.values()).tensors == (TensorSpec("t", "U8", (4,)),)
    assert base.elements("t").tolist() == [3, 4, 5, 6]


@given(data=st.data())
def test_segments_are_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, columns - 1))
    run = data.draw(st.integers(1, columns - first))
    tensor = torch.arange(rows * columns, dtype=torch.int16).reshape(rows, columns)
    base = save(tmp_path_factory.mktemp("segments"), {"t": tensor})
    out = np.zeros(rows * run, np.uint16)
    base.read("t", Segment(0, first, rows, run, columns), out=out)
    assert out.tolist() == tensor[:, first : first + run].reshape(-1).tolist()


@pytest.mark.parametrize("left", [0, 60])
def test_a_file_that_shrank_after_it_was_listed_is_named(left: int, tmp_path: Path) -> None:
    base = save(tmp_path, {"t": torch.arange(64)})
    assert len(base.specs) == 1
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        base.elements("t")


def test_a_file_that_went_away_after_it_was_listed_is_named(tmp_path: Path) -> None:
    base = save(tmp_path, {"t": torch.arange(64)})
    assert len(base.specs) == 1
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        base.elements("t")


def test_only_the_path_travels_to_other_processes(tmp_path: Path) -> None:
    base = save(tmp_path, {"t": torch.arange(4096)})
    base.elements("t")
    data = pickle.dumps(base)
    assert len(data) < 1000
    copy = pickle.loads(data)  # noqa: S301 - our own bytes
    assert copy.elements("t").tolist() == base.elements("t").tolist()
