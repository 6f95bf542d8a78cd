"""One entry of the log: values to bytes and back, with nothing left to interpretation.

An entry is one line of canonical JSON (sorted keys, ASCII, no spaces), a newline, the BLAKE3 of
that line in hex, a newline: at most 64 KiB. There is exactly one byte string for an entry, so any
other byte string is refused. An entry that breaks a rule cannot be built:

>>> entry = RefEntry(1, "0" * 64, 1, "0" * 32, 1.7e9, name="eval", version=3)
>>> decode(encode(entry), seq=1, where="log/1") == entry
True

The five common fields come first, so ``functools.partial(RefEntry, name="eval", version=3)`` is
what ``LogWriter.append`` wants: it takes ``(seq, prev, epoch, nonce, time)``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal

from blake3 import blake3

from weightdelta.errors import DamagedObject, InputError, UnsupportedFormat

FORMAT: Final = 1
#: Most bytes an entry may have; a reader asks a store for no more.
MAX_BYTES: Final = 64 * 1024
#: Name of the hint that says how far the log reaches at least.
HEAD: Final = "head"

_TAIL: Final = 66  # newline, 64 hex digits, newline
_INT_LIMIT: Final = 1 << 63
_TIME_LIMIT: Final = float(1 << 53)
_HEX32: Final = re.compile(r"[0-9a-f]{32}")
_HEX64: Final = re.compile(r"[0-9a-f]{64}")
_REF: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_CODEC: Final = re.compile(r"[a-z0-9]+(\+[a-z0-9]+)?(,[a-z0-9]+(\+[a-z0-9]+)?)*")


def _fail(field: str, expected: str, found: object) -> InputError:
    if isinstance(found, int) and found.bit_length() > 64:  # too long to be worth printing
        found = f"a number of {found.bit_length()} bits"
    return InputError(f"log entry: {field} must be {expected}, found {found!r}")


def _integers(entry: object, names: tuple[str, ...], *, low: int = 0) -> None:
    """Refuse anything but plain ints in [low, 2^63); bool is not one of them."""
    for name in names:
        value = getattr(entry, name)
        if type(value) is not int or not low <= value < _INT_LIMIT:
            raise _fail(name, f"an int of at least {low}", value)


def _texts(entry: object, names: tuple[str, ...], *, pattern: re.Pattern[str]) -> None:
    for name in names:
        value = getattr(entry, name)
        if type(value) is not str or len(value) > 64 or not pattern.fullmatch(value):
            raise _fail(name, f"text like {pattern.pattern}", value)


@dataclass(frozen=True, slots=True)
class _Common:
    """What every entry has.

    Attributes:
        seq: Position in the log, from 0.
        prev: BLAKE3 of the previous entry's bytes in hex, empty at seq 0.
        epoch: The writer's epoch, from 1.
        nonce: The writer's random id, 32 hex digits.
        time: Unix time in seconds; for people, never for a decision.
    """

    kind: ClassVar[str] = ""

    seq: int
    prev: str
    epoch: int
    nonce: str
    time: float

    def _check_common(self) -> None:
        _integers(self, ("seq",))
        _integers(self, ("epoch",), low=1)
        _texts(self, ("nonce",), pattern=_HEX32)
        if type(self.time) is not float or not 0.0 <= self.time < _TIME_LIMIT:
            raise _fail("time", "a float in [0, 2^53)", self.time)
        if self.seq:
            _texts(self, ("prev",), pattern=_HEX64)
        elif self.prev != "":
            raise _fail("prev", "empty at seq 0", self.prev)


@dataclass(frozen=True, slots=True)
class OpenEntry(_Common):
    """A writer takes over the run, starting from version ``parent``.

    Attributes:
        parent: The newest version at this point; 0 is the base.
        parent_digest: Its digest, 64 hex digits.
        layout: Digest of the layout, 64 hex digits.
    """

    kind: ClassVar[str] = "open"

    parent: int
    parent_digest: str
    layout: str

    def __post_init__(self) -> None:
        self._check_common()
        _integers(self, ("parent",))
        _texts(self, ("parent_digest", "layout"), pattern=_HEX64)


@dataclass(frozen=True, slots=True)
class VersionEntry(_Common):
    """A version and the delta that leads to it from its parent.

    Attributes:
        version: Its number, from 1.
        step: The training step, if the trainer gave one.
        parent: The version it was computed against.
        parent_digest: Digest of that version, 64 hex digits.
        digest: Digest of this version, 64 hex digits.
        write_id: Random id under which the delta's objects lie, 32 hex digits.
        index: BLAKE3 of the index object, 64 hex digits.
        index_bytes: Size of the index object in bytes.
        plan: Digest of the frame plan, 64 hex digits.
        codec: Names of its frames' codecs, ``inner`` or ``inner+outer``, sorted, with commas.
        values: ``diff`` or ``xor``.
        changed: Elements that differ from the parent.
        elements: Elements in the model.
        raw_bytes: Bytes of the model.
        payload_bytes: Bytes of all encoded frames together.
        bound_bytes: Zero-order entropy bound of the XOR mask in bytes, if it was measured.
    """

    kind: ClassVar[str] = "version"

    version: int
    step: int | None
    parent: int
    parent_digest: str
    digest: str
    write_id: str
    index: str
    index_bytes: int
    plan: str
    codec: str
    values: Literal["diff", "xor"]
    changed: int
    elements: int
    raw_bytes: int
    payload_bytes: int
    bound_bytes: int | None

    def __post_init__(self) -> None:
        self._check_common()
        _integers(self, ("version",), low=1)
        _integers(self, ("parent", "index_bytes", "changed", "elements"))
        _integers(self, ("raw_bytes", "payload_bytes"))
        optional = [n for n in ("step", "bound_bytes") if getattr(self, n) is not None]
        _integers(self, tuple(optional))
        _texts(self, ("parent_digest", "digest", "index", "plan"), pattern=_HEX64)
        _texts(self, ("write_id",), pattern=_HEX32)
        _texts(self, ("codec",), pattern=_CODEC)
        if (names := self.codec.split(",")) != sorted(set(names)):
            raise _fail("codec", "sorted names, each once", self.codec)
        if self.values not in ("diff", "xor"):
            raise _fail("values", "'diff' or 'xor'", self.values)
        if self.changed > self.elements:
            raise _fail("changed", f"at most elements ({self.elements})", self.changed)


@dataclass(frozen=True, slots=True)
class RefEntry(_Common):
    """A name for a version, such as ``eval``; a later entry of the same name replaces it.

    Attributes:
        name: Letters, digits, ``_``, ``.`` and ``-``; at most 64, not starting with ``.`` or ``-``.
        version: The version it names.
    """

    kind: ClassVar[str] = "ref"

    name: str
    version: int

    def __post_init__(self) -> None:
        self._check_common()
        _integers(self, ("version",))
        _texts(self, ("name",), pattern=_REF)


Entry = OpenEntry | VersionEntry | RefEntry

_KINDS: Final[Mapping[str, type[Entry]]] = {c.kind: c for c in (OpenEntry, VersionEntry, RefEntry)}
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(f.name for f in fields(c)) | {"format", "kind"} for kind, c in _KINDS.items()
}


def entry_hash(data: bytes) -> str:
    """BLAKE3 of an entry's bytes in hex: what the next entry holds as ``prev``."""
    return blake3(data).hexdigest()


