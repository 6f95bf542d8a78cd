"""A tiny real run: ranks in one process, published through the real sessions and writer."""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch
from safetensors.torch import save_file

from weightdelta.base import Base
from weightdelta.capture import take_inventory
from weightdelta.codecs.names import Codec
from weightdelta.config import Config
from weightdelta.errors import WeightDeltaError
from weightdelta.frame import FramePlan
from weightdelta.job import base_specs, plan_job
from weightdelta.ownership import assign, collect
from weightdelta.publish import Outcome, Receipt, RunWriter
from weightdelta.record import data_name
from weightdelta.session import Payload, RankSession
from weightdelta.stats import PublishStats
from weightdelta.store import Store
from weightdelta.tensors import as_ints

Weights = dict[str, torch.Tensor]
Commit = Callable[[], PublishStats]


def some_weights(seed: int = 0) -> Weights:
    """A few tensors of several widths, one 0-d and one empty."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(12, 10, generator=g).bfloat16(),
        "b": torch.randn(7, generator=g),
        "e": torch.zeros(0, 3),
        "m": torch.rand(9, generator=g) > 0.5,
        "s": torch.tensor(3.0, dtype=torch.float64),
    }


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in C order, as bytes."""
    raw: bytes = as_ints(tensor.detach()).cpu().contiguous().reshape(-1).numpy().tobytes()
    return raw


def all_bits(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Every tensor's bytes."""
    return {name: bits(tensor) for name, tensor in weights.items()}


def clone(weights: Mapping[str, torch.Tensor]) -> Weights:
    """A copy with memory of its own."""
    return {name: tensor.clone() for name, tensor in weights.items()}


def edit(tensor: torch.Tensor, at: int, mask: int = 1) -> None:
    """Flip bits of one element in place."""
    ints = as_ints(tensor.detach())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape))
    ints[where] = ints[where] ^ mask


class SmallRun:
    """A trainer whose ranks all hold every tensor.

    Attributes:
        live: The trainer's weights; edit them, then ``publish``.
        versions: Bytes of all weights at each committed version.
        base: Weights at version 0.
        tamper: What becomes of each receipt on its way to the writer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        store: Store | None = None,
        weights: Weights | None = None,
        config: Config | None = None,
        ranks: int = 2,
        max_bytes: int = 128,
    ) -> None:
        self.base = some_weights() if weights is None else weights
        self.live = clone(self.base)
        self.store = store or Store(f"memory://{secrets.token_hex(8)}", timeout_s=None)
        self.checkpoint = folder / "model.safetensors"
        save_file(self.base, str(self.checkpoint))
        self.versions = [all_bits(self.base)]
        self.tamper: Callable[[Receipt], Receipt] = lambda receipt: receipt
        self._sessions: list[RankSession] = []
        self.open(config=config, ranks=ranks, max_bytes=max_bytes)

    def open(self, *, config: Config | None = None, ranks: int = 2, max_bytes: int = 128) -> None:
        """Start the ranks anew, as after a restart, perhaps with another plan."""
        self.close()
        config = config or Config()
        base = Base(self.checkpoint)
        inventory = take_inventory(self.live, base=base_specs(base))
        job = plan_job([inventory] * ranks, base=base, config=config)
        owners = assign(
            collect([inventory.shards] * ranks, layout=job.layout),
            layout=job.layout,
            world_size=ranks,
        )
        groups = [config.codec_group(t.name) for t in job.layout.tensors]
        plan = FramePlan.build(owners, layout=job.layout, max_bytes=max_bytes, groups=groups)
        job = replace(job, plan=plan)
        self._sessions = [
            RankSession(job, rank=r, store=self.store, clock=lambda: 0.0) for r in range(ranks)
        ]
        self.writer = RunWriter(
            self.store,
            config=config,
            clock=lambda: 0.0,
            now=lambda: 0.0,
            nonce=secrets.token_hex(16),
        )
        self.writer.log.refresh()
        newest = self.writer.newest
        parts = [s.start(version=newest, fresh=True) for s in self._sessions]
        self.writer.open(job, table=sum(parts[1:], parts[0]))

    @property
    def newest(self) -> int:
        """The newest committed version."""
        return len(self.versions) - 1

    def publish(self, *, step: int | None = None, codec: Codec | None = None) -> PublishStats:
        """Publish the live weights as the next version."""
        stats = self.upload(step=step, codec=codec)()
        self.versions.append(all_bits(self.live))
        return stats

    def upload(self, *, step: int | None = None, codec: Codec | None = None) -> Commit:
        """Capture and upload; what is returned commits."""
        write_id = secrets.token_hex(16)
        self.writer.begin(write_id, step=step)
        decided: Future[Outcome] = Future()
        lock, uploaded = Lock(), Future[None]()

        def deliver(item: Payload | WeightDeltaError) -> Outcome:
            if isinstance(item, WeightDeltaError):
                uploaded.set_exception(item)
                return Outcome(write_id, error=item)
            if parts := list(item.parts):
                self.store.write(data_name(write_id, item.receipt.rank), parts)
            try:
                with lock:
                    if self.writer.add(self.tamper(item.receipt)):
                        uploaded.set_result(None)
            except WeightDeltaError as e:
                uploaded.set_exception(e)
                raise
            return decided.result(60)

        ends = [
            s.publish(lambda: self.live, write_id=write_id, deliver=deliver, codec=codec)
            for s in self._sessions
        ]
        uploaded.result(60)

        def commit() -> PublishStats:
            decided.set_result(self.writer.commit(write_id))
            outcomes = [end.result(60) for end in ends]
            return outcomes[0].result()

        return commit

    def step(self, seed: int, *, share: float = 0.1, codec: Codec | None = None) -> PublishStats:
        """Change some elements of every tensor at random, then publish."""
        g = torch.Generator().manual_seed(seed)
        for tensor in self.live.values():
            ints = as_ints(tensor)
            hit = torch.rand(tensor.shape, generator=g) < share
            ints[hit] ^= 1
        return self.publish(step=seed, codec=codec)

    def model(self, version: int = 0) -> Weights:
        """A fresh sampler's weights at a version."""
        found = clone(self.base)
        for name, data in self.versions[version].items():
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
            if data:
                as_ints(found[name]).copy_(
                    raw.view(as_ints(found[name]).dtype).reshape(found[name].shape)
                )
        return found

    def close(self) -> None:
        """End the ranks' threads and hooks."""
        for session in self._sessions:
            session.close()
        self._sessions = []
