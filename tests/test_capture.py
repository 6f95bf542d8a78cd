"""What is captured is what the trainer holds: every dtype, stride, tie and bit pattern."""

import ast
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import (
    Rank,
    Weights,
    bits,
    clone,
    content,
    job_for,
    job_of,
    random_tensor,
    same,
    save,
    wire,
)

from weightdelta.base import Base
from weightdelta.capture import Inventory, SnapshotCapture, take_inventory
from weightdelta.config import Config
from weightdelta.errors import CaptureDropped, LayoutMismatch
from weightdelta.fence import Token
from weightdelta.job import base_specs
from weightdelta.kernels.planes import UINTS
from weightdelta.layout import PLAIN_FLOATS, WIDTHS, Box, TensorSpec
from weightdelta.live import _local
from weightdelta.sharding.explicit import LocalShard
from weightdelta.state import StateSource
from weightdelta.tensors import TORCH

#: NaNs with payloads, infinities, zeros of both signs, denormals, all ones; float32 bits.
ODD = np.array(
    [
        0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000,
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00008000, 0x0000FFFF, 0x7F7FFFFF, 0x3F800000,
        0x3F808000, 0x3F818000, 0x3F808001, 0x477FF000,
    ],
    np.uint32,
)  # fmt: skip


def _random(draw: Callable[..., Any], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(dtype, shape, seed=draw(st.integers(0, 2**32 - 1)))


@st.composite
def base_tensors(draw: Callable[..., Any]) -> Weights:
    """A few small tensors of any dtype and shape."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True))
    found = {}
    for name in names:
        dtype = draw(st.sampled_from(sorted(TORCH)))
        shape = tuple(draw(st.lists(st.integers(0, 5), min_size=dtype == "F4", max_size=3)))
        found[name] = _random(draw, dtype, shape)
    return found


def _strided(draw: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides and an offset into a larger memory."""
    order = draw(st.permutations(range(tensor.dim())))
    step = [draw(st.integers(1, 2)) for _ in order]
    shape = tuple(tensor.shape)
    room = [shape[d] * step[d] + 1 for d in order]
    ints = bits(tensor).view(f"i{tensor.element_size()}").reshape(shape)
    memory = torch.from_numpy(np.zeros(room, ints.dtype))
    back = [order.index(d) for d in range(tensor.dim())]
    view = memory.permute(back)[tuple(slice(1, None, step[d]) for d in range(tensor.dim()))]
    view = view[tuple(slice(0, n) for n in shape)]
    view.copy_(torch.from_numpy(ints.copy()))
    return view.view(tensor.dtype)


@given(data=st.data())
def test_baseline_and_planes_make_the_live_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For every dtype and stride, diff and xor, one rank and several, tiny frames and large."""
    tensors = data.draw(base_tensors())
    base = save(tmp_path_factory.mktemp("law"), tensors)
    new = {
        n: _random(data.draw, name, tuple(t.shape)) if data.draw(st.booleans()) else t
        for n, t in tensors.items()
        for name in [next(k for k, v in TORCH.items() if v == t.dtype)]
    }
    live = {n: _strided(data.draw, t) for n, t in new.items()}
    config = Config.of({"values": data.draw(st.sampled_from(["diff", "xor"]))})
    max_bytes, world = data.draw(st.sampled_from([16, 64, 4096])), data.draw(st.integers(1, 3))
    job = job_for(live, base, world_size=world, config=config, max_bytes=max_bytes)
    ranks = [Rank(job, r) for r in range(world)]
    for rank in ranks:
        rank.baseline.advance(rank.encode(live), version=1)
    assert same(content([r.baseline for r in ranks]), wire(live, job.layout))
    assert same(wire(live, job.layout), wire(new, job.layout))


def _odd_live(dtype: torch.dtype) -> torch.Tensor:
    """The odd patterns in every position of a vector register, then alone."""
    values = torch.from_numpy(np.tile(ODD, 7).view(np.int32)).view(torch.float32)
    return values.to(dtype) if dtype != torch.float32 else values


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("live_dtype", [torch.float32, torch.float64])
def test_odd_values_are_cast_as_torch_casts(
    wire_dtype: torch.dtype, live_dtype: torch.dtype, tmp_path: Path
) -> None:
    """NaN stays NaN; which NaN is up to torch, whose vector and scalar paths differ."""
    live = {"w": _odd_live(live_dtype).reshape(7, -1), "one": _odd_live(live_dtype)[1]}
    base = save(tmp_path, {n: torch.zeros(t.shape, dtype=wire_dtype) for n, t in live.items()})
    rank = Rank(job_for(live, base))
    rank.baseline.advance(rank.encode(live), version=1)
    held, expected = content([rank.baseline]), wire(live, rank.job.layout)
    for name, value in live.items():
        nan = torch.isnan(value).reshape(-1).numpy()
        assert np.array_equal(held[name][~nan], expected[name][~nan])
        kept = torch.from_numpy(held[name].view(np.int16)).view(wire_dtype)
        assert np.array_equal(torch.isnan(kept).numpy(), nan)


def test_casting_the_same_values_again_changes_nothing(tmp_path: Path) -> None:
    live = {"w": _odd_live(torch.float32), "t": _odd_live(torch.float32).reshape(10, -1).t()}
    base = save(tmp_path, {n: torch.zeros(t.shape, dtype=torch.bfloat16) for n, t in live.items()})
    rank = Rank(job_for(live, base, max_bytes=96))
    rank.baseline.advance(rank.encode(live), version=1)
    assert sum(f.changed for f in rank.encode(live)) == 0


@pytest.mark.parametrize("dtype", sorted(PLAIN_FLOATS))
def test_equal_dtypes_pass_every_pattern_untouched(dtype: str, tmp_path: Path) -> None:
    kind = UINTS[WIDTHS[dtype]]
    top = 2 ** (8 * WIDTHS[dtype]) - 1
    (infinity,) = bits(torch.tensor([float("inf")]).to(TORCH[dtype])).tolist()
    patterns = np.array(
        [*range(64), *range(top - 63, top + 1), top // 2, *range(infinity, infinity + 64)], kind
    )
    flat = torch.from_numpy(patterns).view(TORCH[dtype])
    live = {"flat": flat, "wide": flat.repeat(2, 1).t()}
    base = save(tmp_path, {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in live.items()})
    rank = Rank(job_for(live, base))
    rank.baseline.advance(rank.encode(live), version=1)
    assert content([rank.baseline])["flat"].tolist() == patterns.tolist()
    assert content([rank.baseline])["wide"][::2].tolist() == patterns.tolist()


def test_master_weights_of_each_float_are_cast_to_the_wire(tmp_path: Path) -> None:
    base = save(tmp_path, {d: torch.zeros(33, dtype=TORCH[d]) for d in sorted(PLAIN_FLOATS)})
    for dtype in sorted(PLAIN_FLOATS):
        live = {n: torch.linspace(-3, 3, 33).to(TORCH[dtype]) for n in PLAIN_FLOATS}
        other = {"F16": "BF16", "BF16": "F16"}.get(dtype, "")
        if other:
            with pytest.raises(LayoutMismatch, match=f"{other!r}: .* between the two halves"):
                job_for(live, base)
            live.pop(other)
            live[other] = torch.linspace(-3, 3, 33).to(TORCH[other])
        rank = Rank(job_for(live, base))
        rank.baseline.advance(rank.encode(live), version=1)
        assert same(content([rank.baseline]), wire(live, rank.job.layout))


def test_parameters_that_require_gradients_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 4)
    base = save(tmp_path, clone(model.state_dict()))
    with torch.no_grad():
        model.weight[1] += 1
    rank = Rank(job_for(model, base))
    rank.baseline.advance(rank.encode(model), version=1)
    assert same(content([rank.baseline]), wire(model.state_dict(), rank.job.layout))


def test_nothing_changed_means_nothing_encoded(tmp_path: Path) -> None:
    live = {"a": torch.randn(40), "b": torch.arange(9)}
    rank = Rank(job_for(live, save(tmp_path, live), max_bytes=64))
    frames = rank.encode(live)
    assert len(frames) > 2
    assert {(f.data, f.changed, f.digest_change) for f in frames} == {(b"", 0, 0)}


def test_a_second_name_is_no_second_tensor(tmp_path: Path) -> None:
    w = torch.randn(4, 3)
    base = save(tmp_path, {"embed": w})
    live = {"embed": w.clone()}
    live["head"] = live["embed"]
    found = take_inventory(live, base=base_specs(base))
    assert [s.name for s in found.shards] == ["embed"]
    assert found.aliases == {"head": "embed"}
    assert job_for(live, base).layout.alias_of == {"head": "embed"}


def test_tied_weights_that_base_holds_twice_are_both_published(tmp_path: Path) -> None:
    w = torch.randn(4, 3)
    base = save(tmp_path, {"embed": w, "head": w.clone()})
    live = {"embed": w.clone()}
    live["head"] = live["embed"]
    rank = Rank(job_for(live, base))
    live["embed"][0] += 1
    rank.baseline.advance(rank.encode(live), version=1)
    assert same(content([rank.baseline]), wire(live, rank.job.layout))
    assert rank.job.layout.aliases == ()


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Two tensors to differ from."""
    return save(tmp_path, {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "q": torch.zeros(8).int()})


def _weights() -> Weights:
    return {"w": torch.zeros(4, 3), "q": torch.zeros(8, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("w", torch.zeros(3, 4), ["(4, 3)", "(3, 4)"]),
        ("w", torch.zeros(12), ["(4, 3)", "(12,)"]),
        ("w", torch.zeros(4, 3).to(torch.float8_e4m3fn), ["BF16", "F8_E4M3"]),
        ("w", torch.zeros(4, 3).short(), ["BF16", "I16"]),
        ("q", torch.zeros(8), ["I32", "F32"]),
        ("q", torch.zeros(8).to(torch.uint32), ["I32", "U32"]),
        ("w", torch.zeros(4, 3, dtype=torch.complex128), ["complex128"]),
        ("lora", torch.zeros(2), ["not in base", "exclude"]),
    ],
)
def test_what_differs_from_base_is_named(
    base: Base, name: str, tensor: torch.Tensor, words: list[str]
) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        take_inventory({**_weights(), name: tensor}, base=base_specs(base))
    assert all(word in str(caught.value) for word in [f"'{name}'", *words])


def test_a_tensor_that_no_rank_holds_is_named(base: Base) -> None:
    live = _weights()
    del live["q"]
    with pytest.raises(LayoutMismatch, match="'q' is in base but on none"):
        job_for(live, base)


def test_excluded_names_are_left_out_on_both_sides(base: Base) -> None:
    live = {"w": torch.zeros(4, 3), "lora.a": torch.zeros(2), "lora.b": torch.zeros(3)}
    job = job_for(live, base, exclude=["lora.*", "q"])
    assert [t.name for t in job.layout.tensors] == ["w"]
    with pytest.raises(LayoutMismatch, match=r"lora\.b"):
        job_for(live, base, exclude=["lora.a", "q"])


@pytest.mark.parametrize("name", ["lora", "blocks[0].lora", "a*b", "why?", "[[]", "]x["])
def test_the_pattern_that_a_message_offers_excludes_that_name(base: Base, name: str) -> None:
    live = {**_weights(), name: torch.zeros(2)}
    with pytest.raises(LayoutMismatch) as caught:
        job_for(live, base)
    (offered,) = re.findall(r"exclude=(\[.*\]) or", str(caught.value))
    assert name not in job_for(live, base, exclude=ast.literal_eval(offered)).layout.index


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("w"), ["'w' was in the state"]),
        (lambda s: s.update(w=torch.zeros(3, 4)), ["'w'", "(4, 3)", "(3, 4)"]),
        (lambda s: s.update(w=torch.zeros(4, 3).short()), ["'w'", "BF16", "I16"]),
        (lambda s: s.update(q=torch.zeros(8)), ["'q'", "I32", "F32"]),
    ],
)
def test_a_state_that_changed_after_attach_is_refused(
    base: Base, change: Callable[[Weights], object], words: list[str]
) -> None:
    live = _weights()
    rank = Rank(job_for(live, base))
    change(live)
    with pytest.raises(LayoutMismatch) as caught:
        rank.capture(live)
    assert all(word in str(caught.value) for word in words)


