"""Servers that refuse a credential, and everything that a person may then read."""

import logging
import os
import secrets
import traceback
from pathlib import Path

import pytest
from servers import BUCKET, Server
from small_runs import SmallRun

from weightdelta.errors import StoreUnavailable, WeightDeltaError
from weightdelta.store import Store

SECRET = "c2VjcmV0LXRoYXQtbm9ib2R5LW1heS1zZWUtMDEyMw=="  # noqa: S105 - opens nothing


def _all_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(error.__dict__)


def _refused(store: Store) -> str:
    """Every operation, and all that its errors show."""
    shown = repr(store)
    calls = (
        lambda: store.read("log/1", limit=9),
        lambda: store.size("log/1"),
        lambda: store.write("data/a", b"1"),
        lambda: store.create("log/1", b"1"),
        lambda: store.hint("head", b"1"),
        lambda: store.names(),
        store.probe,
    )
    for call in calls:
        with pytest.raises(WeightDeltaError) as caught:
            call()
        shown += _all_of(caught.value)
    return shown


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("bulk", ["fsspec", "obstore"])
def test_a_wrong_secret_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bulk: str
) -> None:
    if bulk == "obstore":
        pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with caplog.at_level(logging.INFO):
        shown = _refused(Store(f"s3://{BUCKET}/x", bulk=bulk))  # type: ignore[arg-type]
    assert SECRET not in shown + caplog.text
    assert "could not write data/a" in shown


@pytest.mark.usefixtures("azure")
def test_a_wrong_account_key_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, azurite: Server
) -> None:
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={SECRET};"
        f"BlobEndpoint={azurite.url}/devstoreaccount1;",
    )
    with caplog.at_level(logging.INFO):
        shown = _refused(Store(f"abfs://{BUCKET}/x"))
    assert SECRET not in shown + caplog.text


@pytest.mark.parametrize("url", ["s3://nobody/x", "abfs://nobody/x", "gs://nobody/x"])
def test_a_server_that_is_not_there_is_typed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Nothing listens on the discard port of this host."""
    pytest.importorskip({"s3": "s3fs", "abfs": "adlfs", "gs": "gcsfs"}[url.partition(":")[0]])
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nowhere)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nowhere)
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=someone;AccountKey={SECRET};"
        f"BlobEndpoint={nowhere}/someone;",
    )
    options = {"token": "anon"} if url.startswith("gs") else {}
    store = Store(url, retries=0, timeout_s=1.5, options=options)
    with pytest.raises((StoreUnavailable, TimeoutError), match=url) as caught:
        store.read("log/1", limit=9)
    assert SECRET not in _all_of(caught.value)


@pytest.mark.usefixtures("s3")
def test_nothing_that_a_run_stores_holds_a_credential(tmp_path: Path) -> None:
    """Log entries, layouts, plans, indexes and frames, byte by byte."""
    store = Store(f"s3://{BUCKET}/{secrets.token_hex(8)}")
    run = SmallRun(tmp_path, store=store)
    run.step(1)
    run.writer.tag("eval")
    run.close()
    names = store.names()
    stored = b"".join(store.read(name) for name in names)
    assert len(names) > 6
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        assert os.environ[name].encode() not in stored + "".join(names).encode()
