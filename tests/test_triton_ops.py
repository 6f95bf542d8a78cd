"""Triton's kernels, in its interpreter: every law holds bit for bit (tests/gpu: on a device)."""

import interpreted

interpreted.require()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from chunking import WIDTHS, Case, cases, change, count_of, random_elements, segments  # noqa: E402
from device_laws import (  # noqa: E402
    applies,
    boxed,
    encodes,
    finds_foreign_values,
    got,
    put,
    unsigned,
    whole,
)
from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from weightdelta.kernels import reference, triton_ops, triton_scan  # noqa: E402
from weightdelta.kernels.device import INTS  # noqa: E402
from weightdelta.kernels.planes import CHUNK, Elements  # noqa: E402

#: The interpreter takes seconds for thousands of elements.
few = settings(max_examples=5, phases=(Phase.explicit, Phase.reuse, Phase.generate))


def pair(count: int, *, width: int, density: float, seed: int = 3) -> tuple[Elements, Elements]:
    old = random_elements(count, width=width, seed=seed)
    where = np.flatnonzero(np.random.default_rng(seed).random(count) < density)
    return old, change(old, where, seed=seed)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.03, 0.16, 0.3, 1.0])
def test_every_form_of_chunk(width: int, density: float) -> None:
    chunks = segments([151, 7, 0, 30])
    old, new = pair(count_of(chunks), width=width, density=density)
    encodes(triton_ops, old, new, chunks=chunks, shifts=(width % 8, width % 8))


@given(
    case=cases(most=90, segment_count=4),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
@few
def test_any_frame(case: Case, shifts: tuple[int, int]) -> None:
    width = case.old.itemsize
    at = shifts[0] // width * width, shifts[1] // width * width
    encodes(triton_ops, case.old, case.new, chunks=case.chunks, xor=case.xor, shifts=at)


@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_in_which_all_has_changed(width: int) -> None:
    """Every count and rank is as large as it gets, but what changes has room in its unit's row."""
    tile = 8 * 32 * 8 // width
    chunks = segments([17 * tile + 5, 3 * tile])
    old = random_elements(20 * tile + 5, width=width, seed=1)
    stretch = np.arange(tile - 3, 2 * tile + 1)
    where = np.r_[stretch, 4 * tile + 9, 18 * tile : 19 * tile + 7]
    encodes(triton_ops, old, change(old, where, seed=2), chunks=chunks, shifts=(width % 8,) * 2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.04, 0.1, 0.3, 0.8])
def test_tiles_in_which_much_has_changed(width: int, density: float) -> None:
    """Some lanes have one changed element, some several, some none."""
    tile = 8 * 32 * 8 // width
    chunks = segments([4 * tile + 3, 2 * tile])
    old, new = pair(6 * tile + 3, width=width, density=density)
    encodes(triton_ops, old, new, chunks=chunks, shifts=(width % 8,) * 2)


@pytest.mark.parametrize("width", WIDTHS)
def test_scratch_is_what_encode_takes(width: int) -> None:
    for chunks in (0, 1, 5, 5000):
        window = torch.empty(64, dtype=INTS[width])
        units = triton_scan.Units.of(window, window, chunks=chunks)
        taken = units.tally.nbytes + units.records.nbytes + units.pairs.nbytes
        assert triton_ops.scratch(chunks, width=width) == taken
        assert taken <= chunks * CHUNK * width


def test_units_that_overflow_spill_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowded changes in gap form outgrow a unit's row of scratch."""
    monkeypatch.setattr(triton_scan, "_SCRATCH", 0)
    chunks = segments([400, 300])
    old = random_elements(700, width=2, seed=1)
    new = change(old, np.r_[3, 100:140, 399, 420:440], seed=2)
    encodes(triton_ops, old, new, chunks=chunks)


@pytest.mark.parametrize("width", WIDTHS)
def test_apply_to_a_whole_resident(width: int) -> None:
    chunks = segments([80, 1, 50], run=2**40, stride=2**40)
    old, new = pair(131, width=width, density=0.1)
    residents = whole(old, chunks=chunks, first=chunks.start, device="cpu")
    order = np.arange(131)
    lists = applies(
        triton_ops, old, new, chunks=chunks, order=order, residents=residents, xor=width == 4
    )
    residents.memory.copy_(put(old))
    finds_foreign_values(triton_ops, lists, chunks=chunks, residents=residents)


@given(
    shape=st.tuples(*[st.integers(1, 6)] * 3),
    cut=st.tuples(*[st.integers(0, 5)] * 6),
    order=st.permutations(range(3)),
    width=st.sampled_from(WIDTHS),
    density=st.floats(0, 1),
)
@few
def test_apply_to_a_box_in_any_order(
    shape: tuple[int, ...], cut: tuple[int, ...], order: list[int], width: int, density: float
) -> None:
    low = tuple(min(c, n - 1) for c, n in zip(cut[:3], shape, strict=True))
    high = tuple(min(a + 1 + c, n) for a, c, n in zip(low, cut[3:], shape, strict=True))
    count = int(np.prod(shape))
    old, new = pair(count, width=width, density=density)
    # The window holds every second row of the last dimension first, then the others.
    rows, run = count // shape[2], shape[2]
    even, odd = (rows + 1) // 2, rows // 2
    chunks = segments([even * run, odd * run], run=run, stride=2 * run, key=99)
    chunks.key[:] = [99, 99 + run]
    first = np.array([0, run])
    index = np.arange(count).reshape(rows, run)
    window = np.concatenate([index[0::2].reshape(-1), index[1::2].reshape(-1)])
    residents = boxed(
        old, shape=shape, low=low, high=high, order=tuple(order), chunks=chunks, first=first,
        device="cpu",
    )  # fmt: skip
    applies(triton_ops, old, new, chunks=chunks, order=window, residents=residents)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("skip", "run", "stride"), [(7, 10**6, 10**6), (3, 7, 19), (70000, 70001, 70100)]
)
def test_full_digest(width: int, skip: int, run: int, stride: int) -> None:
    values = random_elements(1203, width=width, seed=1)
    arguments = {"key": 2**64 - 5, "skip": skip, "run": run, "stride": stride}
    found = triton_ops.digest(put(values, shift=width), **arguments)
    assert unsigned(found).tolist() == [reference.digest(values, **arguments)]


@pytest.mark.parametrize("shift", [0, 2])
def test_dense_xor(shift: int) -> None:
    a, b = (random_elements(8195, width=2, seed=s) for s in (1, 2))
    out = put(a, shift=shift)
    triton_ops.dense_xor(out, put(b, shift=shift), out)
    assert np.array_equal(got(out), a ^ b)
