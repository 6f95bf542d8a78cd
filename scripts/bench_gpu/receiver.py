"""Rows of a sampler rank end to end: preparation while it serves, pause, rollback."""

import secrets
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3

from bench_gpu.data import random_planes
from bench_gpu.rows import Row
from bench_gpu.trainer import model
from weightdelta.base import Base
from weightdelta.chunk_table import ChunkTable
from weightdelta.codecs.names import DEFAULT, IDS, Codec, Values
from weightdelta.codecs.registry import encode_frame
from weightdelta.config import Config
from weightdelta.frame import FramePlan
from weightdelta.job import Job
from weightdelta.kernels.device import DevicePlanes
from weightdelta.kernels.planes import Planes
from weightdelta.layout import Box, Layout, TensorSpec
from weightdelta.ownership import assign, collect
from weightdelta.placement import place
from weightdelta.publish import Receipt, RunWriter
from weightdelta.receiver import Receiver
from weightdelta.record import data_name
from weightdelta.sharding.explicit import LocalShard
from weightdelta.site import Site
from weightdelta.store import Store

#: Changes of a chunk on average: 0.085 % of the bytes of bf16.
EACH = 111
#: Moves there and back in each mode; a CPU takes seconds to decode the blocks of a whole rank.
VERSIONS: Final = {"sparse+zstd": 5, "lz4+zstd": 2, "snappy+zstd": 2}


class Run:
    """A run of one rank whose versions are made from random changes, without a trainer."""

    def __init__(
        self, weights: dict[str, torch.Tensor], folder: Path, *, codec: Codec, frame: int
    ) -> None:
        self.weights, self.codec, self.frame = weights, codec, frame
        self.values: Values = "diff" if codec == DEFAULT else "xor"
        self.config = Config.of(
            {
                "store": {"fsync": False},
                "frame_bytes": frame,
                "codec": codec,
                "values": self.values,
            }
        )
        self.store = Store.of(str(folder / "run"), config=self.config)
        self.layout = Layout.of(
            TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in weights.items()
        )
        whole = [
            LocalShard(t.name, t.dtype, t.extent, Box.whole(t.extent)) for t in self.layout.tensors
        ]
        owners = assign(collect([whole], layout=self.layout), layout=self.layout, world_size=1)
        self.plan = FramePlan.build(owners, layout=self.layout, max_bytes=frame)
        self.table = ChunkTable.of_plan(self.plan, layout=self.layout)
        residents = place(weights, layout=self.layout)
        self.site = Site(
            residents, device=torch.device("cuda", 0), layout=self.layout,
            config=self.config.device,
        )  # fmt: skip
        self.digests = np.array([r.digest() & (2**64 - 1) for r in residents], np.uint64)
        job = Job(self.layout, self.plan, 1, Base(folder), self.config)
        self.writer = RunWriter(
            self.store, config=self.config, clock=time.time, nonce=secrets.token_hex(16)
        )
        self.writer.open(job, table=self.digests)

    def publish(self, seed: int) -> int:
        """Commit a version that changes every chunk; the weights stay; encoded bytes."""
        planes = random_planes(len(self.table.chunks), each=EACH, seed=seed)
        change = self._change(planes)
        host = planes.host()
        del planes
        cuts = self.table.bounds
        ends = np.concatenate([[0], np.cumsum(host.counts, dtype=np.int64)])[cuts]
        number = IDS[self.codec]

        def one(i: int) -> tuple[bytes, Any]:
            part = slice(int(ends[i]), int(ends[i + 1]))
            mine = Planes(
                host.counts[cuts[i] : cuts[i + 1]], host.gaps[part], host.bitmap[:0],
                host.values[part],
            )  # fmt: skip
            return encode_frame(
                mine, codec=self.codec, chunks=self.table.frame(i), width=2, values=self.values
            )

        with ThreadPoolExecutor(16) as pool:
            encoded = list(pool.map(one, range(len(self.plan))))
        write_id = secrets.token_hex(16)
        self.store.write(data_name(write_id, 0), [data for data, _ in encoded])
        tensors = np.zeros(len(self.layout.tensors), np.uint64)
        np.add.at(tensors, self.table.tensor, change)
        hashes = b"".join(blake3(data).digest(length=16) for data, _ in encoded)
        receipt = Receipt(
            write_id=write_id, rank=0, parent=self.writer.newest, steps=1, mark=None,
            codecs=np.full(len(encoded), number, np.uint8),
            sizes=np.array([sizes for _, sizes in encoded], np.uint32),
            hashes=np.frombuffer(hashes, np.uint8).reshape(-1, 16),
            digest_change=np.add.reduceat(change, cuts[:-1]),
            changed=np.diff(ends).astype(np.uint32),
            tensor_digest=tensors, histogram=None, capture_s=0.0, encode_s=0.0, upload_s=0.0,
        )  # fmt: skip
        self.writer.begin(write_id, step=seed)
        self.writer.add(receipt)
        self.writer.commit(write_id)
        return sum(len(data) for data, _ in encoded)

    def _change(self, planes: DevicePlanes) -> Any:
        """Digest change of each chunk, uint64, if the planes were added to the weights."""
        table = self.site.table("bench", self.table)
        found = self.site.ops.stage(
            planes, chunks=table.chunks, placed=table.placed, width=2, xor=self.values == "xor"
        )[1]
        return found.cpu().numpy().view(np.uint64)


