"""Targets that are binary: plans, indexes, tables, encoded frames, Zstd frames."""

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from fuzz import frames
from fuzz.mutate import Rng, edge
from fuzz.target import Target
from fuzz.texts import layouts
from fuzz.zstd_forge import forge
from weightdelta.codecs import zstd
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.frame import FramePlan, chunks_of
from weightdelta.index import Index
from weightdelta.layout import Box, Layout
from weightdelta.ownership import Owned, OwnerMap
from weightdelta.record import table_name
from weightdelta.store import Store

Bytes = npt.NDArray[np.uint8]

#: Columns of a plan behind its 68-byte header, by what each entry belongs to.
PLAN_HEADER = 68
PLAN_COLUMNS = (
    ("first", "<u8", 1), ("stride", "<u8", 1), ("tensor", "<u4", 1), ("rows", "<u4", 1),
    ("run", "<u4", 1), ("owner", "<u4", 0), ("width", "<u1", 0), ("count", "<u4", 0),
)  # fmt: skip


# --- plans ------------------------------------------------------------------------------------


def owner_map(layout: Layout, seed: int, *, world: int = 3) -> OwnerMap:
    """Every tensor cut once along a random dimension."""
    rng = Rng(seed)
    owned = []
    for number, spec in enumerate(layout.tensors):
        box = Box.whole(spec.extent)
        d = rng.randrange(len(box.shape)) if box.shape else 0
        size = box.shape[d] if box.shape else 0
        at = rng.randrange(size + 1)
        for low, high in ((0, at), (at, size)) if box.shape and size else ():
            shape, offset = list(box.shape), list(box.offset)
            shape[d], offset[d] = high - low, low
            owned.append(Owned(number, Box(tuple(offset), tuple(shape)), rng.randrange(world)))
        if not box.shape:
            owned.append(Owned(number, box, rng.randrange(world)))
    return OwnerMap(tuple(o for o in owned if o.box.numel), world)


def _small() -> list[Layout]:
    return [layout for layout in layouts() if layout.nbytes < 1 << 20]


def plans() -> list[tuple[Layout, FramePlan]]:
    """Valid plans of the small layouts."""
    return [
        (layout, FramePlan.build(owner_map(layout, seed), layout=layout, max_bytes=64))
        for layout in _small()
        for seed in range(3)
    ]


def _covered(plan: FramePlan, layout: Layout) -> bool:
    """Whether every element is held once, by counting."""
    held = [np.zeros(t.numel, np.int64) for t in layout.tensors]
    for i in range(len(plan)):
        for tensor, first, rows, run, stride in plan.frame(i).segments:
            where = first + np.arange(rows)[:, None] * stride + np.arange(run)
            np.add.at(held[tensor], where.reshape(-1), 1)
    return all((count == 1).all() for count in held)


def _plan_check() -> Callable[[bytes], None]:
    known = {bytes.fromhex(layout.digest): layout for layout in layouts()}
    first = layouts()[0]

    def check(data: bytes) -> None:
        layout = known.get(data[8:40], first)
        plan = FramePlan.from_bytes(data, layout=layout)
        assert plan.to_bytes() == data
        assert int(plan.numel.sum()) == sum(t.numel for t in layout.tensors)
        if layout.nbytes < 1 << 20:
            assert _covered(plan, layout)
        for i in range(min(len(plan), 8)):
            chunks = chunks_of(plan.frame(i), layout=layout)
            assert int(chunks.length.sum()) == plan.frame(i).numel == plan.numel[i]
            assert plan.frame(i).nbytes <= plan.max_bytes

    return check


