"""Canonical tensors: widths, extents, boxes, and the one spelling of a layout's bytes."""

import json
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.errors import DamagedObject, LayoutMismatch, UnsupportedFormat
from weightdelta.layout import PLAIN_FLOATS, WIDTHS, Box, Layout, TensorSpec, castable

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.builds(
    TensorSpec,
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.sampled_from(sorted(set(WIDTHS) - {"F4"})),
    SHAPES,
)
LAYOUTS = st.lists(SPECS, max_size=5, unique_by=lambda t: t.name).map(Layout.of)
INTERVALS = st.tuples(st.integers(0, 4), st.integers(0, 4))
BOXES = st.lists(INTERVALS, min_size=2, max_size=2).map(
    lambda sides: Box(tuple(o for o, _ in sides), tuple(n for _, n in sides))
)


def test_halves_are_never_cast_into_each_other() -> None:
    pairs = {(a, b) for a in WIDTHS for b in WIDTHS if a != b and castable(a, to=b)}
    assert pairs == {(a, b) for a in PLAIN_FLOATS for b in PLAIN_FLOATS if a != b} - {
        ("F16", "BF16"),
        ("BF16", "F16"),
    }
    assert all(castable(a, to=a) for a in WIDTHS)


@given(LAYOUTS)
def test_bytes_round_trip(layout: Layout) -> None:
    data = layout.to_bytes()
    again = Layout.from_bytes(data)
    assert again == layout
    assert again.to_bytes() == data
    assert layout.digest == blake3(data).hexdigest()
    assert data.isascii()


@given(st.lists(SPECS, max_size=5, unique_by=lambda t: t.name), st.randoms())
def test_order_of_the_input_does_not_matter(specs: list[TensorSpec], random: Any) -> None:
    shuffled = random.sample(specs, len(specs))
    assert Layout.of(shuffled).digest == Layout.of(specs).digest


def test_names_sort_by_code_point() -> None:
    names = ["b", "a.10", "a.9", "Z", "\U0001f600", "\uffff"]
    layout = Layout.of(TensorSpec(n, "U8", ()) for n in names)
    assert [t.name for t in layout.tensors] == ["Z", "a.10", "a.9", "b", "\uffff", "\U0001f600"]
    assert layout.index["b"] == 3


def test_the_written_form_is_the_documented_one() -> None:
    layout = Layout.of(
        [TensorSpec("w", "BF16", (2, 3)), TensorSpec("b", "F4", (4,))], aliases={"head": "w"}
    )
    assert layout.to_bytes() == (
        b'{"format":1,"tensors":[["b","F4",[4]],["w","BF16",[2,3]]],"aliases":[["head","w"]]}'
    )
    assert layout.nbytes == 2 + 12
    assert layout.alias_of == {"head": "w"}


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_sizes_follow_from_dtype_and_shape(dtype: str) -> None:
    spec = TensorSpec("t", dtype, (3, 4))
    assert spec.extent == ((3, 2) if dtype == "F4" else (3, 4))
    assert spec.nbytes == np.prod(spec.extent) * spec.width
    assert spec.width in {1, 2, 4, 8}


def test_scalars_and_empty_tensors_have_one_and_no_element() -> None:
    assert TensorSpec("t", "F32", ()).numel == 1
    assert TensorSpec("t", "F32", (3, 0)).numel == 0


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", (2, -1)), ("U9", (2, -1)), ("F4", ()), ("F4", (2, 3))]
)
def test_a_tensor_that_cannot_be_is_named(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutMismatch, match="layer"):
        TensorSpec("layer", dtype, shape)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F8_E4M3FNUZ", "bf16"])
def test_an_unsupported_dtype_is_named_where_it_would_be_used(dtype: str) -> None:
    """Not before: a checkpoint may hold such a tensor beside those that are published."""
    spec = TensorSpec("layer", dtype, (4,))
    with pytest.raises(LayoutMismatch, match=f"'layer'.*{dtype}.*exclude="):
        Layout.of([spec])
    with pytest.raises(LayoutMismatch, match=f"'layer'.*{dtype}"):
        _ = spec.nbytes


def test_names_and_aliases_must_fit() -> None:
    a, b = TensorSpec("a", "U8", ()), TensorSpec("b", "U8", ())
    for tensors, aliases in [
        ((b, a), ()),
        ((a, a), ()),
        ((a, b), (("b", "a"),)),
        ((a, b), (("c", "d"),)),
        ((a, b), (("d", "a"), ("c", "a"))),
        ((a, b), (("c", "a"), ("c", "b"))),
    ]:
        with pytest.raises(LayoutMismatch):
            Layout(tensors, aliases)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"format": 1, "tensors": []},
        {"format": 1, "tensors": [["a", "U8"]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", [1], 0]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", [1.0]]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", [True]]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", [-1]]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", ["1"]]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", None]], "aliases": []},
        {"format": 1, "tensors": [["a", "U9", [1]]], "aliases": []},
        {"format": 1, "tensors": [["a", ["U8"], [1]]], "aliases": []},
        {"format": 1, "tensors": [[7, "U8", [1]]], "aliases": []},
        {"format": 1, "tensors": [["\ud800", "U8", [1]]], "aliases": []},
        {"format": 1, "tensors": [["b", "U8", []], ["a", "U8", []]], "aliases": []},
        {"format": 1, "tensors": [["a", "U8", []]], "aliases": [["b"]]},
        {"format": 1, "tensors": [["a", "U8", []]], "aliases": [["b", "c"]]},
        {"format": 1, "tensors": [["a", "U8", []]], "aliases": [["b", 1]]},
        {"format": 1, "tensors": [], "aliases": [], "more": 1},
        {"format": True, "tensors": [], "aliases": []},
        {"aliases": [], "format": 1, "tensors": []},
    ],
)
def test_a_document_of_another_form_is_damaged(document: object) -> None:
    data = json.dumps(document, separators=(",", ":")).encode()
    with pytest.raises(DamagedObject, match="layout/x"):
        Layout.from_bytes(data, name="layout/x")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_no_document_are_damaged(data: bytes) -> None:
    with pytest.raises(DamagedObject, match="layout/x"):
        Layout.from_bytes(data, name="layout/x")


def test_another_spelling_is_refused() -> None:
    data = Layout.of([TensorSpec("a", "U8", (1,))]).to_bytes()
    for other in (data + b"\n", data.replace(b",", b", ", 1), data.replace(b'"a"', b'"\\u0061"')):
        with pytest.raises(DamagedObject, match="canonical"):
            Layout.from_bytes(other)


def test_a_newer_format_is_told_apart_from_damage() -> None:
    with pytest.raises(UnsupportedFormat, match="format 2"):
        Layout.from_bytes(b'{"format":2,"anything":[]}')


def _cells(box: Box) -> set[tuple[int, ...]]:
    return {tuple(np.add(i, box.offset).tolist()) for i in np.ndindex(box.shape)}


@given(BOXES, BOXES)
def test_intersection_holds_the_common_cells(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (_cells(common) if common else set()) == _cells(a) & _cells(b)
    assert a.numel == len(_cells(a))


@given(BOXES, SHAPES)
def test_inside_means_every_corner_fits(box: Box, extent: tuple[int, ...]) -> None:
    fits = len(extent) == 2 and all(e <= n for e, n in zip(box.end, extent, strict=False))
    assert box.inside(extent) == fits
    assert Box.whole(extent).inside(extent)
