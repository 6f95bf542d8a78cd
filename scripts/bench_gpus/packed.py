"""The peer: all weights, packed into buckets and broadcast, one bucket on its way behind another.

What NeMo-RL's non-colocated refit does (https://github.com/NVIDIA-NeMo/RL): every trainer GPU that
no sampler shares is in the group, tensors are packed so that a collective moves a large buffer,
and gathering the next bucket runs beside the broadcast of the one before, on streams of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from bench_gpus.link import Link

#: Wire bytes of an element.
ITEM = 2
#: Given a tensor's name and what arrived for it.
Sink = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + prod(self.shape)


def plan_buckets(wire: Mapping[str, tuple[int, ...]], *, limit: int) -> list[list[Slot]]:
    """Whole tensors in order, at most ``limit`` bytes a bucket unless one is larger itself."""
    buckets: list[list[Slot]] = [[]]
    for name, shape in wire.items():
        start = buckets[-1][-1].stop if buckets[-1] else 0
        if buckets[-1] and (start + prod(shape)) * ITEM > limit:
            buckets.append([])
            start = 0
        buckets[-1].append(Slot(name, shape, start))
    return buckets


class Lanes:
    """Buffers used in turn, each with a stream of its own where there are streams."""

    def __init__(
        self, buckets: Sequence[Sequence[Slot]], *, device: torch.device, count: int
    ) -> None:
        size = max(bucket[-1].stop for bucket in buckets)
        self._memory = [
            torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(count)
        ]
        cuda = device.type == "cuda"
        streams: Any = torch.cuda.Stream  # without types in torch
        self._streams = [streams(device) if cuda else None for _ in range(count)]
        for stream in self._streams:
            if stream is not None:  # behind the zeros
                stream.wait_stream(torch.cuda.current_stream(device))
        self._works: list[Any] = [None] * count

    @contextmanager
    def turn(self, number: int) -> Iterator[torch.Tensor]:
        """The buffer of a turn, once the turn that used it before is over."""
        at = number % len(self._memory)
        with torch.cuda.stream(self._streams[at]):
            self.free(at)
            yield self._memory[at]

    def sent(self, number: int, work: Any) -> None:
        """A turn ends when ``work`` does."""
        self._works[number % len(self._works)] = work

    def free(self, at: int) -> None:
        """Wait for the turn that uses a buffer; that also bounds how far the host runs ahead."""
        work, self._works[at] = self._works[at], None
        stream = self._streams[at]
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()
            if stream is not None:
                stream.synchronize()

    def finish(self) -> None:
        """Wait for all of them."""
        for at in range(len(self._memory)):
            self.free(at)


def send(
    buckets: Sequence[Sequence[Slot]],
    *,
    lanes: Lanes,
    gather: Callable[[str], torch.Tensor] | None,
    link: Link | None,
) -> None:
    """A trainer's part; all ranks gather, those in the link broadcast.

    Args:
        buckets: What goes together.
        lanes: Buffers, as many as buckets are under way at once.
        gather: A whole tensor in the wire dtype, by name; a collective. None sends the buffers as
            they are.
        link: None leaves the broadcast out.
    """
    for number, bucket in enumerate(buckets):
        with lanes.turn(number) as memory:
            for slot in bucket if gather else ():
                assert gather is not None
                whole = gather(slot.name)
                if link is None or link.rank == 0:
                    memory[slot.start : slot.stop].copy_(whole.reshape(-1))
            if link is not None:
                lanes.sent(number, link.broadcast(memory[: bucket[-1].stop]))
    lanes.finish()


def receive(
    buckets: Sequence[Sequence[Slot]], *, lanes: Lanes, link: Link, sink: Sink | None
) -> None:
    """A sampler's part; ``sink`` unpacks a bucket while the next one arrives."""
    for number, bucket in enumerate(buckets):
        with lanes.turn(number) as memory:
            work = link.broadcast(memory[: bucket[-1].stop])
            if sink is None:
                lanes.sent(number, work)
                continue
            work.wait()
            for slot in bucket:
                sink(slot.name, memory[slot.start : slot.stop].view(slot.shape))
    lanes.finish()