def _follow(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Move back and forth along the newest delta; medians, and that every bit is back."""
    config = Config.of(
        {
            "store": {"fsync": False, "threads": 16},
            "threads": 16,
            "scrub_every": 0,
            "device": settings,
        }
    )
    began = time.perf_counter()
    receiver = Receiver(run.store, run.weights, config=config)
    attach = time.perf_counter() - began
    names = ("prepare", "fetch", "decode", "stage", "pause", "store", "rollback")
    samples: dict[str, list[float]] = {name: [] for name in names}
    low, high = receiver.version, receiver.version + 1
    for _ in range(VERSIONS[run.codec]):
        began = time.perf_counter()
        prepared = receiver.prepare(version=high).wait()
        samples["prepare"].append(time.perf_counter() - began)
        samples["fetch"].append(prepared.fetch_s)
        samples["decode"].append(prepared.decode_s)
        samples["stage"].append(prepared.stage_s)
        torch.cuda.synchronize()
        applied = receiver.apply()
        samples["pause"].append(applied.pause_s)
        samples["store"].append(applied.apply_s)
        samples["rollback"].append(receiver.rollback().pause_s)
    receiver.prepare(version=high).wait()
    receiver.apply()
    began = time.perf_counter()
    assert receiver.scrub() == high
    scrub = time.perf_counter() - began
    receiver.rollback()
    assert receiver.scrub() == low
    receiver.close()
    return {
        **{name: statistics.median(times[1:]) for name, times in samples.items()},
        "first_prepare": samples["prepare"][0],
        "attach": attach,
        "scrub": scrub,
        "changed": prepared.changed,
        "device_bytes": prepared.device_bytes,
        "pinned_bytes": prepared.pinned_bytes,
        "fetched": prepared.fetched_bytes,
    }


STAGED: Final = {"staging_bytes": 2 << 30}
#: Codec and MiB of frames; then what is said of how a receiver takes them, its settings, and the
#: goals of a 111 GB rank's pause and preparation in seconds.
Mode = tuple[str, dict[str, Any], float | None, float | None]
MODES: Final[tuple[tuple[Codec, int, tuple[Mode, ...]], ...]] = (
    (
        "sparse+zstd",
        16,
        (
            ("staged", STAGED, 8e-3, 0.15),
            ("streamed", {"staging_bytes": 192 << 20}, 10e-3, 0.15),
        ),
    ),
    ("sparse+zstd", 64, (("staged", STAGED, 8e-3, 0.15),)),
    (
        "lz4+zstd",
        16,
        (("as lists", STAGED, 8e-3, None), ("raw", {**STAGED, "blocks": "raw"}, None, None)),
    ),
    (
        "snappy+zstd",
        16,
        (("as lists", STAGED, 8e-3, None), ("raw", {**STAGED, "blocks": "raw"}, None, None)),
    ),
)


def _rows_of(run: Run, modes: tuple[Mode, ...], payload: int) -> list[Row]:
    raw, found = run.layout.nbytes, []
    for mode, settings, pause, prepare in modes:
        details = {**_follow(run, settings), "payload": payload, "frame": run.frame}
        print(run.codec, mode, details, flush=True)
        torch.cuda.empty_cache()
        label = f"{run.codec}, {mode}, frames of {run.frame >> 20} MiB"
        for what, goal in (("pause", pause), ("prepare", prepare)):
            took, most = details[what], goal and goal * raw / 111e9
            text = f"<= {most * 1e3:.1f} ms" if most else ""
            met = took <= most if most else None
            name = f"{raw / 1e9:.0f} GB rank, 0.085 % of bytes, {label}: {what}"
            row = Row("receiver", name, took, raw, goal=text, met=met)
            found.append(replace(row, details=details))
    return found


def rows(*, nbytes: int) -> list[Row]:
    """A rank of ``nbytes``, with each codec: staged in device memory, streamed, as raw blocks."""
    found, weights = [], model(nbytes)
    for codec, mebibytes, modes in MODES:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None))  # noqa: S108
        try:
            began = time.perf_counter()
            run = Run(weights, folder, codec=codec, frame=mebibytes << 20)
            payload = run.publish(1)
            run.site.release()
            torch.cuda.empty_cache()
            took = time.perf_counter() - began
            print(f"receiver: {codec} made in {took:.1f} s, {payload} bytes", flush=True)
            found += _rows_of(run, modes, payload)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return found
