"""Mutators: one valid object in, one hostile object out. All of them are seeded.

Bytes are flipped, cut, spliced and given integers at the edges of their types. Whoever knows an
object's structure builds on these and mends hashes and lengths afterwards, so that parsers are
reached and not only the checks before them.
"""

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Rng = random.Random
Mutator = Callable[[Rng, bytes], bytes]

#: Integers where something ends: widths, signs, limits of this format, sizes that overflow.
EDGES: tuple[int, ...] = (
    0, 1, 2, 3, 7, 8, 9, 14, 15, 16, 63, 64, 127, 128, 255, 256, 32767, 32768, 65534, 65535,
    65536, 65537, 10**9, 2**24 - 1, 2**24, 2**26, 2**28, 2**30, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**53, 2**59, 2**60 - 1, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip

#: Names that a careless reader would follow, print or fail to encode.
NAMES: tuple[str, ...] = (
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "log/" + "0" * 20, "head",
    "\0", "a\0b", "\x1b[2J", "[/red]", "C:\\x", "NaN", "__metadata__", "\ud800", "\udfff.\ud800",
    "é", "é", "\U0010ffff", "a" * 300, "%s%n", "{0}", "-rf",
)  # fmt: skip


def edge(rng: Rng, bits: int = 64) -> int:
    """An integer at an edge, or one off it, modulo 2^bits."""
    return (rng.choice(EDGES) + rng.choice((0, 0, 0, -1, 1))) % (1 << bits)


def flip(rng: Rng, data: bytes) -> bytes:
    """One bit."""
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def poke(rng: Rng, data: bytes) -> bytes:
    """One byte becomes another."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.choice((0, 1, 127, 128, 254, 255, 34, 91, 123))]) + data[at + 1 :]


def integer(rng: Rng, data: bytes) -> bytes:
    """A little-endian integer of 2, 4 or 8 bytes becomes an edge."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(max(1, len(data) - size + 1))
    at -= at % size if rng.random() < 0.5 else 0
    return data[:at] + edge(rng, 8 * size).to_bytes(size, "little") + data[at + size :]


def truncate(rng: Rng, data: bytes) -> bytes:
    """The end is lost."""
    return data[: rng.randrange(len(data) + 1)]


def extend(rng: Rng, data: bytes) -> bytes:
    """Something follows: zeros, noise, a newline, or the object again."""
    tails = (b"\0" * rng.randrange(1, 40), rng.randbytes(rng.randrange(1, 40)), b"\n", data)
    return data + rng.choice(tails)


def delete(rng: Rng, data: bytes) -> bytes:
    """A part in the middle is lost."""
    low, high = _range(rng, data)
    return data[:low] + data[high:]


def duplicate(rng: Rng, data: bytes) -> bytes:
    """A part comes twice."""
    low, high = _range(rng, data)
    return data[:high] + data[low:high] + data[high:]


def swap(rng: Rng, data: bytes) -> bytes:
    """Two halves of a part change places."""
    low, high = _range(rng, data)
    middle = (low + high) // 2
    return data[:low] + data[middle:high] + data[low:middle] + data[high:]


def _range(rng: Rng, data: bytes) -> tuple[int, int]:
    low = rng.randrange(len(data) + 1)
    return low, min(len(data), low + rng.choice((1, 2, 4, 8, 16, 64)))


BYTES: tuple[Mutator, ...] = (
    flip, flip, poke, integer, integer, truncate, extend, delete, duplicate, swap,
)  # fmt: skip


def any_bytes(rng: Rng, data: bytes) -> bytes:
    """One to three of the mutators of bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(BYTES)(rng, data)
    return data


def splice(rng: Rng, data: bytes, others: Sequence[bytes]) -> bytes:
    """The start of one object and the end of another."""
    other = rng.choice(others)
    cut = rng.randrange(min(len(data), len(other)) + 1)
    return data[:cut] + other[cut:]


# --- JSON -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """JSON that is written just as it says."""

    text: str


def _nested(rng: Rng) -> Raw:
    depth = rng.choice((3, 50, 900, 3000, 20000))
    return Raw(rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))


def value(rng: Rng) -> Any:
    """A JSON value that a reader may not expect."""
    return rng.choice(_VALUES)(rng)


_VALUES: tuple[Callable[[Rng], Any], ...] = (
    lambda r: edge(r),
    lambda r: -edge(r),
    lambda r: 10 ** r.choice((19, 30, 308, 4299)),
    lambda r: Raw(r.choice(("1e400", "-1e400", "1E5", "1.0", "-0", "-0.0", "1e-400", "0.1e1"))),
    lambda r: Raw("9" * r.choice((4300, 4301, 20000))),
    lambda r: r.choice((float("nan"), float("inf"), float("-inf"), 0.5, 1e300)),
    lambda r: r.choice((None, True, False)),
    lambda r: r.choice(NAMES),
    lambda r: r.choice(([], {}, [[]], [{}], {"": ""}, [None])),
    _nested,
    lambda r: "".join(r.choices("0123456789abcdefABCDEF", k=r.choice((31, 32, 64, 65)))),
    lambda r: [edge(r) for _ in range(r.choice((1, 2, 5, 70)))],
)  # fmt: skip


def mutate_json(rng: Rng, document: Any) -> Any:
    """Change one to three places of a document; it is not copied."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _mutate_one(rng, document)
    return document


def reshape(rng: Rng, text: bytes, *, sort: bool) -> bytes:
    """A JSON text with its document changed; what is no JSON, or too deep, changes as bytes."""
    try:
        return dump(mutate_json(rng, json.loads(text)), sort=sort)
    except (ValueError, RecursionError):
        return any_bytes(rng, text)


def _mutate_one(rng: Rng, document: Any) -> Any:
    places = [(document, key) for key in _keys(document)]
    for at, key in places:  # grows while it is walked
        if len(places) < 400:
            places += [(at[key], inner) for inner in _keys(at[key])]
    if not places:
        return value(rng)
    holder, key = rng.choice(places)
    rng.choice(_CHANGES)(rng, holder, key, document)
    return document


def _keys(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item)
    return list(range(len(item))) if isinstance(item, list) else []


def _replace(rng: Rng, holder: Any, key: Any, _: Any) -> None:
    holder[key] = value(rng)


def _nudge(rng: Rng, holder: Any, key: Any, _: Any) -> None:
    found = holder[key]
    if type(found) is int:
        holder[key] = rng.choice(
            (found + 1, found - 1, -found, f"{found}", [found], Raw(f"{found}.0"))
        )
    else:
        holder[key] = value(rng)


def _remove(_r: Rng, holder: Any, key: Any, _: Any) -> None:
    del holder[key]


def _twice(rng: Rng, holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), holder[key])
    else:
        holder[rng.choice(("extra", str(key) + " ", *NAMES))] = holder[key]


