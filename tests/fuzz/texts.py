"""Targets that are text: log entries and the log, its hint, layouts, safetensors, YAML."""

import json
import re
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors.numpy import save

from fuzz.mutate import NAMES, Rng, any_bytes, dump, edge, mutate_json, reshape, spell
from fuzz.target import Target
from weightdelta import record
from weightdelta.base import INDEX, Base
from weightdelta.config import Config, presets
from weightdelta.layout import WIDTHS, Layout, TensorSpec
from weightdelta.log import Log
from weightdelta.record import OpenEntry, RefEntry, VersionEntry
from weightdelta.store import Store

H64, H32 = "0123456789abcdef" * 4, "fedcba9876543210" * 2


# --- log entries ------------------------------------------------------------------------------


def signed(line: bytes) -> bytes:
    """An entry whose hash is right, whatever its line says."""
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


def _history() -> list[record.Entry]:
    opened = OpenEntry(0, "", 1, H32, 1.5, parent=0, parent_digest=H64, layout=H64)
    version = VersionEntry(
        1, H64, 1, H32, 1.7e9, version=1, step=None, parent=0, parent_digest=H64, digest=H64,
        write_id=H32, index=H64, index_bytes=640, plan=H64, codec="sparse+zstd", values="diff",
        changed=5, elements=9, raw_bytes=18, payload_bytes=4, bound_bytes=None,
    )  # fmt: skip
    second = replace(version, seq=2, version=2, parent=1, step=7, values="xor", bound_bytes=3)
    ref = RefEntry(3, H64, 1, H32, 0.25, name="eval", version=2)
    again = replace(opened, seq=4, prev=H64, epoch=2, nonce=H64[:32], parent=2)
    return [opened, version, second, ref, again]


def chain(documents: Sequence[dict[str, Any]]) -> list[bytes]:
    """Entries whose ``prev`` and hashes are right, whatever else they say."""
    found, tip = list[bytes](), ""
    for document in documents:
        if document.get("prev") in (H64, "") or re.fullmatch(
            r"[0-9a-f]{64}", str(document.get("prev"))
        ):
            document["prev"] = tip
        data = signed(dump(document, sort=True))
        tip = record.entry_hash(data)
        found.append(data)
    return found


