"""FORMAT.md is enough: a reader written from it alone rebuilds every version, bit for bit.

``Reader`` uses nothing of this project: the standard library, zstandard and blake3. If it has
to know anything that FORMAT.md does not say, FORMAT.md is wrong.
"""

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from blake3 import blake3
from small_runs import SmallRun, Weights, edit

from weightdelta.config import Config
from weightdelta.store import Store
from weightdelta.tensors import as_ints

WIDTHS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}
CODECS = ["sparse+zstd", "snappy+zstd", "lz4+zstd", "zstd", "none"]
M = (1 << 64) - 1
Segment = tuple[int, int, int, int, int]  # tensor, first, rows, run, stride


def mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31


def h(term: int, b: int) -> int:
    return mix64((term * 0x9E3779B97F4A7C15 & M) ^ (b * 0xD6E8FEB86659FD93 & M))


def hashed(data: bytes, expected: str) -> bytes:
    assert blake3(data).hexdigest() == expected
    return data


def snappy(data: bytes) -> bytes:
    """A raw Snappy block, decoded as its format description says."""
    at = size = shift = 0
    while True:
        byte, at = data[at], at + 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    out = bytearray()
    while at < len(data):
        tag, at = data[at], at + 1
        if tag & 3 == 0:
            length = (tag >> 2) + 1
            if length > 60:
                more = length - 60
                length = int.from_bytes(data[at : at + more], "little") + 1
                at += more
            out += data[at : at + length]
            at += length
            continue
        more = {1: 1, 2: 2, 3: 4}[tag & 3]
        back = int.from_bytes(data[at : at + more], "little")
        at += more
        length = (tag >> 2) + 1
        if tag & 3 == 1:
            back, length = (tag >> 5) << 8 | back, (tag >> 2 & 7) + 4
        copied(out, back, length)
    assert (len(out), at) == (size, len(data))
    return bytes(out)


def lz4(data: bytes) -> bytes:
    """A raw LZ4 block, decoded as its format description says."""
    at, out = 0, bytearray()

    def length(nibble: int) -> int:
        nonlocal at
        total = nibble
        more = 255 if nibble == 15 else 0
        while more == 255:
            more, at = data[at], at + 1
            total += more
        return total

    while True:
        token, at = data[at], at + 1
        count = length(token >> 4)
        out += data[at : at + count]
        at += count
        if at == len(data):
            return bytes(out)
        back = int.from_bytes(data[at : at + 2], "little")
        at += 2
        copied(out, back, length(token & 15) + 4)