def test_a_live_dtype_may_change_to_another_plain_float(base: Base) -> None:
    live = _weights()
    rank = Rank(job_for(live, base))
    live["w"] = torch.ones(4, 3, dtype=torch.bfloat16)
    rank.baseline.advance(rank.encode(live), version=1)
    assert same(content([rank.baseline]), wire(live, rank.job.layout))


def test_the_state_is_read_anew_at_each_capture(base: Base) -> None:
    states = [_weights() for _ in range(3)]
    source = StateSource(lambda: states[0])
    rank = Rank(job_for(source, base))
    for step in range(2):
        states.pop(0)
        states[0]["w"] += step + 1
        rank.baseline.advance(rank.encode(source), version=step + 1)
        assert same(content([rank.baseline]), wire(states[0], rank.job.layout))


@pytest.mark.parametrize("bad", ["", "tensors", "shape", "dropped"])
def test_a_source_is_released_however_the_capture_ends(base: Base, bad: str) -> None:
    calls: list[str] = []
    weights = _weights()
    source = StateSource(
        lambda: weights, lambda: calls.append("prepare"), lambda: calls.append("release")
    )
    rank = Rank(job_for(source, base))
    assert calls == ["prepare", "release"]  # the inventory, too, needs tensors that are ready
    if bad == "tensors":
        weights.clear()
    if bad == "shape":
        weights["w"] = torch.zeros(1)
    token = Token(dropped=bad == "dropped")
    if bad:
        with pytest.raises(CaptureDropped if bad == "dropped" else LayoutMismatch):
            rank.capture(source, token=token)
    else:
        rank.capture(source, token=token)
    assert calls == ["prepare", "release"] * 2


