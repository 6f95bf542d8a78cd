"""The log of a run: who writes, which versions exist, what they are called.

Entries lie at ``log/<seq>`` without a gap, each is created once and none is ever deleted. Only
what an entry names counts as published.

Reading: start at the hint, then GET forward until there is nothing. Every entry must name the
hash of the one before it, its writer must be the one that opened last, and version numbers must
follow each other; the first entry that breaks a rule stops the reader by name.

Writing: a writer opens with an epoch one above the highest and appends only right after the last
entry it has seen, so it cannot pass another's ``open`` unseen. What an append can meet:

==================================  ===========================================================
the slot                            what follows
==================================  ===========================================================
becomes ours, or already is         committed
holds an ``open``, epoch >= ours    ``Fenced``: this writer is finished
holds anything else                 read on; a version whose parent is no longer the newest is
                                    lost, anything else goes into the next free slot
is not known (an error)             the same bytes again, until it is known
==================================  ===========================================================
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from weightdelta.errors import (
    CommitInDoubt,
    DamagedObject,
    Fenced,
    InputError,
    LayoutMismatch,
    MissingObject,
    NotYet,
    PublicationLost,
    RetryError,
    StateMismatch,
    StoreTimeout,
    StoreUnavailable,
)
from weightdelta.record import (
    HEAD,
    MAX_BYTES,
    Entry,
    OpenEntry,
    RefEntry,
    VersionEntry,
    decode,
    encode,
    entry_hash,
    log_name,
)
from weightdelta.store import Store

#: Called with (seq, prev, epoch, nonce, time); must return an entry that holds just these.
Make = Callable[[int, str, int, str, float], Entry]

#: Most entries asked for at once beyond the last one known.
WINDOW: Final = 64
#: Entries looked at beyond the last one known when no hint says where the log ends: enough to
#: see that one is gone.
AHEAD: Final = 2
#: Most entries asked for at once up to the hint.
_AT_ONCE: Final = 1024
_HEAD_BYTES: Final = 20
_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 2.0


class Log:
    """What has been read of a run's log. ``refresh`` reads on; the rest never touches the store.

    Attributes:
        store: Where the log is.
        entries: All entries read, by seq.
        versions: Version entries by number.
        refs: Version by ref name.
        opened: The newest ``open``, None before the first.
        lock: Held while any of these change.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.entries: list[Entry] = []
        self.versions: dict[int, VersionEntry] = {}
        self.refs: dict[str, int] = {}
        self.opened: OpenEntry | None = None
        self.lock = threading.RLock()
        self._tip = ""
        self._base_digest = ""

    @property
    def next_seq(self) -> int:
        """Seq of the first entry not read."""
        return len(self.entries)

    @property
    def tip(self) -> str:
        """Hash of the last entry's bytes; empty when there is none."""
        return self._tip

    @property
    def newest(self) -> int:
        """The newest version; 0, the base, when nothing was published."""
        return len(self.versions)

    @property
    def epoch(self) -> int:
        """Epoch of the newest writer; 0 when there was none."""
        return self.opened.epoch if self.opened else 0

    def digest(self, version: int) -> str:
        """Digest of a version, 64 hex digits.

        Raises:
            NotYet: It has not been published, or for version 0: nobody has opened the log.
        """
        if version in self.versions:
            return self.versions[version].digest
        if version or not self._base_digest:
            raise NotYet(f"version {version} is not in the log yet; the newest is {self.newest}")
        return self._base_digest

    def refresh(self) -> int:
        """Read what was appended since; returns how many entries that was.

        After an error, the entries before the one it names have been taken in.

        Raises:
            DamagedObject: An entry does not follow from those before it.
            MissingObject: An entry is gone although later ones exist.
            UnsupportedFormat: An entry was written by a newer weightdelta.
            StoreUnavailable: The store failed.
            StoreTimeout: It did not answer in time.
        """
        with self.lock:
            before, hint = self.next_seq, self._hint()
            self._read_up_to(hint)
            # A hole in the log ends it for whoever looks at one entry at a time. The hint shows
            # that there are later ones, unless it is lost too: so look past the next entry once,
            # and whenever the hint does not fit.
            look = width = 1 if before and hint >= before - 1 else AHEAD
            while self._read_ahead(width) < look:
                width = min(2 * width, WINDOW)
            return self.next_seq - before

    def accept(self, data: bytes) -> Entry:
        """Take in the bytes of the next entry.

        Raises:
            DamagedObject: It does not follow from the entries before it.
            UnsupportedFormat: It was written by a newer weightdelta.
        """
        with self.lock:
            where = log_name(self.next_seq)
            entry = decode(data, seq=self.next_seq, where=where)
            if entry.prev != self._tip:
                before = log_name(self.next_seq - 1) if self._tip else "nothing"
                raise DamagedObject(
                    f"{where}: follows an entry that hashes to {entry.prev or 'nothing'}, "
                    f"but {before}, which comes before it, hashes to {self._tip or 'nothing'}; "
                    "one of the two was replaced"
                )
            self._check(entry, where=where)
            self._take(entry)
            self._tip = entry_hash(data)
            return entry

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, OpenEntry):
            self._base_digest = self._base_digest or entry.parent_digest
            self.opened = entry
        elif isinstance(entry, VersionEntry):
            self.versions[entry.version] = entry
        else:
            self.refs[entry.name] = entry.version
        self.entries.append(entry)

    def _check(self, entry: Entry, *, where: str) -> None:
        """Hold an entry against everything before it."""
        if isinstance(entry, OpenEntry):
            _expect(where, "epoch", expected=self.epoch + 1, found=entry.epoch)
            _expect(where, "parent", expected=self.newest, found=entry.parent)
            if self.opened:
                _expect(where, "layout", expected=self.opened.layout, found=entry.layout)
                digest = self.digest(entry.parent)
                _expect(where, "parent_digest", expected=digest, found=entry.parent_digest)
            return
        if self.opened is None:
            raise DamagedObject(f"{where}: expected an open entry, found {entry.kind}")
        _expect(where, "epoch", expected=self.epoch, found=entry.epoch)
        _expect(where, "nonce", expected=self.opened.nonce, found=entry.nonce)
        if isinstance(entry, VersionEntry):
            _expect(where, "version", expected=self.newest + 1, found=entry.version)
            _expect(where, "parent", expected=self.newest, found=entry.parent)
            digest = self.digest(entry.parent)
            _expect(where, "parent_digest", expected=digest, found=entry.parent_digest)
        elif entry.version > self.newest:
            raise DamagedObject(f"{where}: names version {entry.version} of {self.newest}")

    def _hint(self) -> int:
        """Seq of an entry that exists, by the hint; -1 when the hint is of no use."""
        try:
            text = self.store.read(HEAD, limit=_HEAD_BYTES).strip()
        except (MissingObject, DamagedObject):
            return -1
        hint = int(text) if text.isdigit() else -1
        if hint < self.next_seq:
            return hint
        try:  # a hint may be torn, stale or wrong: only an entry proves that the log reaches there
            self.store.size(log_name(hint))
        except MissingObject:
            return -1
        return hint

    def _read_up_to(self, last: int) -> None:
        # A stray entry far ahead may make ``last`` any number: never take memory by it.
        while (first := self.next_seq) <= last:
            names = (log_name(seq) for seq in range(first, min(first + _AT_ONCE, last + 1)))
            for data in self.store.read_all(names, limit=MAX_BYTES):
                self.accept(self._again(last) if data is None else data)

    def _read_ahead(self, width: int) -> int:
        """Try the next ``width`` entries; how many at the end were not there."""
        first = self.next_seq
        names = [log_name(seq) for seq in range(first, first + width)]
        found = list(self.store.read_all(names, limit=MAX_BYTES))
        last = max((i for i, data in enumerate(found) if data is not None), default=-1)
        for data in found[: last + 1]:
            # Absent, yet a later one is there: it may have appeared between the two requests.
            self.accept(self._again(first + last) if data is None else data)
        return width - last - 1

    def _again(self, later: int) -> bytes:
        """Read the next entry, which must exist because a later one does."""
        name = log_name(self.next_seq)
        try:
            return self.store.read(name, limit=MAX_BYTES)
        except MissingObject as e:
            raise MissingObject(
                f"{self.store.url}: {name} is gone, though {log_name(later)} exists; entries are "
                "never deleted, so restore it from a copy or start a new run"
            ) from e


