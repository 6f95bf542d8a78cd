"""What runs inside a trainer actor: describe, start, capture; and ``TrainerRank``.

The functions are called through ``handle.__ray_call__``, so the user's class needs no change.
They keep one session per attachment in this process. A process that was restarted has none and
gets what it needs from the coordinator.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import cloudpickle

from ray_actors.calls import ActorGone, Attachment, get, is_gone
from ray_actors.publisher import HandedOver
from weightdelta.base import Base
from weightdelta.capture import Inventory, take_inventory
from weightdelta.codecs.names import Codec
from weightdelta.digest import U64
from weightdelta.errors import (
    Fenced,
    InputError,
    PublicationLost,
    UnfencedWriter,
    WeightDeltaError,
)
from weightdelta.fence import unfenced
from weightdelta.job import Job, base_specs, plan_job
from weightdelta.publish import Outcome, Receipt
from weightdelta.record import data_name
from weightdelta.replicas import Hashes
from weightdelta.session import Payload, RankSession, known, upload
from weightdelta.state import State, as_attached
from weightdelta.store import Store

#: Longest wait of one question for an outcome; then it is asked again [s].
POLL_S = 20.0
#: Uploads asked of the publisher actor, which restarts between two, before the rank does it.
UPLOAD_TRIES = 2
#: Pause before something that failed is tried again [s].
PAUSE_S = 1.0
#: A rank beats so many times in the time in which silence means loss.
BEATS = 4
#: Least time between two looks for the driver, else ``heartbeat_s`` [s].
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says about itself at attach.

    Attributes:
        node: Ray node id.
        concurrent: The actor may run an optimizer step beside a capture.
        inventory: What it holds.
    """

    node: str
    concurrent: bool
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Ack:
    """A capture that ended: how long it held its caller [s], and the version it compared with."""

    seconds: float
    version: int


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that is ready.

    Attributes:
        table: Digests of the elements it owns: uint64, one per tensor of the layout.
        hashes: Of its shards that other ranks hold too.
    """

    table: U64
    hashes: Hashes


class Heartbeat:
    """Tells a coordinator that this rank lives, for every publication it has in hand.

    Args:
        rank: Which one.
        period_s: Seconds between two beats.
        idle: Called now and then while no publication is in hand.
    """

    def __init__(self, rank: int, *, period_s: float, idle: Callable[[], None]) -> None:
        self._rank = rank
        self._period_s = period_s
        self._idle = idle
        self._changed = threading.Condition()
        self._coordinators: dict[str, Any] = {}
        self._closed = False
        name = f"weightdelta-{rank}-beat"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, write_id: str, coordinator: Any) -> None:
        """Take a publication in hand."""
        with self._changed:
            self._coordinators[write_id] = coordinator
            self._changed.notify_all()

    def stop(self, write_id: str) -> None:
        """Be done with a publication."""
        with self._changed:
            self._coordinators.pop(write_id, None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while self._wait():
            with self._changed:
                for write_id, coordinator in self._coordinators.items():
                    coordinator.beat.remote(write_id, self._rank)
                if self._coordinators:
                    self._changed.wait(self._period_s)
                    continue
            self._idle()  # without the lock, which a capture needs

    def _wait(self) -> bool:
        """Until there is something to do; False once closed."""
        with self._changed:
            idle_s = max(IDLE_S, BEATS * self._period_s)
            self._changed.wait_for(lambda: self._closed or self._coordinators, idle_s)
            return not self._closed


class Rank:
    """One attached trainer rank: the session, the user's functions, the way to the others.

    Attributes:
        coordinator: The one that was heard of last, None before the run is open; the driver
            starts another when it is gone.
    """

    def __init__(self, attachment: Attachment, job: Job, *, rank: int) -> None:
        self.rank = rank
        self._store = Store.of(attachment.store, config=attachment.config)
        self._publisher = attachment.publishers.get(ray.get_runtime_context().get_node_id())
        self._state, self._guard, self._mark = _functions(attachment)
        self._exclude = attachment.exclude
        self.session = RankSession(job, rank=rank, store=self._store, clock=time.monotonic)
        self._group = attachment.group
        self._serving = list(attachment.publishers.values())
        self.coordinator: Any = None
        self._ending = False
        self._beat_s = attachment.config.heartbeat_s / BEATS
        self._heart = Heartbeat(rank, period_s=self._beat_s, idle=self._end_if_orphaned)

    def close(self) -> None:
        """Remove the hooks and end the threads."""
        self._heart.close()
        self.session.close()

    def hash_replicas(self, actor: Any, inventories: list[Inventory]) -> Hashes:
        """Hashes of the shards that other ranks hold too."""
        guard = self._guard
        return self.session.hash_replicas(
            lambda: self._state(actor),
            inventories=inventories,
            guard=None if guard is None else lambda: guard(actor),
        )

    def _attached(self, actor: Any) -> State:
        layout = self.session.job.layout
        return as_attached(self._state(actor), layout=layout, exclude=self._exclude)

    def capture(
        self, actor: Any, write_id: str, coordinator: Any, *, codec: Codec | None = None
    ) -> None:
        """Capture now; the rest happens on the session's thread."""
        guard = self._guard
        mark = None if self._mark is None else int(self._mark(actor))
        self.coordinator = coordinator
        self._heart.start(write_id, coordinator)
        try:
            self.session.publish(
                lambda: self._attached(actor),
                write_id=write_id,
                deliver=lambda item: self._deliver(write_id, item, coordinator),
                mark=mark,
                guard=None if guard is None else lambda: guard(actor),
                codec=codec,
            )
        except BaseException:
            self._heart.stop(write_id)
            raise

    def _end_if_orphaned(self) -> None:
        """End the session when its driver is gone: nobody else takes its hooks off.

        The driver owns the coordinator and the publishers, so all of them go with it; one that
        is killed for good is no sign, the driver goes on without it.
        """
        serving = [*self._serving, *filter(None, [self.coordinator])]
        if self._ending or not all(is_gone(a, timeout=self._beat_s) for a in serving):
            return
        self._ending = True
        # In the actor's own line: hooks must not go while a step runs through them.
        me = ray.get_runtime_context().current_actor
        me.__ray_call__.remote(detach, self._group)

    def _deliver(
        self, write_id: str, item: Payload | WeightDeltaError, coordinator: Any
    ) -> Outcome:
        try:
            self._hand_over(write_id, item, coordinator)
            return self._outcome(write_id, coordinator)
        finally:
            self._heart.stop(write_id)

    def _hand_over(self, write_id: str, item: Payload | WeightDeltaError, coordinator: Any) -> None:
        error = item if isinstance(item, WeightDeltaError) else None
        if isinstance(item, Payload):
            try:
                receipt = self._upload(data_name(write_id, self.rank), item)
                get(coordinator.deliver.remote(receipt))
            except Exception as e:  # noqa: BLE001 (the other ranks must not wait for this one)
                error = known(self.rank, getattr(e, "cause", None) or e)  # the publisher's own
        if error is not None:
            get(coordinator.fail.remote(write_id, error))

    def _upload(self, name: str, payload: Payload) -> Receipt:
        # None: restarted on a node that had no trainer at attach.
        for _ in range(UPLOAD_TRIES if self._publisher else 0):
            try:
                return upload(
                    payload, begin=lambda: HandedOver(self._publisher, name), clock=time.monotonic
                )
            except ActorGone:
                break
            except PublicationLost:
                payload.check()  # the rank's own loss is final
                time.sleep(PAUSE_S)  # the publisher actor is being restarted
        # Better at this trainer's cost than lost: there is no publisher on this node any more.
        return upload(payload, begin=lambda: self._store.begin(name), clock=time.monotonic)

    def _outcome(self, write_id: str, coordinator: Any) -> Outcome:
        while True:
            found: Outcome | None = get(coordinator.outcome.remote(write_id, POLL_S))
            if found is not None:
                return found


