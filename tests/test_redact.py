"""Credentials are refused where they would travel and never quoted."""

import pickle
from typing import Any

import pytest

from weightdelta.config import Config
from weightdelta.errors import ConfigError
from weightdelta.redact import redact, refuse_credentials, secret_options
from weightdelta.store import Store

SECRET = "hunter2-hunter2-hunter2"  # noqa: S105 - nobody's


@pytest.mark.parametrize(
    "options",
    [
        {"key": SECRET}, {"secret": SECRET}, {"token": SECRET}, {"password": SECRET},
        {"username": SECRET}, {"account_key": SECRET}, {"sas_token": SECRET},
        {"connection_string": f"AccountName=a;AccountKey={SECRET}"}, {"client_secret": SECRET},
        {"credential": {"a": SECRET}}, {"client_kwargs": {"aws_access_key_id": SECRET}},
        {"client_kwargs": {"aws_session_token": SECRET}}, {"headers": {"X-Mine": SECRET}},
        {"s3_additional_kwargs": {"SSECustomerKey": SECRET}}, {"token": {"private_key": SECRET}},
    ],
    ids=str,
)  # fmt: skip
def test_credentials_in_options_are_refused_without_being_quoted(options: dict[str, Any]) -> None:
    for call in (
        lambda: Store("memory://x", options=options),
        lambda: Config.of({"store": {"options": options}}),
        lambda: Config.of({"store": {"options": options, "nonsense": 1}}),
    ):
        with pytest.raises(ConfigError, match="environment") as caught:
            call()
        assert SECRET not in _everything(caught.value)
    with pytest.raises(ValueError, match="environment") as raw:
        Config(store={"options": options})  # type: ignore[arg-type]
    assert SECRET not in str(raw.value)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"anon": True}, {"token": "anon"}, {"token": None}, {"profile": "trainers"},
        {"endpoint_url": "http://127.0.0.1:1"}, {"client_kwargs": {"region_name": "eu-north-1"}},
        {"key": ""}, {"requests_timeout": 3.5},
        {"s3_additional_kwargs": {"SSEKMSKeyId": "alias/x"}},
    ],
    ids=str,
)  # fmt: skip
def test_other_options_pass(options: dict[str, Any]) -> None:
    assert secret_options(options) == []
    assert Config.of({"store": {"options": options}}).store.options == options


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        (f"s3://me:{SECRET}@bucket/run", "s3://bucket/run"),
        (f"s3://bucket/run?aws_secret_access_key={SECRET}", "s3://bucket/run"),
        (f"az://c/run?sv=1&sig={SECRET}", "az://c/run"),
        (f"gs://b/run?X-Goog-Signature={SECRET}", "gs://b/run"),
        (f"memory://a:{SECRET}@b", "memory://b"),
    ],
)
def test_credentials_in_a_url_are_refused_without_being_quoted(url: str, bare: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        Store(url)
    assert bare in str(caught.value)
    assert SECRET not in _everything(caught.value)


def test_a_container_before_an_at_sign_is_no_credential() -> None:
    refuse_credentials("abfs://container@account.dfs.core.windows.net/run", {})


def test_a_chained_url_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="not a directory or a plain URL") as caught:
        Store(f"simplecache::s3://me:{SECRET}@bucket/run")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://me:{SECRET}@host/path: refused",
        f"https://host/c/b?sv=2025&sig={SECRET}&se=1",
        f"https://host/b?X-Amz-Credential={SECRET}%2F2026&X-Amz-Signature={SECRET}",
        f"AccountName=x;AccountKey={SECRET};EndpointSuffix=y",
        f"Authorization: Bearer {SECRET}",
        f"Authorization: SharedKey account:{SECRET}",
        f"{{'secret': '{SECRET}', 'key': 1}}",
        f'{{"access_token": "{SECRET}"}}',
        f"aws_secret_access_key = {SECRET}",
    ],
)
def test_known_forms_are_struck_out(text: str) -> None:
    assert SECRET not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AZURE_STORAGE_SAS_TOKEN",
     "AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY", "MY_PASSWORD"],
)  # fmt: skip
def test_values_of_the_environment_are_struck_out(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redact(f"the server said {SECRET}, twice {SECRET}") == "the server said ***, twice ***"


def test_keys_inside_connection_strings_are_struck_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=abc;AccountKey={SECRET}==")
    assert SECRET not in redact(f"bad signature for {SECRET}==")


def test_plain_text_is_left_alone() -> None:
    text = "store s3://bucket/run: could not write data/0123/00001: [Errno 28] token ring is full"
    assert redact(text) == text


def test_a_config_shows_no_options() -> None:
    config = Config.of({"store": {"options": {"endpoint_url": "http://10.0.0.1:9000"}}})
    assert "10.0.0.1" not in repr(config)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own


def _everything(error: BaseException | None) -> str:
    """What any printer of a traceback could show: the error and all that led to it."""
    text = ""
    while error is not None:
        text += f"{error!r} {error} {error.args}"
        error = error.__cause__ or error.__context__
    return text
