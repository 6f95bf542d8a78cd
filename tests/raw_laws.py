"""What a receiver obeys whose frames wait as raw blocks: on a CPU device as on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mask_cases import Failing, Interrupted
from small_runs import SmallRun, Weights, all_bits, edit

from weightdelta import receiver as receiver_module
from weightdelta.codecs import blocks
from weightdelta.config import Config
from weightdelta.errors import DamagedObject, DeviceLost, Dirty, LayoutMismatch, StateMismatch
from weightdelta.receiver import Receiver
from weightdelta.site import Site

Follow = Callable[..., Receiver]

#: Shares of elements that versions 1 to 4 change: a few, all, none, many.
SHARES = (0.002, 1.0, 0.0, 0.3)


def weights() -> Weights:
    """Tensors of every width, some of several blocks, and odd ones."""
    g = torch.Generator().manual_seed(2)
    return {
        "a": torch.randn(300, 257, generator=g).bfloat16(),
        "b": torch.randn(71, 130, generator=g),
        "c": torch.randn(40, 130, generator=g, dtype=torch.float64),
        "d": torch.randn(200, 333, generator=g).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 3),
        "m": torch.rand(9, generator=g) > 0.5,
        "s": torch.tensor(3.0),
    }


def publisher(inner: str, **settings: Any) -> Config:
    """Settings of a run whose frames are blocks."""
    return Config.of({"values": "xor", "codec": f"{inner}+zstd", **settings})


def config(*, blocks: str = "raw", staging: int = 2 << 20, **settings: Any) -> Config:
    """Settings of a receiver that keeps raw blocks."""
    device = {"use": "always", "blocks": blocks, "staging_bytes": staging}
    return Config.of({"device": device, **settings})


def a_run(folder: Path, inner: str, *, shares: tuple[float, ...] = SHARES, **more: Any) -> SmallRun:
    """A run of blocks."""
    options = {"weights": weights(), "config": publisher(inner), "max_bytes": 100_000, **more}
    run = SmallRun(folder, **options)
    for seed, share in enumerate(shares):
        run.step(seed, share=share)
    return run


def on(model: Weights, device: str) -> Weights:
    """The model on a device."""
    return {name: tensor.to(device) for name, tensor in model.items()}


def go(receiver: Receiver, version: int | None = None, *, raw: bool = True) -> Any:
    """Prepare and apply; whether any frame waited raw is what it should be."""
    stats = receiver.prepare(version=version).wait()
    assert (stats.raw_frames > 0) == raw
    assert bool(stats.decoder) == raw
    applied = receiver.apply()
    assert applied.changed == stats.changed
    return stats


def memory_of(receiver: Receiver) -> Any:
    """What the receiver's raw blocks share."""
    found = receiver._sites[0].blocks
    assert found is not None
    return found


@contextmanager
def failing(receiver: Receiver, *, at: int, share: float, error: Any = None) -> Iterator[Failing]:
    """Kernels of which the n-th store in the pause is cut short."""
    memory = memory_of(receiver)
    plain = memory.kernels
    memory.kernels = wrapped = Failing(plain, at=at, share=share, error=error)
    try:
        yield wrapped
    finally:
        memory.kernels = plain


def touched(run: SmallRun, name: str, *, version: int) -> int:
    """The first element of a tensor that a version changes."""
    width = run.base[name].element_size()
    old, new = (
        np.frombuffer(run.versions[v][name], np.uint8).reshape(-1, width)
        for v in (version - 1, version)
    )
    return int(np.flatnonzero((old != new).any(axis=1))[0])


# -- the way forward and back ------------------------------------------------------------------


def follows_bit_for_bit_as_lists_do(
    folder: Path, follow: Follow, *, inner: str, device: str, staging: int
) -> None:
    """Single hops raw, paths of several as lists; every step beside a receiver of lists."""
    run = a_run(folder, inner)
    model, other = on(run.model(), device), on(run.model(), device)
    receiver = follow(model, store=run.store, config=config(staging=staging))
    lists = follow(other, store=run.store, config=config(blocks="lists"))
    for version in (1, 2, 3, 4, 3, 2, 1, 4, 0):
        single = abs(receiver.version - version) == 1
        changes = {receiver.version, version} != {2, 3}
        before = all_bits(model)
        stats = receiver.prepare(version=version).wait()
        assert all_bits(model) == before, "preparing writes nothing"
        assert (stats.raw_frames > 0) == (single and changes)
        assert stats.device_bytes <= staging
        beside = go(lists, version, raw=False)
        assert (stats.changed, stats.hops) == (beside.changed, beside.hops)
        receiver.apply()
        assert all_bits(model) == all_bits(other) == run.versions[version]
        assert receiver.scrub() == version
    go(receiver, 1)
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    run.close()