_RANKS: dict[str, Rank] = {}
#: Groups whose run another attachment has taken over.
_SUPERSEDED: set[str] = set()
#: Concurrent actors may run two captures at once; only one of them starts a session.
_STARTING = threading.Lock()


def published(actor: Any) -> State:
    """The default ``state=``: what a ``TrainerRank`` publishes.

    Raises:
        InputError: The actor is of another class.
    """
    if not isinstance(actor, TrainerRank):
        raise InputError(
            f"attach: actors of class {type(actor).__name__} need state=, for example "
            "state=lambda self: self.model; only a wd.TrainerRank has a default"
        )
    return actor.published_state()


def describe(actor: Any, attachment: Attachment) -> Report:
    """Take a rank's inventory.

    Raises:
        LayoutMismatch, UnsupportedSharding: The state does not fit base.
        UnfencedWriter: The actor is concurrent and something besides optimizers may write.
    """
    # Ray runs a sync actor's calls in the main thread, in order; any other kind uses a pool.
    concurrent = threading.current_thread() is not threading.main_thread()
    function, guard, _ = _functions(attachment)
    try:
        state: State = function(actor)
    except WeightDeltaError:
        raise
    except Exception as e:
        raise InputError(
            f"attach: state= raised {type(e).__name__} on an actor of class "
            f"{type(actor).__name__}: {e}"
        ) from e
    if concurrent and guard is None:
        _refuse_unfenced(state)
    specs = base_specs(Base(_path(attachment)), exclude=attachment.exclude)
    inventory = take_inventory(state, base=specs, exclude=attachment.exclude)
    return Report(ray.get_runtime_context().get_node_id(), concurrent, inventory)


