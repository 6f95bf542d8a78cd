"""Targets for encoded frames: every codec that the registry knows, by name."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.mutate import Rng, any_bytes, edge
from fuzz.target import Target
from fuzz.zstd_forge import forge
from weightdelta.codecs import zstd
from weightdelta.codecs.batch import decode_block_frames, decode_frames
from weightdelta.codecs.blocks import INNER
from weightdelta.codecs.names import DEFAULT, IDS, Codec, Values, takes
from weightdelta.codecs.registry import decode_frame, encode_frame
from weightdelta.codecs.slots import SLOTS
from weightdelta.errors import DamagedObject
from weightdelta.frame import Frame, Segment, chunks_of
from weightdelta.kernels import load, ops
from weightdelta.kernels.planes import GAP_FACTOR, UINTS, Chunks, Elements, Planes
from weightdelta.layout import Layout, TensorSpec

_LAYOUT = Layout.of(
    [TensorSpec(f"t{width}", f"U{8 * width}", (1 << 18,)) for width in (1, 2, 4, 8)]
)
#: What precedes a frame's bytes in an input: the number of its case, its values, 15 sizes.
HEAD = 2 + 4 * SLOTS


def _frame(width: int, *shapes: tuple[int, int, int]) -> Frame:
    tensor = {1: 0, 2: 1, 4: 2, 8: 3}[width]
    first, segments = 0, []
    for rows, run, stride in shapes:
        segments.append(Segment(tensor, first, rows, run, stride))
        first += rows * stride
    return Frame(0, width, tuple(segments))


#: Small and strided, with chunks of every form, and one that spans chunks and blocks.
CASES: tuple[tuple[Frame, Chunks], ...] = tuple(
    (frame, chunks_of(frame, layout=_LAYOUT))
    for frame in (
        _frame(2, (1, 300, 300)),
        _frame(1, (5, 7, 11), (1, 1, 1), (1, 64, 64)),
        _frame(4, (1, 65, 65), (3, 20, 40)),
        _frame(8, (1, 17, 17), (2, 2, 9)),
        _frame(2, (1, 65536 + 1000, 65536 + 1000), (1, 3, 3)),
        _frame(1, (2, 70000, 70000)),
    )
)


@dataclass(frozen=True)
class Input:
    """An input taken apart."""

    case: int
    values: Values
    sizes: npt.NDArray[np.uint32]
    data: bytes

    @classmethod
    def of(cls, raw: bytes) -> "Input":
        """Whatever the bytes are; missing ones are zero."""
        raw = raw.ljust(HEAD, b"\0")
        sizes = np.frombuffer(raw[2:HEAD], "<u4").astype(np.uint32)
        return cls(raw[0] % len(CASES), "xor" if raw[1] % 2 else "diff", sizes, raw[HEAD:])

    def to_bytes(self) -> bytes:
        """One input."""
        flags = bytes([self.case, self.values == "xor"])
        return flags + self.sizes.astype("<u4").tobytes() + self.data

    def parts(self) -> list[bytes]:
        """The parts that the sizes cut out."""
        ends = [0, *np.cumsum(self.sizes.astype(np.int64)).tolist()]
        return [self.data[low:high] for low, high in pairwise(ends)]

    def with_parts(self, parts: list[bytes]) -> "Input":
        """Other parts, their sizes right."""
        sizes = np.array([len(p) for p in parts], np.uint32)
        return Input(self.case, self.values, sizes, b"".join(parts))


def _changes(case: int, seed: int, density: float) -> Planes:
    frame, chunks = CASES[case]
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, frame.nbytes, dtype=np.uint8).view(UINTS[frame.width])
    new = old.copy()
    hit = random.random(len(old)) < density
    new[hit] ^= random.integers(1, 256, int(hit.sum())).astype(old.dtype)
    return ops().encode(old, new, chunks=chunks, xor=True)[0]


def _seeds(codec: Codec) -> list[bytes]:
    found = []
    for case in range(len(CASES)):
        frame, chunks = CASES[case]
        for density in (0.01, 0.4, 1.0) if frame.numel < 1000 else (0.001, 0.3):
            for values in ("diff", "xor"):
                if not takes(codec, values):
                    continue
                data, sizes = encode_frame(
                    _changes(case, case, density), codec=codec, chunks=chunks, width=frame.width,
                    values=values,
                )  # fmt: skip
                found.append(Input(case, values, sizes, data).to_bytes())
    return found


def _sound(planes: Planes, chunks: Chunks, frame: Frame) -> None:
    """Positions ascend within the frame, by the compiled and by the reference kernels."""
    assert (planes.counts <= chunks.length).all()
    assert planes.values.dtype == UINTS[frame.width]
    assert bool(planes.values.all())
    where = ops().expand(planes, chunks=chunks)
    assert len(where) == planes.changed == int(planes.counts.sum(dtype=np.int64))
    assert bool((where[1:] > where[:-1]).all())
    assert not len(where) or int(where[-1]) < frame.numel
    if frame.numel < 1000:
        oracle = load("reference")
        assert oracle.check(planes, chunks=chunks) == -1
        assert np.array_equal(oracle.expand(planes, chunks=chunks), where)


def _comes_back(planes: Planes, chunks: Chunks, frame: Frame, values: Values) -> None:
    """Applied to zeros and compared again, the same changes."""
    xor = values == "xor"
    old: Elements = np.zeros(frame.numel, UINTS[frame.width])
    new = old.copy()
    ops().decode_into(new, planes, chunks=chunks, xor=xor)
    again = ops().encode(old, new, chunks=chunks, xor=xor)[0]
    for name in ("counts", "gaps", "bitmap", "values"):
        assert np.array_equal(getattr(again, name), getattr(planes, name)), name


def _in_batch(item: Input, codec: Codec, changed: int) -> Planes | None:
    """The input as both frames of a batch, of which each has ``changed`` changes."""
    frame, chunks = CASES[item.case]
    data, start = np.frombuffer(item.data, np.uint8), np.zeros(2, np.int64)
    sizes, count = np.stack([item.sizes, item.sizes]), len(chunks)
    where: Any = {
        "chunks": Chunks(*(np.tile(getattr(chunks, name), 2) for name in Chunks.__slots__)),
        "bounds": np.array([0, count, 2 * count]),
        "width": frame.width,
    }
    if codec == DEFAULT:
        return decode_frames(data, start, sizes, values=item.values, **where)
    return decode_block_frames(
        data, start, sizes, inner=INNER[codec], changed=np.array([changed, changed]),
        memory=lambda nbytes: np.empty(nbytes, np.uint8), **where,
    )  # fmt: skip


def _refused_in_batch(item: Input, codec: Codec) -> None:
    """A batch takes nothing that is damaged, whatever the index may say of it."""
    if int(item.sizes.sum(dtype=np.uint64)) == len(item.data) and takes(codec, item.values):
        for changed in (1,) if codec == DEFAULT else range(1, 9):
            assert _in_batch(item, codec, changed) is None, "a batch took what is damaged"


def _agrees_in_batch(item: Input, codec: Codec, planes: Planes) -> None:
    """A batch finds the same, if it is for frames like this one."""
    few = 0 < GAP_FACTOR * planes.changed <= CASES[item.case][0].numel
    if codec == DEFAULT or few:
        _same_twice(planes, _in_batch(item, codec, planes.changed))


def _same_twice(one: Planes, both: Planes | None) -> None:
    assert both is not None, "a batch refused what is sound"
    for name in Planes.__slots__:
        assert np.array_equal(getattr(both, name), np.tile(getattr(one, name), 2)), name


def frame_target(codec: Codec) -> Target:
    """Frames of one codec."""
    batched = codec == DEFAULT or codec in INNER

    def check(raw: bytes) -> None:
        item = Input.of(raw)
        frame, chunks = CASES[item.case]
        try:
            planes = decode_frame(
                item.data, item.sizes, codec=codec, chunks=chunks, width=frame.width,
                values=item.values, where="frame",
            )  # fmt: skip
        except DamagedObject:
            if batched:
                _refused_in_batch(item, codec)
            raise
        if batched and load("cpu") is ops():
            _agrees_in_batch(item, codec, planes)
        _sound(planes, chunks, frame)
        _comes_back(planes, chunks, frame, item.values)

    def declared(raw: bytes) -> int:
        return CASES[Input.of(raw).case][0].nbytes

    mutators = (_sizes, _contents, _contents, _forged, _noise)
    if codec == "sparse+zstd":
        mutators = (*mutators, _implied, _implied, _implied)
    return Target(f"frame {codec}", _seeds(codec), check, mutators, declared, weight=2)


def frame_targets() -> list[Target]:
    """All codecs."""
    return [frame_target(codec) for codec in IDS]


# --- mutators ---------------------------------------------------------------------------------


def _sizes(rng: Rng, raw: bytes) -> bytes:
    """Sizes that lie, add up otherwise, or name other slots."""
    item = Input.of(raw)
    sizes = item.sizes.copy()
    i, j = rng.randrange(SLOTS), rng.randrange(SLOTS)
    if rng.random() < 0.5:
        sizes[[i, j]] = sizes[[j, i]]
    else:
        sizes[i] = edge(rng, 32)
    return Input(item.case, item.values, sizes, item.data).to_bytes()


def _contents(rng: Rng, raw: bytes) -> bytes:
    """Change what lies under the outer stage of one to three parts, and compress it again."""
    item = Input.of(raw)
    parts = item.parts()
    for _ in range(rng.choice((1, 1, 2, 3))):
        present = [i for i, part in enumerate(parts) if part]
        if not present:
            break
        i = rng.choice(present)
        content = _content(parts[i])
        changed = any_bytes(rng, content if content is not None else parts[i])
        parts[i] = changed if content is None else zstd.compress(changed)
    return item.with_parts(parts).to_bytes()


def _content(part: bytes) -> bytes | None:
    """What a true Zstd frame holds, None for anything else."""
    try:
        size = zstd.zstandard.frame_content_size(part)
        return zstd.decompress(part, size=size, where="seed") if 0 <= size < 1 << 21 else None
    except (zstd.zstandard.ZstdError, zstd.DamagedObject):
        return None


def _forged(rng: Rng, raw: bytes) -> bytes:
    """A part's Zstd frame has a header that lies."""
    item = Input.of(raw)
    parts = item.parts()
    i = rng.randrange(SLOTS)
    content = _content(parts[i])
    parts[i] = forge(rng, len(content or b""))[1]
    return item.with_parts(parts).to_bytes()