class LogWriter:
    """The one who may append to a log, until a newer one opens it.

    While an entry is in doubt, every method first finds out what became of it. Asking again for
    what turns out to have been committed returns that entry and appends nothing.

    Args:
        log: The log to append to; it is kept up to date.
        nonce: 32 random hex digits, new for each writer.
        clock: Unix time in seconds, for the entries' ``time``.
        sleep: Waits between two attempts, in seconds.
    """

    def __init__(
        self,
        log: Log,
        *,
        nonce: str,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.log = log
        self.nonce = nonce
        self.epoch = 0
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._pending: Entry | None = None
        self._fenced: str = ""

    @property
    def in_doubt(self) -> Entry | None:
        """The entry that was sent and whose slot is not known yet."""
        return self._pending

    def open(
        self, parent: int, *, parent_digest: str, layout: str, deadline_s: float = 60.0
    ) -> int:
        """Take over the run at version ``parent``, which must be the newest; returns the epoch.

        Args:
            parent: The version this writer's weights are.
            parent_digest: Their digest, 64 hex digits.
            layout: Digest of the layout, 64 hex digits.
            deadline_s: Seconds after which no further attempt is made to learn the outcome; the
                last one may take the store's own bound on top.

        Raises:
            PublicationLost: ``parent`` is not the newest; look again and open from what is.
            StateMismatch: The log has another digest for ``parent``.
            LayoutMismatch: The run has another layout.
            Fenced: Another writer opened at the same time, or has since.
            CommitInDoubt: The outcome is not known yet; call again.
        """

        def make(seq: int, prev: str, _: int, nonce: str, now: float) -> OpenEntry:
            self._check_open(parent, parent_digest=parent_digest, layout=layout)
            return OpenEntry(
                seq, prev, self.log.epoch + 1, nonce, now, parent, parent_digest, layout
            )

        with self._lock:
            self._settle(deadline_s)
            if self.epoch:  # the attempt that was in doubt, or a second call
                self._check_open(parent, parent_digest=parent_digest, layout=layout)
                return self.epoch
            self.log.refresh()
            return self._send(make, deadline_s=deadline_s, done=None).epoch

    def append(self, make: Make, *, deadline_s: float = 60.0) -> Entry:
        """Append an entry and return it as it stands in the log.

        Args:
            make: Builds the entry for a slot; called again for each slot that was taken.
            deadline_s: Seconds after which no further attempt is made to learn the outcome; the
                last one may take the store's own bound on top.

        Raises:
            Fenced: A newer writer has opened the log.
            PublicationLost: The version's parent is no longer the newest.
            NotYet: The ref names a version that is not in the log.
            CommitInDoubt: Sent, and the outcome is not known yet; call again with the same.
            InputError: ``open`` has not been called, or ``make`` returned something else.
        """
        with self._lock:
            done = self._settle(deadline_s)
            if not self.epoch:
                raise InputError("this writer has not opened the log; call open() first")
            return self._send(make, deadline_s=deadline_s, done=done)

    def _send(self, make: Make, *, deadline_s: float, done: Entry | None) -> Entry:
        while True:
            with self.log.lock:  # a reader of the same log must not move the slot meanwhile
                entry = make(self.log.next_seq, self.log.tip, self.epoch, self.nonce, self._clock())
                earlier = self._earlier(entry, done=done)
                if earlier is not None:
                    return earlier
                self._check_fence()
                self._check(entry)
            self._pending = entry
            committed = self._settle(deadline_s)
            if committed is not None:
                return committed

    def _settle(self, deadline_s: float) -> Entry | None:
        """What became of the pending entry: itself if committed, None if another has the slot."""
        pending = self._pending
        if pending is None:
            self._check_fence()
            return None
        data = encode(pending)
        ours = self._is_ours(pending, data, deadline_s=deadline_s)
        self._pending = None
        if not ours:
            self.log.refresh()
            self._check_fence(at=pending)
            return None
        with self.log.lock:
            if self.log.next_seq == pending.seq:  # a reader of the same log may have been faster
                self.log.accept(data)
        if isinstance(pending, OpenEntry):
            self.epoch = pending.epoch
        with contextlib.suppress(RetryError):
            self.log.store.hint(HEAD, b"%d\n" % pending.seq)
        return pending

    def _is_ours(self, pending: Entry, data: bytes, *, deadline_s: float) -> bool:
        """Send the same bytes until it is known who has the slot."""
        name, store = log_name(pending.seq), self.log.store
        stop, wait = time.monotonic() + deadline_s, _FIRST_WAIT_S
        while True:
            try:
                # A slot that reads as absent proves nothing: the first attempt may be under way.
                return store.create(name, data) or store.read(name, limit=MAX_BYTES) == data
            except (StoreUnavailable, StoreTimeout, MissingObject) as e:
                if time.monotonic() + wait >= stop:
                    raise CommitInDoubt(
                        f"{name}: sent a {pending.kind} entry and could not learn its outcome in "
                        f"{deadline_s} s ({e}); call again, and change nothing until it is known"
                    ) from e
            self._sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _check_fence(self, *, at: Entry | None = None) -> None:
        """Stop for good when another writer's open has an epoch of at least ours."""
        other, epoch = self.log.opened, at.epoch if at else self.epoch
        if other and epoch and other.nonce != self.nonce and other.epoch >= epoch:
            self._fenced = (
                f"{log_name(other.seq)}: writer {other.nonce} opened the run with epoch "
                f"{other.epoch}; this writer (epoch {epoch}) must stop"
            )
        if self._fenced:
            raise Fenced(self._fenced)

    def _earlier(self, entry: Entry, *, done: Entry | None) -> Entry | None:
        """The entry in the log that already says what ``entry`` says."""
        if isinstance(entry, VersionEntry):
            there = self.log.versions.get(entry.version)
            return there if there is not None and there.write_id == entry.write_id else None
        if done is None:
            return None
        return (
            done if replace(entry, seq=done.seq, prev=done.prev, time=done.time) == done else None
        )

    def _check(self, entry: Entry) -> None:
        epoch = self.log.epoch + 1 if isinstance(entry, OpenEntry) else self.epoch
        slot = (self.log.next_seq, self.log.tip, epoch, self.nonce)
        if (entry.seq, entry.prev, entry.epoch, entry.nonce) != slot:
            raise InputError(f"make() must keep seq, prev, epoch and nonce {slot}, found {entry}")
        if isinstance(entry, VersionEntry):
            self._check_version(entry)
        elif isinstance(entry, RefEntry) and entry.version > self.log.newest:
            raise NotYet(
                f"ref {entry.name!r}: version {entry.version} is not in the log; the newest is "
                f"{self.log.newest}"
            )

    def _check_version(self, entry: VersionEntry) -> None:
        newest = self.log.newest
        if entry.parent != newest:
            raise PublicationLost(
                f"version {entry.version}: computed against version {entry.parent}, but the "
                f"newest is {newest}; compute it again"
            )
        if entry.version != newest + 1 or entry.parent_digest != self.log.digest(newest):
            raise InputError(
                f"expected version {newest + 1} on {newest} ({self.log.digest(newest)}), found "
                f"version {entry.version} on {entry.parent} ({entry.parent_digest})"
            )

    def _check_open(self, parent: int, *, parent_digest: str, layout: str) -> None:
        log = self.log
        if parent != log.newest:
            raise PublicationLost(
                f"cannot open at version {parent}: the newest is {log.newest}; attach again"
            )
        if log.opened is None:
            return
        if layout != log.opened.layout:
            raise LayoutMismatch(
                f"the run's layout is {log.opened.layout}, this writer's {layout}; "
                "a changed model needs a new run"
            )
        if parent_digest != log.digest(parent):
            raise StateMismatch(
                f"version {parent} has digest {log.digest(parent)}, this writer's weights have "
                f"{parent_digest}; rebuild them from the log"
            )


def _expect(where: str, what: str, *, expected: object, found: object) -> None:
    if expected != found:
        raise DamagedObject(f"{where}: expected {what} {expected}, found {found}")