def start(
    actor: Any,
    attachment: Attachment,
    job: Job,
    rank: int,
    version: int,
    inventories: list[Inventory] | None = None,
) -> Started:
    """Fill the rank's baseline; with ``inventories`` also check plan and replicas."""
    if inventories is not None:
        _check_plan(attachment, job, rank, inventories)
    found = Rank(attachment, job, rank=rank)
    try:
        hashes = found.hash_replicas(actor, inventories or [])
        table = found.session.start(version=version, fresh=inventories is not None)
    except BaseException:
        found.close()  # leave no hook behind
        raise
    before = _RANKS.pop(attachment.group, None)
    if before:
        before.close()
    _RANKS[attachment.group] = found
    return Started(table, hashes)


def capture(
    actor: Any,
    group: str,
    rank: int,
    write_id: str,
    version: int,
    coordinator: Any,
    codec: Codec | None = None,
) -> Ack:
    """Capture the rank's weights against ``version`` and publish them in the background."""
    started = time.monotonic()
    try:
        found = _ready(actor, group, rank, version, coordinator)
        found.capture(actor, write_id, coordinator, codec=codec)
    except BaseException as e:
        # Not left to the driver, which may have been interrupted; to be told twice is harmless.
        coordinator.fail.remote(write_id, known(rank, e))
        raise
    return Ack(time.monotonic() - started, version)


def _ready(actor: Any, group: str, rank: int, version: int, coordinator: Any) -> Rank:
    """The group's session in this process, its baseline at ``version``."""
    with _STARTING:
        _refuse_superseded(group)
        if group not in _RANKS:
            # This process was restarted since attach.
            attachment, job = get(coordinator.bundle.remote())
            start(actor, attachment, job, rank, version)
        found = _RANKS[group]
    if found.session.version != version:
        found.session.catch_up(version)
    return found


def take_over(actor: Any, group: str, older: Sequence[str], coordinator: Any) -> None:
    """Drop the sessions of the groups that opened this run before; the log has fenced them.

    Called only once the new run is open: an attach that fails must not harm the one before it.
    ``older`` comes from the log: of two that attach at once the calls may arrive in any order,
    and one that is only about to open is newer than both.

    Raises:
        Fenced: A newer group was here first.
        PublicationLost: This process was restarted since ``start``.
    """
    with _STARTING:
        _refuse_superseded(group)
        for other in older:
            detach(actor, other)
        _SUPERSEDED.update(older)
        if group not in _RANKS:
            raise PublicationLost(
                f"group {group}: expected the session that attach started on this rank, found "
                "none; the rank was restarted meanwhile, attach again"
            )
        _RANKS[group].coordinator = coordinator


def _refuse_superseded(group: str) -> None:
    if group in _SUPERSEDED:
        raise Fenced(
            f"group {group}: another job has attached to this store since; this group must not "
            "publish any more"
        )


def detach(actor: Any, group: str) -> None:  # noqa: ARG001 (passed by __ray_call__)
    """Remove the hooks and forget the session."""
    found = _RANKS.pop(group, None)
    if found:
        found.close()


def _check_plan(attachment: Attachment, job: Job, rank: int, inventories: list[Inventory]) -> None:
    mine = plan_job(
        inventories,
        base=Base(_path(attachment)),
        config=attachment.config,
        exclude=attachment.exclude,
    )
    if mine.plan.digest != job.plan.digest:
        raise PublicationLost(
            f"rank {rank}: expected frame plan {job.plan.digest[:16]}, computed "
            f"{mine.plan.digest[:16]}; base or weightdelta differ between nodes"
        )


def _refuse_unfenced(state: State) -> None:
    names = unfenced(state)
    if names:
        raise UnfencedWriter(
            f"tensor {names[0]!r}: this actor runs calls concurrently and no torch optimizer "
            f"steps this tensor ({len(names)} such); attach after the optimizer is made, or pass "
            "guard= with a context that keeps the writer out"
        )


def _functions(attachment: Attachment) -> tuple[Callable[..., Any], Any, Any]:
    # Pickles of the driver's own functions, not of anything that comes from a store.
    loads = cloudpickle.loads
    return loads(attachment.state), loads(attachment.guard), loads(attachment.mark)


def _path(attachment: Attachment) -> Any:
    from pathlib import Path

    return Path(attachment.base)


class TrainerRank:
    """A ready trainer actor, or a mixin for one: process group, and a model to publish.

    A subclass sets ``self.model``; ``attach`` then needs no ``state=``.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: ``host:port`` where rank 0 listens.
        backend: torch.distributed backend.
    """

    model: torch.nn.Module

    def __init__(self, rank: int, *, world_size: int, address: str, backend: str = "gloo") -> None:
        self.rank = rank
        self.world_size = world_size
        torch.distributed.init_process_group(
            backend, init_method=f"tcp://{address}", rank=rank, world_size=world_size
        )

    def published_state(self) -> State:
        """The live weights."""
        return self.model
