"""``Receiver``: a sampler's side. Prepare while serving, apply in a pause, never a wrong weight.

States: CLEAN at a version; APPLYING, when an apply was interrupted (calling ``apply`` again
finishes it); DIRTY, when the weights belong to no version and have to be reloaded.
"""

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from weightdelta import threads
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.digest import U64, version_digest
from weightdelta.engines import Engine
from weightdelta.errors import (
    Busy,
    DeviceLost,
    Dirty,
    InputError,
    NotPrepared,
    NotYet,
    StateMismatch,
)
from weightdelta.fetch import Fetched, Tally, fetch_path
from weightdelta.log import Log
from weightdelta.placement import Resident, place
from weightdelta.preparation import Preparation, Step
from weightdelta.recognition import recognize
from weightdelta.site import Site
from weightdelta.staging import Stagers, Staging, sites_of
from weightdelta.state import State, Tensors, find_aliases, read_state
from weightdelta.stats import ApplyStats
from weightdelta.store import Store
from weightdelta.versions import Hop, check_target, find_path

Phase = Literal["CLEAN", "APPLYING", "DIRTY"]


class Receiver:
    """Follows a run's versions in the weights of a live model.

    Construction reads the log and computes the digest of all weights to find which version they
    are, usually 0, the base checkpoint.

    Args:
        store: URL of the run's store, or a ``Store``.
        model: A module, a dictionary of tensors, or an ``Engine``; patched in place.
        config: Preset name, YAML path or ``Config``.
        exclude: Patterns of names in the model that are not published.
        partial: The model holds only some of the run's tensors.

    Raises:
        NotYet: The store holds no run yet.
        LayoutMismatch: The model's tensors are not the run's.
        StateMismatch: The weights are no version of this run.
    """

    def __init__(
        self,
        store: str | Store,
        model: torch.nn.Module | Mapping[str, torch.Tensor] | Engine,
        *,
        config: str | Path | Config | None = None,
        exclude: Sequence[str] = (),
        partial: bool = False,
    ) -> None:
        self._config = Config.load(config)
        self._store = store if isinstance(store, Store) else Store.of(store, config=self._config)
        self._engine = model if isinstance(model, Engine) else None
        self._state: State = {} if isinstance(model, Engine) else model
        self._exclude, self._partial = tuple(exclude), partial
        self._log = Log(self._store)
        self._reader = DeltaReader(self._store, config=self._config)
        self._log.refresh()
        if self._log.opened is None:
            raise NotYet(f"store {self._store.url}: no run has been opened here yet")
        self._layout = self._reader.layout(self._log.opened.layout)
        self._residents: list[Resident] = []
        self._sites: list[Site] = []
        self._pool = self._workers()
        self._fetchers = threads.pool(self._config.store.threads, "weightdelta-fetch")
        self._background = threads.pool(2, "weightdelta-prepare")
        self._turn = threading.Lock()  # one long operation at a time; taken before a pause
        self._lock = threading.Lock()  # the fields below; never held for long but by that one
        self._preparation: Preparation | None = None
        self._undo: Step | None = None
        self._moving: tuple[Step, bool] | None = None
        self._prepared = 0
        self._phase: Phase = "DIRTY"
        self._closed = False
        self._version = -1
        self._table = np.zeros(len(self._layout.tensors), np.uint64)
        try:
            self.attach()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The version that the weights are; -1 when they are none."""
        return self._version if self._phase != "DIRTY" else -1

    @property
    def state(self) -> Phase:
        """CLEAN, APPLYING or DIRTY."""
        return self._phase

    @property
    def integrity(self) -> Literal["verified", "partial"]:
        """``partial`` when this receiver holds only some of the run's tensors."""
        return "verified" if len(self._residents) == len(self._layout.tensors) else "partial"

    def attach(self) -> int:
        """Find out, by a full digest pass, which version the weights are.

        The model's tensors are looked up anew, wherever they lie by now.

        Raises:
            LayoutMismatch: The model's tensors are not the run's.
            StateMismatch: They are none; the message names tensors that differ from base.
            ConfigError: ``device.blocks`` is ``raw`` and nothing here decodes raw blocks.
        """
        with self._turn, self._lock:
            self._refuse_closed()
            self._forget()
            self._phase = "DIRTY"
            self._release_sites()
            self._sites = []
            self._residents = self._place()
            self._sites = sites_of(self._residents, layout=self._layout, config=self._config.device)
            self._log.refresh()
            found = self._digests()
            self._version, self._table = recognize(
                found,
                residents=self._residents,
                log=self._log,
                reader=self._reader,
                layout=self._layout,
            )
            self._phase = "CLEAN"
            return self._version

    def prepare(self, *, version: int | None = None, ref: str | None = None) -> Preparation:
        """Fetch, verify and stage a version in the background, while the model serves.

        Args:
            version: The version to go to; the newest by default.
            ref: Name of a ref to go to instead.

        Raises:
            Busy: Another preparation is running.
            Dirty: The weights are in no known version.
            StateMismatch: A tensor was given other memory since ``attach``.
            InputError: Both ``version`` and ``ref`` were given.
        """
        check_target(version=version, ref=ref)
        with self._lock:
            self._refuse_unclean()
            if self._preparation and not self._preparation.done():
                raise Busy("prepare: another preparation is running; wait for it")
            self._refuse_moved()
            self._drop_preparation()
            self._preparation = Preparation(self._background, partial(self._prepare, version, ref))
            return self._preparation

    def apply(self) -> ApplyStats:
        """Store the prepared version's weights; waits for a running preparation.

        Raises:
            NotPrepared: Nothing is prepared.
            StateMismatch: The weights were edited meanwhile; nothing was stored.
            WeightDeltaError: The preparation's own error; nothing was stored.
        """
        self._let_end(self._preparation)
        # The pause before the lock: whoever holds the gate may be calling prepare().
        with self._turn, self._pause() as started, self._lock:
            self._refuse_closed()
            if self._phase == "APPLYING" and self._moving:
                # Lists are absolute, and masks know what they have changed: do all of it again.
                return self._move(self._moving[0], back=self._moving[1], started=started)
            self._refuse_unclean()
            if self._preparation is None or not self._preparation.done():
                raise NotPrepared("apply: expected a prepared version, found none; call prepare()")
            step = self._preparation.step()
            if step.start != self._version:
                raise NotPrepared(
                    f"apply: prepared from version {step.start}, the weights are now "
                    f"{self._version}; call prepare() again"
                )
            self._refuse_moved()
            return self._move(step, back=False, started=started)

    def rollback(self) -> ApplyStats:
        """Go back to the version before the last ``apply``, without fetching anything.

        Raises:
            NotPrepared: No apply to undo; ``prepare(version=...)`` goes back any distance.
        """
        if self._undo is not None and (running := self._preparation) is not None:
            running.cancel()
            self._let_end(running)
        with self._turn, self._pause() as started, self._lock:
            self._refuse_unclean()
            if self._undo is None:
                raise NotPrepared(
                    "rollback: expected an apply to undo, found none; use prepare(version=...)"
                )
            self._refuse_moved()
            self._drop_preparation()
            return self._move(self._undo, back=True, started=started)

    def scrub(self) -> int:
        """Check every weight against the version it should be; returns that version.

        Raises:
            StateMismatch: Some weight was edited behind the receiver's back.
        """
        with self._turn, self._lock:
            self._refuse_unclean()
            self._refuse_moved()
            return self._scrub()

    def release(self) -> None:
        """Drop all staging memory and the way back; the receiver can go on with ``prepare``."""
        with self._turn, self._lock:
            if self._phase != "APPLYING":
                self._forget()
                self._release_sites()
            if not self._closed:  # its threads keep work arrays as large as what was staged
                ended, self._pool = self._pool, self._workers()
                ended.shutdown()

    def close(self) -> None:
        """Release, and end the threads; every later call but ``release`` is refused."""
        with self._turn, self._lock:
            self._closed = True
            self._forget()
            self._release_sites()
        for pool in (self._background, self._fetchers, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _let_end(running: Preparation | None) -> None:
        """Wait for a preparation before anything stands still or is locked."""
        if running is not None:
            running.end()

    @contextmanager
    def _pause(self) -> Iterator[float]:
        with self._engine.paused() if self._engine else nullcontext():
            yield time.monotonic()

    # -- preparation -------------------------------------------------------------------------

    def _prepare(self, version: int | None, ref: str | None) -> Step:
        started = time.monotonic()
        self._log.refresh()
        end = self._target(version, ref)
        self._prepared += 1
        if self._config.scrub_every and self._prepared % self._config.scrub_every == 0:
            self._scrub()
        path = find_path(
            self._log,
            start=self._version,
            end=end,
            max_chain=self._config.limits.max_chain,
        )
        stager = self._stagers(path)
        tally, table = Tally(), self._table.copy()
        try:
            with closing(self._fetch(path)) as coming:
                for fetched in coming:
                    stager.add(fetched)
                    tally.add(fetched)
                    change = fetched.delta.index.tensor_digest
                    table = table + change if fetched.hop.forward else table - change
            staged = self._finish(stager)
            self._check_digest(table, end)
        except BaseException:
            stager.clear()  # what was lent is for the next one, also while this error is kept
            raise
        stats = staged.stats(
            hops=len(path), start=self._version, end=end, tally=tally, began=started
        )
        return Step(self._version, end, staged, self._table, table, stats)

    def _fetch(self, path: Sequence[Hop]) -> Generator[Fetched, None, None]:
        return fetch_path(
            self._reader,
            path,
            layout=self._layout,
            tensors=[r.tensor for r in self._residents],
            pool=self._fetchers,
            ahead=self._background,
        )

    def _stagers(self, path: Sequence[Hop]) -> Stagers:
        older = self._undo.staged if self._undo else Staging()
        return Stagers(
            self._residents, sites=self._sites, pool=self._pool, hops=len(path), older=older
        )

    def _finish(self, stager: Stagers) -> Staging:
        try:
            return stager.finish()
        except StateMismatch:
            self._scrub()  # the weights are to blame, unless a full pass clears them
            raise

    def _target(self, version: int | None, ref: str | None) -> int:
        if ref is not None:
            if ref not in self._log.refs:
                raise NotYet(f"ref {ref!r} has not been set in {self._store.url}")
            return self._log.refs[ref]
        if version is None:
            return self._log.newest
        self._log.digest(version)
        return version

    def _check_digest(self, table: U64, version: int) -> None:
        """The digests after the path must hash to the version's own digest."""
        expected = self._log.digest(version)
        if version_digest(table) != expected:
            raise StateMismatch(
                f"version {version}: expected digest {expected[:16]}, the path leads to "
                f"{version_digest(table)[:16]}; nothing was changed, attach() again"
            )

    # -- state -------------------------------------------------------------------------------

    def _move(self, step: Step, *, back: bool, started: float) -> ApplyStats:
        start, end = (step.end, step.start) if back else (step.start, step.end)
        changed = step.changed
        storing = time.monotonic()
        self._phase, self._moving = "APPLYING", (step, back)
        try:
            step.staged.store(pool=self._pool, workers=self._config.threads, back=back)
        except (StateMismatch, DeviceLost, Dirty):
            self._phase = "DIRTY"
            self._forget()
            raise
        except BaseException:
            self._settle()  # an interrupt; the caller may reload weights next
            raise
        # All of it before the pause ends: leaving the pause may fail as well.
        self._arrive(step, back=back)
        now = time.monotonic()
        return ApplyStats(
            from_version=start,
            version=end,
            changed=changed,
            apply_s=now - storing,
            pause_s=now - started,
            integrity=self.integrity,
        )

    def _arrive(self, step: Step, *, back: bool) -> None:
        """Note that a move is complete; what it leaves behind cannot be applied any more."""
        older, moved = self._undo, step.start != step.end
        self._version = step.start if back else step.end
        self._table = step.before if back else step.after
        if back or moved:  # a move to where we are keeps the way back
            self._undo = None if back else step
        self._preparation = None
        self._phase = "CLEAN"
        self._moving = None
        # Last: whoever interrupts this finds a receiver that goes on.
        if older and older is not self._undo:
            older.staged.clear()

    def _digests(self) -> U64:
        table = np.zeros(len(self._layout.tensors), np.uint64)
        values = self._pool.map(lambda r: r.digest(), self._residents)
        for resident, value in zip(self._residents, values, strict=True):
            table[resident.tensor] = value
        return table

    def _scrub(self) -> int:
        found = self._digests()
        wrong = [r.spec.name for r in self._residents if found[r.tensor] != self._table[r.tensor]]
        if wrong:
            self._phase = "DIRTY"
            raise StateMismatch(
                f"tensor {wrong[0]!r}: expected its weights at version {self._version}, found "
                f"others ({len(wrong)} tensors differ); they were edited behind the receiver's "
                "back. Reload a checkpoint and attach()"
            )
        return self._version

    def _workers(self) -> ThreadPoolExecutor:
        return threads.pool(self._config.threads, "weightdelta-receiver")

    def _tensors(self) -> Tensors:
        return self._engine.tensors() if self._engine else read_state(self._state)

    def _place(self) -> list[Resident]:
        return place(
            self._tensors(),
            layout=self._layout,
            aliases=self._engine.aliases() if self._engine else find_aliases(self._state),
            exclude=self._exclude,
            partial=self._partial,
            use=self._config.device.use,
        )

    def _refuse_moved(self) -> None:
        """Refuse weights that got other memory: nobody would read what is stored in the old."""
        live = self._tensors()
        for resident in self._residents:
            if not resident.is_at(live.get(resident.name)):
                self._phase = "DIRTY"
                raise StateMismatch(
                    f"tensor {resident.name!r}: expected it where attach() found it, found other "
                    "memory (freed, moved or assigned); attach() again"
                )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InputError("this receiver is closed; construct a new one")

    def _refuse_unclean(self) -> None:
        self._refuse_closed()
        if self._phase == "DIRTY":
            raise Dirty("the weights are in no known version; reload a checkpoint and attach()")
        if self._phase == "APPLYING":
            raise Dirty("an apply was interrupted; call apply() again to finish it")

    def _release_sites(self) -> None:
        for site in self._sites:
            site.release()

    def _settle(self) -> None:
        for site in self._sites:
            site.settle()

    def _forget(self) -> None:
        self._drop_preparation()
        self._settle()
        for step in (self._undo, self._moving and self._moving[0]):
            if step:
                step.staged.clear()
        self._undo = self._moving = None

    def _drop_preparation(self) -> None:
        """Forget a preparation; one that runs reads the weights, so it has to end first."""
        dropped, self._preparation = self._preparation, None
        if dropped is not None:
            dropped.drop()
