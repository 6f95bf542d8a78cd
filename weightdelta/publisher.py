"""``Publisher``: the trainer's side without Ray, on torch.distributed or a single process.

Every rank calls ``publish`` after the same steps. Captures run in the call; uploads, the
exchange of receipts and the commit run on background threads over a process group of their own.
All ranks learn the same outcome.
"""

import json
import operator
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from blake3 import blake3

from weightdelta.base import Base
from weightdelta.capture import Inventory, take_inventory
from weightdelta.codecs.names import Codec
from weightdelta.config import Config
from weightdelta.errors import (
    Busy,
    CommitInDoubt,
    ConfigError,
    InputError,
    PublicationLost,
    WeightDeltaError,
)
from weightdelta.fence import Guard
from weightdelta.job import Job, base_specs, plan_job
from weightdelta.publish import Outcome, Receipt, RunWriter, skipped
from weightdelta.record import data_name
from weightdelta.replicas import Hashes, refuse_divergence
from weightdelta.session import Payload, RankSession, known, upload
from weightdelta.state import State, StateSource, as_attached
from weightdelta.stats import PublishStats
from weightdelta.store import Store

#: Pause between two tries of an entry whose slot is not known [s].
DOUBT_PAUSE_S = 0.5
#: Steps are below this; the log holds no larger number.
STEP_LIMIT: Final = 2**63
#: Settings that shape what is written: a version is one whole, so all ranks need the same.
SHAPING: Final = (
    "values", "codec", "codec_by_ref", "codec_by_tensor", "frame_bytes", "measure_bound",
)  # fmt: skip


class Publication:
    """A publication under way; ``wait`` returns its stats."""

    def __init__(self, future: "Future[Outcome]") -> None:
        self._future = future

    def done(self) -> bool:
        """Whether the outcome is known and the baseline has moved."""
        return self._future.done()

    def settled(self, timeout: float | None = None) -> bool:
        """Wait for the outcome, whatever it is; False when it is not known in time."""
        return bool(wait([self._future], timeout).done)

    def wait(self, timeout: float | None = None) -> PublishStats:
        """The stats of the committed version.

        Raises:
            WeightDeltaError: Why the publication was lost; the next one covers the span.
            TimeoutError: Not known within ``timeout`` seconds; it goes on.
        """
        if not self.settled(timeout):
            raise TimeoutError(f"publication: not settled within {timeout} s; it goes on")
        return self._future.result().result()


def wait_for(last: Publication | None, *, config: Config) -> Busy | None:
    """Wait for the publication before as ``on_busy`` says; the reason to skip, if any."""
    if last is None or last.done():
        return None
    if config.on_busy == "wait" and last.settled(config.busy_wait_s):
        return None
    return Busy("publish: the previous publication is still running; the next one covers the span")


