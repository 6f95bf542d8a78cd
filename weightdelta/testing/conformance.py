"""What a store must do for a run to be safe on it, as checks that run on any backend.

As tests: derive a class and say how to open a store; pytest collects the rest.

    class TestOurStore(StoreConformance):
        def open_store(self, prefix: str) -> Store:
            return Store(f"s3://our-bucket/{prefix}")

As a table: ``conformance`` runs the same checks and returns a row for each backend.

>>> row = conformance("memory", lambda prefix: Store(f"memory://{prefix}"))
>>> row.ok, row.failed
(True, {})
"""

import contextlib
import datetime
import gc
import itertools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weightdelta.errors import DamagedObject, MissingObject
from weightdelta.store import Store

Open = Callable[[str], Store]
#: Bytes of the large object: more than any backend sends by one request.
LARGE: Final = 40 << 20
_RACERS: Final = 4
_ROUNDS: Final = 3


class NotConforming(AssertionError):
    """A store did something else than a run relies on."""


class StoreConformance:
    """Checks of one backend; every check works under a new prefix of its own."""

    def open_store(self, prefix: str) -> Store:
        """A store under ``prefix``, which nobody else uses; called anew for each client."""
        raise NotImplementedError

    def new_store(self) -> Store:
        """A store that holds nothing yet."""
        return self.open_store(f"conformance-{secrets.token_hex(8)}")

    def test_create_is_once(self) -> None:
        """A name is taken by whoever creates it first, also when it was written before."""
        store = self.new_store()
        store.write("log/0", b"written")
        results = [store.create("log/1", data) for data in (b"first", b"second", b"first")]
        _same("creates of one name", results, [True, False, False])
        _same("the object's bytes", store.read("log/1"), b"first")
        _same("create over an object", store.create("log/0", b"other"), False)
        _same("the older object", store.read("log/0"), b"written")

    def test_racing_creates_have_one_winner(self) -> None:
        """Clients that create at the same time: one wins, all of them see its whole bytes."""
        prefix = f"conformance-{secrets.token_hex(8)}"
        stores = [self.open_store(prefix) for _ in range(_RACERS)]
        start = threading.Barrier(_RACERS)
        won: list[list[int]] = [[] for _ in range(_ROUNDS)]
        seen: list[bytes] = []

        def race(me: int) -> None:
            for turn in range(_ROUNDS):
                start.wait()
                if stores[me].create(f"log/{turn}", bytes([me]) * 4096):
                    won[turn].append(me)
                seen.append(bytes([turn]) + stores[me].read(f"log/{turn}"))

        racers = [threading.Thread(target=race, args=(i,)) for i in range(_RACERS)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        _same("winners a round", [len(w) for w in won], [1] * _ROUNDS)
        expected = {bytes([t]) + bytes(w) * 4096 for t, w in enumerate(won)}
        _same("what the racers saw", (len(seen), set(seen)), (_RACERS * _ROUNDS, expected))

    def test_what_was_written_is_read(self) -> None:
        """Whole objects and ranges, to the byte, also past the end and of empty objects."""
        store = self.new_store()
        store.write("data/a", [b"01", bytearray(b"234"), memoryview(b"56789")])
        store.write("empty", b"")
        ranges = ((0, None), (3, 5), (8, None), (8, 1 << 40), (10, 12), (11, 12), (4, 4))
        found = [store.read("data/a", start=s, end=e) for s, e in ranges]
        expected = [b"0123456789"[s:e] for s, e in ranges]
        _same("ranges", found, expected)
        _same("an empty object", (store.read("empty"), store.read("empty", end=9)), (b"", b""))
        _same("sizes", (store.size("data/a"), store.size("empty")), (10, 0))
        store.write("data/a", b"0123456789")
        _same("the same bytes again", store.read("data/a"), b"0123456789")

    def test_a_limit_is_kept(self) -> None:
        """No more bytes than allowed come back."""
        store = self.new_store()
        store.write("x", b"0123456789")
        _same("a limit that suffices", store.read("x", limit=10), b"0123456789")
        _same("a limit on a range", store.read("x", start=5, limit=5), b"56789")
        for start, end, limit in ((0, None, 9), (1, None, 8), (0, 5, 4), (0, None, 0)):
            _raises(
                DamagedObject,
                lambda s=start, e=end, n=limit: store.read("x", start=s, end=e, limit=n),  # type: ignore[misc]
            )

    def test_what_is_not_there_is_missing(self) -> None:
        """Absence is told apart from failure."""
        store = self.new_store()
        store.write("a/b", b"1")
        for name in ("a", "c", "a/c", "d/e"):
            _raises(MissingObject, lambda n=name: store.read(n))  # type: ignore[misc]
            _raises(MissingObject, lambda n=name: store.read(n, start=2, end=2))  # type: ignore[misc]
            _raises(MissingObject, lambda n=name: store.size(n))  # type: ignore[misc]
        _same(
            "absent objects among others", list(store.read_all(["c", "a/b"], limit=1)), [None, b"1"]
        )
        _same("names under an absent folder", store.names("c/"), [])

    def test_a_hint_is_replaced_at_once(self) -> None:
        """Another client sees the newest bytes: nothing is cached on the way."""
        prefix = f"conformance-{secrets.token_hex(8)}"
        writer, reader = self.open_store(prefix), self.open_store(prefix)
        for i in range(5):
            writer.hint("head", b"%d\n" % i)
            _same("the hint", reader.read("head", limit=20), b"%d\n" % i)
            writer.write(f"log/{i}", b"x")
            _same("objects in the log", len(reader.names("log/")), i + 1)
            _same("size of a new object", reader.size(f"log/{i}"), 1)

    def test_a_large_object_travels_in_parts(self) -> None:
        """An upload of several parts and a download of several ranges."""
        store, block = self.new_store(), secrets.token_bytes(1 << 20)
        parts = [bytes([i]) + block[1:] for i in range(LARGE >> 20)]
        store.write("data/large", parts)
        _same("size", store.size("data/large"), LARGE)
        if store.read("data/large", limit=LARGE) != b"".join(parts):
            raise NotConforming("a large object: other bytes came back")
        low, high = (8 << 20) - 3, (17 << 20) + 5
        if store.read("data/large", start=low, end=high) != b"".join(parts)[low:high]:
            raise NotConforming("a range of a large object: other bytes came back")

    def test_half_an_upload_is_nothing(self) -> None:
        """An upload that is given up in the middle leaves no object behind, not even later."""
        store, parts = self.new_store(), [bytes(1 << 20)] * (LARGE >> 20)
        for most in (0, len(parts) // 2):
            asked = itertools.count()
            with contextlib.suppress(TimeoutError):
                store._backend.put(
                    "data/half",
                    parts,
                    durable=True,
                    live=lambda asked=asked, most=most: next(asked) < most,  # type: ignore[misc]
                )
                if next(asked) > most:
                    raise NotConforming("an upload went on although nobody waited for it")
                continue  # this backend asks once, at the very end
            gc.collect()  # a client's file that is collected must not finish the upload
            _raises(MissingObject, lambda: store.size("data/half"))

    def test_names_are_listed_by_prefix(self) -> None:
        """Listings are complete and sorted, and hold nothing of other prefixes."""
        store = self.new_store()
        names = ["data/a/1", "head", "log/1", "log/2"]
        for name in reversed(names):
            store.write(name, b"x")
        _same("all names", store.names(), names)
        _same("by folder", store.names("log/"), names[2:])
        _same("by the start of a word", store.names("lo"), names[2:])

    def test_any_valid_name_works(self) -> None:
        """Every letter, long names, deep names."""
        store = self.new_store()
        names = [
            "ABCXYZabcxyz0189_", "a.b-c_d/e..f", "x" * 128, "/".join("abcdefgh"), "0" * 20,
        ]  # fmt: skip
        for name in names:
            _same(f"create {name}", store.create(name, name.encode()), True)
        _same("bytes", [store.read(name) for name in names], [n.encode() for n in names])
        _same("names", store.names(), sorted(names))

    def test_delete_is_idempotent(self) -> None:
        """Deleted is absent, deleting again is fine, and the name is free again."""
        store = self.new_store()
        store.write("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        _raises(MissingObject, lambda: store.read("a/b"))
        _same("a create after a delete", store.create("a/b", b"2"), True)

    def test_the_probe_passes_and_leaves_nothing(self) -> None:
        """What a writer asks of a store when it opens a run."""
        store = self.new_store()
        store.probe()
        _same("fenced", store.fenced, True)
        _same("objects left", store.names(), [])


@dataclass(frozen=True, slots=True)
class Row:
    """What was proven of one backend, and when.

    Attributes:
        passed: Names of the checks that passed.
        failed: What went wrong in each of the others.
    """

    backend: str
    passed: tuple[str, ...]
    failed: dict[str, str]
    date: datetime.date

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failed

    def markdown(self) -> str:
        """A line of the table ``| backend | proven | date |``."""
        total = len(self.passed) + len(self.failed)
        holes = f"; not: {', '.join(self.failed)}" if self.failed else ""
        return f"| {self.backend} | {len(self.passed)} of {total}{holes} | {self.date} |"


def conformance(backend: str, open_store: Open) -> Row:
    """Run every check on one backend.

    Args:
        backend: What to call it.
        open_store: Opens a store under a prefix that nobody else uses.
    """
    checks = StoreConformance()
    checks.open_store = open_store  # type: ignore[method-assign, assignment]
    passed, failed = [], dict[str, str]()
    for name in sorted(n for n in dir(checks) if n.startswith("test_")):
        label = name.removeprefix("test_").replace("_", " ")
        try:
            getattr(checks, name)()
        except Exception as e:  # noqa: BLE001 (a check that breaks has not passed)
            failed[label] = f"{type(e).__name__}: {e}"
        else:
            passed.append(label)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return Row(backend, tuple(passed), failed, today)


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise NotConforming(f"{what}: expected {expected!r}, found {found!r}")


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        found = call()
    except kind:
        return
    raise NotConforming(f"expected {kind.__name__}, found {found!r}")
