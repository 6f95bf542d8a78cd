"""Entries of the log as bytes: one byte string each, and no other is taken for it."""

import json
import subprocess
import sys
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightdelta import record
from weightdelta.errors import DamagedObject, InputError, UnsupportedFormat
from weightdelta.record import (
    MAX_BYTES,
    Entry,
    OpenEntry,
    RefEntry,
    VersionEntry,
    decode,
    encode,
    entry_hash,
)

H64, H32 = "0123456789abcdef" * 4, "fedcba9876543210" * 2
OPEN = OpenEntry(0, "", 1, H32, 1.5, parent=0, parent_digest=H64, layout=H64)
VERSION = VersionEntry(
    7, H64, 2, H32, 1.7e9, version=3, step=None, parent=2, parent_digest=H64, digest=H64,
    write_id=H32, index=H64, index_bytes=640, plan=H64, codec="sparse+zstd", values="diff",
    changed=5, elements=9, raw_bytes=18, payload_bytes=4, bound_bytes=None,
)  # fmt: skip
REF = RefEntry(8, H64, 2, H32, 0.25, name="eval", version=3)
SAMPLES: tuple[Entry, ...] = (OPEN, VERSION, REF)

ints = st.integers(0, 2**63 - 1)
hex64 = st.text("0123456789abcdef", min_size=64, max_size=64)
hex32 = st.text("0123456789abcdef", min_size=32, max_size=32)
common = st.tuples(
    st.integers(1, 2**63 - 1), hex64, st.integers(1, 2**63 - 1), hex32,
    st.floats(0, 2**53, exclude_max=True),
)  # fmt: skip
opens = st.builds(lambda c, *a: OpenEntry(*c, *a), common, ints, hex64, hex64)
refs = st.builds(
    lambda c, *a: RefEntry(*c, *a), common, st.from_regex(r"\A[A-Za-z0-9_][\w.-]{0,63}\Z",
    alphabet=st.characters(max_codepoint=127)), ints,
)  # fmt: skip


@st.composite
def versions(draw: st.DrawFn) -> VersionEntry:
    changed, elements = sorted((draw(ints), draw(ints)))
    return VersionEntry(
        *draw(common), draw(st.integers(1, 2**63 - 1)), draw(st.none() | ints), draw(ints),
        draw(hex64), draw(hex64), draw(hex32), draw(hex64), draw(ints), draw(hex64),
        draw(st.sampled_from(["sparse+zstd", "none", "lz4+zstd,none"])),
        draw(st.sampled_from(["diff", "xor"])), changed, elements, draw(ints), draw(ints),
        draw(st.none() | ints),
    )  # fmt: skip


def signed(line: bytes) -> bytes:
    """An entry whose hash is right, whatever the line says."""
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