class Peers:
    """Objects exchanged among the ranks, from any thread, one exchange at a time."""

    def __init__(self, *, rank: int, world_size: int, group: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, on every rank.

        Raises:
            PublicationLost: A rank went away; the process group is of no more use.
        """
        if self.world_size == 1:
            return [mine]
        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, mine, group=self._group)
        except RuntimeError as e:
            raise PublicationLost(
                f"rank {self.rank}: another rank went away ({e}); restart the ranks"
            ) from e
        return found

    def agree(self, call: Callable[[], Any]) -> list[Any]:
        """Every rank's result, on every rank; the first error is everyone's error."""
        return _all_or_error(self.gather(_attempt(call)))


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others before they plan; ``settings`` are the shaping ones."""

    inventory: Inventory
    settings: Mapping[str, str]


class Publisher:
    """Publishes a training job's weights, one version a call.

    Ranks wait for each other as long as the process group does: its timeout takes the place of
    ``publish_timeout_s``, and once it has passed the group is of no more use. It is 30 minutes
    for a group that is made here; pass ``group`` for another.

    Args:
        store: URL of the run's store, or a ``Store``.
        state: The live weights, or a function that returns them: a module, a dictionary of
            tensors (plain or DTensor), or a ``StateSource``. A function is called anew at
            each capture.
        base: Path of the safetensors checkpoint that samplers boot from: version 0.
        rank: This process's rank; taken from torch.distributed when left out.
        world_size: Number of ranks.
        group: A gloo process group for control messages that nothing else uses; one is made
            when left out and there are several ranks (then all ranks must construct together).
        config: Preset name, YAML path or ``Config``.
        exclude: Patterns of names that are not published.
        guard: Entered around each capture, for weights that something besides torch
            optimizers writes.
        mark: Returns this rank's own step number, asked for at each publication; ranks must
            agree on it. Without one the steps of torch optimizers are compared.

    Raises:
        InputError: State, base and shards do not fit together; the message names the tensor.
        ConfigError: A setting is wrong, or one that shapes what is written is not the same on
            all ranks.
        PublicationLost: Something else failed on a rank. Whichever rank it was, all ranks raise.
    """

    def __init__(
        self,
        store: str | Store,
        state: State | Callable[[], State],
        *,
        base: str | Path,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        config: str | Path | Config | None = None,
        exclude: Sequence[str] = (),
        guard: Guard | None = None,
        mark: Callable[[], int] | None = None,
    ) -> None:
        self._peers = _peers(rank, world_size, group)
        self._state = _function(state)
        self._guard = guard
        self._mark = mark
        self._count = 0
        self._last: Publication | None = None
        self._lock = threading.RLock()
        self._publishing = False
        self._closing = threading.Event()
        job = self._plan(lambda: self._report(store, base, config, exclude))
        with ExitStack() as undo:
            self._peers.agree(lambda: self._start(job, undo))
            self._nonce = self._open(job)
            undo.pop_all()

    @property
    def job(self) -> Job:
        """Layout, ownership and settings that the ranks agreed on."""
        return self._session.job

    def publish(self, *, step: int | None = None, codec: Codec | None = None) -> Publication:
        """Capture the current weights and publish them as the next version.

        Returns once captured; every rank has to call it after the same optimizer step. Where
        one rank has not finished the publication before, all ranks skip this one.

        Args:
            step: The trainer's step, an integer from 0 to 2**63 - 1, for people to read.
            codec: Stands in for the one in the settings, this time; tensors with one of their
                own keep it.

        Raises:
            Busy: Another publication is running and ``on_busy`` is ``error``. Ranks that were
                not busy learn it from ``wait``. Or this call was made from within another on
                the same thread, by a signal handler or by ``state``; it takes no part then.
            InputError: ``step`` is no such number; the others learn it from ``wait``.
            WeightDeltaError: This rank could not capture; the others learn it from ``wait``.
        """
        # Re-entrant: a plain lock would wait for the very call that this one interrupts.
        with self._lock:
            if self._publishing:
                raise Busy(
                    "publish: expected no publish() under way on this thread, found one: a signal "
                    "handler or state() called it again; call it after the one before returns"
                )
            self._publishing = True
            try:
                return self._publish(step, codec)
            finally:
                self._publishing = False

    def _publish(self, step: object, codec: Codec | None) -> Publication:
        busy = wait_for(self._last, config=self.job.config)
        self._count += 1
        write_id = blake3(f"{self._nonce}:{self._count}".encode()).hexdigest(length=16)
        try:
            number = step_number(step)
            mark = None if self._mark is None else int(self._mark())
        except BaseException as e:
            deliver = partial(self._deliver, write_id, None)
            error = known(self._peers.rank, e)
            self._last = Publication(self._session.skip(error, deliver=deliver))
            raise
        return self._capture(write_id, number, mark=mark, codec=codec, busy=busy)

    def _capture(
        self,
        write_id: str,
        step: int | None,
        *,
        mark: int | None,
        codec: Codec | None,
        busy: Busy | None,
    ) -> Publication:
        deliver = partial(self._deliver, write_id, step)
        if busy is None:
            try:
                future = self._session.publish(
                    self._watched,
                    write_id=write_id,
                    deliver=deliver,
                    mark=mark,
                    guard=self._guard,
                    codec=codec,
                )
            except Busy as e:
                busy = e
        if busy is not None:
            # Whatever happens here, this rank takes part: the others wait for its word.
            future = self._session.skip(busy, deliver=deliver)
        self._last = Publication(future)
        if busy is not None and self.job.config.on_busy == "error":
            raise busy
        return self._last

    def tag(self, name: str, *, version: int | None = None) -> int:
        """Point a ref at a version (rank 0 writes it); the newest by default."""
        if self._peers.rank:
            return self._session.version if version is None else version
        return self._writer.tag(name, version=version)

    def close(self) -> None:
        """End threads and hooks, after the publication under way.

        An entry in doubt is waited for up to ``store.retry_s``; what became of it then shows
        when the run is opened again. With several ranks, one that never publishes what the
        others did is waited for up to the process group's timeout (see the class).
        """
        if self._last and not self._last.settled(self.job.config.store.retry_s):
            self._closing.set()
        self._session.close(drain=True)

    def _plan(self, report: Callable[[], Report]) -> Job:
        """Every rank reports, every rank plans alike."""
        reports = self._peers.agree(report)
        refuse_differences([found.settings for found in reports])
        self._inventories: list[Inventory] = [found.inventory for found in reports]
        job = _attempt(
            lambda: plan_job(
                self._inventories, base=self._base, config=self._config, exclude=self._exclude
            )
        )
        mine = job.plan.digest if isinstance(job, Job) else job
        plans = _all_or_error(self._peers.gather(mine))
        if len(set(plans)) > 1:
            raise PublicationLost(
                f"ranks planned differently: {plans}; check their versions, base and exclude"
            )
        made: Job = job
        return made

    def _report(
        self,
        store: str | Store,
        base: str | Path,
        config: str | Path | Config | None,
        exclude: Sequence[str],
    ) -> Report:
        """Read the arguments. What is wrong with them on one rank has to reach the others."""
        self._config = Config.load(config)
        self._store = store if isinstance(store, Store) else Store.of(store, config=self._config)
        self._base = Base(Path(base))
        self._exclude = tuple(exclude)
        specs = base_specs(self._base, exclude=self._exclude)
        inventory = take_inventory(self._state(), base=specs, exclude=self._exclude)
        settings = {name: json.dumps(getattr(self._config, name)) for name in SHAPING}
        return Report(inventory, settings)

    def _start(self, job: Job, undo: ExitStack) -> None:
        """Set up what publishes; ``undo`` leaves no hook behind."""
        self._session = RankSession(
            job, rank=self._peers.rank, store=self._store, clock=time.monotonic
        )
        undo.callback(self._session.close)
        self._writer = RunWriter(
            self._store, config=self._config, clock=time.monotonic, nonce=secrets.token_hex(16)
        )

    def _watched(self) -> State:
        """The live state, in which no name may have appeared."""
        return as_attached(self._state(), layout=self.job.layout, exclude=self._exclude)

    def _open(self, job: Job) -> str:
        """Fill the baselines, add up their digests, and let rank 0 open the run."""

        def newest() -> int:
            self._writer.log.refresh()
            return self._writer.newest

        refuse_divergence(self._peers.agree(self._hash_replicas))
        version = max(self._peers.agree(newest))
        parts = self._peers.agree(lambda: self._session.start(version=version, fresh=True))
        table = sum(parts[1:], parts[0])
        self._peers.agree(lambda: None if self._peers.rank else self._writer.open(job, table=table))
        nonce = secrets.token_hex(16)
        found: str = self._peers.gather(nonce)[0]
        return found

    def _hash_replicas(self) -> Hashes:
        return self._session.hash_replicas(
            self._state, inventories=self._inventories, guard=self._guard
        )

    def _deliver(
        self, write_id: str, step: int | None, item: Payload | WeightDeltaError
    ) -> Outcome:
        mine: Receipt | WeightDeltaError
        try:
            mine = self._upload(write_id, item) if isinstance(item, Payload) else item
        except WeightDeltaError as e:
            mine = e
        except Exception as e:  # noqa: BLE001 (the other ranks wait for this one's word)
            mine = _as_lost(e)
        found = self._peers.gather(mine)
        outcome = None if self._peers.rank else self._conclude(write_id, step, found)
        decided: Outcome = self._peers.gather(outcome)[0]
        return decided

    def _upload(self, write_id: str, payload: Payload) -> Receipt:
        name = data_name(write_id, self._peers.rank)
        return upload(payload, begin=lambda: self._store.begin(name), clock=time.monotonic)

    def _conclude(
        self, write_id: str, step: int | None, found: Sequence[Receipt | WeightDeltaError]
    ) -> Outcome:
        """On rank 0: commit when every rank delivered, else name the first error."""
        errors = [item for item in found if isinstance(item, WeightDeltaError)]
        serious = [e for e in errors if not isinstance(e, Busy)]
        if serious:
            return Outcome(write_id, error=serious[0])
        if errors:
            if self.job.config.on_busy == "error":
                return Outcome(write_id, error=errors[0])
            return skipped(write_id, step=step, version=self._writer.newest)
        try:
            self._writer.begin(write_id, step=step)
            for item in found:
                if isinstance(item, Receipt):
                    self._writer.add(item)
            return self._commit(write_id)
        except WeightDeltaError as e:
            error = e
        except Exception as e:  # noqa: BLE001 (the other ranks wait for this one's word)
            error = _as_lost(e)
        return self._writer.abort(write_id, error) or Outcome(write_id, error=error)

    def _commit(self, write_id: str) -> Outcome:
        while True:
            try:
                return self._writer.commit(write_id)
            except CommitInDoubt as e:
                if self._closing.wait(DOUBT_PAUSE_S) or not threading.main_thread().is_alive():
                    return Outcome(write_id, error=e)  # the next writer's ``open`` settles it


def step_number(step: object) -> int | None:
    """A caller's step as an int, also from numpy; None stays None.

    Raises:
        InputError: It is no integer from 0 to 2**63 - 1.
    """
    if step is None:
        return None
    expected = "publish: expected an integer step from 0 to 2**63 - 1, found"
    try:
        # A tensor of truth values has an index too.
        if isinstance(step, bool) or getattr(step, "dtype", None) is torch.bool:
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{expected} {type(step).__name__} {step!r:.80}; pass int(step)") from None
    if not 0 <= number < STEP_LIMIT:
        found = number if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
        raise InputError(f"{expected} {found}; pass the trainer's own step count, or none")
    return number


def refuse_differences(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks would write alike.

    Args:
        settings: Each rank's shaping settings by name, as JSON.

    Raises:
        ConfigError: Two ranks differ; the message names the setting and the ranks.
    """
    for rank, found in enumerate(settings):
        for name, value in settings[0].items():
            if found.get(name) != value:
                raise ConfigError(
                    f"config {name}: expected the same on all ranks, found {value:.200} on rank 0 "
                    f"and {found.get(name)!s:.200} on rank {rank}; give every rank the same config"
                )


def _function(state: State | Callable[[], State]) -> Callable[[], State]:
    if isinstance(state, torch.nn.Module | StateSource) or not callable(state):
        fixed = state
        return lambda: fixed
    return state


def _peers(rank: int | None, world_size: int | None, group: Any) -> Peers:
    ready = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if ready else 0
    if world_size is None:
        world_size = dist.get_world_size() if ready else 1
    if world_size > 1 and group is None:
        group = dist.new_group(backend="gloo")
    return Peers(rank=rank, world_size=world_size, group=group)


def _attempt(call: Callable[[], Any]) -> Any:
    """A call's result, or its error as a value that can be exchanged."""
    try:
        return call()
    except WeightDeltaError as e:
        return e
    except Exception as e:  # noqa: BLE001 (the other ranks wait for this one's word)
        return _as_lost(e)


def _as_lost(error: Exception) -> PublicationLost:
    lost = PublicationLost(f"a rank failed with {type(error).__name__}: {error}")
    lost.__cause__ = error  # its traceback, where no other rank is involved
    return lost


def _all_or_error(items: list[Any]) -> list[Any]:
    for item in items:
        if isinstance(item, WeightDeltaError):
            raise item
    return items