def test_nobody_reads_after_a_failed_capture_has_released(base: Base) -> None:
    """A frame that fails must not leave another thread reading weights behind."""
    rank = Rank(job_for(_weights(), base, max_bytes=8))
    reading, first = threading.Semaphore(0), threading.Event()
    released = threading.Event()
    late: list[bool] = []

    def check() -> None:
        if not first.is_set():
            first.set()
            reading.acquire()  # fails only once another frame is being read
            raise CaptureDropped("first")
        reading.release()
        late.append(released.wait(0.05))

    token: Any = SimpleNamespace(check=check)
    source = StateSource(_weights, release=released.set)
    with ThreadPoolExecutor(2) as pool, pytest.raises(CaptureDropped):
        SnapshotCapture(rank.baseline, pool=pool).capture(source, token=token)
    assert late
    assert not any(late)


def _rows(low: int, high: int) -> Inventory:
    shards = [LocalShard("w", "BF16", (4, 3), Box((low, 0), (high - low, 3)))]
    if low == 0:
        shards.append(LocalShard("q", "I32", (8,), Box((0,), (8,))))
    return Inventory(tuple(shards), {})


def test_a_shard_that_moved_after_attach_is_refused() -> None:
    """What a rank owns must still lie in its shard, or other elements would be read."""
    spec = TensorSpec("w", "BF16", (4, 3))
    assert _local(4, spec, Box((1, 0), (2, 3))) == 1
    for index in (2, 9):
        with pytest.raises(LayoutMismatch, match=r"'w'.*resharding"):
            _local(index, spec, Box((1, 0), (2, 3)))


