"""Hostile input by name: each of these was written to break one particular bound."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fuzz.binary import PLAN_COLUMNS, join_plan, plans, split_plan
from fuzz.frames import CASES, Input, frame_target
from fuzz.guard import guarded
from fuzz.texts import signed
from fuzz.zstd_forge import MAGIC, block, header
from weightdelta import record
from weightdelta.codecs import zstd
from weightdelta.codecs.registry import decode_frame
from weightdelta.errors import WeightDeltaError
from weightdelta.frame import Frame, FramePlan, Segment, chunks_of
from weightdelta.index import Index
from weightdelta.layout import Layout, TensorSpec
from weightdelta.log import Log
from weightdelta.record import log_name
from weightdelta.store import Store

BILLION = 10**9
LAYOUT, PLAN = plans()[0]


def refused(check: Callable[[bytes], object], data: bytes, *, declared: int = 0) -> None:
    """Refused as damaged, within the bounds of the guard."""
    assert guarded(check, data, declared=declared).error == "damaged-object"


def layout_of(**changes: object) -> bytes:
    document = json.loads(LAYOUT.to_bytes()) | changes
    return json.dumps(document, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(layout_of(tensors=[["a", "U8", [1]]] * 2), id="duplicate tensors"),
        pytest.param(layout_of(tensors=[["a", "U8", [2**63, 2]]]), id="size past 2^60"),
        pytest.param(layout_of(tensors=[["a", "U8", [10**18] * 60000]]), id="product of bignums"),
        pytest.param(layout_of(tensors=[["a", "U8", [-1]]]), id="negative size"),
        pytest.param(layout_of(tensors=[["a", "U8", [1.0]]]), id="float size"),
        pytest.param(layout_of(tensors=[["a", "U8", [True]]]), id="boolean size"),
        pytest.param(layout_of(tensors=[["\ud800", "U8", [1]]]), id="lone surrogate"),
        pytest.param(layout_of(aliases=[["\ud800", "a"]]), id="lone surrogate as alias"),
        pytest.param(layout_of(aliases=[[1, "a"]]), id="number as alias"),
        pytest.param(layout_of(aliases=[["a", "a"]]), id="alias of itself"),
        pytest.param(layout_of(tensors={"a": 1}), id="tensors as object"),
        pytest.param(b'{"format":1,"tensors":' + b"[" * 10**6, id="deep"),
        pytest.param(b'{"format":1,"tensors":[["a","U8",[NaN]]],"aliases":[]}', id="NaN"),
        pytest.param(b'{"format":1,"tensors":[["a","U8",[1e999]]],"aliases":[]}', id="infinity"),
        pytest.param(b'{"format":1,"tensors":[["a","U8",[' + b"9" * 9999 + b"]]]}", id="long int"),
        pytest.param(layout_of() + b" ", id="trailing"),
        pytest.param(layout_of().replace(b'"a"', b'"\xff"'), id="invalid UTF-8"),
        pytest.param(b" " * (33 << 20), id="too long"),
    ],
)
def test_layout(data: bytes) -> None:
    refused(Layout.from_bytes, data)


def test_a_billion_claimed_tensors_or_frames_cost_nothing() -> None:
    plan = bytearray(PLAN.to_bytes())
    index = bytearray(np.zeros(200, np.uint8).tobytes())
    index[:8] = b"WDINDEX1"
    index[40:72] = bytes.fromhex(PLAN.digest)
    for at in (40, 48):
        plan[at : at + 8] = BILLION.to_bytes(8, "little")
    for at in (8, 16):
        index[at : at + 8] = BILLION.to_bytes(8, "little")
    refused(lambda d: FramePlan.from_bytes(d, layout=LAYOUT), bytes(plan))
    refused(lambda d: Index.from_bytes(d, plan=PLAN, layout=LAYOUT), bytes(index))


def _with(**entries: int) -> bytes:
    """The plan with other numbers in its first segment or frame."""
    columns = {name: column.copy() for name, column in split_plan(PLAN.to_bytes()).items()}
    for name, value in entries.items():
        columns[name][0] = value
    return join_plan(PLAN.to_bytes()[:68], columns, mend=True)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_with(first=2**64 - 1), id="first past the end"),
        pytest.param(_with(first=2**63 - 1, run=2**32 - 1), id="first and run overflow"),
        pytest.param(_with(rows=2**32 - 1, run=2**32 - 1), id="rows times run overflows"),
        pytest.param(_with(rows=2**31, stride=2**62), id="rows times stride overflows"),
        pytest.param(_with(tensor=2**32 - 1), id="tensor past the end"),
        pytest.param(_with(count=2**32 - 1), id="segments past the end"),
        pytest.param(_with(run=0), id="empty segment"),
        pytest.param(_with(width=8), id="another width"),
        pytest.param(_with(owner=2**32 - 1), id="no such rank"),
        pytest.param(_with(first=1), id="overlap and gap"),
        pytest.param(PLAN.to_bytes() + b"\0", id="trailing"),
        pytest.param(PLAN.to_bytes()[:-1], id="truncated"),
        pytest.param(PLAN.to_bytes()[:67], id="half a header"),
    ],
)
def test_plan(data: bytes) -> None:
    refused(lambda d: FramePlan.from_bytes(d, layout=LAYOUT), data)


def test_a_plan_cannot_claim_rows_that_cost_more_than_its_bytes() -> None:
    """Four segments of 2^24 rows of mixed strides once took a minute and eight gigabytes."""
    rows = 1 << 24
    layout = Layout.of([TensorSpec("a", "U8", (rows, 4, 2))])
    segments = [(0, 0, rows, 4, 8), (0, 4, 2, 1, 2), (0, 5, 2, 1, 2), (0, 12, rows - 1, 4, 8)]
    table = np.array(segments, np.int64).T
    columns = dict(zip(("tensor", "first", "rows", "run", "stride"), table, strict=True))
    columns |= {"owner": np.zeros(4), "width": np.ones(4), "count": np.ones(4)}
    kinds = {name: kind for name, kind, _ in PLAN_COLUMNS}
    head = b"WDPLAN01" + bytes.fromhex(layout.digest) + bytes(16) + (1 << 30).to_bytes(8, "little")
    columns = {name: column.astype(kinds[name]) for name, column in columns.items()}
    data = join_plan(head + b"\1\0\0\0", columns, mend=True)
    assert len(data) < 256
    outcome = guarded(lambda d: FramePlan.from_bytes(d, layout=layout), data, declared=0)
    assert outcome.error == ""
    assert outcome.peak < 1 << 20


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":' * 10000,
        b"[" * 60000,
        b'{"kind":"ref","format":1,"seq":' + b"9" * 60000 + b"}",
        b'{"kind":"ref","format":1,"time":NaN}',
        b'{"kind":"ref","format":1,"time":-Infinity}',
        b'{"kind":"ref","kind":"open","format":1}',
        b'{"kind":"ref","format":1,"name":"\xff"}',
        b'\xff\xfe{\0"\0a\0"\0:\x001\0}\0',
        b'"ref"',
        b"null",
    ],
    ids=lambda line: repr(line[:40]),
)
def test_entry(line: bytes) -> None:
    refused(lambda d: record.decode(d, seq=0, where="log/x"), signed(line))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", "a//b", ".tmp/x", "a/.hidden", "", "a\0", "a\n", "a" * 200,
     "\u00e9", "C:\\x", "a/" * 9 + "a"],
)  # fmt: skip
def test_names_that_escape_are_no_object_names(name: str) -> None:
    store = Store("memory://hostile-names", timeout_s=None)
    for call in (store.read, store.size, store.delete):
        with pytest.raises(WeightDeltaError, match="is not like"):
            call(name)
    with pytest.raises(WeightDeltaError, match="is not like"):
        store.write(name, b"")
    assert log_name(3) == "log/00000000000000000003"


# --- frames -----------------------------------------------------------------------------------

#: A frame of 16 MiB, the largest by default: what a bomb would have to beat.
LARGE = Frame(0, 2, (Segment(0, 0, 1, 8 << 20, 8 << 20),))
LARGE_LAYOUT = Layout.of([TensorSpec("a", "U16", (8 << 20,))])
LARGE_CHUNKS = chunks_of(LARGE, layout=LARGE_LAYOUT)


def repeated(size: int, *, says: int | None = None) -> bytes:
    """A Zstd frame of a few bytes that stands for ``size`` zeros."""
    head = header(size=size if says is None else says, size_bytes=8, single=True)
    full, rest = divmod(size, 1 << 17)
    blocks = [block(b"\0", kind=1, last=False, size=1 << 17)] * full
    return head + b"".join(blocks) + block(b"\0", kind=1, last=True, size=rest) + bytes(4)


@pytest.mark.parametrize("codec", ["sparse+zstd", "snappy+zstd", "lz4+zstd", "zstd"])
@pytest.mark.parametrize("slot", range(15))
def test_bombs_in_any_plane_are_refused_before_they_go_off(codec: str, slot: int) -> None:
    for size, says in ((1 << 30, None), (1 << 30, 128), (1 << 12, 2**62), (1 << 30, 16 << 20)):
        bomb = repeated(size, says=says)
        sizes = np.zeros(15, np.uint32)
        sizes[slot] = len(bomb)

        def check(data: bytes, sizes: object = sizes) -> None:
            decode_frame(
                data, sizes, codec=codec, chunks=LARGE_CHUNKS, width=2, values="xor", where="x",
            )  # fmt: skip

        refused(check, bomb, declared=LARGE.nbytes)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(repeated(1000, says=999), id="more than it says"),
        pytest.param(repeated(1000, says=1001), id="less than it says"),
        pytest.param(repeated(999), id="another size"),
        pytest.param(zstd.compress(bytes(1000)) * 2, id="two frames"),
        pytest.param(zstd.compress(bytes(1000)) + b"\x50\x2a\x4d\x18" + bytes(4), id="skippable"),
        pytest.param(b"\x50\x2a\x4d\x18" + bytes(4) + zstd.compress(bytes(1000)), id="skip first"),
        pytest.param(zstd.compress(bytes(1000)) + b"\0", id="trailing"),
        pytest.param(zstd.compress(bytes(1000))[:-1], id="truncated"),
        pytest.param(
            header(size=1000, size_bytes=4, single=False, window=255)
            + block(bytes(1000), kind=0, last=True),
            id="window of terabytes",
        ),
        pytest.param(
            header(size=1000, size_bytes=4, single=True, dictionary=7, dictionary_bytes=4)
            + block(bytes(1000), kind=0, last=True),
            id="dictionary",
        ),
        pytest.param(
            header(size=1000, size_bytes=4, single=True, checksum=False)
            + block(bytes(1000), kind=0, last=True),
            id="no checksum",
        ),
        pytest.param(header(size=None, size_bytes=0, single=False, window=64), id="no size"),
        pytest.param(MAGIC, id="only magic"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_zstd_frame(data: bytes) -> None:
    refused(lambda d: zstd.decompress(d, size=1000, where="x"), data, declared=1000)


def _sparse(counts: list[int], **planes: bytes) -> bytes:
    """An input of case 0 (300 elements of two bytes): one chunk, these planes."""
    names = ("c0", "c1", "c2", "low", "high", "bits", "nibbles", *(f"v{i}" for i in range(8)))
    raw = {"c0": bytes(n & 255 for n in counts), "c1": bytes(n >> 8 for n in counts)} | planes
    parts = [zstd.compress(raw[n]) if any(raw.get(n, b"")) else b"" for n in names]
    return Input(0, "xor", np.zeros(15, np.uint32), b"").with_parts(parts).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_sparse([301], v0=b"\1" * 301), id="count above the chunk"),
        pytest.param(_sparse([3], low=b"\1" * 3, high=b"\1" * 3, v0=b"\1" * 3), id="gaps past end"),
        pytest.param(_sparse([1], low=b"\x2c", high=b"\1", v0=b"\1"), id="gap just past the end"),
        pytest.param(_sparse([3], low=b"\1" * 2, v0=b"\1" * 3), id="too few gaps"),
        pytest.param(_sparse([3], low=b"\1" * 4, v0=b"\1" * 3), id="too many gaps"),
        pytest.param(_sparse([3], low=b"\1" * 3, v0=b"\1" * 2), id="too few values"),
        pytest.param(_sparse([3], low=b"\1" * 3), id="no values"),
        pytest.param(_sparse([100], bits=b"\xff" * 38, v0=b"\1" * 100), id="too many bits"),
        pytest.param(_sparse([100], bits=b"\1" * 38, v0=b"\1" * 100), id="too few bits"),
        pytest.param(_sparse([300], bits=b"\1", v0=b"\1" * 300), id="bitmap nobody asked for"),
        pytest.param(_sparse([3], low=b"\1" * 3, nibbles=b"\1", v0=b"\1" * 3), id="nibbles"),
        pytest.param(_sparse([3], low=b"\1" * 3, v0=b"\1" * 3, v7=b"\1" * 3), id="values too wide"),
    ],
)
def test_planes_that_disagree_with_counts(data: bytes) -> None:
    target = frame_target("sparse+zstd")
    refused(target.check, data, declared=target.declared(data))


def test_those_planes_would_pass_if_they_agreed() -> None:
    target = frame_target("sparse+zstd")
    for data in (
        _sparse([3], low=b"\1" * 3, v0=b"\1" * 3),
        _sparse([1], low=b"\x2b", high=b"\1", v0=b"\1"),
        _sparse([300], v0=b"\1" * 300),
    ):
        assert guarded(target.check, data, declared=0).error == ""
    assert CASES[0][0].numel == 300


def test_a_stray_entry_far_ahead_and_a_hint_at_it_take_no_memory() -> None:
    """A reader once listed every name up to the hint: ten quintillion of them."""
    store = Store("memory://hostile-head", timeout_s=None)
    store.create(log_name(10**19), b"x")
    store.hint(record.HEAD, b"%d" % 10**19)
    outcome = guarded(lambda _: Log(store).refresh(), b"", declared=0)
    assert outcome.error == "missing-object"
