"""Rows of the block codecs: nvCOMP, zero-run blocks, and the pause of a rank from raw blocks."""

import itertools
import time
from typing import Any, Final

import numpy as np
import torch
from nvidia import nvcomp

from bench_gpu.rows import Row
from weightdelta.apply_blocks import BlockApply, MaskFrame
from weightdelta.codecs.blocks import Blocks, unpack, wrap
from weightdelta.codecs.nvcomp import BlockCodec, Job
from weightdelta.codecs.stock import Inner
from weightdelta.kernels.device import INTS, device_ops
from weightdelta.kernels.planes import BLOCK_BYTES, CHUNK, Chunks
from weightdelta.kernels.triton_blocks import zero_runs

#: What is said of a mask, its element width, and the share of elements that differ by one.
MASKS: Final = (("0.085 % of bytes, fp8", 1, 0.00085), ("1.5 % of bf16", 2, 0.015))
INNERS: Final[tuple[Inner, ...]] = ("snappy", "lz4")
#: Bytes of a frame, and of the part of a mask whose payload is taken.
FRAME: Final = 16 << 20
RANK: Final = 111e9


def mask_of(nbytes: int, *, width: int, density: float) -> torch.Tensor:
    """XOR of random elements with themselves and one more or less."""
    kind = INTS[width]
    mask = torch.zeros(nbytes // width, dtype=kind, device="cuda")
    for part in mask.split(1 << 27):
        where = (torch.rand(len(part), device="cuda") < density).nonzero().squeeze(1)
        old = torch.randint(0, 1 << 15 if width > 1 else 256, (len(where),), device="cuda")
        step = torch.randint(0, 2, (len(where),), device="cuda") * 2 - 1
        part[where] = (old.to(kind) ^ (old + step).to(kind)).to(kind)
    return mask


def median(work: Any, *, repeats: int = 5, warm: int = 2) -> float:
    """Median wall time of work that ends with the device idle."""
    times = []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(time.perf_counter() - begin)
    return float(np.median(times))


def payload(inner: Inner, sizes: np.ndarray, arena: torch.Tensor, *, size: int) -> int:
    """Bytes of one frame's blocks once the outer stage has them."""
    blocks = Blocks(inner, size, sizes.astype(np.uint32), arena.cpu().numpy())
    return sum(len(part) for part in wrap(blocks))


def _job(codec: BlockCodec, arena: torch.Tensor, sizes: np.ndarray, target: torch.Tensor) -> Job:
    """All blocks of a mask, each at a multiple of 16 bytes, into ``target``."""
    room = -(-sizes // 16) * 16
    offsets, ends = np.cumsum(room) - room, np.cumsum(sizes)
    laid = torch.zeros(int(room.sum()), dtype=torch.uint8, device="cuda")
    shift = torch.from_numpy(offsets - (ends - sizes)).cuda()
    index = torch.repeat_interleave(shift, torch.from_numpy(sizes).cuda())
    laid[index + torch.arange(len(arena), device="cuda")] = arena
    at = np.arange(0, len(target), BLOCK_BYTES)
    lengths = np.minimum(BLOCK_BYTES, len(target) - at)
    return codec.job(
        laid, offsets=offsets, sizes=sizes, target=target, targets=at, lengths=lengths,
        where="bench",
    )  # fmt: skip


def nvcomp_rows(
    label: str, inner: Inner, mask: torch.Tensor, *, details: dict[str, Any]
) -> list[Row]:
    """Its encoder and decoder on raw blocks."""
    codec = BlockCodec(inner, device="cuda")
    octets = mask.view(torch.uint8)
    lengths = [BLOCK_BYTES] * (len(octets) // BLOCK_BYTES)
    each = 80 * 1024
    room = torch.empty(each * len(lengths), dtype=torch.uint8, device="cuda")
    places = [each * i for i in range(len(lengths))]
    source = nvcomp.as_arrays(octets, [BLOCK_BYTES * i for i in range(len(lengths))], lengths)
    out = nvcomp.as_arrays(room, places, [each] * len(lengths))
    raw = codec._codec
    config = raw.compression_config(lengths)
    arena, sizes = codec.encode(octets)
    target = torch.full_like(octets, 171)
    job = _job(codec, arena, sizes, target)
    codec.decode(job)
    assert torch.equal(target, octets)
    part = FRAME // BLOCK_BYTES
    size = payload(inner, sizes[:part], arena[: int(sizes[:part].sum())], size=FRAME)
    more = {**details, "inner": int(sizes.sum()) / len(octets), "payload": size / FRAME}
    encode = median(lambda: raw.encode(source, out=out, compression_config=config).buffer_sizes)
    decode = median(lambda: codec.decode(job))
    name = f"nvCOMP {inner}"
    return [
        Row("codecs", f"{name} encode, {label}", encode, len(octets), details=more),
        Row(
            "codecs",
            f"{name} decode, {label}",
            decode,
            len(octets),
            details={"engine": codec.engine},
        ),
    ]


def zstd_rows(label: str, mask: torch.Tensor) -> list[Row]:
    """NvCOMP's Zstd on blocks of 64 KiB, one frame each."""
    octets = mask.view(torch.uint8)
    count, each = len(octets) // BLOCK_BYTES, 80 * 1024
    lengths = [BLOCK_BYTES] * count
    codec = nvcomp.Codec(algorithm="Zstd", bitstream_kind=nvcomp.BitstreamKind.RAW)
    room = torch.empty(each * count, dtype=torch.uint8, device="cuda")
    source = nvcomp.as_arrays(octets, [BLOCK_BYTES * i for i in range(count)], lengths)
    out = nvcomp.as_arrays(room, [each * i for i in range(count)], [each] * count)
    config = codec.compression_config(lengths)
    torch.cuda.synchronize()
    sizes = codec.encode(source, out=out, compression_config=config).buffer_sizes
    blocks = nvcomp.as_arrays(room, [each * i for i in range(count)], sizes)
    target = torch.full_like(octets, 171)
    places = nvcomp.as_arrays(target, [BLOCK_BYTES * i for i in range(count)], lengths)
    back = codec.decompression_config(config)
    torch.cuda.synchronize()
    assert codec.decode(blocks, out=places, decompression_config=back).buffer_sizes == lengths
    assert torch.equal(target, octets)
    encode = median(lambda: codec.encode(source, out=out, compression_config=config).buffer_sizes)
    decode = median(
        lambda: codec.decode(blocks, out=places, decompression_config=back).buffer_sizes
    )
    more = {"payload": sum(sizes) / len(octets)}
    return [
        Row("codecs", f"nvCOMP zstd encode, {label}", encode, len(octets), details=more),
        Row("codecs", f"nvCOMP zstd decode, {label}", decode, len(octets)),
    ]


def our_row(label: str, inner: Inner, mask: torch.Tensor) -> Row:
    """Zero-run blocks from the list of changes; nvCOMP decodes them to the mask."""
    octets = mask.view(torch.uint8)
    offsets = mask.nonzero().squeeze(1).to(torch.int32)
    values = mask[offsets.long()]
    numbers = torch.arange(len(octets) // BLOCK_BYTES, device="cuda")
    size, lz4 = len(octets), inner == "lz4"

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return zero_runs(offsets, values, blocks=numbers, size=size, lz4=lz4)

    arena, found = work()
    sizes = found.cpu().numpy().astype(np.int64)
    codec = BlockCodec(inner, device="cuda")
    target = torch.full_like(octets, 171)
    job = _job(codec, arena, sizes, target)
    codec.decode(job)
    assert torch.equal(target, octets)
    part = FRAME // BLOCK_BYTES
    after = payload(inner, sizes[:part], arena[: int(sizes[:part].sum())], size=FRAME)
    seconds, decode = median(work), median(lambda: codec.decode(job))
    more = {
        "inner": len(arena) / len(octets),
        "payload": after / FRAME,
        "decode_rate": size / decode,
    }
    return Row("codecs", f"zero-run {inner} encode, {label}", seconds, len(octets), details=more)


def _frames(weights: torch.Tensor, mask: torch.Tensor, inner: Inner) -> list[MaskFrame]:
    """Frames of one tensor; masks repeat after those that ``mask`` has."""
    width = mask.element_size()
    each, per = FRAME // width, FRAME // width // CHUNK
    made = []
    for part in mask.split(each):
        offsets = part.nonzero().squeeze(1).to(torch.int32)
        numbers = torch.arange(FRAME // BLOCK_BYTES, device="cuda")
        lz4 = inner == "lz4"
        arena, sizes = zero_runs(offsets, part[offsets.long()], blocks=numbers, size=FRAME, lz4=lz4)
        made.append(
            Blocks(inner, FRAME, sizes.cpu().numpy().astype(np.uint32), arena.cpu().numpy())
        )
        out = np.empty(FRAME, np.uint8)
        unpack(made[-1], out=out, where="bench")
        assert np.array_equal(out, part.view(torch.uint8).cpu().numpy())
    start, whole = np.arange(per) * CHUNK, np.full(per, 1 << 40)
    frames = []
    for i in range(len(weights) // each):
        key = np.full(per, 12345 + i * each, np.uint64)
        chunks = Chunks(start, np.full(per, CHUNK), key, start, whole, whole)
        first, address = np.full(per, i * each), np.full(per, weights.data_ptr())
        where = f"frame {i}"
        frames.append(
            MaskFrame(
                made[i % len(made)], width, chunks, address, first, np.zeros(per, np.int32), where
            )
        )
    return frames


def pause_rows(label: str, inner: Inner, mask: torch.Tensor, *, nbytes: int) -> list[Row]:
    """The article's path: raw blocks in pinned memory to weights, and what it means for a rank."""
    width = mask.element_size()
    weights = torch.empty(nbytes // 8, dtype=torch.int64, device="cuda")
    weights.random_(-(2**63), 2**63 - 1)
    weights = weights.view(INTS[width])
    before = weights.clone()
    frames = _frames(weights, mask, inner)
    begin = time.perf_counter()
    update = BlockApply(frames, inner=inner, tensors=1, device="cuda")
    staged = time.perf_counter() - begin
    sums = update.dry_run()
    whole = {"key": 12345, "skip": 0, "run": 1 << 40, "stride": 1 << 40}
    ops = device_ops("cuda")
    old = ops.digest(before, **whole)
    update.apply()
    assert (ops.digest(weights, **whole) - old).item() == sums.view(np.int64)[0]
    for part, was in zip(weights.split(len(mask)), before.split(len(mask)), strict=True):
        assert torch.equal(part, was ^ mask)
    update.undo()
    assert torch.equal(weights, before)
    turn = itertools.cycle([update.apply, update.undo])  # undo does the same work
    seconds = median(lambda: next(turn)(), repeats=7, warm=3)
    dry = median(update.dry_run, repeats=3, warm=1)
    more = {
        "rank_s": seconds * RANK / nbytes, "engine": update.engine, "dry_run_s": dry,
        "staging_s": staged, "device": update.device_bytes, "pinned": update.pinned_bytes / nbytes,
    }  # fmt: skip
    name = f"111 GB rank from {inner} blocks, {label}, of {nbytes / 1e9:.1f} GB measured"
    return [Row("codecs", name, seconds * RANK / nbytes, int(RANK), details=more)]


def xor_row(mask: torch.Tensor, *, ceiling: float) -> Row:
    """The dense XOR alone, torch's."""
    weights = torch.zeros_like(mask)
    seconds = median(lambda: weights.bitwise_xor_(mask))
    moved = 3 * mask.nbytes
    return Row("codecs", "dense XOR, torch", seconds, moved, moved / seconds / ceiling, "the copy")


def rows(*, nbytes: int, ceiling: float) -> list[Row]:
    """All rows.

    Args:
        nbytes: Bytes of the mask that codecs work on; eight times as many for a pause.
        ceiling: Bytes a second of a copy on the device.
    """
    found: list[Row] = []
    for label, width, density in MASKS:
        mask = mask_of(nbytes, width=width, density=density)
        details = {"changed": (mask != 0).float().mean().item()}
        found.append(xor_row(mask, ceiling=ceiling))
        for inner in INNERS:
            found += nvcomp_rows(label, inner, mask, details=details)
            found.append(our_row(label, inner, mask))
        found += zstd_rows(label, mask)
        few = mask[: 16 * FRAME // width].clone()
        del mask
        torch.cuda.empty_cache()
        for inner in INNERS:
            found += pause_rows(label, inner, few, nbytes=8 * nbytes)
    return found
