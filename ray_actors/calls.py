"""Calls between actors: results unwrapped, options of every actor in one place."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, as_completed, wait
from dataclasses import dataclass
from typing import Any, Final

from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from weightdelta.config import Config
from weightdelta.errors import PublicationLost, WeightDeltaError

#: Neither actor computes; both restart on their own and their calls are idempotent by name.
COORDINATOR: Final = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
PUBLISHER: Final = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 3, "max_concurrency": 8}


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a rank needs to take part, kept by the coordinator for ranks that restart.

    Attributes:
        group: Random id of the attachment.
        state, guard, mark: The caller's functions of the actor, pickled: they may refer to
            modules that only trainers can import.
        publishers: Publisher actor by node id.
    """

    group: str
    store: str
    base: str
    exclude: tuple[str, ...]
    config: Config
    state: bytes
    guard: bytes
    mark: bytes
    publishers: dict[str, Any]


class ActorGone(PublicationLost):
    """The actor that was called has died and does not restart."""


def pickled(function: Any) -> bytes:
    """A function of the driver's, by value where it cannot be imported."""
    data: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    return data


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """``ray.get`` that raises a remote ``WeightDeltaError`` as itself.

    Of a list, the first failure is raised without waiting for the rest: those may be waiting for
    the one that failed.

    Raises:
        PublicationLost: The actor that was called has died; ``ActorGone`` when it stays dead.
        TimeoutError: No answer within ``timeout`` seconds.
    """
    # Futures, because ray.get() in a thread of an asyncio actor is refused with a warning.
    if not isinstance(refs, list):
        return _result(refs.future(), timeout)
    futures = [ref.future() for ref in refs]
    for future in wait(futures, timeout, return_when=FIRST_EXCEPTION).done:
        if future.exception():
            _result(future)
    return [_result(future, 0) for future in futures]


def _result(future: "Future[Any]", timeout: float | None = None) -> Any:
    try:
        return future.result(timeout)
    except RayTaskError as e:
        cause = e.cause
        if isinstance(cause, WeightDeltaError):
            raise cause from None
        raise
    except ActorDiedError as e:
        raise ActorGone(f"an actor died: {e}") from e
    except RayActorError as e:
        raise PublicationLost(f"an actor died: {e}") from e


def first_error(refs: Sequence[Any]) -> WeightDeltaError | None:
    """Wait for calls until all have returned or one has failed; the failure as ours."""
    for future in as_completed([ref.future() for ref in refs]):
        error = future.exception()
        cause = getattr(error, "cause", error)
        if isinstance(cause, WeightDeltaError):
            return cause
        if error is not None:
            return PublicationLost(f"capture failed with {type(cause).__name__}: {cause}")
    return None
