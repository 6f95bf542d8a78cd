"""``attach``: make a running Ray training job publish its weights, without changing its code."""

import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_actors import trainer
from ray_actors.calls import (
    COORDINATOR,
    PUBLISHER,
    ActorGone,
    Attachment,
    first_error,
    get,
    pickled,
)
from ray_actors.coordinator import Coordinator
from ray_actors.publisher import NodePublisher
from weightdelta.base import Base
from weightdelta.capture import Inventory
from weightdelta.codecs.names import Codec
from weightdelta.config import Config
from weightdelta.errors import Busy, InputError, PublicationLost, WeightDeltaError
from weightdelta.job import Job, plan_job
from weightdelta.publish import Outcome, skipped
from weightdelta.publisher import Publication, step_number, wait_for
from weightdelta.replicas import refuse_divergence
from weightdelta.store import Store

#: Longest wait of one question for an outcome [s].
POLL_S = 20.0
#: Longest wait for ranks to drop their sessions [s]; a step may be far from its end.
DETACH_S = 10.0


class TrainerGroup:
    """Attached trainers; made by ``attach``.

    Attributes:
        coordinator: Handle of the coordinator actor.
        publishers: Handles of the publisher actors, by node id.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        *,
        attachment: Attachment,
        job: Job,
        shared: Any,
        coordinator: Any,
        concurrent: bool,
    ) -> None:
        self._handles = list(handles)
        self._attachment = attachment
        self._job = job
        self._shared = shared  # a coordinator that restarts needs it
        self._lives = 0
        self.coordinator = coordinator
        self.publishers = attachment.publishers
        self._concurrent = concurrent
        self._last: Publication | None = None
        self._newest = 0
        self._closed = False
        self._publishing = threading.Lock()
        self._reviving = threading.Lock()

    @property
    def job(self) -> Job:
        """Layout, ownership and settings that all ranks agreed on."""
        return self._job

    def publish(self, *, step: int | None = None, codec: Codec | None = None) -> Publication:
        """Publish the current weights of all ranks as the next version.

        On actors that run their calls in order it returns at once: the capture takes its place
        behind the step that was submitted before. On threaded and asyncio actors call it only
        after every rank's step has returned; it returns when all ranks have captured. ``codec``
        stands in for the one in the settings, this time; tensors with one of their own keep it.

        Raises:
            Busy: The previous publication is running and ``on_busy`` is ``error``.
            ConfigError: The codec does not take the values that the settings name.
            InputError: ``step`` is no integer from 0 to 2**63 - 1.
            PublicationLost: On concurrent actors, a capture outlasted ``publish_timeout_s``.
            WeightDeltaError: On concurrent actors, what a rank's capture raised.
        """
        number = step_number(step)
        if codec is not None:
            self._job.config.with_codec(codec)  # refused here rather than on every rank
        with self._publishing:
            return self._publish(secrets.token_hex(16), number, codec)

    def _publish(self, write_id: str, step: int | None, codec: Codec | None) -> Publication:
        strict = self._job.config.on_busy == "error"
        busy = wait_for(self._last, config=self._job.config)
        if busy is not None:
            if strict:
                raise busy
            # As of the last begin: to ask for it could wait for a store that does not answer.
            return _settled(skipped(write_id, step=step, version=self._newest))
        try:
            version = self._newest = self._ask("begin", write_id, step)
            acks = self._capture(write_id, version, codec)
            self._last = Publication(self._follow(write_id, acks))
        except BaseException as e:
            # Interrupted in between: without this the next ones would find it still under way.
            if not self._closed:
                lost = PublicationLost(f"publish was interrupted by {type(e).__name__}")
                self.coordinator.fail.remote(write_id, lost)
            raise
        if self._concurrent:
            error = first_error(acks, timeout=self._job.config.publish_timeout_s)
            if error:
                self._ask("fail", write_id, error)
                if strict or not isinstance(error, Busy):
                    raise error
        return self._last

    def _capture(self, write_id: str, version: int, codec: Codec | None) -> list[Any]:
        """Start the captures, without Ray's retries.

        A second capture would replace an object whose hash the first one's receipt may already
        have carried into the log.
        """
        group, coordinator = self._attachment.group, self.coordinator
        return [
            handle.__ray_call__.options(max_task_retries=0).remote(
                trainer.capture, group, rank, write_id, version, coordinator, codec
            )
            for rank, handle in enumerate(self._handles)
        ]

    def tag(self, name: str, *, version: int | None = None) -> int:
        """Point a ref at a version, the newest committed one by default; returns the version.

        Raises:
            NotYet: There is no such version.
        """
        found: int = self._ask("tag", name, version)
        return found

    def close(self) -> None:
        """Take the hooks off the trainers and end the actors.

        Waits for the publication under way, up to ``store.retry_s``: where a store has failed
        for good, its outcome will never be known. A rank that is in a call of its own for more
        than 10 s drops its session after that.
        """
        with self._publishing:
            if self._last:
                self._last.settled(self._job.config.store.retry_s)
            with self._reviving:
                self._closed = True
            _detach(self._handles, self._attachment, self.coordinator)

    def _ask(self, method: str, *args: Any) -> Any:
        """Ask the coordinator; one that was killed for good is replaced first."""
        if self._closed:
            raise InputError("this group was closed; attach again")
        coordinator = self.coordinator
        try:
            return get(getattr(coordinator, method).remote(*args))
        except ActorGone:
            self._revive(coordinator)
            return get(getattr(self.coordinator, method).remote(*args))

    def _revive(self, gone: Any) -> None:
        with self._reviving:
            if not self._closed and self.coordinator is gone:
                self._lives += 1
                group = self._attachment.group
                self.coordinator = _coordinator(self._shared, group=group, life=self._lives)

    def _follow(self, write_id: str, acks: list[Any]) -> "Future[Outcome]":
        """Watch the captures and the outcome on a thread; trainers are never asked again."""
        future: Future[Outcome] = Future()

        def captures() -> None:
            error = first_error(acks)
            if error:
                self.coordinator.fail.remote(write_id, error)
            else:
                self.coordinator.captured.remote(write_id)

        def outcome() -> None:
            try:
                found = None
                while found is None:
                    found = self._ask("outcome", write_id, POLL_S)
                future.set_result(found)
            except WeightDeltaError as e:
                future.set_result(Outcome(write_id, error=e))
            except BaseException as e:  # noqa: BLE001 (whatever it is, wait() must raise it)
                future.set_exception(e)

        for work in (captures, outcome):
            threading.Thread(target=work, name="weightdelta-follow", daemon=True).start()
        return future


def attach(
    trainers: Sequence[Any],
    *,
    store: str,
    base: str | Path,
    state: Callable[[Any], Any] | None = None,
    config: str | Path | Config | None = None,
    exclude: Sequence[str] = (),
    guard: Callable[[Any], Any] | None = None,
    mark: Callable[[Any], int] | None = None,
) -> TrainerGroup:
    """Attach to the actors of a running training job.

    Args:
        trainers: Actor handles, in rank order.
        store: URL of the run's store; one store holds one run.
        base: Path of the safetensors checkpoint that samplers boot from, readable on every
            trainer's node and here.
        state: Given the actor's instance, returns its live weights: a module, a dictionary of
            tensors, or a ``StateSource``. Called anew at each capture. The default is
            ``TrainerRank``'s model.
        config: Preset name, YAML path or ``Config``.
        exclude: Patterns of names that are not published.
        guard: Given the instance, returns a context manager held during each capture; needed
            on concurrent actors whose weights something besides torch optimizers writes.
        mark: Given the instance, returns its own step number; ranks must agree on it.

    Returns:
        The group, ready for ``publish``.

    Raises:
        InputError: State, base and shards do not fit; the message names the tensor.
        StateMismatch: The store holds a run that started elsewhere.
        UnfencedWriter: See ``guard``.
    """
    settings = Config.load(config)
    _check(trainers, store, settings)
    attachment = Attachment(
        group=secrets.token_hex(8),
        store=store,
        base=str(Path(base).resolve()),
        exclude=tuple(exclude),
        config=settings,
        state=pickled(state or trainer.published),
        guard=pickled(guard),
        mark=pickled(mark),
        publishers={},
    )
    reports: list[trainer.Report] = get(
        [h.__ray_call__.remote(trainer.describe, attachment) for h in trainers]
    )
    inventories = [r.inventory for r in reports]
    job = plan_job(inventories, base=Base(Path(attachment.base)), config=settings, exclude=exclude)
    attachment.publishers.update(_publishers(reports, attachment))
    shared = ray.put((attachment, job))
    coordinator = _coordinator(shared, group=attachment.group)
    try:
        _start(trainers, attachment, job, coordinator, inventories)
    except BaseException:
        _detach(trainers, attachment, coordinator)  # leave no hook and no actor behind
        raise
    return TrainerGroup(
        trainers,
        attachment=attachment,
        job=job,
        shared=shared,
        coordinator=coordinator,
        concurrent=any(r.concurrent for r in reports),
    )


def _check(trainers: Sequence[Any], store: str, config: Config) -> None:
    """Refuse before any actor is started what no actor could use."""
    given: Any = trainers
    handles = list(given) if isinstance(given, Collection) else []
    if not handles or not all(isinstance(h, ActorHandle) for h in handles):
        found = ", ".join(sorted({type(h).__name__ for h in handles})) or type(given).__name__
        raise InputError(
            "attach: expected a list of Ray actor handles, in rank order, found "
            + ("an empty list" if given == [] else found)
        )
    _refuse_duplicates(handles)
    Store.of(store, config=config)


def _refuse_duplicates(handles: Sequence[Any]) -> None:
    """An actor holds one session of a group, so a second rank on it would never be heard of."""
    first: dict[Any, int] = {}
    for position, handle in enumerate(handles):
        before = first.setdefault(handle, position)
        if before != position:
            raise InputError(
                "attach: expected a different actor for each rank, found "
                f"{handle!r} at positions {before} and {position}; pass each handle once"
            )


def _start(
    trainers: Sequence[Any],
    attachment: Attachment,
    job: Job,
    coordinator: Any,
    inventories: Sequence[Inventory],
) -> None:
    """Fill every rank's baseline and open the run with what they add up to."""
    version = get(coordinator.newest.remote())
    shared = ray.put(inventories)
    started: list[trainer.Started] = get(
        [
            h.__ray_call__.remote(trainer.start, attachment, job, rank, version, shared)
            for rank, h in enumerate(trainers)
        ]
    )
    refuse_divergence([s.hashes for s in started])
    tables = [s.table for s in started]
    older = get(coordinator.open.remote(sum(tables[1:], tables[0]), version))
    taken = (trainer.take_over, attachment.group, older, coordinator)
    get([h.__ray_call__.remote(*taken) for h in trainers])


