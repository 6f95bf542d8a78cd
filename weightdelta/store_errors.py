"""What client libraries raise, as OSErrors: a code, a text without secrets, whether to retry.

botocore, aiohttp, azure and google errors share no base class and must not be imported here, so
they are told apart by HTTP status and by the names of their classes.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from weightdelta.redact import redact
from weightdelta.store_backend import GivenUp, Transient

#: Longest text that is kept of a library's message.
_LONGEST: Final = 400
_CODES: Final = {
    400: errno.EINVAL,
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    409: errno.EBUSY,
    412: errno.EEXIST,
    416: errno.ERANGE,
}
_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
#: Classes of connections that break, by the names that botocore, aiohttp, azure.core, google.auth,
#: requests and gcsfs give them.
_BROKEN: Final = frozenset({
    "HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "IncompleteReadError",
    "ResponseStreamingError", "ResponseParserError", "ClientConnectionError",
    "ClientPayloadError", "ServerDisconnectedError", "ServiceRequestError",
    "ServiceResponseError", "TransportError", "RefreshError", "RequestException", "ChecksumError",
})  # fmt: skip
_BROKEN_CODES: Final = frozenset(
    {errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT,
     errno.EHOSTUNREACH, errno.ENETUNREACH}
)  # fmt: skip
#: An upload that ended while its answer was lost, and writes that met each other.
_AGAIN: Final = frozenset({"NoSuchUpload", "ConditionalRequestConflict", "OperationAborted"})
#: There is nowhere to look, which is not the same as nothing there.
_NOWHERE: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_KINDS: Final = (
    (FileNotFoundError, errno.ENOENT),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
)


@contextmanager
def translated() -> Iterator[None]:
    """Whatever is raised inside comes out as an OSError.

    Raises:
        Transient: The same request may succeed later.
        OSError: Anything else, of the subclass that belongs to its code.
    """
    try:
        yield
    except GivenUp:
        raise
    except Exception as e:  # libraries raise what they like; all of it is the store
        raise translate(e) from e


def translate(error: Exception) -> OSError:
    """One error of a client library as an OSError."""
    status, word = _status(error), _word(error)
    if word in _NOWHERE:
        return OSError(errno.ENXIO, f"{word}: {_text(error)}")
    code = _CODES.get(status or 0) or getattr(error, "errno", None) or _kind(error)
    code = code if isinstance(code, int) else errno.EIO
    if _may_pass(error, status, word, code):
        return Transient(code, _text(error))
    return OSError(code, _text(error))


def _may_pass(error: Exception, status: int | None, word: str, code: int) -> bool:
    if word in _AGAIN or status in _RETRIED:
        return True
    if status is not None:
        return False
    names = {c.__name__ for c in type(error).__mro__}
    broken = isinstance(error, ConnectionError | TimeoutError) or code in _BROKEN_CODES
    return broken or bool(names & _BROKEN)


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error, if it came from a response."""
    for e in (error, error.__cause__):
        response = getattr(e, "response", None)
        if isinstance(response, dict):
            return _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        for name in ("status_code", "status", "code"):
            found = _number(getattr(e, name, None))
            if found is not None:
                return found
    said = re.search(r"status code: (\d{3})\b", str(error))  # obstore has it in its text alone
    return int(said[1]) if said else None


def _number(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"[1-5]\d\d", text) else None


def _word(error: Exception) -> str:
    """The service's own name for what went wrong, such as ``NoSuchUpload``."""
    for e in (error, error.__cause__):
        response = getattr(e, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        word = getattr(e, "error_code", None)
        if word:
            return str(getattr(word, "value", word))
    said = re.search(r"<Code>(\w+)</Code>", str(error))
    return said[1] if said else ""


def _kind(error: Exception) -> int:
    return next((code for kind, code in _KINDS if isinstance(error, kind)), errno.EIO)


def _text(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    said = " ".join(str(said).partition("\n\nDebug source")[0].split())
    name = "" if isinstance(error, OSError) and said else f"{type(error).__name__}: "
    text = redact(f"{name}{said}")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