def documents(entries: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON of entries."""
    return [json.loads(data.splitlines()[0]) for data in entries]


def _entry(data: bytes) -> None:
    seq = re.search(rb'"seq":(\d{1,18})[,}]', data)
    entry = record.decode(data, seq=int(seq[1]) if seq else 0, where="log/x")
    assert record.encode(entry) == data
    assert type(entry.time) is float
    assert "/" not in getattr(entry, "name", "") + getattr(entry, "write_id", "")


def _entry_json(rng: Rng, data: bytes) -> bytes:
    return signed(reshape(rng, data[:-66], sort=True))


def _entry_text(rng: Rng, data: bytes) -> bytes:
    return signed(rng.choice((spell, any_bytes))(rng, data[:-66]))


def entry_target() -> Target:
    """One log entry."""
    seeds = [record.encode(e) for e in _history()]
    return Target("entry", seeds, _entry, (_entry_json, _entry_json, _entry_text), weight=3)


_UNUSED = Store("memory://unused", timeout_s=None)


def _log(data: bytes) -> None:
    log = Log(_UNUSED)
    for entry in split_log(data):
        log.accept(entry)
    assert list(log.versions) == list(range(1, log.newest + 1))
    assert all(0 <= version <= log.newest for version in log.refs.values())
    assert [e.seq for e in log.entries] == list(range(log.next_seq))
    assert all(len(log.digest(v)) == 64 for v in range(log.newest + 1) if log.opened)


def _join(entries: Sequence[bytes]) -> bytes:
    return b"".join(len(data).to_bytes(4, "little") + data for data in entries)


def split_log(data: bytes) -> list[bytes]:
    """Entries, each behind its length."""
    found = []
    while data and len(found) < 64:
        size = int.from_bytes(data[:4], "little")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def _log_json(rng: Rng, data: bytes) -> bytes:
    """Change one entry, or repeat one; number and chain all of them anew."""
    try:
        found = documents(split_log(data))
        at = rng.randrange(len(found))
        if rng.random() < 0.6:
            found[at] = mutate_json(rng, found[at])
        else:
            found.insert(rng.randrange(len(found) + 1), dict(found[at]))
            for seq, document in enumerate(found):
                document["seq"] = seq
        return _join(chain([d if isinstance(d, dict) else {"kind": d} for d in found]))
    except (ValueError, IndexError, TypeError, RecursionError):
        return any_bytes(rng, data)


def log_target() -> Target:
    """A whole log, entry by entry, correctly chained."""
    seeds = [_join(chain(documents([record.encode(e) for e in _history()])))]
    return Target("log", seeds, _log, (_log_json,), weight=1.5)


# --- the hint ---------------------------------------------------------------------------------


def head_check() -> Callable[[bytes], None]:
    """Reads a log of five entries, and a stray far ahead, by a hint that says anything."""
    store = Store(f"memory://{secrets.token_hex(8)}", timeout_s=None)
    entries = chain(documents([record.encode(e) for e in _history()]))
    for seq, data in enumerate(entries):
        store.create(record.log_name(seq), data)
    for stray in (10**6, 10**12, 10**19):
        store.create(record.log_name(stray), entries[-1])

    def check(data: bytes) -> None:
        store.hint(record.HEAD, data)
        log = Log(store)
        log.refresh()
        assert log.next_seq == len(entries)

    return check


def _head_number(rng: Rng, _: bytes) -> bytes:
    number = rng.choice((edge(rng), 10**6, 10**12, 10**19, -1, rng.randrange(8)))
    return rng.choice((b"%d\n", b"%d", b" %d ", b"%025d", b"+%d", b"%d.0", b"0x%x")) % number


def head_target() -> Target:
    """The hint, and what a reader makes of it."""
    return Target("head", [b"4\n", b"0\n", b"17\n"], head_check(), (_head_number,), weight=0.03)


# --- layouts ----------------------------------------------------------------------------------


def layouts() -> list[Layout]:
    """Small, huge, empty and tied ones."""
    return [
        Layout.of([TensorSpec("a", "BF16", (12, 10)), TensorSpec("b", "F32", (7,))]),
        Layout.of(
            [TensorSpec(f"t{i}", d, (2,) * (i % 5)) for i, d in enumerate(WIDTHS) if d != "F4"],
            aliases={"lm_head": "t0", "z": "t3"},
        ),
        Layout.of([TensorSpec("cube", "U8", (4, 6, 8)), TensorSpec("q", "F4", (3, 4))]),
        Layout.of([TensorSpec("e", "F64", (0, 3)), TensorSpec("s", "F64", ())]),
        Layout.of([TensorSpec("vast", "U8", (1 << 20, 1 << 20)), TensorSpec("x", "U8", (1,))]),
        Layout.of([]),
    ]


def _layout(data: bytes) -> None:
    found = Layout.from_bytes(data)
    assert found.to_bytes() == data
    assert found == Layout.of(found.tensors, aliases=dict(found.aliases))
    names = [t.name for t in found.tensors] + [alias for alias, _ in found.aliases]
    assert len(set(names)) == len(names)
    assert all(type(name) is str and name.encode() is not None for name in names)
    assert found.nbytes == sum(t.numel * t.width for t in found.tensors) >= 0
    assert len(found.digest) == 64


def _layout_json(rng: Rng, data: bytes) -> bytes:
    return reshape(rng, data, sort=False)


def _tensors(rng: Rng, _: bytes) -> bytes:
    """A layout written without asking whether it is one."""
    made = [
        [rng.choice((*NAMES, f"t{i}")), rng.choice(list(WIDTHS)), [edge(rng) for _ in range(n)]]
        for i, n in enumerate(rng.choice((0, 1, 2, 40, 400)) for _ in range(rng.randrange(5)))
    ]
    if rng.random() < 0.7:
        made.sort(key=lambda t: str(t[0]))
    pairs = [[rng.choice(NAMES), t[0]] for t in made if rng.random() < 0.3]
    return dump({"format": 1, "tensors": made, "aliases": pairs}, sort=False)


def layout_target() -> Target:
    """The canonical tensors."""
    seeds = [layout.to_bytes() for layout in layouts()]
    return Target("layout", seeds, _layout, (_layout_json, _layout_json, _tensors, spell), weight=2)


# --- safetensors and their index --------------------------------------------------------------


def scratch() -> Path:
    """A folder in memory where there is one."""
    shm = Path("/dev/shm")  # noqa: S108 - a folder of our own below it
    made = tempfile.TemporaryDirectory(
        prefix="weightdelta-fuzz-", dir=shm if shm.is_dir() else None, ignore_cleanup_errors=True
    )
    _FOLDERS.append(made)  # gone with the process
    return Path(made.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _read_all(base: Base) -> None:
    for spec in base.specs:
        elements = base.elements(spec.name)
        assert elements.nbytes == spec.nbytes
        assert int(elements.view(np.uint8).max(initial=0)) <= 255
    Layout.of(base.specs).to_bytes()


def base_target() -> Target:
    """A safetensors file."""
    path = scratch() / "model.safetensors"

    def check(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        _read_all(Base(path))

    rng = np.random.default_rng(1)
    seeds = [
        save({"a": rng.random((3, 4), np.float32), "b": rng.integers(0, 9, 5, np.uint8)}),
        save({"e": np.zeros((0, 2)), "s": np.array(3.0)}, metadata={"format": "pt"}),
    ]
    return Target("base", seeds, check, (_base_json, _base_json, _base_text), weight=0.7)


def _framed(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def _base_parts(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def _base_json(rng: Rng, data: bytes) -> bytes:
    header, body = _base_parts(data)
    return _framed(reshape(rng, header, sort=False), body)


def _base_text(rng: Rng, data: bytes) -> bytes:
    header, body = _base_parts(data)
    return _framed(rng.choice((spell, any_bytes))(rng, header), body)


def shards_target() -> Target:
    """The index of a checkpoint in several files."""
    folder = scratch()
    (folder / "one.safetensors").write_bytes(save({"a": np.zeros(3, np.float32)}))
    (folder / "two.safetensors").write_bytes(save({"b": np.zeros(2, np.uint8)}))

    def check(data: bytes) -> None:
        (folder / INDEX).write_bytes(data)
        base = Base(folder)
        _read_all(base)
        assert all(place.file.parent == folder for place in base.places.values())

    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    seed = dump({"metadata": {"total_size": 14}, "weight_map": weight_map}, sort=False)
    return Target("shards", [seed], check, (_layout_json, _layout_json, spell), weight=0.3)


# --- settings ---------------------------------------------------------------------------------

_YAML: tuple[str, ...] = (
    "codec: sparse+zstd", "threads: 4", "values: xor", "on_busy: skip", "busy_wait_s: 0.5",
    "store: {timeout_s: 5, options: {key: x}}", "limits:\n  max_chain: 3", "threads: 1e99",
    "threads: .inf", "threads: .nan", "busy_wait_s: .nan", "threads: 0b_", "threads: 0x_",
    "a: 2001-99-99", "a: 2001-12-14t21:59:43.10-99:99", "? [a, b]\n: c", "? {a: b}\n: c",
    "a: &x [*x]", "a: &x {b: *x}", "<<: {threads: 3}", "<<: [1]", "a: !!python/name:os.system ''",
    "a: !!binary 1", "a: !!timestamp x", "a: !!int x", "a: !!float y", "a: !!bool z",
    "a: !!set [1]", "a: !!omap [1]", "a: !!null z", "a: !x y", "%YAML 9.9\n---\na: b",
    "--- a\n--- b", "null: 1",
    "1: 2", "true: 1", "threads: 190:20:30", "a: !!int ''", "1e3: 2", "threads: null", "~: ~",
    "store: []", "store:\n  - 1", "limits: text", "codec: [1]", "a: |\n  b", "\ufeffa: 1", "a: '",
    "threads: " + "9" * 5000, "a: !!int " + "9" * 5000, "a: " + "[" * 500, "- " * 500 + "a",
    "a: \"\\U00110000\"", "a: \"\\ud800\"", "store: {options: {a: {b: {c: 1}}}}", "{", "\t", "---",
)  # fmt: skip


def _yaml_lines(rng: Rng, data: bytes) -> bytes:
    lines = [rng.choice(_YAML) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.3:
        lines += data.decode("utf-8", "replace").splitlines()
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _yaml_bomb(rng: Rng, _: bytes) -> bytes:
    """Each line doubles or trebles the one before it."""
    kind = rng.choice(("[*{0}, *{0}, *{0}]", "{{<<: [*{0}, *{0}]}}", "{{a: *{0}, b: *{0}}}"))
    start = rng.choice(("{x: 1}", "[1, 2]", "text"))
    key = rng.choice(("threads", "codec", "store", "k", "limits", "busy_wait_s"))
    lines = [f"{key}0: &l0 {start}"]
    lines += [f"k{i}: &l{i} " + kind.format(f"l{i - 1}") for i in range(1, rng.choice((2, 9, 40)))]
    return "\n".join([*lines, f"{key}: *l{len(lines) - 1}"]).encode()


def config_target() -> Target:
    """A YAML file of settings."""
    path = scratch() / "settings.yaml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        found = Config.load(path)
        assert Config.of(found.model_dump()) == found

    seeds = [file.read_bytes() for file in presets().values()] or [b"threads: 2\n"]
    return Target("config", seeds, check, (_yaml_lines, _yaml_lines, _yaml_bomb), weight=0.2)


def text_targets() -> list[Target]:
    """All of them."""
    return [
        entry_target(), log_target(), head_target(), layout_target(), base_target(),
        shards_target(), config_target(),
    ]  # fmt: skip
