"""The publisher actor: one a node, uploads what the node's trainer ranks hand over.

Trainer ranks compress on their own threads; the store's client runs here, so that it never
competes for a trainer's interpreter. A rank hands its frames over as they are encoded.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ray_actors.calls import get
from weightdelta.config import Config
from weightdelta.errors import PublicationLost
from weightdelta.store import Store, Upload

#: Bytes that a rank hands over at a time.
BATCH: Final = 8 << 20


@dataclass(slots=True)
class _Begun:
    """An object under way; ``timer`` gives it up when its rank falls silent."""

    upload: Upload
    timer: threading.Timer
    parts: int = 0


class NodePublisher:
    """Uploads objects. Names are unique to a publication, so a repeated upload is harmless.

    Attributes:
        store: Where to.
    """

    def __init__(self, store: str, config: Config) -> None:
        self.store = Store.of(store, config=config)
        self._silence_s = config.publish_timeout_s
        self._begun: dict[str, _Begun] = {}
        self._lock = threading.Lock()

    def add(self, name: str, first: int, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Take the next parts of an object; part 0 begins it anew.

        Raises:
            PublicationLost: The parts before these are not here: this actor was restarted.
        """
        with self._lock:
            if first == 0:
                self._drop_all_of(name.rpartition("/")[2])
                self._begun[name] = _Begun(self.store.begin(name), self._watch(name, 0))
            begun = self._expect(name, first)
            for part in parts:
                begun.upload.add(memoryview(part.data))
            begun.parts += len(parts)

    def finish(self, name: str, parts: int) -> None:
        """Wait until an object of ``parts`` parts is written.

        Raises:
            PublicationLost: The parts are not here: this actor was restarted.
            StoreUnavailable, StoreTimeout: The store failed; the publication is lost.
        """
        with self._lock:
            begun = self._expect(name, parts)
            del self._begun[name]
        begun.timer.cancel()
        begun.upload.finish()

    def abandon(self, name: str) -> None:
        """Forget an object that will not be completed."""
        with self._lock:
            self._drop(name)

    def _expect(self, name: str, parts: int) -> _Begun:
        begun = self._begun.get(name)
        if begun is None or begun.parts != parts:
            found = begun.parts if begun else 0
            raise PublicationLost(f"{name}: expected {parts} parts at the publisher, found {found}")
        return begun

    def _drop_all_of(self, rank: str) -> None:
        """A rank writes one object at a time; what it left behind when it died goes."""
        for name in [n for n in self._begun if n.rpartition("/")[2] == rank]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if begun := self._begun.pop(name, None):
            begun.timer.cancel()
            begun.upload.abandon()

    def _watch(self, name: str, parts: int) -> threading.Timer:
        timer = threading.Timer(self._silence_s, self._give_up, (name, parts))
        timer.daemon = True
        timer.start()
        return timer

    def _give_up(self, name: str, parts: int) -> None:
        """Drop an object that has not grown since; nobody else frees what a dead rank left."""
        with self._lock:
            begun = self._begun.get(name)
            if begun is None:
                return
            if begun.parts == parts:
                self._drop(name)
            else:
                begun.timer = self._watch(name, begun.parts)


class HandedOver:
    """An upload that a node's publisher does, in place of one from ``Store.begin``.

    Raises, in any method:
        PublicationLost: The publisher went away; ``ActorGone`` when it does not come back.
    """

    def __init__(self, publisher: Any, name: str) -> None:
        self._publisher = publisher
        self._name = name
        self._sent = 0
        self._held: list[npt.NDArray[np.uint8]] = []
        self._bytes = 0

    def add(self, part: bytes) -> None:
        """Hand in the next part."""
        self._held.append(np.frombuffer(part, np.uint8))
        self._bytes += len(part)
        if self._bytes >= BATCH:
            self._send()

    def finish(self) -> None:
        """Wait until the object is written."""
        self._send()
        get(self._publisher.finish.remote(self._name, self._sent))

    def abandon(self) -> None:
        """Write nothing after all; does not wait for the publisher."""
        self._publisher.abandon.remote(self._name)

    def _send(self) -> None:
        if self._held:
            get(self._publisher.add.remote(self._name, self._sent, self._held))
            self._sent += len(self._held)
            self._held, self._bytes = [], 0
