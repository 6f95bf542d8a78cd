"""The whole way on a GPU: publish from device memory, store, receive into device memory."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SmallRun, Weights, all_bits

from weightdelta.capture import SnapshotCapture
from weightdelta.config import Config
from weightdelta.errors import DeviceMemory
from weightdelta.fence import Token
from weightdelta.receiver import Receiver

pytestmark = pytest.mark.gpu

Follow = Callable[..., Receiver]
CODECS = ("sparse+zstd", "snappy+zstd", "lz4+zstd", "zstd", "none")


def weights() -> Weights:
    """A few matrices of several frames, of each width."""
    g = torch.Generator().manual_seed(2)
    return {
        "a": torch.randn(700, 513, generator=g).bfloat16(),
        "b": torch.randn(300, 257, generator=g),
        "c": torch.randn(200, 130, generator=g, dtype=torch.float64),
        "d": torch.randn(900, 333, generator=g).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 3),
        "s": torch.tensor(3.0),
    }


def to_gpu(state: Weights) -> Weights:
    return {name: tensor.cuda() for name, tensor in state.items()}


def go(receiver: Receiver, version: int | None = None) -> None:
    receiver.prepare(version=version).wait()
    receiver.apply()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("baseline", ["host", "device"])
@pytest.mark.parametrize("streamed", [False, True])
def test_publish_store_receive(
    tmp_path: Path, follow: Follow, codec: Any, baseline: str, streamed: bool
) -> None:
    """Nothing, a little, half and everything changed, forward, back and by several hops."""
    device = {
        "baseline": baseline,
        "window_bytes": 1 << 18,
        "staging_bytes": 1 << (17 if streamed else 29),
    }
    config = Config.of({"values": "xor", "codec": codec, "device": device})
    run = SmallRun(tmp_path, weights=weights(), config=config, max_bytes=100_000)
    run.live = to_gpu(run.live)
    for seed, share in enumerate([0.001, 1.0, 0.0, 0.4]):
        stats = run.step(seed, share=share)
        assert stats.up_bytes > 0
        assert (stats.down_bytes > 0) == (baseline == "host" or not seed)
    model = to_gpu(run.model())
    receiver = follow(model, store=run.store, config=config)
    for version in (1, 2, 3, 4, 0, 4):
        go(receiver, version)
        assert all_bits(model) == run.versions[version]
        assert receiver.scrub() == version
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    run.close()


def test_differences_from_master_weights_and_from_both_memories(
    tmp_path: Path, follow: Follow
) -> None:
    """Live float32 cast to bfloat16 on the device; some tensors stay on the host."""
    base = weights()
    run = SmallRun(tmp_path, weights=base, max_bytes=100_000)
    master = to_gpu({"a": base["a"].float()})["a"].t().contiguous().t()
    run.live = {**run.live, "a": master, "c": run.live["c"].cuda()}
    for step in range(3):
        with torch.no_grad():
            master += 0.01 * torch.randn_like(master)
            run.live["c"][step] += 1
            run.live["b"][step] -= 1
        run.publish()
        run.versions[-1] = all_bits({**run.live, "a": master.bfloat16()})
    model = {**run.model(), "c": run.model()["c"].cuda(), "a": run.model()["a"].cuda()}
    receiver = follow(model, store=run.store)
    for version in (3, 1):
        go(receiver, version)
        assert all_bits(model) == run.versions[version]
    run.close()


@contextmanager
def memory_left(nbytes: int) -> Iterator[None]:
    """A GPU on which this process may take only so much more."""
    gc.collect()  # what earlier tests left must not become room later on
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_too_little_memory_means_smaller_windows_then_an_error(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1 << 20) for i in range(24)}
    config = Config.of({"frame_bytes": 4 << 20})
    run = SmallRun(tmp_path, weights=state, config=config, ranks=1, max_bytes=4 << 20)
    run.live = to_gpu(run.live)
    session = run._sessions[0]
    with ThreadPoolExecutor(2) as pool:
        capture = SnapshotCapture(session._baseline, pool=pool, config=config.device)
        for tensor in run.live.values():
            tensor[::7] += 1
        with memory_left(100 << 20):
            planes = capture.capture(run.live, token=Token())
        assert sum(p.planes.changed for p in planes) == 24 * len(range(0, 1 << 20, 7))
        assert capture.costs.windows > 2
        starved = SnapshotCapture(session._baseline, pool=pool, config=config.device)
        with memory_left(1 << 20), pytest.raises(DeviceMemory, match="no room for a window"):
            starved.capture(run.live, token=Token())
        assert starved.capture(run.live, token=Token()), "and goes on once there is room"
    run.close()


def test_staging_spills_to_the_host_when_memory_is_short(tmp_path: Path, follow: Follow) -> None:
    run = SmallRun(tmp_path, weights={"w": torch.randn(8 << 20)}, max_bytes=4 << 20)
    run.step(1, share=0.5)
    model = to_gpu(run.model())
    receiver = follow(model, store=run.store)
    with memory_left(48 << 20):
        stats = receiver.prepare().wait()
    assert stats.pinned_bytes > 0
    receiver.apply()
    assert all_bits(model) == run.versions[1]
    run.close()


def test_training_goes_on_while_frames_are_encoded(tmp_path: Path, follow: Follow) -> None:
    """What was captured is what is published, whatever the next step does to the weights."""
    run = SmallRun(tmp_path, weights={"w": torch.randn(4 << 20)}, ranks=1, max_bytes=1 << 20)
    run.live = to_gpu(run.live)
    run.live["w"][::3] += 1
    run.versions.append(all_bits(run.live))
    commit = run.upload()
    run.live["w"].mul_(-1)
    commit()
    model = to_gpu(run.model())
    go(follow(model, store=run.store))
    assert all_bits(model) == run.versions[1]
    run.close()