def memory_is_taken_once(folder: Path, follow: Follow, *, device: str) -> None:
    """Slots and host memory stay where they are from version to version; release gives back."""
    run = a_run(folder, "lz4", shares=())
    for step in range(6):
        for name in ("a", "b", "c"):
            run.live[name].view(torch.uint8).reshape(-1)[::500] ^= 1 << step
        run.publish()
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    seen = []
    for version in range(1, 7):
        stats = go(receiver, version)
        memory = memory_of(receiver)
        assert receiver._undo is not None
        (update,) = receiver._undo.staged.devices[0]._blocks
        seen.append((update._host.data_ptr(), memory.masks[0].data_ptr()))
        assert stats.pinned_bytes == len(update._host) + len(update._tables) > 0
        assert stats.device_bytes == update.own_bytes + memory.nbytes
    assert len(set(seen[:2])) == 2, "an update and the way back"
    assert seen[2:] == seen[:2] * 2
    receiver.release()
    assert memory.nbytes == 0
    assert not any(memory._free.values())
    go(receiver, 5)
    assert all_bits(model) == run.versions[5]
    run.close()


def a_part_is_followed(folder: Path, follow: Follow, *, device: str) -> None:
    """Frames that hold tensors of others wait as lists."""
    run = a_run(folder, "snappy")
    whole = on(run.model(), device)
    model = {name: whole[name] for name in ("a", "c", "s")}
    receiver = follow(model, store=run.store, config=config(), partial=True)
    for version in (1, 2, 1):
        go(receiver, version)
        assert all_bits(model) == {n: run.versions[version][n] for n in model}
    run.close()


# -- what is not as it should be ---------------------------------------------------------------


def edits_are_found(folder: Path, follow: Follow, *, inner: str, device: str) -> None:
    """Before a preparation by its dry run; after it by the pause, which puts all of it back."""
    run = a_run(folder, inner, shares=(0.01, 0.01))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    for name in ("a", "b", "c", "d"):
        edit(model[name], touched(run, name, version=1), 2)
        with pytest.raises(StateMismatch, match=f"'{name}'"):
            receiver.prepare(version=1).wait()
        edit(model[name], touched(run, name, version=1), 2)
        receiver.attach()
        receiver.prepare(version=1).wait()
        edit(model[name], touched(run, name, version=1), 2)
        edited = all_bits(model)
        with pytest.raises(StateMismatch, match=r"edited after prepare.*Nothing was changed"):
            receiver.apply()
        assert (receiver.state, all_bits(model)) == ("DIRTY", edited)
        with pytest.raises(Dirty):
            receiver.prepare()
        edit(model[name], touched(run, name, version=1), 2)
        assert receiver.attach() == 0
    go(receiver, 1)
    edit(model["d"], touched(run, "d", version=1))
    edited = all_bits(model)
    with pytest.raises(StateMismatch, match="Nothing was changed"):
        receiver.rollback()
    assert (receiver.state, all_bits(model)) == ("DIRTY", edited)
    run.close()


def unsound_blocks_are_refused(
    folder: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, *, inner: str, device: str
) -> None:
    """A trainer that writes bad blocks, under sound hashes: nothing reaches a device's decoder."""
    pack = blocks.pack

    def bad(*args: Any, **more: Any) -> blocks.Blocks:
        found = pack(*args, **more)
        arena = found.arena.copy()
        arena[-30:] = 255
        return blocks.Blocks(found.inner, found.size, found.sizes, arena)

    run = a_run(folder, inner, shares=(0.01,))
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "pack", bad)
        with pytest.raises((DamagedObject, StateMismatch)):  # once it has been committed
            run.step(7, share=0.01)
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    go(receiver, 1)
    with pytest.raises(DamagedObject, match=f"damaged {inner} block"):
        receiver.prepare(version=2).wait()
    assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[1])
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    run.close()