def copied(out: bytearray, back: int, length: int) -> None:
    """``length`` bytes from ``back`` bytes ago, which may overlap what they make."""
    assert 0 < back <= len(out)
    pattern = bytes(out[len(out) - back :])
    out += (pattern * (length // back + 1))[:length]


class Columns:
    """Fixed-width little-endian integers, read from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def raw(self, size: int) -> bytes:
        """The next bytes."""
        self.at += size
        assert self.at <= len(self.data)
        return self.data[self.at - size : self.at]

    def ints(self, width: int, count: int = 1) -> list[int]:
        """The next column."""
        raw = self.raw(width * count)
        return [int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)]


class Plan:
    """How a layout is cut into frames."""

    def __init__(self, data: bytes, layout: str) -> None:
        c = Columns(data)
        assert c.raw(8) == b"WDPLAN01"
        assert c.raw(32).hex() == layout
        frames, segments, _largest = c.ints(8, 3)
        (self.world,) = c.ints(4)
        first, stride = c.ints(8, segments), c.ints(8, segments)
        tensor, rows, run = c.ints(4, segments), c.ints(4, segments), c.ints(4, segments)
        self.owner, self.width = c.ints(4, frames), c.ints(1, frames)
        counts = c.ints(4, frames)
        assert c.at == len(data)
        each = iter(zip(tensor, first, rows, run, stride, strict=True))
        self.frames: list[list[Segment]] = [[next(each) for _ in range(n)] for n in counts]


class Reader:
    """All weights as lists of element bits, followed from base through the log."""

    def __init__(self, store: Path, base: Path) -> None:
        self.store = store
        self.log = list(self._entries())
        opened = self.log[0]
        assert opened["kind"] == "open"
        self.layout = opened["layout"]
        document = json.loads(hashed((store / "layout" / self.layout).read_bytes(), self.layout))
        assert document["format"] == 1
        self.tensors: list[tuple[str, str, list[int]]] = document["tensors"]
        self.seeds = [
            int.from_bytes(blake3(name.encode()).digest(length=8), "little")
            for name, _, _ in self.tensors
        ]
        self.weights = self._base(base)
        self.table = [
            sum(h(s + i & M, b) for i, b in enumerate(w)) & M
            for s, w in zip(self.seeds, self.weights, strict=True)
        ]
        table = hashed((store / "table" / self.digest).read_bytes(), self.digest)
        assert Columns(table).ints(8, len(self.tensors)) == self.table
        assert opened["parent_digest"] == self.digest

    @property
    def digest(self) -> str:
        """Digest of the version that the weights are."""
        return blake3(struct.pack(f"<{len(self.table)}Q", *self.table)).hexdigest()

    def _entries(self) -> Iterator[dict[str, Any]]:
        prev = ""
        for seq in range(10**6):
            path = self.store / "log" / f"{seq:020d}"
            if not path.exists():
                return
            data = path.read_bytes()
            line, check, end = data.split(b"\n")
            hashed(line, check.decode())
            entry = json.loads(line)
            assert (entry["format"], entry["seq"], entry["prev"], end) == (1, seq, prev, b"")
            assert json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() == line
            prev = blake3(data).hexdigest()
            yield entry

    def _base(self, path: Path) -> list[list[int]]:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        found = []
        for name, dtype, shape in self.tensors:
            item = header[name]
            assert (item["dtype"], item["shape"]) == (dtype, shape)
            start, end = (8 + size + n for n in item["data_offsets"])
            width = WIDTHS[dtype]
            found.append(Columns(data[start:end]).ints(width, (end - start) // width))
        return found

    def bytes_of(self, name: str) -> bytes:
        """A tensor's elements in C order."""
        t = [n for n, _, _ in self.tensors].index(name)
        width = WIDTHS[self.tensors[t][1]]
        return b"".join(b.to_bytes(width, "little") for b in self.weights[t])

    def move(self, entry: dict[str, Any], *, back: bool = False) -> None:
        """Along one version entry's delta."""
        folder = self.store / "data" / entry["write_id"]
        plan_bytes = (self.store / "plan" / entry["plan"]).read_bytes()
        plan = Plan(hashed(plan_bytes, entry["plan"]), self.layout)
        data = hashed((folder / "index").read_bytes(), entry["index"])
        assert len(data) == entry["index_bytes"]
        frames, tensors = len(plan.frames), len(self.tensors)
        c = Columns(data)
        assert c.raw(8) == b"WDINDEX1"
        assert c.ints(8, 4) == [frames, tensors, entry["version"], entry["parent"]]
        assert (c.raw(32).hex(), c.raw(16).hex()) == (entry["plan"], entry["write_id"])
        (mask,) = c.ints(2)
        changes, _of_frames, changed = c.ints(8, tensors), c.ints(8, frames), c.ints(4, frames)
        codecs = [CODECS[number] for number in c.ints(1, frames)]
        named = entry["codec"].split(",")
        assert named == sorted(set(named))
        sizes = [c.ints(4, frames) if mask >> slot & 1 else [0] * frames for slot in range(15)]
        hashes = [c.raw(16) for _ in range(frames)]
        assert c.at == len(data)
        offset: dict[int, int] = {}
        moved = [0] * tensors
        for f in range(frames):
            mine = [column[f] for column in sizes]
            owner, length = plan.owner[f], sum(mine)
            start = offset.get(owner, 0)
            offset[owner] = start + length
            assert bool(length) == bool(changed[f])
            assert length or codecs[f] == CODECS[0]
            if length:
                assert codecs[f] in named
                stored = (folder / f"{owner:05d}").read_bytes()[start : start + length]
                assert blake3(stored).digest(length=16) == hashes[f]
                parts = [stored[sum(mine[:slot]) : sum(mine[: slot + 1])] for slot in range(15)]
                values = entry["values"]
                if codecs[f] == CODECS[0]:
                    found = self._sparse(plan, f, parts, values)
                else:
                    assert values == "xor"
                    found = self._masked(plan, f, parts, codecs[f])
                self._apply(plan, f, found, values, back, moved)
        sign = -1 if back else 1
        assert [d & M for d in moved] == [sign * d & M for d in changes]
        self.table = [t + sign * d & M for t, d in zip(self.table, changes, strict=True)]
        assert self.digest == entry["parent_digest" if back else "digest"]

    def _sparse(
        self, plan: Plan, f: int, parts: list[bytes], values: str
    ) -> Iterator[tuple[Segment, int, int]]:
        """Changes of a frame: segment, place in it, value."""
        width, segments = plan.width[f], plan.frames[f]

        def plane(slot: int, size: int) -> bytes:
            return unpacked(parts[slot], size)

        def joined(slot: int, planes: int, count: int) -> list[int]:
            columns = [plane(slot + i, count) for i in range(planes)]
            return [int.from_bytes(b, "little") for b in zip(*columns, strict=True)]

        chunks = [
            (s, low, min(65536, s[2] * s[3] - low))
            for s in segments
            for low in range(0, s[2] * s[3], 65536)
        ]
        counts = joined(0, 3, len(chunks))
        forms = [
            "" if k == 0 else "all" if k == n else "gaps" if 6 * k < n else "bits"
            for k, (_, _, n) in zip(counts, chunks, strict=True)
        ]
        each = list(zip(forms, counts, chunks, strict=True))
        gaps = iter(joined(3, 2, sum(k for form, k, _ in each if form == "gaps")))
        bits = iter(plane(5, sum((n + 7) // 8 for form, _, (_, _, n) in each if form == "bits")))
        total = sum(counts)
        if values == "xor":
            found = iter(joined(7, width, total))
        else:
            packed = plane(6, (total + 1) // 2)
            nibbles = [packed[i // 2] >> 4 * (i % 2) & 15 for i in range(total)]
            large = iter(joined(7, width, nibbles.count(15)))
            zigzag = [(next(large) if n == 15 else n) + 1 for n in nibbles]
            found = iter([z // 2 if z % 2 == 0 else -(z + 1) // 2 for z in zigzag])
        for form, k, (segment, low, n) in each:
            if form == "gaps":
                at, where = -1, []
                for _ in range(k):
                    at += next(gaps) + 1
                    where.append(at)
            elif form == "bits":
                packed = bytes(next(bits) for _ in range((n + 7) // 8))
                where = [i for i in range(n) if packed[i // 8] >> i % 8 & 1]
            else:
                where = list(range(k))
            assert len(where) == k
            assert all(a < b for a, b in pairwise(where))
            for position in where:
                yield segment, low + position, next(found)

    def _masked(
        self, plan: Plan, f: int, parts: list[bytes], codec: str
    ) -> Iterator[tuple[Segment, int, int]]:
        """The same from a frame that is coded as its XOR mask."""
        width, segments = plan.width[f], plan.frames[f]
        size = width * sum(s[2] * s[3] for s in segments)
        blocks = -(-size // 65536)
        pieces = min(8, -(-blocks // 64))
        each = -(-blocks // pieces)
        table = [bytes(blocks)] * 3
        if "+" in codec:
            table = [unpacked(part, blocks) for part in parts[:3]]
        assert not any(parts[3:7] + parts[7 + pieces :])
        encoded = [int.from_bytes(b, "little") for b in zip(*table, strict=True)]
        mask = b""
        for p in range(pieces):
            numbers = range(p * each, min(blocks, p * each + each))
            lengths = [min(65536, size - b * 65536) for b in numbers]
            part = parts[7 + p]
            if codec == "none":
                mask += part or bytes(sum(lengths))
            elif codec == "zstd":
                mask += unpacked(part, sum(lengths))
            else:
                arena, at = unpacked(part, sum(encoded[b] for b in numbers)), 0
                for b, n in zip(numbers, lengths, strict=True):
                    block = arena[at : at + encoded[b]]
                    at += encoded[b]
                    content = (snappy if codec == "snappy+zstd" else lz4)(block) if block else b""
                    assert len(content) in (0, n)
                    mask += content or bytes(n)
        elements = Columns(mask).ints(width, size // width)
        for segment in segments:
            n = segment[2] * segment[3]
            yield from ((segment, q, v) for q, v in enumerate(elements[:n]) if v)
            elements = elements[n:]

    def _apply(
        self, plan: Plan, f: int, found: Iterator[tuple[Segment, int, int]], values: str,
        back: bool, moved: list[int],
    ) -> None:  # fmt: skip
        for (tensor, first, _rows, run, stride), q, value in found:
            element = first + q // run * stride + q % run
            old = self.weights[tensor][element]
            new = old ^ value if values == "xor" else old - value if back else old + value
            new &= (1 << 8 * plan.width[f]) - 1
            term = self.seeds[tensor] + element & M
            moved[tensor] += h(term, new) - h(term, old)
            self.weights[tensor][element] = new


def unpacked(part: bytes, size: int) -> bytes:
    """Content of one Zstd frame; nothing stands for zeros."""
    if not part:
        return bytes(size)
    assert zstandard.get_frame_parameters(part).has_checksum
    raw = zstandard.decompress(part)
    assert len(raw) == size == zstandard.frame_content_size(part)
    return raw


# -- what the trainer wrote, read by the reader ----------------------------------------------


def _weights() -> Weights:
    g = torch.Generator().manual_seed(3)
    return {
        "cube": torch.randn(5, 6, 7, generator=g).half(),
        "empty": torch.zeros(0, 2),
        "f8": torch.randn(40, generator=g).to(torch.float8_e4m3fn),
        "mask": torch.rand(31, generator=g) > 0.5,
        "matrix": torch.randn(40, 36, generator=g).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "vector \u00e9": torch.randn(70000, generator=g),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    folder = tmp_path_factory.mktemp("format")
    store = Store(folder / "store", timeout_s=None, fsync=False)
    found = SmallRun(folder, store=store, weights=_weights(), max_bytes=1 << 18)
    g = torch.Generator().manual_seed(4)
    found.writer.tag("first", version=0)
    mixed = {"cube": "zstd", "f8": "none", "ma*": "lz4+zstd"}
    for config, max_bytes, ranks in (
        ({"values": "diff"}, 1 << 19, 1),
        ({"values": "xor"}, 1024, 3),
        ({"values": "xor", "codec": "snappy+zstd", "codec_by_tensor": mixed}, 1 << 19, 1),
        ({"values": "diff"}, 2048, 2),
    ):
        found.open(config=Config.of(config), ranks=ranks, max_bytes=max_bytes)
        for share in (0.0005, 0.05, 0.4, 1.0):
            for name, tensor in found.live.items():
                ints = as_ints(tensor).reshape(-1)
                if 0.1 < share < 1 or ranks > 1:
                    ints = ints[-3000:]  # few of the large one: this reader takes its time
                hit = torch.rand(ints.shape, generator=g) < share
                high = 1 if name == "mask" else 1 << 8 * min(tensor.element_size(), 4) - 2
                step = torch.randint(1, high + 1, ints.shape, generator=g).to(ints.dtype)
                small = torch.rand(ints.shape, generator=g) < 0.8
                ints[hit] ^= torch.where(small, torch.ones_like(step), step)[hit]
            found.publish()
    found.publish()
    edit(found.live["scalar"].reshape(1), 0, 1 << 62)
    found.publish()
    found.close()
    return found


def test_every_version_is_rebuilt_forward_and_back(run: SmallRun) -> None:
    reader = Reader(Path(run.store.url), run.checkpoint)
    versions = [e for e in reader.log if e["kind"] == "version"]
    assert len(versions) == run.newest == 18
    for entry in versions:
        reader.move(entry)
        _check(reader, run, entry["version"])
    for entry in reversed(versions):
        reader.move(entry, back=True)
        _check(reader, run, entry["parent"])


def _check(reader: Reader, run: SmallRun, version: int) -> None:
    for name, expected in run.versions[version].items():
        assert reader.bytes_of(name) == expected, (version, name)


def test_the_run_uses_all_of_the_format(run: SmallRun) -> None:
    """Else the test above would prove less than it says."""
    store = Path(run.store.url)
    reader = Reader(store, run.checkpoint)
    assert {e["kind"] for e in reader.log} == {"open", "version", "ref"}
    versions = [e for e in reader.log if e["kind"] == "version"]
    assert {e["values"] for e in versions} == {"diff", "xor"}
    assert {name for e in versions for name in e["codec"].split(",")} == set(CODECS)
    masks, strided, several, widths = 0, False, False, set()
    for entry in versions:
        data = (store / "data" / entry["write_id"] / "index").read_bytes()
        masks |= int.from_bytes(data[88:90], "little")
        plan = Plan((store / "plan" / entry["plan"]).read_bytes(), reader.layout)
        strided |= any(s[2] > 1 for frame in plan.frames for s in frame)
        several |= any(s[2] * s[3] > 65536 for frame in plan.frames for s in frame)
        widths |= set(plan.width)
    assert widths == {1, 2, 4, 8}
    assert strided
    assert several
    assert masks == (1 << 15) - 1, "every plane, counts of 65536 and values of 8 bytes included"


# -- the vectors that FORMAT.md prints -------------------------------------------------------


def _vectors(heading: str) -> list[list[str]]:
    text = (Path(__file__).parents[1] / "FORMAT.md").read_text(encoding="utf-8")
    table = text.split(heading)[1].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


def test_zero_run_blocks() -> None:
    mask = bytearray(70)
    mask[3], mask[40] = 5, 7
    rows = _vectors("Raw blocks (hex)")
    assert [inner for inner, _ in rows] == ["snappy", "lz4"]
    for (_, block), decode in zip(rows, (snappy, lz4), strict=True):
        assert decode(bytes.fromhex(block)) == mask


def test_values_of_h() -> None:
    rows = _vectors("Values of h, with term")
    assert len(rows) == 5
    for term, b, expected in rows:
        value = (1 << 64) - 1 if b == "2^64-1" else int(b, 16)
        assert h(int(term), value) == int(expected, 16)
