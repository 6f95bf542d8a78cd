"""One sampler: whole weights in the wire dtype that follow a run, or take what is broadcast."""

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import weightdelta as wd
from bench_gpus.link import Link, Meeting
from bench_gpus.model import SHAPES, wire
from bench_gpus.packed import Lanes, plan_buckets, receive
from bench_gpus.trainer import identity, settle, use


class Sampler:
    """Weights that a receiver patches in place.

    Args:
        meeting: Where the members of the broadcast group meet.
        shape: Name of the model's shape.
        device: Where the weights lie, as torch names it.
        bucket: Bytes that a broadcast packs together.
    """

    def __init__(self, meeting: Meeting, *, shape: str, device: str, bucket: int) -> None:
        self.device = use(device)
        self.meeting = meeting
        names = wire(SHAPES[shape])
        self.weights = {
            name: torch.zeros(size, dtype=torch.bfloat16, device=self.device)
            for name, size in names.items()
        }
        self.buckets = plan_buckets(names, limit=bucket)
        self.lanes: dict[int, Lanes] = {}
        self.receiver: wd.Receiver | None = None

    def where(self) -> str:
        """Identity of this sampler's device."""
        return identity(self.device)

    def join(self, rank: int, size: int) -> None:
        """Become a member of the broadcast group."""
        self.link = Link(self.meeting, rank=rank, size=size, device=self.device)
        self.link.meet()

    def load(self, folder: str) -> None:
        """Take the base checkpoint's weights, in place."""
        for file in sorted(Path(folder).glob("*.safetensors")):
            for name, tensor in load_file(str(file)).items():
                self.weights[name].copy_(tensor)
        settle(self.device)

    def follow(self, store: str, config: wd.Config) -> int:
        """Attach to a run; the version that the weights are."""
        self.leave()
        self.receiver = wd.Receiver(store, self.weights, config=config)
        return self.receiver.version

    def update(self, seconds: float) -> dict[str, Any]:
        """Prepare and apply the newest version; what it took, and when it was served."""
        assert self.receiver is not None
        prepared = self.receiver.prepare().wait(seconds)
        applied = self.receiver.apply()
        return {
            "served": time.time(),
            "version": applied.version,
            "integrity": applied.integrity,
            "prepare": prepared.as_dict(),
            "pause_s": applied.pause_s,
            "apply_s": applied.apply_s,
        }

    def leave(self) -> None:
        """Stop following."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def blank(self) -> None:
        """Clear all weights, so that what is found later must have arrived."""
        for tensor in self.weights.values():
            tensor.zero_()
        settle(self.device)

    def accept(self, *, buffers: int, stores: bool) -> float:
        """Take part in a transfer; when all had arrived, in Unix time [s].

        Args:
            buffers: Buckets under way at once.
            stores: Whether to unpack them into the weights.
        """
        lanes = self._lanes(buffers)
        self.link.meet()

        def store(name: str, arrived: torch.Tensor) -> None:
            self.weights[name].copy_(arrived)

        receive(self.buckets, lanes=lanes, link=self.link, sink=store if stores else None)
        settle(self.device)
        return time.time()

    def compare(self, *, buffers: int) -> tuple[int, list[str]]:
        """Compare all weights, bit for bit, with what the trainers send.

        Returns:
            Bytes that were compared, and the tensors that differ.
        """
        lanes = self._lanes(buffers)
        compared, wrong = 0, []
        self.link.meet()

        def check(name: str, arrived: torch.Tensor) -> None:
            nonlocal compared
            mine = self.weights[name]
            compared += mine.nbytes
            if not torch.equal(mine.view(torch.int16), arrived.view(torch.int16)):
                wrong.append(name)

        receive(self.buckets, lanes=lanes, link=self.link, sink=check)
        return compared, wrong

    def forget_lanes(self) -> None:
        """Give the buffers of transfers back."""
        self.lanes.clear()

    def memory(self) -> int:
        """Most device memory that torch held in this process [B]."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _lanes(self, buffers: int) -> Lanes:
        if buffers not in self.lanes:
            self.lanes[buffers] = Lanes(self.buckets, device=self.device, count=buffers)
        return self.lanes[buffers]