def split_plan(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """A plan's columns, whatever they say; short ones when there are too few bytes."""
    frames, segments = (int.from_bytes(data[i : i + 8], "little") for i in (40, 48))
    at, found = PLAN_HEADER, {}
    for name, kind, of_segments in PLAN_COLUMNS:
        size = np.dtype(kind).itemsize * min(segments if of_segments else frames, 4096)
        part = data[at : at + size]
        found[name] = np.frombuffer(part[: len(part) - len(part) % np.dtype(kind).itemsize], kind)
        at += size
    return found


def join_plan(header: bytes, columns: dict[str, npt.NDArray[Any]], *, mend: bool) -> bytes:
    """Columns behind a header; ``mend`` makes its counts theirs."""
    if mend:
        counts = (len(columns["owner"]), len(columns["first"]))
        header = header[:40] + b"".join(n.to_bytes(8, "little") for n in counts) + header[56:]
    return header + b"".join(columns[name].tobytes() for name, _, _ in PLAN_COLUMNS)


def _plan_edit(rng: Rng, data: bytes) -> bytes:
    """Change entries of columns, or take whole segments or frames away, twice or elsewhere."""
    header, columns = data[:PLAN_HEADER], split_plan(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, kind, of_segments = rng.choice(PLAN_COLUMNS)
        size = len(columns[name])
        if not size:
            continue
        i, j = rng.randrange(size), rng.randrange(size)
        row = [n for n, _, s in PLAN_COLUMNS if s == of_segments]
        how = rng.choice(("edge", "near", "copy", "drop", "twice", "swap"))
        if how in ("edge", "near"):
            bits = 8 * np.dtype(kind).itemsize
            near = (int(columns[name][i]) + rng.choice((-2, -1, 1, 2))) % (1 << bits)
            columns[name] = columns[name].copy()
            columns[name][i] = near if how == "near" else edge(rng, bits)
            continue
        order = {
            "copy": [j if at == i else at for at in range(size)],
            "drop": [at for at in range(size) if at != i],
            "twice": sorted([*range(size), i]),
            "swap": [{i: j, j: i}.get(at, at) for at in range(size)],
        }[how]
        for n in row:
            columns[n] = (
                columns[n][order[: len(columns[n])]] if len(columns[n]) == size else columns[n]
            )
    return join_plan(header, columns, mend=rng.random() < 0.8)


def _plan_split(rng: Rng, data: bytes) -> bytes:
    """Cut one segment in two where that leaves a valid plan, or nearly."""
    columns = split_plan(data)
    size = len(columns["first"])
    if not size or len(columns["count"]) != len(columns["owner"]):
        return data
    i = rng.randrange(size)
    wide = {n: c.astype(np.int64) for n, c in columns.items()}
    first, stride, rows, run = (int(wide[n][i]) for n in ("first", "stride", "rows", "run"))
    order = sorted([*range(size), i])
    wide |= {n: wide[n][order] for n, _, s in PLAN_COLUMNS if s}
    if rows > 1:
        low, high = (1, rows - 1) if rng.random() < 0.7 else (rows - 1, 1)
        wide["rows"][i], wide["rows"][i + 1], wide["first"][i + 1] = low, high, first + low * stride
        for at, n in ((i, low), (i + 1, high)):
            wide["stride"][at] = run if n == 1 else stride
    else:
        low = rng.randrange(max(1, run)) + (rng.random() < 0.1)
        wide["run"][i], wide["run"][i + 1], wide["first"][i + 1] = low, run - low, first + low
        wide["stride"][i], wide["stride"][i + 1] = low, run - low
    frame = int(np.searchsorted(np.cumsum(wide["count"]), i, side="right"))
    if frame < len(wide["count"]):
        wide["count"][frame] += 1
    kinds = {n: k for n, k, _ in PLAN_COLUMNS}
    return join_plan(
        data[:PLAN_HEADER], {n: c.astype(kinds[n]) for n, c in wide.items()}, mend=True
    )


def _plan_header(rng: Rng, data: bytes) -> bytes:
    """Another layout, an edge for a count, a limit or the world."""
    at, size = rng.choice(((40, 8), (48, 8), (56, 8), (64, 4), (8, 32), (6, 2)))
    if at == 8:
        new = bytes.fromhex(rng.choice(layouts()).digest)
    elif at == 6:
        new = rng.choice((b"00", b"02", b"1\0"))
    else:
        new = edge(rng, 8 * size).to_bytes(size, "little")
    return data[:at] + new + data[at + size :]


def plan_target() -> Target:
    """Plans of small and of vast layouts."""
    seeds = [plan.to_bytes() for _, plan in plans()]
    vast = next(layout for layout in layouts() if layout.nbytes > 1 << 30)
    columns = {n: np.zeros(0, k) for n, k, _ in PLAN_COLUMNS}
    columns |= {n: np.array([0, 1 << 30], k) for n, k, s in PLAN_COLUMNS if s and n == "first"}
    columns |= {n: np.array([1 << 20, 1 << 20], k) for n, k, s in PLAN_COLUMNS if n == "stride"}
    columns |= {n: np.array([0, 1], k) for n, k, s in PLAN_COLUMNS if n == "tensor"}
    columns |= {n: np.array([1 << 20, 1], k) for n, k, s in PLAN_COLUMNS if n == "rows"}
    columns |= {n: np.array([1 << 10, 1], k) for n, k, s in PLAN_COLUMNS if n == "run"}
    columns |= {
        "owner": np.zeros(1, "<u4"),
        "width": np.ones(1, "<u1"),
        "count": np.full(1, 2, "<u4"),
    }
    header = b"WDPLAN01" + bytes.fromhex(vast.digest) + bytes(16) + (1 << 30).to_bytes(8, "little")
    claims = join_plan(header + (3).to_bytes(4, "little"), columns, mend=True)

    def from_vast(rng: Rng, _: bytes) -> bytes:
        return _plan_edit(rng, claims)

    mutators = (_plan_edit, _plan_edit, _plan_split, _plan_split, _plan_header, from_vast)
    return Target("plan", seeds, _plan_check(), mutators, weight=2, share=0.9)


# --- indexes ----------------------------------------------------------------------------------


def _index_seed(plan: FramePlan, layout: Layout, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    n = len(plan)
    changed = np.minimum(random.integers(0, 4, n), plan.numel).astype(np.uint32)
    sizes = (random.integers(0, 60, (n, 15)) * (random.random(15) < 0.5)).astype(np.uint32)
    sizes[:, 0] = 9
    sizes[changed == 0] = 0
    return Index(
        plan=plan, version=seed + 1, parent=seed, write_id=secrets.token_hex(16),
        codecs=np.where(changed > 0, random.integers(0, 5, n), 0).astype(np.uint8), sizes=sizes,
        hashes=random.integers(0, 256, (n, 16)).astype(np.uint8), changed=changed,
        digest_change=np.where(changed > 0, random.integers(1, 2**63, n), 0).astype(np.uint64),
        tensor_digest=random.integers(0, 2**63, len(layout.tensors)).astype(np.uint64),
    ).to_bytes()  # fmt: skip


def index_target() -> Target:
    """Indexes, each for the plan that its header names."""
    known = {bytes.fromhex(plan.digest): (layout, plan) for layout, plan in plans() if len(plan)}
    seeds = [_index_seed(plan, layout, i) for i, (layout, plan) in enumerate(known.values())]
    first = next(iter(known.values()))

    def check(data: bytes) -> None:
        layout, plan = known.get(data[40:72], first)
        index = Index.from_bytes(data, plan=plan, layout=layout)
        assert index.to_bytes() == data
        ends = index.offsets + index.lengths
        assert (index.lengths >= 0).all()
        assert (index.offsets >= 0).all()
        assert index.payload_bytes == int(index.lengths.sum())
        for rank in range(plan.world_size):
            mine = plan.owned(rank)
            assert [index.offset(i) for i in mine[1:]] == [int(ends[i]) for i in mine[:-1]]
        assert all(index.codec_of(i) for i in range(len(plan)))

    return Target("index", seeds, check, (_index_mask, _index_entry), weight=2)


def _index_mask(rng: Rng, data: bytes) -> bytes:
    """A plane more or less, with or without its column."""
    frames = min(int.from_bytes(data[8:16], "little"), 4096)
    tensors = min(int.from_bytes(data[16:24], "little"), 4096)
    mask = int.from_bytes(data[88:90], "little") ^ 1 << rng.randrange(16)
    at = 90 + 8 * tensors + 13 * frames
    column = np.array([edge(rng, 32) for _ in range(frames)], "<u4").tobytes()
    column = rng.choice((column, bytes(4 * frames), b""))
    body = data[90:at] + (column + data[at:] if rng.random() < 0.5 else data[at + 4 * frames :])
    return data[:88] + mask.to_bytes(2, "little") + body


def _index_entry(rng: Rng, data: bytes) -> bytes:
    """One entry of one column, or one field of the header."""
    frames = min(int.from_bytes(data[8:16], "little"), 4096)
    tensors = min(int.from_bytes(data[16:24], "little"), 4096)
    start = 90 + 8 * tensors
    fields = [(8, 8), (16, 8), (24, 8), (32, 8), (88, 2)]
    if frames:
        i = rng.randrange(frames)
        fields += [
            (start + 8 * i, 8), (start + 8 * frames + 4 * i, 4), (start + 12 * frames + i, 1),
            (start + 13 * frames + 4 * rng.randrange(4 * frames), 4),
        ] * 2  # fmt: skip
    at, size = rng.choice(fields)
    return data[:at] + edge(rng, 8 * size).to_bytes(size, "little") + data[at + size :]


# --- tables -----------------------------------------------------------------------------------


def table_target() -> Target:
    """Tables of digests, under the name that their hash gives them."""
    store = Store(f"memory://{secrets.token_hex(8)}", timeout_s=None)
    reader = DeltaReader(store, config=Config())
    layout = layouts()[1]

    def check(data: bytes) -> None:
        digest = blake3(data).hexdigest()
        store.write(table_name(digest), data)
        try:
            table = reader.table(digest, layout=layout)
            assert table.astype("<u8").tobytes() == data
            assert len(table) == len(layout.tensors)
        finally:
            store.delete(table_name(digest))

    seeds = [Rng(i).randbytes(8 * len(layout.tensors)) for i in range(2)]
    return Target("table", seeds, check, weight=0.3)


# --- Zstd frames ------------------------------------------------------------------------------


def zstd_target() -> Target:
    """One Zstd frame behind the size that its reader expects, at most 256 KiB."""

    def size_of(data: bytes) -> int:
        return int.from_bytes(data[:3], "little") % (1 << 18)

    def check(data: bytes) -> None:
        size = size_of(data)
        content = zstd.decompress(data[3:], size=size, where="x")
        assert len(content) == size
        if zstd.compress(content) != data[3:]:
            assert size, "another spelling of nothing"

    def forged(rng: Rng, data: bytes) -> bytes:
        size, frame = forge(rng, size_of(data))
        return size.to_bytes(3, "little") + frame

    seeds = [
        len(c).to_bytes(3, "little") + zstd.compress(c)
        for c in (b"", b"a", bytes(1000), bytes(range(256)) * 9, Rng(1).randbytes(300))
    ]
    return Target("zstd", seeds, check, (forged,), size_of, weight=1.5, share=0.6)


def binary_targets() -> list[Target]:
    """All of them."""
    return [
        plan_target(), index_target(), table_target(), zstd_target(), *frames.frame_targets(),
    ]  # fmt: skip
