"""BLAKE3 of many short pieces in one call, eight blocks side by side.

A library's call a piece hands the interpreter's lock around thousands of times, which takes longer
than the hashing; this is one long call without it. Pieces of a few dozen KiB fill no vector by
themselves, so chunks of all of them share the lanes.

The algorithm is that of the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020,
section 2); the library ``blake3`` is what tests compare it with.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weightdelta.kernels.compiled import copy, jit, scratch

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_LANES: Final = 8
_BLOCK: Final = 64
_CHUNK: Final = 1024
_START, _END, _PARENT, _ROOT = (np.uint32(1 << i) for i in range(4))
_IV: Final = np.array(
    [
        0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
        0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
    ],
    np.uint32,
)  # fmt: skip
_ORDER: Final = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
#: Columns, then diagonals, of the state.
_STEPS: Final = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip

_WORD: Final = ir.IntType(32)
_VECTOR: Final = ir.VectorType(_WORD, _LANES)


def _splat(value: int) -> Any:
    return ir.Constant(_VECTOR, [value] * _LANES)


def _rotated(builder: Any, x: Any, bits: int) -> Any:
    right = builder.lshr(x, _splat(bits))
    return builder.or_(right, builder.shl(x, _splat(32 - bits)))


def _mixed(builder: Any, state: list[Any], at: tuple[int, ...], x: Any, y: Any) -> None:
    """The quarter round G on four words of the state."""
    i, j, k, m = at
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        state[i] = builder.add(builder.add(state[i], state[j]), word)
        state[m] = _rotated(builder, builder.xor(state[m], state[i]), first)
        state[k] = builder.add(state[k], state[m])
        state[j] = _rotated(builder, builder.xor(state[j], state[k]), second)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight words, the other way round."""
    for half in (1, 2, 4):
        low = [i if not i & half else 8 + i - half for i in range(8)]
        high = [i + half if not i & half else 8 + i for i in range(8)]
        masks = [ir.Constant(ir.VectorType(_WORD, 8), mask) for mask in (low, high)]
        found = list(rows)
        for i in range(8):
            if not i & half:
                pair = rows[i], rows[i + half]
                found[i] = builder.shuffle_vector(*pair, masks[0])
                found[i + half] = builder.shuffle_vector(*pair, masks[1])
        rows = found
    return rows


def _message(builder: Any, address: Callable[[int], Any]) -> list[Any]:
    """The 16 words of each lane's block, word by word."""
    pointers = [builder.inttoptr(address(i), _VECTOR.as_pointer()) for i in range(_LANES)]
    halves = []
    for half in range(2):
        places = [builder.gep(p, [ir.Constant(_WORD, half)]) for p in pointers]
        halves += _transposed(builder, [builder.load(p, align=1) for p in places])
    return halves


def _compress(_: Any, value: Any, blocks: Any, about: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = [
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args, args, strict=True)
        ]

        def row(array: int, i: int) -> Any:
            place = builder.gep(data[array], [ir.Constant(_WORD, _LANES * i)])
            return builder.bitcast(place, _VECTOR.as_pointer())

        words = _message(
            builder, lambda i: builder.load(builder.gep(data[1], [ir.Constant(_WORD, i)]))
        )
        state = [builder.load(row(0, i), align=4) for i in range(8)]
        state += [_splat(int(word)) for word in _IV[:4]]
        counter, length, flags = (builder.load(row(2, i), align=4) for i in range(3))
        state += [counter, _splat(0), length, flags]  # counters end at 2^32 chunks, 4 TiB
        for _ in range(7):
            for i, step in enumerate(_STEPS):
                _mixed(builder, state, step, words[2 * i], words[2 * i + 1])
            words = [words[i] for i in _ORDER]
        for i in range(8):
            builder.store(builder.xor(state[i], state[i + 8]), row(0, i), align=4)
        return context.get_dummy_value()

    return types.void(value, blocks, about), generate


#: ``compress(value, blocks, about)``: eight blocks into their chaining values. ``value``: uint32
#: [8 words * 8 lanes]; ``blocks``: uint64 [8], addresses; ``about``: uint32 [3 * 8]: each lane's
#: chunk counter, bytes in the block, flags.
compress: Final[Any] = intrinsic(_compress)


@jit
def _load_iv(value: Any, iv: Any) -> None:
    for i in range(8):
        for lane in range(8):
            value[8 * i + lane] = iv[i]


@jit
def _leaves(
    first: Any, count: Any, tail: Any, last: Any, counter: Any, alone: Any, node: Any, lanes: Any,
    iv: Any, value: Any, kept: Any, blocks: Any, about: Any, nodes: Any,
) -> None:  # fmt: skip
    """Chaining values of up to eight chunks.

    ``first`` and ``tail`` are addresses of a chunk's first and last block, ``count`` its blocks,
    ``last`` bytes of the last; ``alone`` says that it is all of its piece.
    """
    _load_iv(value, iv)
    most, least = 0, 16
    for lane in range(lanes):
        most, least = max(most, count[lane]), min(least, count[lane])
    for b in range(most):
        for lane in range(8):
            here = min(lane, lanes - 1)  # lanes without a chunk do what the last one does
            final = b >= count[here] - 1
            blocks[lane] = tail[here] if final else first[here] + np.uint64(64 * b)
            flags = np.uint32(0)
            if b == 0:
                flags |= _START
            if final:
                flags |= _END | (_ROOT if alone[here] else np.uint32(0))
            about[lane] = counter[here]
            about[8 + lane] = last[here] if final else np.uint32(64)
            about[16 + lane] = flags
        if b >= least:
            copy(value, kept)
        compress(value, blocks, about)
        if b >= least:
            for lane in range(lanes):
                if b >= count[lane]:
                    for i in range(8):
                        value[8 * i + lane] = kept[8 * i + lane]
    for lane in range(lanes):
        for i in range(8):
            nodes[8 * node[lane] + i] = value[8 * i + lane]


