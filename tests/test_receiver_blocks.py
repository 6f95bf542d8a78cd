"""The receiver with raw blocks in the pause, on a CPU device: decoded by the CPU's own decoders."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import raw_laws
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from mask_cases import Interrupted
from small_runs import SmallRun, all_bits
from test_receiver_states import Following

from weightdelta.config import Config
from weightdelta.errors import ConfigError
from weightdelta.kernels.device import VARIABLE
from weightdelta.receiver import Receiver

Follow = Callable[..., Receiver]
both = pytest.mark.parametrize("inner", ["snappy", "lz4"])


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's interpreter, which takes minutes."""
    monkeypatch.setenv(VARIABLE, "torch_ops")


@both
@pytest.mark.parametrize("staging", [1 << 20, 8 << 20])
def test_every_step_as_lists_do(tmp_path: Path, follow: Follow, inner: str, staging: int) -> None:
    raw_laws.follows_bit_for_bit_as_lists_do(
        tmp_path, follow, inner=inner, device="cpu", staging=staging
    )


def test_memory_is_taken_once(tmp_path: Path, follow: Follow) -> None:
    raw_laws.memory_is_taken_once(tmp_path, follow, device="cpu")


def test_a_part_is_followed(tmp_path: Path, follow: Follow) -> None:
    raw_laws.a_part_is_followed(tmp_path, follow, device="cpu")


@both
def test_edits_are_found(tmp_path: Path, follow: Follow, inner: str) -> None:
    raw_laws.edits_are_found(tmp_path, follow, inner=inner, device="cpu")


@both
def test_unsound_blocks_are_refused(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    raw_laws.unsound_blocks_are_refused(tmp_path, follow, monkeypatch, inner=inner, device="cpu")


def test_sound_blocks_of_something_else_are_refused(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_laws.sound_blocks_of_something_else_are_refused(tmp_path, follow, monkeypatch, device="cpu")


def test_a_lost_device_leaves_dirty_weights(tmp_path: Path, follow: Follow) -> None:
    raw_laws.a_lost_device_leaves_dirty_weights(tmp_path, follow, device="cpu")


@both
def test_an_interrupted_move_is_finished_by_another(
    tmp_path: Path, follow: Follow, inner: str
) -> None:
    raw_laws.an_interrupted_move_is_finished_by_another(tmp_path, follow, inner=inner, device="cpu")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("edited", ["a", "b", "c", "d"])
def test_devices_go_together(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, edited: str, strided: bool
) -> None:
    raw_laws.devices_go_together(
        tmp_path, follow, monkeypatch, device="cpu", edited=edited, strided=strided
    )


@pytest.mark.parametrize("blocks", ["raw", "lists"])
def test_an_interruption_between_devices(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, blocks: str
) -> None:
    raw_laws.an_interruption_between_devices(
        tmp_path, follow, monkeypatch, device="cpu", blocks=blocks
    )


def test_strided_weights_wait_as_lists(tmp_path: Path, follow: Follow) -> None:
    raw_laws.strided_weights_wait_as_lists(tmp_path, follow, device="cpu")


def test_tied_weights_wait_as_lists(tmp_path: Path, follow: Follow) -> None:
    raw_laws.tied_weights_wait_as_lists(tmp_path, follow, device="cpu")


def test_every_codec_beside_each_other(tmp_path: Path, follow: Follow) -> None:
    raw_laws.every_codec_beside_each_other(tmp_path, follow, device="cpu")


@pytest.mark.parametrize("staging", [64 << 10, 300_000, 900_000, 1 << 20, 16 << 20])
def test_staged_memory_keeps_to_its_budget(tmp_path: Path, follow: Follow, staging: int) -> None:
    raw_laws.staged_memory_keeps_to_its_budget(tmp_path, follow, device="cpu", staging=staging)


def test_without_room_for_slots_there_are_lists(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_laws.without_room_for_slots_there_are_lists(tmp_path, follow, monkeypatch, device="cpu")


@pytest.mark.parametrize("use", ["auto", "never"])
def test_without_a_device_attach_says_so(tmp_path: Path, follow: Follow, use: str) -> None:
    run = raw_laws.a_run(tmp_path, "lz4", shares=())
    settings = Config.of({"device": {"use": use, "blocks": "raw"}})
    with pytest.raises(ConfigError, match=r"no weights .* device kernels.*to 'lists'"):
        follow(run.model(), store=run.store, config=settings)
    run.close()


def test_without_its_kernels_attach_says_so(
    run: SmallRun, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton_ops")
    monkeypatch.setitem(sys.modules, "weightdelta.kernels.triton_masks", None)
    with pytest.raises(ConfigError, match=r"device.blocks is 'raw'.* need Triton .* to 'lists'"):
        follow(run.model(), config=raw_laws.config())


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inner=st.sampled_from(["snappy", "lz4"]),
    dtypes=st.lists(
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
        min_size=1,
        max_size=4,
    ),
    size=st.integers(1, 50_000),
    frame=st.sampled_from([1000, 70_000, 300_000]),
    staging=st.sampled_from([1 << 19, 1 << 20, 4 << 20]),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_any_run_is_followed_as_lists_do(
    inner: str,
    dtypes: list[torch.dtype],
    size: int,
    frame: int,
    staging: int,
    shares: list[float],
) -> None:
    base = {
        f"w{i}": torch.zeros(size // (i + 1) + 1, dtype=dtype) for i, dtype in enumerate(dtypes)
    }
    with TemporaryDirectory() as folder:
        run = raw_laws.a_run(
            Path(folder), inner, weights=base, max_bytes=frame, shares=tuple(shares)
        )
        raw, lists = run.model(), run.model()
        followers = [
            Receiver(run.store, model, config=raw_laws.config(blocks=blocks, staging=staging))
            for model, blocks in ((raw, "raw"), (lists, "lists"))
        ]
        for version in [*range(1, len(shares) + 1), 0]:
            changed = {r.prepare(version=version).wait().changed for r in followers}
            assert len(changed) == 1
            for receiver in followers:
                receiver.apply()
            assert all_bits(raw) == all_bits(lists) == run.versions[version]
        for receiver in followers:
            receiver.close()
        run.close()


class FollowingRaw(Following):
    """The same with raw blocks; pauses are interrupted as well."""

    config = raw_laws.config(scrub_every=0)
    first = raw_laws.publisher("lz4")
    codecs = ("sparse+zstd", "snappy+zstd", "lz4+zstd")

    @precondition(lambda self: self.edited is None and self.run.newest)
    @rule(at=st.integers(0, 3), share=st.sampled_from([0.0, 0.5, 1.0]), up=st.booleans())
    def interrupted(self, at: int, share: float, up: bool) -> None:
        """One version on and back again: whatever has been stored by then, another call ends it."""
        here = self.receiver.version
        there = here + 1 if (up and here < self.run.newest) or not here else here - 1
        self.receiver.prepare(version=there).wait()
        for move, end in ((self.receiver.apply, there), (self.receiver.rollback, here)):
            with raw_laws.failing(self.receiver, at=at, share=share):
                try:
                    move()
                except Interrupted:
                    assert self.receiver.state == "APPLYING"
            if self.receiver.state == "APPLYING":
                self.receiver.apply()
            assert self.receiver.version == end
            assert all_bits(self.model) == self.run.versions[end]
        self.undo = self.target = None


def test_any_order_of_events() -> None:
    run_state_machine_as_test(
        FollowingRaw, settings=settings(max_examples=12, stateful_step_count=25)
    )
