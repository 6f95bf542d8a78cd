"""The publisher actor: objects arrive in pieces, whole or not at all."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from rayjobs import LONG

from ray_actors.calls import PUBLISHER, get
from ray_actors.publisher import BATCH, HandedOver, NodePublisher
from weightdelta.config import Config
from weightdelta.errors import MissingObject, PublicationLost
from weightdelta.record import data_name
from weightdelta.store import Store

ONE, TWO = data_name("1" * 32, 0), data_name("2" * 32, 0)


def _parts(*words: bytes) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    return [np.frombuffer(word, np.uint8) for word in words]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def publisher(store: Store) -> NodePublisher:
    return NodePublisher(store.url, Config())


def test_parts_become_one_object(publisher: NodePublisher, store: Store) -> None:
    publisher.add(ONE, 0, _parts(b"a", b"b"))
    publisher.add(ONE, 2, _parts(b"c"))
    with pytest.raises(MissingObject):
        store.read(ONE)
    publisher.finish(ONE, 3)
    assert store.read(ONE) == b"abc"


@pytest.mark.parametrize("first", [1, 3])
def test_parts_that_do_not_follow_are_refused(publisher: NodePublisher, first: int) -> None:
    publisher.add(ONE, 0, _parts(b"a", b"b"))
    with pytest.raises(PublicationLost, match=f"expected {first} parts at the publisher, found 2"):
        publisher.add(ONE, first, _parts(b"c"))
    with pytest.raises(PublicationLost, match="expected 1 parts at the publisher, found 2"):
        publisher.finish(ONE, 1)
    publisher.abandon(ONE)
    with pytest.raises(PublicationLost, match="found 0"):
        publisher.finish(ONE, 2)


def test_what_a_rank_left_behind_is_dropped_by_its_next_object(
    publisher: NodePublisher, store: Store
) -> None:
    other = data_name("1" * 32, 1)
    publisher.add(ONE, 0, _parts(b"a"))
    publisher.add(other, 0, _parts(b"o"))
    publisher.add(TWO, 0, _parts(b"b"))
    publisher.finish(TWO, 1)
    publisher.finish(other, 1)
    with pytest.raises(PublicationLost):
        publisher.finish(ONE, 1)
    assert store.names("data") == sorted([other, TWO])


def test_what_a_dead_rank_left_behind_is_dropped_in_the_end(store: Store) -> None:
    publisher = NodePublisher(store.url, Config.of({"publish_timeout_s": 0.3}))
    before = set(threading.enumerate())
    publisher.add(ONE, 0, _parts(b"a"))
    publisher.add(data_name("1" * 32, 1), 0, _parts(b"b"))
    publisher.finish(data_name("1" * 32, 1), 1)
    stop = time.monotonic() + LONG
    while set(threading.enumerate()) - before and time.monotonic() < stop:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before, "neither an upload nor a timer is left"
    with pytest.raises(PublicationLost, match="found 0"):
        publisher.finish(ONE, 1)


@pytest.fixture
def actor(cluster: None, store: Store) -> Any:  # noqa: ARG001 (starts Ray)
    made = ray.remote(NodePublisher).options(**PUBLISHER).remote(store.url, Config())
    yield made
    ray.kill(made)


def test_an_object_is_handed_over_in_batches(actor: Any, store: Store) -> None:
    pieces = [bytes([i]) * (BATCH // 3) for i in range(7)]
    upload = HandedOver(actor, ONE)
    for piece in pieces:
        upload.add(piece)
    upload.finish()
    assert store.read(ONE) == b"".join(pieces)


def test_a_publisher_that_was_restarted_says_so_and_takes_it_again(
    actor: Any, store: Store
) -> None:
    upload = HandedOver(actor, ONE)
    upload.add(bytes(BATCH))
    pid = get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PublicationLost):
        upload.finish()
    upload.abandon()
    again = HandedOver(actor, ONE)
    for piece in (b"a", bytes(BATCH), b"b"):
        again.add(piece)
    again.finish()
    assert store.read(ONE) == b"a" + bytes(BATCH) + b"b"


def test_what_is_abandoned_leaves_nothing(actor: Any, store: Store) -> None:
    upload = HandedOver(actor, ONE)
    upload.add(bytes(BATCH))
    upload.abandon()
    while get(actor.__ray_call__.remote(lambda self: len(self._begun))):  # nobody waits for it
        time.sleep(0.01)
    with pytest.raises(PublicationLost, match="expected 1 parts at the publisher, found 0"):
        upload.finish()
    assert [n for n in store.names() if n.startswith("data")] == []