def _noise(rng: Rng, raw: bytes) -> bytes:
    """Parts appear, vanish, or hold zeros, ones or noise of some size."""
    item = Input.of(raw)
    parts = item.parts()
    for _ in range(rng.choice((1, 2))):
        content = _content(parts[rng.randrange(SLOTS)]) or b""
        size = rng.choice((len(content), len(content), edge(rng, 17)))
        fill = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
        parts[rng.randrange(SLOTS)] = rng.choice((b"", fill, zstd.compress(fill)))
    return item.with_parts(parts).to_bytes()


def _implied(rng: Rng, raw: bytes) -> bytes:
    """Sparse planes of just the sizes that counts imply, with contents that need not fit them."""
    item = Input.of(raw)
    frame, chunks = CASES[item.case]
    n = chunks.length
    counts = np.array([_count(rng, int(length)) for length in n], np.int64)
    gaps = (GAP_FACTOR * counts < n) & (counts > 0)
    bits = (GAP_FACTOR * counts >= n) & (counts < n)
    total = int(counts.sum())
    gap, bit = int(counts[gaps].sum()), int(((n[bits] + 7) // 8).sum())
    nibbles = _fill(rng, (total + 1) // 2)
    if total % 2:
        nibbles = nibbles[:-1] + bytes([nibbles[-1] & (15 if rng.random() < 0.9 else 255)])
    halves = np.frombuffer(nibbles, np.uint8)
    escapes = int((halves & 15 == 15).sum()) + int((halves >> 4 == 15).sum())
    many = total if item.values == "xor" else escapes
    table = counts.astype("<u4").view(np.uint8).reshape(-1, 4)
    planes = [
        *(table[:, i].tobytes() for i in range(3)),
        _fill(rng, gap),
        _fill(rng, gap) if rng.random() < 0.3 else b"",
        _fill(rng, bit),
        b"" if item.values == "xor" else nibbles,
        *(_fill(rng, many) for _ in range(frame.width)),
    ]
    parts = [zstd.compress(p) if any(p) else b"" for p in planes]
    return item.with_parts([*parts, *[b""] * (SLOTS - len(parts))]).to_bytes()


def _count(rng: Rng, length: int) -> int:
    near = (0, 1, length // 6, length // 6 + 1, length // 2, length - 1, length, length + 1)
    return max(0, rng.choice((*near, rng.randrange(length + 1))))


def _fill(rng: Rng, size: int) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(size)
    if kind == 1:
        return rng.choice((b"\xff", b"\xf0", b"\x0f", b"\x01", b"\x55")) * size
    if kind == 2:
        return rng.randbytes(size)
    few = bytearray(size)
    for _ in range(min(size, 3)):
        few[rng.randrange(size)] = rng.randrange(256)
    return bytes(few)
