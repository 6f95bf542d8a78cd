"""The tokens of zero-run blocks in bytes: heads of literals, and copies of zeros.

Vectors have an entry a step, where a step is a literal with the copy of zeros after it. Zero
bytes among them are left to an arena that starts out zero.
"""

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def _extra(count: tensor) -> tensor:
    """Bytes of what an LZ4 length's nibble of 15 leaves over."""
    return tl.where(count >= 15, (count - 15) // 255 + 1, 0)


@triton.jit
def head(literal: tensor, lz4: tl.constexpr) -> tensor:
    """Bytes before the content of a literal of this length."""
    longer = (literal > 60).to(tl.int32) + (literal > 256).to(tl.int32)
    return 1 + _extra(literal) if lz4 else 1 + longer


@triton.jit
def copied(zeros: tensor, lz4: tl.constexpr) -> tensor:
    """Bytes of the copy after a literal."""
    rest = zeros % 64
    short = (rest >= 4) & (rest <= 11)
    copies = zeros // 64 * 3 + tl.where(rest == 0, 0, tl.where(short, 2, 3))
    return 2 + _extra(zeros - 4) if lz4 else copies


@triton.jit
def prefix(size: tensor, lz4: tl.constexpr) -> tensor:
    """Bytes of a Snappy block's own size."""
    return size * 0 if lz4 else 1 + (size >= 128).to(tl.int32) + (size >= 16384).to(tl.int32)


@triton.jit
def put(out: tensor, at: tensor, value: tensor, where: tensor) -> None:
    """Store bytes."""
    tl.store(out + at, value.to(tl.uint8), mask=where)


@triton.jit
def _put_extra(out: tensor, at: tensor, count: tensor, where: tensor) -> None:
    """An LZ4 length's rest: bytes of 255, then what is left."""
    more = tl.where(where, _extra(count), 0)
    most = tl.max(more, 0)
    k = most * 0
    while k < most:  # a range() over a tensor is beyond the interpreter
        put(out, at + k, tl.where(k + 1 < more, 255, (count - 15) % 255), k < more)
        k += 1


@triton.jit
def _put_snappy(out: tensor, at: tensor, literal: tensor, zeros: tensor, where: tensor) -> None:
    """A literal's head, and the copies after its content."""
    n = literal - 1
    short = tl.where(n < 60, n << 2, tl.where(n < 256, 60 << 2, 61 << 2))
    put(out, at, short, where)
    put(out, at + 1, n & 255, where & (n >= 60))
    put(out, at + 2, n >> 8, where & (n >= 256))
    at += head(literal, False) + literal
    whole = tl.where(where, zeros // 64, 0)
    most = tl.max(whole, 0)
    k = most * 0
    while k < most:
        put(out, at + 3 * k, whole * 0 + (63 << 2 | 2), k < whole)
        put(out, at + 3 * k + 1, whole * 0 + 1, k < whole)
        k += 1
    at += 3 * whole
    rest = zeros % 64
    brief = (rest >= 4) & (rest <= 11)
    code = tl.where(brief, (rest - 4) << 2 | 1, (rest - 1) << 2 | 2)
    put(out, at, code, where & (rest > 0))
    put(out, at + 1, whole * 0 + 1, where & (rest > 0))


@triton.jit
def _put_lz4(out: tensor, at: tensor, literal: tensor, zeros: tensor, where: tensor) -> None:
    """A sequence's token and lengths; without zeros, the last sequence's."""
    match = tl.where(zeros > 0, zeros - 4, 0)
    put(out, at, tl.minimum(literal, 15) << 4 | tl.minimum(match, 15), where)
    _put_extra(out, at + 1, literal, where)
    at += head(literal, True) + literal
    wanted = where & (zeros > 0)
    put(out, at, match * 0 + 1, wanted)
    _put_extra(out, at + 2, match, wanted)


@triton.jit
def put_size(out: tensor, size: tensor, lz4: tl.constexpr) -> None:
    """What a block begins with: a Snappy block with its own size."""
    k = tl.arange(0, 4)
    more = prefix(size, lz4)
    digit = (size >> (7 * k)) & 127 | tl.where(k + 1 < more, 128, 0)
    put(out, k, digit, k < more)


@triton.jit
def put_step(
    out: tensor, at: tensor, literal: tensor, zeros: tensor, where: tensor, lz4: tl.constexpr,
) -> None:  # fmt: skip
    """Everything of a step but its literal's content."""
    if lz4:
        _put_lz4(out, at, literal, zeros, where)
    else:
        _put_snappy(out, at, literal, zeros, where)
