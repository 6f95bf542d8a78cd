"""What kernels of blocks and masks must do, in Triton's interpreter as on a device."""

import numpy as np
import torch
from chunking import random_elements
from device_laws import put

from weightdelta.codecs.stock import Inner
from weightdelta.kernels import reference, torch_masks
from weightdelta.kernels.planes import BLOCK_BYTES, Chunks, Elements
from weightdelta.kernels.triton_blocks import zero_runs
from weightdelta.kernels.triton_masks import weigh_pieces, xor_pieces

INNERS: tuple[Inner, ...] = ("snappy", "lz4")
#: Bytes of pieces of a mask: more than a program's lanes, a tail that no word fills, and less.
SIZES = (8192 + 24, 16, 7 * 8, 4096)


def sparse(size: int, *, width: int, share: float, seed: int) -> Elements:
    """A mask in which about ``share`` of the elements are not zero."""
    mask = random_elements(size, width=width, seed=seed)
    if seed % 2:
        mask &= mask.dtype.type(0xFF)
    mask[np.random.default_rng(seed).random(size) >= share] = 0
    return mask


def writes_blocks(
    mask: Elements, inner: Inner, *, device: str = "cpu", numbers: list[int] | None = None
) -> bytes:
    """Zero-run blocks are those of the reference; returns them."""
    offsets = np.flatnonzero(mask).astype(np.uint32)
    blocks = np.array(numbers or range(-(-mask.nbytes // BLOCK_BYTES)), np.int64)
    size, lz4 = mask.nbytes, inner == "lz4"
    wanted, sizes = reference.zero_runs(offsets, mask[offsets], blocks=blocks, size=size, lz4=lz4)
    places = torch.from_numpy(offsets.astype(np.int32)).to(device)
    numbered = torch.from_numpy(blocks).to(device)
    values = put(mask[offsets], device=device)
    arena, found = zero_runs(places, values, blocks=numbered, size=size, lz4=lz4)
    assert found.tolist() == sizes.tolist()
    assert arena.cpu().numpy().tobytes() == wanted.tobytes()
    return wanted.tobytes()


def table(weights: torch.Tensor, *, shift: int, width: int) -> dict[str, torch.Tensor]:
    """Pieces one after the other in the mask, apart and ``shift`` elements off in the weights."""
    begins = np.cumsum([0, *SIZES[:-1]])
    addresses = weights.data_ptr() + begins + np.arange(len(SIZES)) * 48 + shift * width
    columns = {"begins": begins, "addresses": addresses, "sizes": np.array(SIZES, np.int32)}
    return {name: torch.from_numpy(c).to(weights.device) for name, c in columns.items()}


def mask_of(width: int, share: float, *, device: str) -> torch.Tensor:
    """uint8, the mask of all pieces."""
    mask = sparse(sum(SIZES) // width, width=width, share=share, seed=2)
    return put(mask, device=device).view(torch.uint8)


def weights_of(width: int, *, device: str) -> torch.Tensor:
    """Random weights, with room for all pieces."""
    return put(random_elements(14_000 // width, width=width, seed=4), device=device)


def host(tensor: torch.Tensor) -> np.ndarray:
    """Its bytes."""
    return tensor.view(torch.uint8).cpu().numpy().copy()


def takes_in_and_back(width: int, share: float, *, shift: int, device: str = "cpu") -> None:
    """A mask is XORed where its pieces say and nowhere else, and back; marks stay the same."""
    mask, weights = mask_of(width, share, device=device), weights_of(width, device=device)
    pieces = table(weights, shift=shift, width=width)
    before, wanted = weights.clone(), host(weights)
    for begin, address, size in zip(*(column.tolist() for column in pieces.values()), strict=True):
        at = address - weights.data_ptr()
        wanted[at : at + size] ^= host(mask)[begin : begin + size]
    marks = torch.zeros(3, len(SIZES), dtype=torch.int64, device=device)
    xor_pieces(mask, **pieces, marks=marks[0], store=False)
    assert torch.equal(weights, before)
    xor_pieces(mask, **pieces, marks=marks[1], store=True)
    assert host(weights).tobytes() == wanted.tobytes()
    xor_pieces(mask, **pieces, marks=marks[2], store=True, back=True)
    assert torch.equal(weights, before)
    assert torch.equal(marks[0], marks[1])
    assert torch.equal(marks[0], marks[2])


def marks_tell(*, device: str = "cpu") -> None:
    """Another mask, or another weight under it; not weights that the mask leaves alone."""
    mask, weights = mask_of(2, 0.01, device=device), weights_of(2, device=device)
    pieces = table(weights, shift=0, width=2)
    bits = mask.view(torch.int16)
    live = int(torch.nonzero(bits[: SIZES[0] // 2])[0])
    zeros = bits[: SIZES[0] // 2].view(-1, 4).eq(0).all(1)
    idle = int(torch.nonzero(zeros)[0]) * 4

    def marked() -> list[int]:
        marks = torch.zeros(len(SIZES), dtype=torch.int64, device=device)
        xor_pieces(mask, **pieces, marks=marks, store=False)
        found: list[int] = marks.tolist()
        return found

    first = marked()
    weights[idle] ^= 1
    assert marked() == first
    weights[live] ^= 1
    assert marked()[0] != first[0]
    weights[live] ^= 1
    bits[live] ^= 2
    assert marked()[0] != first[0]
    assert marked()[1:] == first[1:]


def weighs(width: int, *, device: str = "cpu") -> None:
    """Digest changes are those of the reference."""
    mask, weights = mask_of(width, 0.05, device=device), weights_of(width, device=device)
    pieces = table(weights, shift=1, width=width)
    keys = torch.tensor([5, -7, 1 << 62, 900], dtype=torch.int64, device=device)
    found = weigh_pieces(mask, **pieces, keys=keys, width=width)
    kind = np.dtype(f"u{width}")
    for i, size in enumerate(SIZES):
        begin, at = int(pieces["begins"][i]), int(pieces["addresses"][i]) - weights.data_ptr()
        old = host(weights)[at : at + size].view(kind)
        new = old ^ host(mask)[begin : begin + size].view(kind)
        one, none = np.array([len(old)]), np.array([0])
        key = keys[i : i + 1].cpu().numpy().view(np.uint64)
        chunks = Chunks(none, one, key, none, one, one)
        _, change = reference.encode(old, new, chunks=chunks, xor=True)
        assert int(found[i]) == int(change.view(np.int64)[0])


def agrees_with_the_oracle(width: int, share: float, *, shift: int, device: str = "cpu") -> None:
    """Marks, weights and digest changes are those of plain torch, whichever way the mask goes."""
    mask, weights = mask_of(width, share, device=device), weights_of(width, device=device)
    other = put(host(weights), device=device)
    first, second = (table(w, shift=shift, width=width) for w in (weights, other))
    keys = torch.tensor([5, -7, 1 << 62, 900], dtype=torch.int64, device=device)
    for store, back in ((False, False), (False, True), (True, False), (True, True)):
        changes = weigh_pieces(mask, **first, keys=keys, width=width)
        wanted = torch_masks.weigh_pieces(mask, **second, keys=keys, width=width)
        assert torch.equal(changes, wanted)
        marks = torch.zeros(2, len(SIZES), dtype=torch.int64, device=device)
        xor_pieces(mask, **first, marks=marks[0], store=store, back=back)
        torch_masks.xor_pieces(mask, **second, marks=marks[1], store=store, back=back)
        assert torch.equal(marks[0], marks[1])
        assert host(weights).tobytes() == host(other).tobytes()


def leaves_pieces_of_no_size_alone(*, device: str = "cpu") -> None:
    """What an interrupted pause has done already is left out by its size."""
    mask, weights = mask_of(2, 1, device=device), weights_of(2, device=device)
    before = weights.clone()
    pieces = table(weights, shift=0, width=2)
    pieces["sizes"] = torch.zeros_like(pieces["sizes"])
    marks = torch.ones(len(SIZES), dtype=torch.int64, device=device)
    for kernel in (xor_pieces, torch_masks.xor_pieces):
        kernel(mask, **pieces, marks=marks, store=True, back=False)
        assert torch.equal(weights, before)
        assert marks.tolist() == [0] * len(SIZES)
