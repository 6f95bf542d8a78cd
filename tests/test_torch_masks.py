"""The mask kernels in plain torch, held against their definition in Python's integers."""

import numpy as np
import torch
from chunking import WIDTHS, random_elements
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.kernels import reference, torch_masks
from weightdelta.kernels.planes import UINTS, Chunks

_ONES = 2**64 - 1


def _signed(x: int) -> int:
    x &= _ONES
    return x - 2**64 if x >> 63 else x


def _mark(place: int, weight: int, mask: int) -> int:
    x = _signed((weight ^ _signed(place * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93)
    x = _signed(((x ^ (x >> 29)) + mask) * 0x9E3779B97F4A7C15)
    return x ^ (x >> 32) if mask else 0


def _marked(mask: bytes, weights: bytes, begin: int, *, words: int) -> int:
    """The mark of a piece of which so many 64-bit words are taken as such."""
    total = 0
    for lane in range(words):
        part = slice(8 * lane, 8 * lane + 8)
        bits, weight = (int.from_bytes(b[part], "little", signed=True) for b in (mask, weights))
        total += _mark(begin + lane, weight, bits)
    for at in range(8 * words, len(mask)):
        total += _mark(begin + at, weights[at], mask[at])
    return _signed(total)


@given(
    begin=st.integers(0, 6).map(lambda i: 8 * i),
    shift=st.sampled_from([0, 8, 1, 16]),
    size=st.integers(0, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_marks_and_weights(begin: int, shift: int, size: int, share: float, seed: int) -> None:
    mask = random_elements(128, width=1, seed=seed)
    mask[np.random.default_rng(seed).random(128) >= share] = 0
    room = torch.from_numpy(random_elements(160, width=1, seed=seed + 1).copy())
    low = -room.data_ptr() % 16 + shift
    before = room.clone()
    held = before[low : low + size].numpy().tobytes()
    part = mask[begin : begin + size].tobytes()
    words = size // 8 if not begin % 16 and not shift % 16 else 0
    wanted = _marked(part, held, begin, words=words)
    tables = {
        "begins": torch.tensor([begin]),
        "addresses": torch.tensor([room.data_ptr() + low]),
        "sizes": torch.tensor([size], dtype=torch.int32),
    }
    there = torch.from_numpy(mask)
    for store, back in ((False, False), (True, False), (False, True), (True, True)):
        marks = torch.zeros(1, dtype=torch.int64)
        torch_masks.xor_pieces(there, **tables, marks=marks, store=store, back=back)
        assert int(marks[0]) == wanted
        if store and not back:
            after = before.clone()
            after[low : low + size] ^= there[begin : begin + size]
            assert torch.equal(room, after)
    assert torch.equal(room, before)


@given(
    width=st.sampled_from(WIDTHS), count=st.integers(0, 30), share=st.floats(0, 1),
    key=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_digest_changes(width: int, count: int, share: float, key: int) -> None:
    old, mask = (random_elements(count, width=width, seed=s) for s in (1, 2))
    mask[np.random.default_rng(3).random(count) >= share] = 0
    room = torch.from_numpy(np.concatenate([old.view(np.uint8), np.zeros(8, np.uint8)]))
    one, none = np.array([count]), np.array([0])
    chunks = Chunks(none, one, np.array([key], np.uint64), none, one, one)
    _, wanted = reference.encode(old, old ^ mask, chunks=chunks, xor=True)
    found = torch_masks.weigh_pieces(
        torch.from_numpy(mask.view(np.uint8)),
        begins=torch.tensor([0]),
        addresses=torch.tensor([room.data_ptr()]),
        sizes=torch.tensor([count * width], dtype=torch.int32),
        keys=torch.from_numpy(chunks.key.view(np.int64)),
        width=width,
    )
    assert mask.dtype == UINTS[width]
    assert found.numpy().view(np.uint64).tolist() == wanted.tolist()
