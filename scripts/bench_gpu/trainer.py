"""Rows of a trainer rank end to end: weights in device memory to an object in a local store."""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench_gpu.data import MATRIX, changed, random_window
from bench_gpu.rows import Row
from weightdelta.config import Config
from weightdelta.publisher import Publisher
from weightdelta.receiver import Receiver

#: Fraction of the elements that a step changes: 0.085 % of the bytes of bf16.
DENSITY = 0.0017
STEPS = 5
#: Bytes that the link is measured with.
LINK = 2 << 30


def link_rates(nbytes: int = LINK) -> tuple[float, float]:
    """Bytes a second from pinned memory to the device, and back."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((device, host), (host, device)):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rates.append(nbytes / statistics.median(times))
    return rates[0], rates[1]


def model(nbytes: int) -> dict[str, torch.Tensor]:
    """Random bf16 matrices in device memory."""
    size = 2 * MATRIX * MATRIX
    whole = random_window(nbytes // size * size, width=2)
    parts = whole.split(MATRIX * MATRIX)
    return {
        f"layer.{i:04d}.weight": p.view(MATRIX, MATRIX).view(torch.bfloat16)
        for i, p in enumerate(parts)
    }


def step(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Change some elements of every tensor by one unit of the last place."""
    for i, tensor in enumerate(weights.values()):
        ints = tensor.view(torch.int16).view(-1)
        ints.copy_(changed(ints, density=DENSITY, seed=1000 * seed + i))


def _publish(
    weights: dict[str, torch.Tensor], folder: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """Publish a few steps; medians of what the later ones took, and the last one's sizes."""
    config = Config.of({"store": {"fsync": False}, **settings})
    store = folder / "run"
    samples: list[dict[str, Any]] = []
    replica = {name: tensor.clone() for name, tensor in weights.items()}
    before = torch.cuda.memory_allocated()
    publisher = Publisher(str(store), weights, base=folder / "base", config=config)
    try:
        for seed in range(STEPS):
            step(weights, seed)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            publication = publisher.publish(step=seed)
            captured = time.perf_counter()
            # The object is in the store once the outcome is known; then the baseline moves.
            session = publisher._session
            stats = publication.wait(600)
            ended = time.perf_counter()
            samples.append(
                {
                    "call": captured - begin,
                    "wait": ended - begin,
                    "capture": stats.capture_s,
                    "encode": stats.encode_s,
                    "upload": stats.upload_s,
                    "commit": stats.commit_s,
                    "advance": ended - begin - _to_commit(stats),
                    "object": _to_commit(stats) - stats.commit_s,
                    "device": session._capture.costs.as_dict(),
                    "payload": stats.payload_bytes,
                    "changed": stats.changed,
                    "pinned": stats.pinned_bytes,
                    "hbm": stats.device_bytes,
                    "peak": torch.cuda.max_memory_allocated() - before,
                }
            )
    finally:
        publisher.close()
    receiver = Receiver(str(store), replica, config=config)
    receiver.prepare().wait()
    receiver.apply()
    assert all(torch.equal(replica[n].view(torch.int16), w.view(torch.int16))
               for n, w in weights.items())  # fmt: skip
    receiver.close()
    shutil.rmtree(store)
    found = {
        key: statistics.median(s[key] for s in samples[2:])
        for key in ("call", "wait", "capture", "encode", "upload", "commit", "advance", "object")
    }
    return {**found, "first": samples[0]["call"], "last": samples[-1]}


def _to_commit(stats: Any) -> float:
    """Seconds from the call to the committed entry, as the ranks measured them."""
    return float(stats.capture_s + stats.encode_s + stats.upload_s + stats.commit_s)


def rows(*, nbytes: int, threads: int = 16) -> list[Row]:
    """A rank of ``nbytes``, its baseline on the host and in device memory."""
    down, up = link_rates()
    found = [
        Row("link", "pinned host to device", LINK / down, LINK),
        Row("link", "device to pinned host", LINK / up, LINK),
    ]
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None))  # noqa: S108
    try:
        weights = model(nbytes)
        raw = sum(t.nbytes for t in weights.values())
        original = {name: tensor.clone() for name, tensor in weights.items()}
        (folder / "base").mkdir()
        cpu = {name: tensor.cpu() for name, tensor in weights.items()}
        save_file(cpu, str(folder / "base" / "model.safetensors"))
        del cpu
        for frame in (64, 16):
            for baseline in ("host", "device"):
                for name, tensor in weights.items():
                    tensor.copy_(original[name])
                settings = {
                    "threads": threads,
                    "frame_bytes": frame << 20,
                    "device": {"baseline": baseline},
                    "max_step_delay_s": 60.0,
                }
                details = _publish(weights, folder, settings)
                goal = 1.2 * raw / down if baseline == "host" else 0.10
                took = details["object"]
                found.append(
                    Row(
                        "trainer",
                        f"{raw / 1e9:.2f} GB rank, 0.085 % of bytes, baseline on the {baseline}, "
                        f"frames of {frame} MiB: to the object in the store",
                        took,
                        raw,
                        raw / down / took if baseline == "host" else None,
                        "the link" if baseline == "host" else "",
                        f"<= {goal * 1e3:.0f} ms",
                        took <= goal,
                        details,
                    )
                )
                print(found[-1].name, details, flush=True)
                if baseline == "host":
                    peak, name = details["last"]["peak"], f"frames of {frame} MiB: device memory"
                    found.append(
                        Row("trainer", f"{name} beside the weights, at the peak", None, peak,
                            goal="<= 537 MB", met=peak <= 512 << 20)
                    )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found
