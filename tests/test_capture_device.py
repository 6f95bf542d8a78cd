"""Capture through the device pipeline gives what the CPU's own path gives."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import POOL, Rank, Weights, content, job_for, random_tensor, same, save, wire

from weightdelta.capture import SnapshotCapture
from weightdelta.config import Config, DeviceConfig
from weightdelta.encode import Encoding, encode
from weightdelta.errors import CaptureDropped, LayoutMismatch
from weightdelta.fence import Token
from weightdelta.layout import WIDTHS
from weightdelta.live import FramePlanes

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU not Triton's interpreter, which would take minutes and one thread."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setenv("WEIGHTDELTA_DEVICE_KERNELS", "torch_ops")


def on(state: Weights, place: str) -> Weights:
    """The state on a device, strides kept."""
    return {name: tensor.to(place) for name, tensor in state.items()}


DTYPES = ("BF16", "F32", "F64", "U8", "F8_E4M3", "I16", "BOOL")


def device(**settings: Any) -> DeviceConfig:
    """Settings that send host tensors through the device pipeline."""
    return DeviceConfig(use="always", **settings)


@st.composite
def tensors(draw: Callable[..., Any]) -> Weights:
    found = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        found[name] = random_tensor(dtype, shape, seed=draw(st.integers(0, 999)))
    return found


def _captured(rank: Rank, state: Weights, config: DeviceConfig) -> list[FramePlanes]:
    capture = SnapshotCapture(rank.baseline, pool=POOL, config=config)
    return capture.capture(state, token=Token())


def _equal(one: FramePlanes, other: FramePlanes) -> bool:
    pairs = [(getattr(one.planes, n), getattr(other.planes, n)) for n in one.planes.__slots__]
    pairs.append((one.chunk_digest, other.chunk_digest))
    return one.frame == other.frame and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
def test_planes_are_those_of_the_host(
    tmp_path_factory: pytest.TempPathFactory, place: str, data: st.DataObject
) -> None:
    base = data.draw(tensors())
    live = {
        name: tensor
        if data.draw(st.booleans())
        else random_tensor(
            next(d for d in DTYPES if random_tensor(d, (1,), seed=0).dtype == tensor.dtype),
            tuple(tensor.shape),
            seed=data.draw(st.integers(0, 999)),
        )
        for name, tensor in base.items()
    }
    live = {n: t.T.contiguous().T if t.dim() == 2 and data.draw(st.booleans()) else t
            for n, t in live.items()}  # fmt: skip
    job = job_for(
        live,
        save(tmp_path_factory.mktemp("law"), base),
        config=Config.of({"values": data.draw(st.sampled_from(["diff", "xor"]))}),
        max_bytes=data.draw(st.sampled_from([16, 64, 4096])),
    )
    rank = Rank(job)
    expected = _captured(rank, live, DeviceConfig())
    for baseline in ("host", "device"):
        found = _captured(rank, on(live, place), device(baseline=baseline))
        assert [f.frame for f in found] == [f.frame for f in expected]
        assert all(map(_equal, found, expected))


@pytest.mark.parametrize("baseline", ["host", "device"])
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_of_captures_over_many_windows(
    tmp_path: Path, place: str, baseline: Any, slots: int
) -> None:
    """More windows than slots, changes from none to all, master weights cast on the way."""
    g = torch.Generator().manual_seed(1)
    state = {"w": torch.randn(700, 256, generator=g), "b": torch.randn(300, generator=g)}
    base = save(tmp_path, {"w": state["w"].bfloat16(), "b": state["b"]})
    rank = Rank(job_for(state, base, max_bytes=30_000))
    state = on(state, place)
    config = device(baseline=baseline, slots=slots, window_bytes=65536)
    capture = SnapshotCapture(rank.baseline, pool=POOL, config=config)
    for version, share in enumerate([0.0, 0.001, 0.3, 1.0, 0.01], start=1):
        for tensor in state.values():
            hit = (torch.rand(tensor.shape, generator=g) < share).to(place)
            tensor[hit] = -2 * tensor[hit]
        seen: list[FramePlanes] = []
        planes = capture.capture(state, token=Token(), sink=seen.extend)
        assert planes == seen
        frames = encode(planes, baseline=rank.baseline, pool=POOL, config=rank.job.config)
        rank.baseline.advance(frames, version=version)
        capture.advance(frames, start=version - 1)
        assert same(content([rank.baseline]), wire(on(state, "cpu"), rank.job.layout))
        assert capture.costs.windows > (slots if baseline == "host" else 1)
        sent = capture.costs.down_bytes
        whole = rank.baseline.arena.nbytes
        assert sent <= whole if baseline == "host" or version == 1 else sent == 0
        assert sent or baseline == "device"


def test_a_copy_that_missed_a_version_is_filled_anew(tmp_path: Path) -> None:
    state = {"w": torch.zeros(500)}
    rank = Rank(job_for(state, save(tmp_path, {"w": torch.zeros(500)}), max_bytes=256))
    capture = SnapshotCapture(rank.baseline, pool=POOL, config=device(baseline="device"))
    capture.capture(state, token=Token())
    state["w"][3] = 1
    rank.baseline.advance(rank.encode(state), version=1)  # nobody told the copy
    assert sum(p.planes.changed for p in capture.capture(state, token=Token())) == 0
    assert capture.costs.down_bytes == rank.baseline.arena.nbytes


@pytest.mark.parametrize("bad", ["dropped", "gone"])
def test_a_capture_that_fails_leaves_the_next_one_whole(tmp_path: Path, bad: str) -> None:
    state = {"a": torch.zeros(300), "b": torch.zeros(300)}
    rank = Rank(job_for(state, save(tmp_path, state), max_bytes=256))
    capture = SnapshotCapture(rank.baseline, pool=POOL, config=device(window_bytes=65536))
    token = Token(dropped=bad == "dropped")
    broken = {"a": state["a"]} if bad == "gone" else state
    with pytest.raises(CaptureDropped if bad == "dropped" else LayoutMismatch):
        capture.capture(broken, token=token)
    state["b"] += 1
    assert sum(p.planes.changed for p in capture.capture(state, token=Token())) == 300


def test_encoding_goes_on_beside_the_capture(tmp_path: Path) -> None:
    state = {"w": torch.arange(9000.0)}
    rank = Rank(job_for(state, save(tmp_path, {"w": torch.zeros(9000)}), max_bytes=1024))
    with ThreadPoolExecutor(2) as pool:
        encoding = Encoding(baseline=rank.baseline, pool=pool, config=rank.job.config)
        capture = SnapshotCapture(rank.baseline, pool=pool, config=device())
        planes = capture.capture(state, token=Token(), sink=encoding.add)
        found = [job.result() for job in encoding.coming(planes)]
    whole = encode(planes, baseline=rank.baseline, pool=POOL, config=rank.job.config)
    assert [(f.frame, f.data) for f in found] == [(f.frame, f.data) for f in whole]


def test_every_width_takes_part() -> None:
    assert {WIDTHS[d] for d in DTYPES} == {1, 2, 4, 8}
