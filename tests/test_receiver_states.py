"""Any order of events: the weights are always the trainer's at the claimed version."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from small_runs import SmallRun, all_bits, edit

from weightdelta.config import Config
from weightdelta.errors import (
    Dirty,
    NotPrepared,
    StateMismatch,
)
from weightdelta.receiver import Receiver

NO_SCRUB = Config.of({"scrub_every": 0})


class Following(RuleBasedStateMachine):
    """Any order of events: the weights are always the trainer's at the claimed version.

    Attributes:
        config: The receiver's.
        first: The first trainer's.
        codecs: What later ones write beside differences.
    """

    config = NO_SCRUB
    first = Config()
    codecs: tuple[str, ...] = ("sparse+zstd",)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.run = SmallRun(Path(self.folder.name), ranks=1, config=self.first)
        self.seed = 0
        self.undo: tuple[int, int] | None = None
        self.target: int | None = None
        self.edited: tuple[str, int] | None = None

    @initialize()
    def start(self) -> None:
        """A sampler boots from base."""
        self.model = self.run.model()
        self.receiver = Receiver(self.run.store, self.model, config=self.config)

    @precondition(lambda self: self.run.newest < 6)
    @rule(share=st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    def publish(self, share: float) -> None:
        """Some, none or all elements change."""
        self.seed += 1
        self.run.step(self.seed, share=share)

    @precondition(lambda self: self.run.newest < 6)
    @rule(data=st.data(), max_bytes=st.sampled_from([24, 200]))
    def restart_trainer(self, data: st.DataObject, max_bytes: int) -> None:
        """Later deltas have other values and another plan."""
        forms = [("diff", "sparse+zstd"), *(("xor", codec) for codec in self.codecs)]
        values, codec = data.draw(st.sampled_from(forms))
        config = Config.of({"values": values, "codec": codec})
        self.run.open(config=config, ranks=2, max_bytes=max_bytes)

    @precondition(lambda self: self.edited is None)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        """To the newest, or to any version."""
        newest = self.run.newest
        version = data.draw(st.none() | st.integers(0, newest))
        self.target = newest if version is None else version
        assert self.receiver.prepare(version=version).wait().version == self.target

    @precondition(lambda self: self.edited is None)
    @rule()
    def apply(self) -> None:
        """What was prepared, if anything."""
        if self.target is None:
            with pytest.raises(NotPrepared):
                self.receiver.apply()
            return
        before = self.receiver.version
        assert self.receiver.apply().version == self.target
        if before != self.target:
            self.undo = (before, self.target)
        self.target = None

    @precondition(lambda self: self.edited is None)
    @rule()
    def rollback(self) -> None:
        """The last apply, if there is one to undo."""
        if self.undo is None:
            with pytest.raises(NotPrepared):
                self.receiver.rollback()
            return
        assert self.receiver.version == self.undo[1]
        assert self.receiver.rollback().version == self.undo[0]
        self.undo = self.target = None

    @precondition(lambda self: self.edited is None)
    @rule()
    def scrub(self) -> None:
        """Finds nothing on weights that nobody edited."""
        assert self.receiver.scrub() == self.receiver.version

    @rule()
    def release(self) -> None:
        """Staged values and the way back are gone."""
        self.receiver.release()
        self.undo = self.target = None

    @precondition(lambda self: self.edited is None)
    @rule()
    def restart(self) -> None:
        """The sampler's process ends; a new one finds its version again."""
        version = self.receiver.version
        self.receiver.close()
        self.receiver = Receiver(self.run.store, self.model, config=self.config)
        assert self.run.versions[self.receiver.version] == self.run.versions[version]
        self.undo = self.target = None

    @precondition(lambda self: self.edited is None)
    @rule(name=st.sampled_from("abm"), at=st.integers(0, 6))
    def edit_behind_its_back(self, name: str, at: int) -> None:
        """One bit of one element."""
        edit(self.model[name], at)
        self.edited = (name, at)

    @precondition(lambda self: self.edited is not None)
    @rule(how=st.sampled_from(["scrub", "prepare", "apply", "rollback"]))
    def notice(self, how: str) -> None:
        """Found or not touched; nothing is ever stored on top of it."""
        before = all_bits(self.model)
        call: dict[str, Callable[[], Any]] = {
            "scrub": self.receiver.scrub,
            "prepare": lambda: self.receiver.prepare().wait(),
            "apply": self.receiver.apply,
            "rollback": self.receiver.rollback,
        }
        try:
            call[how]()
        except (StateMismatch, Dirty):
            assert self.receiver.state == "DIRTY"
        except NotPrepared:
            assert how in ("apply", "rollback")
        else:
            assert how != "scrub"
            self.target = self.run.newest if how == "prepare" else None
        if how in ("scrub", "prepare") or self.receiver.state == "DIRTY":
            assert all_bits(self.model) == before

    @precondition(lambda self: self.edited is not None)
    @rule()
    def resync(self) -> None:
        """The checkpoint is loaded again, and the receiver attached."""
        for name, tensor in self.run.model().items():
            self.model[name].copy_(tensor)
        assert self.run.versions[self.receiver.attach()] == self.run.versions[0]
        self.edited = self.undo = self.target = None

    @invariant()
    def weights_are_the_claimed_version(self) -> None:
        """Bit for bit."""
        if self.edited is None:
            assert self.receiver.state == "CLEAN"
            assert all_bits(self.model) == self.run.versions[self.receiver.version]

    def teardown(self) -> None:
        """End threads."""
        self.receiver.close()
        self.run.close()
        self.folder.cleanup()


def test_any_order_of_events() -> None:
    run_state_machine_as_test(Following, settings=settings(max_examples=12, stateful_step_count=25))