def _rename(rng: Rng, holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(NAMES)] = holder.pop(key)
    else:
        holder.reverse()


def _move(rng: Rng, holder: Any, key: Any, document: Any) -> None:
    donors = list(document.values()) if isinstance(document, dict) else list(document)
    holder[key] = copy.deepcopy(rng.choice(donors)) if donors else None


_CHANGES = (_replace, _replace, _replace, _nudge, _remove, _twice, _rename, _move)


def dump(document: Any, *, sort: bool) -> bytes:
    """Canonical JSON of a document, whatever it holds."""
    text = json.dumps(_plain(document), sort_keys=sort, separators=(",", ":"), ensure_ascii=True)
    for i, raw in enumerate(_raws(document)):
        text = text.replace(f'"\\u0000raw{i}"', raw, 1)
    return text.encode()


def _raws(document: Any) -> list[str]:
    found: list[str] = []
    _plain(document, found)
    return found


def _plain(document: Any, raws: list[str] | None = None) -> Any:
    """The document with every ``Raw`` replaced by a mark of its number."""
    raws = [] if raws is None else raws
    if isinstance(document, Raw):
        raws.append(document.text)
        return f"\0raw{len(raws) - 1}"
    if isinstance(document, list):
        return [_plain(item, raws) for item in document]
    if isinstance(document, dict):
        return {key: _plain(item, raws) for key, item in document.items()}
    return document


def spell(rng: Rng, text: bytes) -> bytes:
    """Another spelling of JSON: a key twice, spaces, a BOM, UTF-16, an invalid byte, depth."""
    comma = text.find(b",")
    return rng.choice(
        (
            lambda: text[: comma + 1] + text[1 : comma + 1] + text[comma + 1 :],
            lambda: text.replace(b":", b": ", 1),
            lambda: b"\xef\xbb\xbf" + text,
            lambda: text.decode("latin-1").encode("utf-16"),
            lambda: text.decode("latin-1").encode("utf-32"),
            lambda: text.replace(b'"', b'"\xff', 1),
            lambda: text.replace(b'"', b'"\xed\xa0\x80', 1),
            lambda: b"[" * rng.choice((10, 2000, 30000)) + text,
            lambda: b'{"a":' * rng.choice((10, 2000, 10000)) + text,
            lambda: text + text,
            lambda: b"",
        )
    )()