def sound_blocks_of_something_else_are_refused(
    folder: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, *, device: str
) -> None:
    """The index says what the digests must become; blocks that say otherwise are not applied."""
    pack = blocks.pack

    def other(planes: Any, **more: Any) -> blocks.Blocks:
        planes.values[...] ^= planes.values.dtype.type(64)
        found = pack(planes, **more)
        planes.values[...] ^= planes.values.dtype.type(64)
        return found

    run = a_run(folder, "lz4", shares=())
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "pack", other)
        with pytest.raises(StateMismatch, match="baseline"):  # once it has been committed
            run.step(7, share=0.01)
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    with pytest.raises(StateMismatch, match="expected its digest to change by"):
        receiver.prepare(version=1).wait()
    assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[0])
    run.close()


def a_lost_device_leaves_dirty_weights(folder: Path, follow: Follow, *, device: str) -> None:
    run = a_run(folder, "snappy", shares=(0.01,))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    receiver.prepare().wait()
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with failing(receiver, at=1, share=0.5, error=lost), pytest.raises(DeviceLost):
        receiver.apply()
    assert receiver.state == "DIRTY"
    for name, tensor in run.model().items():
        model[name].copy_(tensor)
    assert receiver.attach() == 0
    go(receiver, 1)
    assert all_bits(model) == run.versions[1]
    run.close()


# -- interruptions -----------------------------------------------------------------------------


def an_interrupted_move_is_finished_by_another(
    folder: Path, follow: Follow, *, inner: str, device: str
) -> None:
    """After any group of either way, in its middle or at its end: exactly, never twice."""
    run = a_run(folder, inner, shares=(0.01,))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config(staging=1 << 20))
    for at in range(100):
        share = (0.0, 0.5, 1.0)[at % 3]
        receiver.prepare(version=1).wait()
        with failing(receiver, at=at, share=share) as kernels:
            try:
                receiver.apply()
            except Interrupted:
                assert receiver.state == "APPLYING"
                with pytest.raises(Dirty, match="call apply"):
                    receiver.prepare()
            kernels.left = at  # once more, in the pass that should end it
            if receiver.state == "APPLYING":
                with pytest.raises(Interrupted):
                    receiver.apply()
        ended = receiver.state == "CLEAN"
        if not ended:
            receiver.apply()
        assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[1])
        with failing(receiver, at=at, share=share):
            try:
                receiver.rollback()
            except Interrupted:
                assert receiver.state == "APPLYING"
        if receiver.state == "APPLYING":
            receiver.apply()
        assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[0])
        if ended:
            break
    assert at > 2, "there was more than one group to interrupt"
    run.close()


def two_sites(
    monkeypatch: pytest.MonkeyPatch, device: str, *, second: tuple[str, ...] = ("c", "d")
) -> None:
    """Two sites on one device stand in for two devices."""

    def split(residents: Any, *, layout: Any, config: Any) -> list[Site]:
        found = [r for r in residents if r.on_device]
        groups = [[r for r in found if (r.name in second) == late] for late in (False, True)]
        where = found[0].source.device
        return [Site(g, device=where, layout=layout, config=config) for g in groups]

    del device
    monkeypatch.setattr(receiver_module, "sites_of", split)


def devices_go_together(
    folder: Path,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str,
    edited: str,
    strided: bool,
) -> None:
    """A mismatch on one puts the other back, and lists and blocks of one device likewise."""
    two_sites(monkeypatch, device)
    run = a_run(folder, "lz4", shares=(0.01,))
    model = on(run.model(), device)
    if strided:
        for name in ("b", "c"):
            model[name] = model[name].T.contiguous().T
    receiver = follow(model, store=run.store, config=config())
    stats = receiver.prepare().wait()
    assert stats.raw_frames > 0
    edit(model[edited], touched(run, edited, version=1), 2)
    before = all_bits(model)
    with pytest.raises(StateMismatch, match="put back"):
        receiver.apply()
    assert (receiver.state, all_bits(model)) == ("DIRTY", before)
    run.close()


def an_interruption_between_devices(
    folder: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, *, device: str, blocks: str
) -> None:
    """One device has ended when the wait for the other is cut short: both end the next time."""
    two_sites(monkeypatch, device)
    run = a_run(folder, "lz4", shares=(0.01,))
    model = on(run.model(), device)
    # As lists, all of it is streamed: what is there already is then no longer looked at.
    staging = (2 << 20) if blocks == "raw" else (64 << 10)
    receiver = follow(model, store=run.store, config=config(blocks=blocks, staging=staging))
    step = receiver.prepare()
    step.wait()
    last = step._future.result().staged.devices[1]
    with monkeypatch.context() as patched:

        def cut(**_: bool) -> None:
            raise Interrupted

        patched.setattr(last, "finish", cut)
        with pytest.raises(Interrupted):
            receiver.apply()
    assert receiver.state == "APPLYING"
    receiver.apply()
    assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[1])
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    run.close()