def _detach(trainers: Sequence[Any], attachment: Attachment, coordinator: Any) -> None:
    """Undo an attachment: no rank keeps a session, no actor stays.

    A rank in a call that does not end within ``DETACH_S`` drops its session after that call.
    """
    calls = [h.__ray_call__.remote(trainer.detach, attachment.group) for h in trainers]
    wait([call.future() for call in calls], DETACH_S)  # a rank that is gone needs none
    for actor in (coordinator, *attachment.publishers.values()):
        ray.kill(actor)


def _publishers(reports: Sequence[trainer.Report], attachment: Attachment) -> dict[str, Any]:
    """One publisher actor on every node that has a trainer."""
    actor = ray.remote(NodePublisher)
    return {
        node: actor.options(
            **PUBLISHER,
            name=f"weightdelta-publisher-{attachment.group}-{node[:8]}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(attachment.store, attachment.config)
        for node in sorted({r.node for r in reports})
    }


def _coordinator(shared: Any, *, group: str, life: int = 0) -> Any:
    """Start a coordinator.

    Args:
        shared: Reference to attachment and job. A large argument lies in the object store and a
            restart needs it again, so whoever starts the actor has to keep the reference.
        group: The attachment's id.
        life: How many coordinators there were before; a name is never used twice.
    """
    name = f"weightdelta-coordinator-{group}" + (f"-{life}" if life else "")
    return ray.remote(Coordinator).options(**COORDINATOR, name=name).remote([shared])


def _settled(outcome: Outcome) -> Publication:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return Publication(future)