def encode(entry: Entry) -> bytes:
    """The one byte string that stands for ``entry``."""
    document = asdict(entry) | {"format": FORMAT, "kind": entry.kind}
    line = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


def decode(data: bytes, *, seq: int, where: str) -> Entry:
    """The entry that ``data`` stands for.

    Args:
        data: What the store holds under the entry's name.
        seq: The position it was read from; the entry must carry it.
        where: Name of the object, for messages.

    Raises:
        UnsupportedFormat: Intact, but of a format or kind that this reader does not know.
        DamagedObject: Anything else that ``encode`` would not have written for this ``seq``.
    """
    document = _parse(_line(data, where=where), where=where)
    if document.get("format") != FORMAT or document.get("kind") not in _KINDS:
        raise UnsupportedFormat(
            f"{where}: log entry of format {document.get('format')!r} and kind "
            f"{document.get('kind')!r}; this reader knows format {FORMAT} and kinds "
            f"{', '.join(_KINDS)}: use a newer weightdelta"
        )
    entry = _build(document, where=where)
    if entry.seq != seq:
        raise DamagedObject(f"{where}: expected log entry {seq}, found a copy of entry {entry.seq}")
    if encode(entry) != data:
        raise DamagedObject(f"{where}: not written in canonical form")
    return entry


def _line(data: bytes, *, where: str) -> bytes:
    """The JSON line, once size, framing and hash have been checked."""
    if not _TAIL < len(data) <= MAX_BYTES:
        raise DamagedObject(
            f"{where}: a log entry has {_TAIL + 1} to {MAX_BYTES} bytes, found {len(data)}"
        )
    line, tail = data[:-_TAIL], data[-_TAIL:]
    found = blake3(line).hexdigest()
    if tail != b"\n" + found.encode() + b"\n":
        raise DamagedObject(
            f"{where}: its line hashes to {found}, but it ends with {tail!r}: "
            "cut short, overwritten or changed after it was written"
        )
    return line


def _parse(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as e:  # bad UTF-8, JSON and huge ints are ValueErrors
        raise DamagedObject(f"{where}: not JSON ({e})") from e
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise DamagedObject(f"{where}: expected an object with a kind")
    return document


def _build(document: dict[str, Any], *, where: str) -> Entry:
    kind = document["kind"]
    if document.keys() != _KEYS[kind]:
        odd = sorted(document.keys() ^ _KEYS[kind])
        raise DamagedObject(f"{where}: {kind} entry with missing or unknown keys {odd[:8]}")
    try:
        return _KINDS[kind](**{k: v for k, v in document.items() if k not in ("format", "kind")})
    except InputError as e:
        raise DamagedObject(f"{where}: {e}") from e


def log_name(seq: int) -> str:
    """Object name of log entry ``seq``."""
    return f"log/{seq:020d}"


def data_name(write_id: str, rank: int) -> str:
    """Object name of the frames that ``rank`` wrote for the delta ``write_id``."""
    return f"data/{write_id}/{rank:05d}"


def index_name(write_id: str) -> str:
    """Object name of a delta's index."""
    return f"data/{write_id}/index"


def plan_name(digest: str) -> str:
    """Object name of a frame plan."""
    return f"plan/{digest}"


def layout_name(digest: str) -> str:
    """Object name of a layout."""
    return f"layout/{digest}"


def table_name(digest: str) -> str:
    """Object name of a version's table of tensor digests."""
    return f"table/{digest}"
