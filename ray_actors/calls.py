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


def is_gone(actor: Any, *, timeout: float) -> bool:
    """Whether an actor has died and stays dead; False when that is not known in time."""
    try:
        get(actor.__ray_ready__.remote(), timeout=timeout)
    except ActorGone:
        return True
    except (PublicationLost, TimeoutError):
        return False  # being restarted, or at work
    return False


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


def first_error(refs: Sequence[Any], *, timeout: float | None = None) -> WeightDeltaError | None:
    """Wait for captures until all have returned or one has failed; the failure as ours.

    Args:
        refs: One a rank, in rank order.
        timeout: After so many seconds those that have not returned are the failure.
    """
    futures = [ref.future() for ref in refs]
    try:
        errors = (_error(future) for future in as_completed(futures, timeout))
        return next((e for e in errors if e is not None), None)
    except TimeoutError:
        late = [rank for rank, future in enumerate(futures) if not future.done()]
        return PublicationLost(
            f"no capture by ranks {late} within {timeout} s; the next publication covers the span"
        )


def _error(future: "Future[Any]") -> WeightDeltaError | None:
    error = future.exception()
    cause = getattr(error, "cause", error)
    if isinstance(cause, WeightDeltaError):
        return cause
    if error is None:
        return None
    return PublicationLost(f"capture failed with {type(cause).__name__}: {cause}")
