"""Trainer ranks without a job around them: base checkpoints, baselines, captures, receipts."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from weightdelta.base import Base
from weightdelta.baseline import Baseline, EncodedFrame, rebuild
from weightdelta.capture import FramePlanes, Inventory, SnapshotCapture, take_inventory
from weightdelta.codecs.names import IDS
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.digest import U64
from weightdelta.encode import encode, histogram, tensor_digests
from weightdelta.fence import Token
from weightdelta.frame import FramePlan
from weightdelta.job import Job, base_specs, plan_job
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import WIDTHS, Box, Layout
from weightdelta.log import Log
from weightdelta.ownership import assign, collect
from weightdelta.publish import Outcome, Receipt
from weightdelta.record import data_name
from weightdelta.sharding.explicit import LocalShard
from weightdelta.state import State
from weightdelta.store import Store
from weightdelta.tensors import TORCH, as_ints

Weights = dict[str, torch.Tensor]

#: Encodes and captures in order, for every test; idle threads cost nothing.
POOL = ThreadPoolExecutor(1, "test-rank")


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Base:
    """A base checkpoint of one file."""
    save_file(dict(tensors), str(folder / "model.safetensors"))
    return Base(folder)


def clone(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Copies that keep bits."""
    return {name: as_ints(t).clone().view(t.dtype) for name, t in tensors.items()}


def bits(tensor: torch.Tensor) -> Elements:
    """A tensor's elements in C order as a 1-D unsigned array."""
    flat = as_ints(tensor.detach()).contiguous().reshape(-1)
    elements: Elements = flat.numpy().view(UINTS[tensor.element_size()])
    return elements


def wire(state: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, Elements]:
    """What a version of this state holds, computed without the library's capture."""
    return {t.name: bits(state[t.name].to(TORCH[t.dtype])).copy() for t in layout.tensors}


def job_for(
    state: State,
    base: Base,
    *,
    world_size: int = 1,
    config: Config | None = None,
    max_bytes: int | None = None,
    exclude: Sequence[str] = (),
) -> Job:
    """A job of ranks that all hold ``state`` whole; ``max_bytes`` makes frames tiny."""
    specs = base_specs(base, exclude=exclude)
    one = take_inventory(state, base=specs, exclude=exclude)
    return job_of([one] * world_size, base, config=config, max_bytes=max_bytes, exclude=exclude)


def job_of(
    inventories: Sequence[Inventory],
    base: Base,
    *,
    config: Config | None = None,
    max_bytes: int | None = None,
    exclude: Sequence[str] = (),
) -> Job:
    """The job that these inventories agree on."""
    job = plan_job(inventories, base=base, config=config or Config(), exclude=exclude)
    if max_bytes is None:
        return job
    found = collect([i.shards for i in inventories], layout=job.layout)
    owners = assign(found, layout=job.layout, world_size=len(inventories))
    plan = FramePlan.build(
        owners,
        layout=job.layout,
        max_bytes=max_bytes,
        groups=[job.config.codec_group(t.name) for t in job.layout.tensors],
    )
    return replace(job, plan=plan)


class Rank:
    """One rank's baseline and captures, without fence and threads."""

    def __init__(self, job: Job, rank: int = 0) -> None:
        self.job = job
        self.rank = rank
        self.baseline = Baseline(job.layout, job.plan, rank, job.config.values)
        self.baseline.load(job.base)
        self.frames: list[EncodedFrame] = []

    def capture(self, state: State, *, token: Token | None = None) -> list[FramePlanes]:
        """Planes of all owned frames."""
        return SnapshotCapture(self.baseline, pool=POOL).capture(state, token=token or Token())

    def encode(self, state: State) -> list[EncodedFrame]:
        """Encoded frames of one capture, kept for ``settle``."""
        self.frames = encode(
            self.capture(state), baseline=self.baseline, pool=POOL, config=self.job.config
        )
        return self.frames

    def deliver(
        self, write_id: str, state: State, store: Store, *, steps: int | None = 1
    ) -> Receipt:
        """Capture, encode, upload; the receipt."""
        planes = self.capture(state)
        frames = encode(planes, baseline=self.baseline, pool=POOL, config=self.job.config)
        self.frames = frames
        data = [f.data for f in frames if f.data]
        if data:
            store.write(data_name(write_id, self.rank), data)
        measured = self.job.config.measure_bound
        return Receipt(
            write_id=write_id,
            rank=self.rank,
            parent=self.baseline.version,
            steps=steps,
            mark=None,
            codecs=np.array([IDS[f.codec] if f.changed else 0 for f in frames], np.uint8),
            sizes=np.array([f.sizes for f in frames], np.uint32).reshape(len(frames), 15),
            hashes=np.frombuffer(b"".join(f.digest for f in frames), np.uint8).reshape(-1, 16),
            digest_change=np.array([f.digest_change for f in frames], np.uint64),
            changed=np.array([f.changed for f in frames], np.uint32),
            tensor_digest=tensor_digests(planes, baseline=self.baseline),
            histogram=histogram(planes, baseline=self.baseline) if measured else None,
            capture_s=0.0,
            encode_s=0.0,
            upload_s=0.0,
        )

    def settle(self, outcome: Outcome) -> None:
        """Move the baseline if the publication was committed."""
        if outcome.version is not None:
            self.baseline.advance(self.frames, version=outcome.version)


def content(ranks: Sequence[Baseline]) -> dict[str, Elements]:
    """Every tensor as the baselines of all ranks hold it together."""
    layout = ranks[0].layout
    found: dict[str, Elements] = {t.name: np.zeros(t.numel, UINTS[t.width]) for t in layout.tensors}
    for baseline in ranks:
        for frame, elements in baseline.frames.items():
            at = 0
            for s in baseline.plan.frame(frame).segments:
                row = np.arange(s.rows)[:, None] * s.stride + np.arange(s.run) + s.first
                found[layout.tensors[s.tensor].name][row.reshape(-1)] = elements[at : at + s.numel]
                at += s.numel
    return found


def total(ranks: Iterable[Baseline]) -> U64:
    """Tensor digests of the baselines of all ranks together."""
    table: U64 = np.sum(np.stack([r.digests() for r in ranks]), axis=0, dtype=np.uint64)
    return table


def random_tensor(dtype: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Random bits as a tensor of ``shape`` elements."""
    width = WIDTHS[dtype]
    octets = np.random.default_rng(seed).integers(0, 256, (*shape, width), np.uint8)
    return torch.from_numpy(octets.view(UINTS[width]).reshape(shape)).view(TORCH[dtype])


def same(found: Mapping[str, Elements], expected: Mapping[str, Elements]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype and np.array_equal(found[n], expected[n])
        for n in expected
    )


def published(store: Store, job: Job, *, version: int | None = None) -> dict[str, Elements]:
    """A version, the newest by default, as anyone would rebuild it from base and store."""
    log = Log(store)
    log.refresh()
    whole = [LocalShard(t.name, t.dtype, t.extent, Box.whole(t.extent)) for t in job.layout.tensors]
    found = collect([whole], layout=job.layout)
    owners = assign(found, layout=job.layout, world_size=1)
    plan = FramePlan.build(owners, layout=job.layout, max_bytes=64)
    baseline = Baseline(job.layout, plan, 0, job.config.values)
    last = log.newest if version is None else version
    reader = DeltaReader(store, config=job.config)
    rebuild(baseline, base=job.base, log=log, reader=reader, versions=range(1, last + 1))
    return content([baseline])
