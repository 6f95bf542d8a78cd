"""nvCOMP reads everybody's raw blocks, and everybody reads nvCOMP's."""

from collections.abc import Callable
from itertools import pairwise

import cramjam
import numpy as np
import pyarrow as pa
import pytest
import torch
from block_laws import INNERS, sparse, writes_blocks

from weightdelta.codecs import blocks as block_codec
from weightdelta.codecs.nvcomp import BlockCodec, Job, hardware_refusal
from weightdelta.codecs.stock import Inner
from weightdelta.codecs.transcode import ALIGN
from weightdelta.kernels import cpu_ops
from weightdelta.kernels.planes import BLOCK_BYTES

pytestmark = pytest.mark.gpu

#: Sizes of masks, with a last block that is short, odd, or barely there.
SIZES = (1, 3, 19, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 12_345)
SHARES = (0.0008, 0.03, 0.5, 1)


def parts_of(mask: bytes) -> list[bytes]:
    return [mask[at : at + BLOCK_BYTES] for at in range(0, len(mask), BLOCK_BYTES)]


def job_of(codec: BlockCodec, blocks: list[bytes], lengths: list[int]) -> Job:
    """Blocks on the device, and a target that holds something else."""
    sizes = np.array([len(b) for b in blocks])
    ends = np.cumsum(-(-sizes // ALIGN) * ALIGN)
    offsets = np.array([0, *ends[:-1]])
    buffer = np.zeros(ends[-1], np.uint8)
    for block, at in zip(blocks, offsets, strict=True):
        buffer[at : at + len(block)] = np.frombuffer(block, np.uint8)
    return codec.job(
        torch.from_numpy(buffer).cuda(),
        offsets=offsets,
        sizes=sizes,
        target=torch.full((BLOCK_BYTES * len(blocks),), 171, dtype=torch.uint8, device="cuda"),
        targets=np.arange(len(blocks)) * BLOCK_BYTES,
        lengths=np.array(lengths),
        where="frame 7",
    )


def decoded(codec: BlockCodec, blocks: list[bytes], lengths: list[int]) -> bytes:
    job = job_of(codec, blocks, lengths)
    codec.decode(job)
    room = job.target.cpu().numpy()
    return b"".join(room[i * BLOCK_BYTES :][:n].tobytes() for i, n in enumerate(lengths))


def by_cramjam(part: bytes, inner: Inner) -> bytes:
    if inner == "snappy":
        return bytes(cramjam.snappy.compress_raw(part))
    return bytes(cramjam.lz4.compress_block(part, store_size=False))


def by_pyarrow(part: bytes, inner: Inner) -> bytes:
    return bytes(pa.Codec("snappy" if inner == "snappy" else "lz4_raw").compress(part, True))


def by_us(part: bytes, inner: Inner) -> bytes:
    mask = np.frombuffer(part, np.uint8)
    offsets = np.flatnonzero(mask).astype(np.uint32)
    numbers, lz4 = np.array([0]), inner == "lz4"
    arena, _ = cpu_ops.zero_runs(offsets, mask[offsets], blocks=numbers, size=len(mask), lz4=lz4)
    return arena.tobytes()


def to_cramjam(block: bytes, size: int, inner: Inner) -> bytes:
    if inner == "snappy":
        return bytes(cramjam.snappy.decompress_raw(block))
    return bytes(cramjam.lz4.decompress_block(block, output_len=size))


def to_pyarrow(block: bytes, size: int, inner: Inner) -> bytes:
    codec = pa.Codec("snappy" if inner == "snappy" else "lz4_raw")
    return bytes(codec.decompress(block, decompressed_size=size, asbytes=True))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("encode", [by_cramjam, by_pyarrow, by_us])
@pytest.mark.parametrize("share", SHARES)
def test_nvcomp_reads_the_blocks_of_all(
    inner: Inner, encode: Callable[[bytes, Inner], bytes], share: float
) -> None:
    codec = BlockCodec(inner, device="cuda")
    for size in SIZES:
        parts = parts_of(sparse(size, width=1, share=share, seed=2).tobytes())
        found = decoded(codec, [encode(p, inner) for p in parts], [len(p) for p in parts])
        assert found == b"".join(parts)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("share", SHARES)
def test_all_read_the_blocks_of_nvcomp(inner: Inner, share: float) -> None:
    codec = BlockCodec(inner, device="cuda")
    for size in SIZES:
        parts = parts_of(sparse(size, width=1, share=share, seed=4).tobytes())
        mask = torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy()).cuda()
        arena, sizes = codec.encode(mask)
        packed = arena.cpu().numpy().tobytes()
        ends = np.cumsum([0, *sizes]).tolist()
        blocks = [packed[a:b] for a, b in pairwise(ends)]
        assert ends[-1] == len(packed)
        for block, part in zip(blocks, parts, strict=True):
            assert to_cramjam(block, len(part), inner) == part
            assert to_pyarrow(block, len(part), inner) == part
        assert decoded(codec, blocks, [len(p) for p in parts]) == b"".join(parts)
        ours = block_codec.Blocks(inner, size, sizes.astype(np.uint32), arena.cpu().numpy())
        if all(any(p) for p in parts):
            out = np.full(size, 171, np.uint8)
            block_codec.unpack(ours, out=out, where="mask")
            assert out.tobytes() == b"".join(parts)


@pytest.mark.parametrize("inner", INNERS)
def test_nvcomp_reads_zero_run_blocks_written_on_the_device(inner: Inner) -> None:
    codec = BlockCodec(inner, device="cuda")
    for seed, share in enumerate([0.0001, 0.002, 0.05]):
        mask = sparse(BLOCK_BYTES // 2, width=2, share=share, seed=seed)
        block = writes_blocks(mask, inner, device="cuda")
        assert decoded(codec, [block], [mask.nbytes]) == mask.tobytes()


@pytest.mark.parametrize("inner", INNERS)
def test_what_decodes_is_said(inner: Inner) -> None:
    """Hopper has no decompression engine: its codec can be made, and fails at the probe."""
    device = torch.device("cuda", torch.cuda.current_device())
    codec = BlockCodec(inner, device=device)
    if torch.cuda.get_device_capability(device)[0] < 10:
        assert f"no decompression engine for {inner}" in hardware_refusal(inner, device)
        assert codec.engine.startswith("multiprocessors: no decompression engine")
    else:
        assert codec.engine