def test_ranks_capture_only_what_they_own(base: Base) -> None:
    live = _weights()
    job = job_of([_rows(0, 2), _rows(2, 4)], base)
    ranks = [Rank(job, r) for r in range(2)]
    live["w"][3] += 1
    changed = [sum(f.changed for f in rank.encode(live)) for rank in ranks]
    assert changed == [0, 3]


def _freed() -> torch.Tensor:
    tensor = torch.zeros(4, 3).bfloat16()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(4, 3, dtype=torch.bfloat16, device="meta"), "meta device"),
        (lambda: torch.ones(4, 3).to_sparse(), "sparse_coo"),
        (lambda: torch.ones(4, 3, dtype=torch.complex64).conj().imag, "negative bit"),
        (_freed, "storage freed"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_named(
    base: Base, make: Callable[[], torch.Tensor], words: str
) -> None:
    rank = Rank(job_for(_weights(), base))
    with pytest.raises(LayoutMismatch, match=f"'w'.*{words}"):
        rank.capture({**_weights(), "w": make()})


def test_a_second_name_with_values_of_its_own_is_refused(base: Base) -> None:
    live = _weights()
    rank = Rank(job_for({**live, "tied": live["w"]}, base))
    assert rank.job.layout.alias_of == {"tied": "w"}
    live["w"] += 1
    for tied in (live["w"], live["w"].clone(), live["w"].view(4, 3)):
        rank.capture({**live, "tied": tied})
    rank.capture(live)  # not in the state: nothing is said of it
    for tied in (-live["w"], live["w"].double(), live["w"][:2], _freed()):
        with pytest.raises(LayoutMismatch, match="'tied'"):
            rank.capture({**live, "tied": tied})