# -- what waits as lists nevertheless ----------------------------------------------------------


def strided_weights_wait_as_lists(folder: Path, follow: Follow, *, device: str) -> None:
    """And with them all of their frames; the others wait raw beside them."""
    run = a_run(folder, "snappy", shares=(0.01, 1.0))
    model = on(run.model(), device)
    model["a"] = model["a"].T.contiguous().T
    receiver = follow(model, store=run.store, config=config())
    for version in (1, 2, 1):
        stats = receiver.prepare(version=version).wait()
        (staged,) = receiver._preparation._future.result().staged.devices  # type: ignore[union-attr]
        raw = sum(update.changed for update in staged._blocks)
        assert 0 < raw < stats.changed == raw + staged._lists.changed
        receiver.apply()
        assert all_bits(model) == run.versions[version]
    receiver.rollback()
    assert all_bits(model) == run.versions[2]
    run.close()


def tied_weights_wait_as_lists(folder: Path, follow: Follow, *, device: str) -> None:
    """They change alike or not at all."""
    w = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    base = {"embed": w, "head": w.clone(), "rest": torch.zeros(30_000, dtype=torch.int16)}
    run = a_run(folder, "lz4", weights=base, shares=())
    for tensor in run.live.values():
        tensor[1::7] += 1
    run.publish()
    run.live["embed"][0] += 1
    run.publish()
    model = {"embed": w.clone().to(device), "rest": base["rest"].to(device)}
    model["head"] = model["embed"]
    receiver = follow(model, store=run.store, config=config())
    go(receiver, 1)
    assert all_bits(model) == run.versions[1]
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    go(receiver, 1)
    with pytest.raises(LayoutMismatch, match="'embed' and 'head' share memory"):
        receiver.prepare(version=2).wait()
    run.close()


def every_codec_beside_each_other(folder: Path, follow: Follow, *, device: str) -> None:
    """Both bitstreams wait raw, each with a decoder of its own; the other codecs as lists."""
    codecs = {"a": "snappy+zstd", "b": "lz4+zstd", "c": "zstd", "d": "sparse+zstd"}
    settings = publisher("lz4", codec_by_tensor=codecs)
    run = a_run(folder, "lz4", config=settings, shares=(0.01, 1.0, 0.2))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    for version in (1, 2, 3):
        receiver.prepare(version=version).wait()
        (staged,) = receiver._preparation._future.result().staged.devices  # type: ignore[union-attr]
        assert len(staged._blocks) == 2
        assert staged._lists.changed > 0
        receiver.apply()
        assert all_bits(model) == run.versions[version]
    receiver.rollback()
    assert all_bits(model) == run.versions[2]
    run.close()


def staged_memory_keeps_to_its_budget(
    folder: Path, follow: Follow, *, device: str, staging: int
) -> None:
    """Slots, tables and lists together; frames that no slot holds wait as lists."""
    run = a_run(folder, "snappy", shares=(0.01, 0.6, 0.6))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config(staging=staging))
    for version in (1, 2, 3, 2):
        stats = receiver.prepare(version=version).wait()
        assert stats.device_bytes <= staging
        older = receiver._undo.staged.devices[0].list_bytes if receiver._undo else 0
        assert stats.device_bytes + older <= staging
        assert (stats.raw_frames > 0) == (staging >= 900_000)
        receiver.apply()
        assert all_bits(model) == run.versions[version]
    receiver.rollback()
    assert all_bits(model) == run.versions[3]
    run.close()


def without_room_for_slots_there_are_lists(
    folder: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, *, device: str
) -> None:
    run = a_run(folder, "snappy", shares=(0.01, 0.6))
    model = on(run.model(), device)
    receiver = follow(model, store=run.store, config=config())
    memory = memory_of(receiver)
    with monkeypatch.context() as patched:

        def full(size: int) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"no {size} bytes, for once")

        patched.setattr(memory, "_slot", full)
        go(receiver, 1, raw=False)
    assert all_bits(model) == run.versions[1]
    go(receiver, 2)
    assert all_bits(model) == run.versions[2]
    run.close()
