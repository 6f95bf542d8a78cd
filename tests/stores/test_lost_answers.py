"""Requests that are carried out and whose answers never arrive."""

import secrets

import pytest
from proxy import first, proxy
from servers import BUCKET, Server

from weightdelta.errors import StoreUnavailable
from weightdelta.log import Log, LogWriter
from weightdelta.record import log_name
from weightdelta.store import Store

pytestmark = pytest.mark.fault

CONDITIONAL = b"if-none-match: *"


def _through(url: str, prefix: str, *, retries: int) -> Store:
    return Store(f"s3://{BUCKET}/{prefix}", options={"endpoint_url": url}, retries=retries)


@pytest.mark.parametrize(("retries", "lost"), [(0, 2), (3, 1), (3, 4)])
def test_an_entry_whose_answer_was_lost_is_found_to_be_ours(
    s3: Server, retries: int, lost: int
) -> None:
    """The client sends it again and meets its own object, or gives up and the log sends it."""
    prefix = secrets.token_hex(8)
    with proxy(s3.port, first(lost, CONDITIONAL)) as between:
        store = _through(between.url, prefix, retries=retries)
        writer = LogWriter(Log(store), nonce=secrets.token_hex(16))
        epoch = writer.open(0, parent_digest="0" * 64, layout="1" * 64)
    assert [log_name(0).encode() in head for head in between.lost] == [True] * lost
    assert epoch == 1
    log = Log(Store(f"s3://{BUCKET}/{prefix}"))
    log.refresh()
    assert [entry.nonce for entry in log.entries] == [writer.nonce]


def test_a_bare_create_says_that_it_does_not_know(s3: Server) -> None:
    with proxy(s3.port, first(2, CONDITIONAL)) as between:  # aiohttp itself tries twice
        store = _through(between.url, secrets.token_hex(8), retries=0)
        with pytest.raises(StoreUnavailable, match="could not create log/1: "):
            store.create("log/1", b"ours")
        assert len(between.lost) == 2
        assert not store.create("log/1", b"ours")
        assert store.read("log/1") == b"ours"


def test_the_probe_survives_a_lost_answer(s3: Server) -> None:
    with proxy(s3.port, first(1, CONDITIONAL)) as between:
        store = _through(between.url, secrets.token_hex(8), retries=3)
        store.probe()
    assert len(between.lost) == 1
    assert store.fenced


def test_an_upload_whose_last_answer_was_lost_is_sent_again(s3: Server) -> None:
    """The second try of the completing request finds no upload any more."""
    parts = [bytes([i]) * (1 << 20) for i in range(34)]
    with proxy(s3.port, first(1, b"?uploadid=")) as between:
        store = _through(between.url, secrets.token_hex(8), retries=3)
        store.write("data/large", parts)
        assert between.lost
        assert store.read("data/large") == b"".join(parts)


def test_a_write_whose_answer_was_lost_is_repeated_unseen(s3: Server) -> None:
    with proxy(s3.port, first(2, b"put /")) as between:
        store = _through(between.url, secrets.token_hex(8), retries=4)
        store.write("data/a", b"bytes")
        assert len(between.lost) == 2
        assert store.read("data/a") == b"bytes"
