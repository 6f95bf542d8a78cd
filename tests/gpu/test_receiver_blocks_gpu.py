"""The receiver with raw blocks in the pause, on a GPU: decoded by nvCOMP, taken in by Triton."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import raw_laws
import torch
from small_runs import all_bits, edit

from weightdelta.codecs import nvcomp
from weightdelta.config import Config
from weightdelta.errors import ConfigError, StateMismatch
from weightdelta.receiver import Receiver

pytestmark = pytest.mark.gpu

Follow = Callable[..., Receiver]
both = pytest.mark.parametrize("inner", ["snappy", "lz4"])
DEVICE = "cuda"


@both
@pytest.mark.parametrize("staging", [1 << 20, 8 << 20])
def test_every_step_as_lists_do(tmp_path: Path, follow: Follow, inner: str, staging: int) -> None:
    raw_laws.follows_bit_for_bit_as_lists_do(
        tmp_path, follow, inner=inner, device=DEVICE, staging=staging
    )


def test_memory_is_taken_once(tmp_path: Path, follow: Follow) -> None:
    raw_laws.memory_is_taken_once(tmp_path, follow, device=DEVICE)


def test_a_part_is_followed(tmp_path: Path, follow: Follow) -> None:
    raw_laws.a_part_is_followed(tmp_path, follow, device=DEVICE)


@both
def test_edits_are_found(tmp_path: Path, follow: Follow, inner: str) -> None:
    raw_laws.edits_are_found(tmp_path, follow, inner=inner, device=DEVICE)


@both
def test_unsound_blocks_are_refused(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    raw_laws.unsound_blocks_are_refused(tmp_path, follow, monkeypatch, inner=inner, device=DEVICE)


def test_sound_blocks_of_something_else_are_refused(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_laws.sound_blocks_of_something_else_are_refused(
        tmp_path, follow, monkeypatch, device=DEVICE
    )


def test_a_lost_device_leaves_dirty_weights(tmp_path: Path, follow: Follow) -> None:
    raw_laws.a_lost_device_leaves_dirty_weights(tmp_path, follow, device=DEVICE)


@both
def test_an_interrupted_move_is_finished_by_another(
    tmp_path: Path, follow: Follow, inner: str
) -> None:
    raw_laws.an_interrupted_move_is_finished_by_another(
        tmp_path, follow, inner=inner, device=DEVICE
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("edited", ["a", "b", "c", "d"])
def test_devices_go_together(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, edited: str, strided: bool
) -> None:
    raw_laws.devices_go_together(
        tmp_path, follow, monkeypatch, device=DEVICE, edited=edited, strided=strided
    )


@pytest.mark.parametrize("blocks", ["raw", "lists"])
def test_an_interruption_between_devices(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, blocks: str
) -> None:
    raw_laws.an_interruption_between_devices(
        tmp_path, follow, monkeypatch, device=DEVICE, blocks=blocks
    )


def test_strided_weights_wait_as_lists(tmp_path: Path, follow: Follow) -> None:
    raw_laws.strided_weights_wait_as_lists(tmp_path, follow, device=DEVICE)


def test_tied_weights_wait_as_lists(tmp_path: Path, follow: Follow) -> None:
    raw_laws.tied_weights_wait_as_lists(tmp_path, follow, device=DEVICE)


def test_every_codec_beside_each_other(tmp_path: Path, follow: Follow) -> None:
    raw_laws.every_codec_beside_each_other(tmp_path, follow, device=DEVICE)


@pytest.mark.parametrize("staging", [64 << 10, 300_000, 900_000, 1 << 20, 16 << 20])
def test_staged_memory_keeps_to_its_budget(tmp_path: Path, follow: Follow, staging: int) -> None:
    raw_laws.staged_memory_keeps_to_its_budget(tmp_path, follow, device=DEVICE, staging=staging)


def test_without_room_for_slots_there_are_lists(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_laws.without_room_for_slots_there_are_lists(tmp_path, follow, monkeypatch, device=DEVICE)


# -- what only a GPU has -----------------------------------------------------------------------


def raw(staging: int = 512 << 20) -> Config:
    """Settings that leave tensors in host memory to the host."""
    return Config.of({"device": {"blocks": "raw", "staging_bytes": staging}})


@pytest.mark.parametrize("edited", ["a", "c", None])
def test_host_and_device_go_together(tmp_path: Path, follow: Follow, edited: str | None) -> None:
    """``c`` and ``s`` lie in host memory: frames that hold them as well wait as lists."""
    run = raw_laws.a_run(tmp_path, "lz4", shares=(0.01,))
    model = {n: t if n in "cs" else t.cuda() for n, t in run.model().items()}
    receiver = follow(model, store=run.store, config=raw())
    stats = receiver.prepare().wait()
    assert stats.raw_frames > 0
    assert "engine" in stats.decoder
    if edited is None:
        receiver.apply()
        assert all_bits(model) == run.versions[1]
        receiver.rollback()
        assert all_bits(model) == run.versions[0]
    else:
        edit(model[edited], raw_laws.touched(run, edited, version=1), 2)
        before = all_bits(model)
        with pytest.raises(StateMismatch):
            receiver.apply()
        assert (receiver.state, all_bits(model)) == ("DIRTY", before)
    run.close()


@both
def test_many_groups_beside_a_model_that_serves(tmp_path: Path, follow: Follow, inner: str) -> None:
    """Sixty-four megabytes through slots of two; torch's memory stays within the budget."""
    g = torch.Generator().manual_seed(4)
    base = {f"w{i}": torch.randn(2048, 1024, generator=g).bfloat16() for i in range(16)}
    run = raw_laws.a_run(
        tmp_path, inner, weights=base, max_bytes=1 << 20, shares=(0.002, 0.002, 0.3)
    )
    model = {name: tensor.cuda() for name, tensor in run.model().items()}
    staging = 12 << 20
    receiver = follow(model, store=run.store, config=raw(staging))
    busy = torch.randn(2048, 2048, device="cuda")
    raw_laws.go(receiver, 1)
    receiver.rollback()
    receiver.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    for version in (1, 2, 3, 2, 1):
        for _ in range(50):  # what serving would have queued
            busy = torch.tanh(busy @ busy)
        stats = raw_laws.go(receiver, version)
        assert stats.raw_frames == len(run._sessions[0].job.plan) >= 64
        assert all_bits(model) == run.versions[version]
        assert receiver.scrub() == version
    tables = torch.cuda.max_memory_allocated() - held
    # all_bits, scrub and the busy model have memory of their own.
    assert tables < staging + (64 << 20)
    before = torch.cuda.memory_allocated()
    for version in (2, 1, 2, 1):
        raw_laws.go(receiver, version)
    assert torch.cuda.memory_allocated() <= before + (1 << 20), "nothing is taken anew"
    run.close()


def test_without_nvcomp_attach_says_so(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = raw_laws.a_run(tmp_path, "lz4", shares=())
    model = {name: tensor.cuda() for name, tensor in run.model().items()}
    nvcomp._library.cache_clear()
    with monkeypatch.context() as patched:
        patched.delattr("nvidia.nvcomp", raising=False)
        patched.setitem(sys.modules, "nvidia.nvcomp", None)
        with pytest.raises(ConfigError, match=r"nvCOMP cannot be imported .*nvidia-nvcomp-cu12"):
            follow(model, store=run.store, config=raw())
    nvcomp._library.cache_clear()
    receiver = follow(model, store=run.store, config=raw())
    assert receiver.version == 0
    run.close()


def test_without_triton_attach_says_so(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = raw_laws.a_run(tmp_path, "lz4", shares=())
    model = {name: tensor.cuda() for name, tensor in run.model().items()}
    monkeypatch.setitem(sys.modules, "weightdelta.kernels.triton_masks", None)
    with pytest.raises(ConfigError, match="raw blocks on a GPU need Triton"):
        follow(model, store=run.store, config=raw())
    run.close()