@jit
def _parents(
    left: Any, node: Any, root: Any, lanes: Any, iv: Any, value: Any, blocks: Any, about: Any,
    nodes: Any,
) -> None:  # fmt: skip
    """Chaining values of up to eight pairs of nodes that lie side by side."""
    _load_iv(value, iv)
    base = np.uint64(nodes.ctypes.data)
    for lane in range(8):
        here = min(lane, lanes - 1)
        blocks[lane] = base + np.uint64(32 * left[here])
        about[lane] = np.uint32(0)
        about[8 + lane] = np.uint32(64)
        about[16 + lane] = _PARENT | (_ROOT if root[here] else np.uint32(0))
    compress(value, blocks, about)
    for lane in range(lanes):
        for i in range(8):
            nodes[8 * node[lane] + i] = value[8 * i + lane]


@jit
def _all_leaves(data: Any, start: Any, size: Any, at: Any, iv: Any, pad: Any, nodes: Any) -> None:
    first, tail = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
    count, node, alone = np.zeros(8, np.int64), np.zeros(8, np.int64), np.zeros(8, np.bool_)
    last, counter = np.zeros(8, np.uint32), np.zeros(8, np.uint32)
    value, kept, blocks = np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(8, np.uint64)
    about = np.zeros(24, np.uint32)
    base, padded, lane = np.uint64(data.ctypes.data), np.uint64(pad.ctypes.data), 0
    for i in range(len(start)):
        chunks = max((size[i] + 1023) // 1024, 1)
        for c in range(chunks):
            begin = start[i] + 1024 * c
            length = min(size[i] - 1024 * c, 1024)
            count[lane] = max((length + 63) // 64, 1)
            rest = length - 64 * (count[lane] - 1)
            first[lane] = base + np.uint64(begin)
            tail[lane] = first[lane] + np.uint64(64 * (count[lane] - 1))
            if rest < 64:
                for j in range(64):
                    inside = j < rest
                    pad[64 * lane + j] = data[begin + length - rest + j] if inside else 0
                tail[lane] = padded + np.uint64(64 * lane)
            last[lane], counter[lane] = np.uint32(rest), np.uint32(c)
            node[lane], alone[lane] = at[i] + c, chunks == 1
            lane += 1
            if lane == 8 or (i == len(start) - 1 and c == chunks - 1):
                _leaves(
                    first, count, tail, last, counter, alone, node, lane, iv, value, kept,
                    blocks, about, nodes,
                )  # fmt: skip
                lane = 0


@jit
def _level(at: Any, left: Any, iv: Any, nodes: Any) -> Any:
    """Nodes of every piece become half as many; whether some piece still has several."""
    first, node, root = np.zeros(8, np.int64), np.zeros(8, np.int64), np.zeros(8, np.bool_)
    value, blocks = np.zeros(64, np.uint32), np.zeros(8, np.uint64)
    about = np.zeros(24, np.uint32)
    lane = 0
    for i in range(len(at)):
        for p in range(left[i] // 2):
            first[lane], node[lane], root[lane] = at[i] + 2 * p, at[i] + p, left[i] == 2
            lane += 1
            if lane == 8:
                _parents(first, node, root, lane, iv, value, blocks, about, nodes)
                lane = 0
    if lane:
        _parents(first, node, root, lane, iv, value, blocks, about, nodes)
    more = False
    for i in range(len(at)):
        if left[i] % 2 and left[i] > 1:  # one without a partner goes up as it is
            for j in range(8):
                nodes[8 * (at[i] + left[i] // 2) + j] = nodes[8 * (at[i] + left[i] - 1) + j]
        left[i] = (left[i] + 1) // 2
        more |= left[i] > 1
    return more


def hash_many(data: U8, start: I64, size: I64) -> U8:
    """BLAKE3 of many pieces of ``data``, in a few calls without the interpreter's lock.

    Args:
        data: uint8, contiguous.
        start: int64, where each piece begins; all of it lies in ``data``.
        size: int64, bytes of each, below 4 TiB.

    Returns:
        uint8 [pieces, 32].
    """
    chunks = np.maximum((size + _CHUNK - 1) // _CHUNK, 1)
    at = np.cumsum(chunks) - chunks
    nodes = scratch.get("nodes", 8 * int(chunks.sum()), np.uint32)
    pad = scratch.get("blocks", _LANES * _BLOCK, np.uint8)
    _all_leaves(data, start, size, at, _IV, pad, nodes)
    while _level(at, chunks, _IV, nodes):
        pass
    out: U8 = nodes.reshape(-1, 8)[at].astype("<u4").view(np.uint8)
    return out
