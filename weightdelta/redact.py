"""Credentials: refused where they would travel, struck out of text that people read.

A configuration is pickled to every actor and a URL stands in every message, so neither may hold
a credential: clients find them in the environment. What a client library says about a failed
request may still quote one; ``redact`` takes it out.

>>> secret_options({"anon": True, "client_kwargs": {"aws_secret_access_key": "abcdef"}})
['client_kwargs.aws_secret_access_key']
>>> redact("GET https://me:hunter2@host/a?sig=abc%3D&b=1 failed")
'GET https://***@host/a?sig=***&b=1 failed'
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from weightdelta.errors import ConfigError

#: Names of options and environment variables that hold a credential.
_SECRET: Final = re.compile(
    r"secret|passw|credential|connection_?string|authorization|signature|customerkey|\bheaders\b"
    r"|(^|_)(token|sas|key|key_id|pwd|username)$|sas_token|access_?key|api_?key",
    re.IGNORECASE,
)
#: Values that name a way to find credentials, as gcsfs takes them for ``token``.
_WAYS: Final = frozenset({"anon", "cloud", "google_default", "cache", "browser", "profile"})
#: Shorter values of environment variables are words, not secrets.
_SHORTEST: Final = 8
_MASK: Final = "***"
_TEXT: Final = (
    (re.compile(r"(://)[^/\s@\"']*@"), rf"\1{_MASK}@"),
    (
        re.compile(
            r"\b(\w*(?:account_?key|shared_?access_?signature|sig|signature|secret\w*|token"
            r"|password|passwd|aws_?access_?key_?id|x-(?:amz|goog)-(?:signature|credential"
            r"|security-token))[\"']?\s*[=:]\s*[\"']?)[^&\s;,\"'<>)]+",
            re.IGNORECASE,
        ),
        rf"\g<1>{_MASK}",
    ),
    (
        re.compile(r"\b(bearer|basic|sharedkey|aws4-hmac-sha256)\s+[^\s,]+", re.IGNORECASE),
        rf"\1 {_MASK}",
    ),
)


def secret_options(options: Mapping[str, Any]) -> list[str]:
    """Dotted paths of the options that look like credentials."""
    return [path for path, value in _walk(options, "") if _is_secret(path, value)]


def refuse_credentials(url: str, options: Mapping[str, Any]) -> None:
    """Check that neither a URL nor options hold a credential.

    Raises:
        ConfigError: One does; the message does not quote it.
    """
    if "://" in url:
        _refuse_in_url(url)
    found = secret_options(options)
    if found:
        raise ConfigError(
            f"store {url}: options {', '.join(found)} look like credentials; a configuration "
            "travels to every actor, so put them into the environment (docs/009-stores.md)"
        )


def redact(text: str) -> str:
    """``text`` without credentials, as far as they can be told: known forms and known values."""
    for secret in sorted(_known(), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    for pattern, instead in _TEXT:
        text = pattern.sub(instead, text)
    return text


def _refuse_in_url(url: str) -> None:
    parts = urlsplit(url)
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    inside = "a password" if ":" in parts.netloc.rpartition("@")[0] else ""
    inside = inside or next((n for n in names if _SECRET.search(n) or n == "sig"), "")
    if inside:
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(
            f"store {bare}: the URL holds {inside}; URLs stand in messages and records, so put "
            "credentials into the environment (docs/009-stores.md)"
        )


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and not _SECRET.search(path.rpartition(".")[2]):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _is_secret(path: str, value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float) or value in ("", {}):
        return False
    if isinstance(value, str) and value in _WAYS:
        return False
    return bool(_SECRET.search(path.rpartition(".")[2]))


def _known() -> Iterator[str]:
    """Values of the environment that are credentials, and those inside connection strings."""
    for name, value in os.environ.items():
        if _SECRET.search(name):
            inner = [piece.partition("=")[2] for piece in value.split(";") if "=" in piece]
            yield from (v for v in (value, *inner) if len(v) >= _SHORTEST)