def forged(entry: Entry, **changes: Any) -> bytes:
    """``entry`` with other values, correctly signed; a value of ``...`` removes the key."""
    document = json.loads(encode(entry).splitlines()[0]) | changes
    document = {k: v for k, v in document.items() if v is not ...}
    return signed(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def refused(data: bytes, *, seq: int) -> None:
    with pytest.raises(DamagedObject, match=r"^log/x: "):
        decode(data, seq=seq, where="log/x")


@given(opens | versions() | refs)
def test_every_entry_comes_back(entry: Entry) -> None:
    data = encode(entry)
    assert decode(data, seq=entry.seq, where="log/x") == entry
    assert len(data) <= MAX_BYTES
    assert data.isascii()


def test_the_format_stays_as_it_is() -> None:
    line = (
        b'{"epoch":2,"format":1,"kind":"ref","name":"eval","nonce":"' + H32.encode() + b'",'
        b'"prev":"' + H64.encode() + b'","seq":8,"time":0.25,"version":3}'
    )
    assert encode(REF) == signed(line)
    assert entry_hash(encode(REF)) == blake3(encode(REF)).hexdigest()


def test_names_of_objects() -> None:
    assert record.log_name(42) == "log/00000000000000000042"
    assert record.data_name(H32, 7) == f"data/{H32}/00007"
    assert record.index_name(H32) == f"data/{H32}/index"
    digests = (record.plan_name(H64), record.layout_name(H64), record.table_name(H64))
    assert digests == (f"plan/{H64}", f"layout/{H64}", f"table/{H64}")
    assert record.HEAD == "head"


@pytest.mark.parametrize("entry", SAMPLES, ids=lambda e: e.kind)
def test_every_flipped_bit_is_found(entry: Entry) -> None:
    good = encode(entry)
    for i in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[i] ^= 1 << bit
            refused(bytes(bad), seq=entry.seq)


@pytest.mark.parametrize("entry", SAMPLES, ids=lambda e: e.kind)
def test_every_cut_and_every_extra_byte_is_found(entry: Entry) -> None:
    good = encode(entry)
    for i in range(len(good)):
        refused(good[:i], seq=entry.seq)
        refused(good[:i] + good[i + 1 :], seq=entry.seq)
    for i in range(len(good) + 1):
        refused(good[:i] + b"0" + good[i:], seq=entry.seq)
        refused(good[:i] + b"\n" + good[i:], seq=entry.seq)
    for n in range(1, 65):
        refused(good + bytes(n), seq=entry.seq)


def test_an_entry_in_another_place_is_found() -> None:
    refused(encode(REF), seq=7)
    refused(encode(OPEN), seq=1)


@pytest.mark.parametrize("entry", SAMPLES, ids=lambda e: e.kind)
def test_every_key_is_needed_and_no_other_is_taken(entry: Entry) -> None:
    for key in json.loads(encode(entry).splitlines()[0]):
        if key not in ("format", "kind"):
            refused(forged(entry, **{key: ...}), seq=entry.seq)
    refused(forged(entry, extra=1), seq=entry.seq)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": True},
        {"version": 3.0},
        {"version": "3"},
        {"version": None},
        {"version": -1},
        {"version": 2**63},
        {"version": 10**400},
        {"epoch": 0},
        {"time": 1},
        {"time": -1.0},
        {"time": float("nan")},
        {"time": float("inf")},
        {"nonce": H32.upper()},
        {"nonce": H32[:-1]},
        {"prev": ""},
        {"prev": H64 + "0"},
        {"name": ""},
        {"name": "../../etc"},
        {"name": "a\n"},
        {"name": "x" * 65},
        {"name": ["eval"]},
    ],
    ids=str,
)
def test_a_signed_lie_in_a_ref_is_found(changes: dict[str, Any]) -> None:
    refused(forged(REF, **changes), seq=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"step": False},
        {"step": -1},
        {"bound_bytes": 1.0},
        {"changed": 10},
        {"write_id": "../" + H32[3:]},
        {"index": H64[:-1] + "g"},
        {"codec": "sparse zstd"},
        {"codec": "sparse+zstd,lz4+zstd"},
        {"codec": "none,none"},
        {"codec": "none,"},
        {"values": "sum"},
        {"values": None},
    ],
    ids=str,
)
def test_a_signed_lie_in_a_version_is_found(changes: dict[str, Any]) -> None:
    refused(forged(VERSION, **changes), seq=7)


@pytest.mark.parametrize(
    "changes", [{"kind": "retire"}, {"format": 2}, {"format": None}, {"format": "1"}], ids=str
)
def test_what_a_newer_writer_wrote_is_called_so(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat, match=r"^log/x: .*newer"):
        decode(forged(REF, **changes), seq=8, where="log/x")


def test_only_the_canonical_spelling_is_taken() -> None:
    line = encode(REF).splitlines()[0]
    document = json.loads(line)
    spellings = [
        json.dumps(document, sort_keys=True).encode(),
        json.dumps(dict(reversed(document.items())), separators=(",", ":")).encode(),
        line.replace(b'"seq":8', b'"seq":8,"seq":8'),
        line.replace(b"0.25", b"2.5e-1"),
        line.replace(b"eval", b"ev\\u0061l"),
        line + b" ",
    ]
    for spelling in spellings:
        assert spelling != line
        refused(signed(spelling), seq=8)


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"[]", b"3", b"null", b'{"kind":[]}', b"[" * 50_000, b'"\xff"', b"9" * 5000],
    ids=lambda line: repr(line[:12]),
)
def test_what_is_no_object_is_refused(line: bytes) -> None:
    refused(signed(line), seq=8)


def test_an_entry_has_at_most_64_kib() -> None:
    refused(signed(b" " * (MAX_BYTES - 65)), seq=8)


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_damage(data: bytes, sign: bool) -> None:
    refused(signed(data) if sign else data, seq=8)


@given(
    st.sampled_from(SAMPLES),
    st.sampled_from(["seq", "prev", "epoch", "nonce", "time", "version", "parent", "name"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_a_signed_value_is_taken_whole_or_refused(entry: Entry, key: str, value: Any) -> None:
    data = forged(entry, **{key: value})
    try:
        taken = decode(data, seq=entry.seq, where="log/x")
    except DamagedObject:
        return
    assert encode(taken) == data


def test_an_entry_that_breaks_a_rule_cannot_be_built() -> None:
    with pytest.raises(InputError, match="version must be an int of at least 0, found -1"):
        RefEntry(8, H64, 2, H32, 0.25, name="eval", version=-1)
    with pytest.raises(InputError, match="prev must be empty at seq 0"):
        RefEntry(0, H64, 2, H32, 0.25, name="eval", version=1)


def test_reading_records_loads_no_file_system() -> None:
    code = "import sys, weightdelta.record; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
