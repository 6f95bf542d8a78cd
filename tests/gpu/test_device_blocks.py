"""Blocks packed on the device say what blocks packed on a CPU say."""

import numpy as np
import pytest
import torch
from block_laws import INNERS, sparse
from chunking import segments
from device_laws import put

from weightdelta.codecs import blocks, device_blocks
from weightdelta.codecs.nvcomp import BlockCodec
from weightdelta.codecs.stock import Inner
from weightdelta.kernels import ops
from weightdelta.kernels.planes import BLOCK_BYTES

pytestmark = pytest.mark.gpu

#: Shares of blocks one after the other: sparse, dense, none, and in between.
SHARES = ((0.01,), (0.5,), (0.001, 0.9, 0, 0.02, 0.3), (1, 0.0005), (0.01, 0.8), (0,))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("shares", SHARES)
def test_blocks_of_device_and_cpu_agree(inner: Inner, shares: tuple[float, ...]) -> None:
    each = BLOCK_BYTES // 2
    parts = [sparse(each, width=2, share=share, seed=i) for i, share in enumerate(shares)]
    mask = np.concatenate(parts)[:-777]
    chunks = segments([len(mask)])
    planes, _ = ops().encode(np.zeros_like(mask), mask, chunks=chunks, xor=True)
    wanted = blocks.pack(planes, inner=inner, chunks=chunks, width=2)
    offsets = np.flatnonzero(mask)
    found = device_blocks.pack(
        torch.from_numpy(offsets.astype(np.int32)).cuda(),
        put(mask[offsets], device="cuda"),
        size=mask.nbytes,
        codec=BlockCodec(inner, device="cuda"),
    )
    out = np.full(mask.nbytes, 171, np.uint8)
    blocks.unpack(found, out=out, where="mask")
    assert out.tobytes() == mask.tobytes()
    assert (found.sizes > 0).tolist() == (wanted.sizes > 0).tolist()
    if max(shares) < 0.1:
        assert found.arena.tobytes() == wanted.arena.tobytes()
        assert found.sizes.tolist() == wanted.sizes.tolist()
