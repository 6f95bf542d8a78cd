"""Updates from raw blocks, without a store: tensors, frames of masks, and what must come out."""

from typing import Any

import numpy as np
import torch
from chunking import random_elements, segments
from device_laws import put

from weightdelta.apply_blocks import BlockApply
from weightdelta.codecs import blocks
from weightdelta.codecs.stock import Inner
from weightdelta.kernels import ops
from weightdelta.kernels.device import MaskOps
from weightdelta.kernels.planes import Elements
from weightdelta.pieces import MaskFrame

SHARES = (0.0008, 0.3, 0.02, 0, 1, 0.004, 0.0002)
#: Elements and width of each tensor.
SIZES = ((900_001, 2), (400_000, 1))


class Case:
    """Tensors on a device, and a frame for each quarter of each."""

    def __init__(
        self,
        inner: Inner,
        *,
        device: str,
        run: int | None = None,
        sizes: tuple[tuple[int, int], ...] = SIZES,
    ) -> None:
        self.device = device
        self.old = [random_elements(n, width=w, seed=w) for n, w in sizes]
        self.new = [values.copy() for values in self.old]
        self.weights = [put(values, device=device, shift=values.itemsize) for values in self.old]
        self.frames: list[MaskFrame] = []
        for tensor, values in enumerate(self.old):
            size = -(-len(values) // 4)
            for part in range(4):
                count = min(size, len(values) - part * size)
                self._frame(tensor, part * size, count, inner=inner, run=run)

    def _frame(self, tensor: int, first: int, count: int, *, inner: Inner, run: int | None) -> None:
        width = self.old[tensor].itemsize
        chunks = segments([count], key=77 + tensor + first, run=run, stride=run)
        mask = random_elements(count, width=width, seed=len(self.frames))
        share = SHARES[len(self.frames) % len(SHARES)]
        mask[np.random.default_rng(first).random(count) >= share] = 0
        self.new[tensor][first : first + count] ^= mask
        planes, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
        packed = blocks.pack(planes, inner=inner, chunks=chunks, width=width)
        many = len(chunks)
        self.frames.append(
            MaskFrame(
                packed,
                width,
                chunks,
                address=np.full(many, self.weights[tensor].data_ptr()),
                first=np.full(many, first),
                tensor=np.full(many, tensor, np.int32),
                where=f"frame {len(self.frames)}",
            )
        )

    def update(self, inner: Inner, *, slot_bytes: int = 1 << 19) -> BlockApply:
        """An update of all frames."""
        many = len(self.old)
        return BlockApply(
            self.frames, inner=inner, tensors=many, device=self.device, slot_bytes=slot_bytes
        )

    def holds(self, wanted: list[Elements]) -> bool:
        """Whether the weights are these, bit for bit."""
        found = [w.view(torch.uint8).cpu().numpy().tobytes() for w in self.weights]
        return found == [values.tobytes() for values in wanted]

    def digests(self) -> list[int]:
        """Digest change of each tensor."""
        found = []
        for tensor, (old, new) in enumerate(zip(self.old, self.new, strict=True)):
            size = len(old)
            sums = [
                ops().digest(v, key=77 + tensor, skip=0, run=size, stride=size) for v in (old, new)
            ]
            found.append((sums[1] - sums[0]) % 2**64)
        return found


class Interrupted(BaseException):
    """What a signal may raise, anywhere in a pause."""


class Failing:
    """Mask kernels of which the n-th store takes only a share of its pieces, and then raises."""

    def __init__(
        self, plain: MaskOps, *, at: int, share: float = 0.5, error: BaseException | None = None
    ) -> None:
        self.plain, self.left, self.share = plain, at, share
        self.error = error or Interrupted()

    def weigh_pieces(self, mask: torch.Tensor, **options: Any) -> torch.Tensor:
        """As the plain one."""
        return self.plain.weigh_pieces(mask, **options)

    def xor_pieces(
        self, mask: torch.Tensor, *, store: bool, back: bool = False, **tables: torch.Tensor
    ) -> None:
        """As the plain one, until it is time."""
        self.left -= store
        if store and self.left == -1:
            some = int(self.share * len(tables["begins"]))
            tables = {name: column[:some] for name, column in tables.items()}
        self.plain.xor_pieces(mask, store=store, back=back, **tables)
        if store and self.left == -1:
            raise self.error
