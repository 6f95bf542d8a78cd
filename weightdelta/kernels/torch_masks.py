"""XOR masks into weights in plain torch: any device, slow, readable; the oracle of the fast one.

``kernels.device`` says what each function does; marks are those of ``triton_masks`` bit for bit.
"""

from collections.abc import Iterator
from typing import Final

import torch

from weightdelta.kernels.device import INTS
from weightdelta.kernels.torch_ops import h, seen, signed

_A: Final = signed(0x9E3779B97F4A7C15)
_B: Final = signed(0xD6E8FEB86659FD93)


def _mark(place: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mixes places with what they hold; 0 where the mask is. Shifts keep the sign."""
    x = (weight ^ (place * _A)) * _B
    x = ((x ^ (x >> 29)) + mask) * _A
    return torch.where(mask != 0, x ^ (x >> 32), 0)


def _lanes(mask: torch.Tensor, begin: int, address: int, size: int) -> Iterator[torch.Tensor]:
    """What a piece's mark sums up: of its 64-bit words where it lies at 16 bytes, then of bytes.

    Yields:
        int64 [3, lanes]: places, weights, mask.
    """
    words = size // 8 if not (begin | address) % 16 else 0
    for low, count, width in ((0, words, 8), (8 * words, size - 8 * words, 1)):
        if count:
            bits = mask[begin + low : begin + low + count * width].view(INTS[width])
            weight = seen(address + low, count, width=width, device=mask.device)
            place = torch.arange(count, device=mask.device) + begin + (low if width == 1 else 0)
            yield torch.stack([place, weight.to(torch.int64), bits.to(torch.int64)])


def xor_pieces(
    mask: torch.Tensor,
    *,
    begins: torch.Tensor,
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    marks: torch.Tensor,
    store: bool,
    back: bool = False,
) -> None:
    """See ``MaskOps.xor_pieces``."""
    pieces = zip(begins.tolist(), addresses.tolist(), sizes.tolist(), strict=True)
    for i, (begin, address, size) in enumerate(pieces):
        total = 0
        for place, weight, bits in _lanes(mask, begin, address, size):
            total += int(_mark(place, weight ^ bits if back else weight, bits).sum())
        marks[i] = signed(total)
        if store and size:  # one operation: an interrupt finds a piece done or not begun
            part = mask[begin : begin + size]
            seen(address, size, width=1, device=mask.device).bitwise_xor_(part)


def weigh_pieces(
    mask: torch.Tensor,
    *,
    begins: torch.Tensor,
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    keys: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """See ``MaskOps.weigh_pieces``."""
    sums = torch.zeros(len(begins), dtype=torch.int64, device=mask.device)
    columns = (begins, addresses, sizes, keys)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (begin, address, size, key) in enumerate(rows):
        bits = mask[begin : begin + size].view(INTS[width])
        where = torch.nonzero(bits).reshape(-1)
        if len(where):
            weights = seen(address, size // width, width=width, device=mask.device)
            old, term = weights[where], where + key
            sums[i] = (h(term, old ^ bits[where]) - h(term, old)).sum()
    return sums
