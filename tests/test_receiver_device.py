"""The receiver through the device pipeline: the same weights, states and errors as on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SmallRun, Weights, all_bits, edit

from weightdelta import decode_batch, lent_memory, stage_device
from weightdelta import receiver as receiver_module
from weightdelta.config import Config
from weightdelta.decode import Stager
from weightdelta.decode_batch import decode_all
from weightdelta.errors import DeviceLost, DeviceMemory, Dirty, LayoutMismatch, StateMismatch
from weightdelta.fetch import Fetched
from weightdelta.receiver import Receiver
from weightdelta.site import Site

Follow = Callable[..., Receiver]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the sampler's weights lie."""
    if request.param == "cpu":  # not Triton's interpreter, which takes minutes and one thread
        monkeypatch.setenv("WEIGHTDELTA_DEVICE_KERNELS", "torch_ops")
    found: str = request.param
    return found


def on(model: Weights, device: str) -> Weights:
    """The model on a device."""
    return {name: tensor.to(device) for name, tensor in model.items()}


#: Everything staged in device memory, or everything streamed in the pause.
MODES = {"staged": 512 << 20, "streamed": 64 << 10}


def config(mode: str = "staged", **settings: Any) -> Config:
    """Settings that send host tensors through the device pipeline."""
    return Config.of({"device": {"use": "always", "staging_bytes": MODES[mode]}, **settings})


@pytest.fixture(params=sorted(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    """Where staged lists wait."""
    found: str = request.param
    return found


@pytest.fixture
def start(follow: Follow, mode: str) -> Follow:
    """Makes receivers that use the device pipeline."""

    def make(model: Any, **options: Any) -> Receiver:
        return follow(model, **{"config": config(mode), **options})

    return make


def _go(receiver: Receiver, version: int | None = None) -> None:
    receiver.prepare(version=version).wait()
    receiver.apply()


def test_every_pair_of_versions(run: SmallRun, start: Follow, device: str) -> None:
    """One hop and several, forward and back; preparing writes nothing."""
    for first in range(4):
        for last in range(4):
            model = on(run.model(first), device)
            receiver = start(model, store=run.store)
            assert receiver.version == first
            stats = receiver.prepare(version=last).wait()
            assert all_bits(model) == run.versions[first]
            assert receiver.apply().integrity == "verified"
            assert (receiver.version, all_bits(model)) == (last, run.versions[last])
            assert receiver.scrub() == last
            assert (stats.pinned_bytes > 0) == (stats.changed > 0 and receiver._sites[0].config
                                                .staging_bytes < 1 << 20)  # fmt: skip


@pytest.mark.parametrize("blocks", [0, 1, 24])
def test_planes_go_down_from_lent_memory_or_through_a_buffer(
    run: SmallRun, start: Follow, device: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of a batch, all or none: nobody waits for memory that the waiting one gives back."""
    monkeypatch.setattr(lent_memory, "BLOCKS", blocks)
    monkeypatch.setattr(decode_batch, "_FRAMES", 2)
    lent: list[bool] = []

    def batches(*args: Any, **more: Any) -> Any:
        for item in decode_all(*args, **more):
            lent.append(item.lent)
            yield item

    monkeypatch.setattr(stage_device, "decode_all", batches)
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    for version in (1, 0, 1, 2):
        _go(receiver, version)
        assert all_bits(model) == run.versions[version]
    assert any(lent) == (blocks > 0)
    assert receiver.scrub() == 2


def test_a_frame_is_decoded_only_for_the_memory_that_its_tensors_lie_in(
    run: SmallRun, start: Follow, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding all of it for the host as well was most of a device's preparation."""
    seen: dict[str, set[int]] = {"host": set(), "device": set()}

    def note(where: str, fetched: Fetched) -> None:
        seen[where] |= {frame for frame, _ in fetched.frames}

    def host(self: Any, fetched: Fetched) -> Any:
        note("host", fetched)
        return decode(self, fetched)

    def batches(fetched: Fetched, *args: Any, **more: Any) -> Any:
        note("device", fetched)
        return decode_all(fetched, *args, **more)

    decode = Stager._decode
    monkeypatch.setattr(Stager, "_decode", host)
    monkeypatch.setattr(stage_device, "decode_all", batches)
    model = on(run.model(), device)
    _go(start(model, store=run.store), 1)
    assert all_bits(model) == run.versions[1]
    assert seen["host"] == set()
    assert seen["device"]


@pytest.mark.parametrize("codec", ["sparse+zstd", "snappy+zstd", "lz4+zstd", "zstd", "none"])
def test_every_codec_and_density(tmp_path: Path, start: Follow, codec: Any, device: str) -> None:
    run = SmallRun(tmp_path, config=Config.of({"values": "xor", "codec": codec}), max_bytes=96)
    for seed, share in enumerate([0.05, 1.0, 0.0, 0.5]):
        run.step(seed, share=share)
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    for version in (1, 2, 3, 4, 0):
        _go(receiver, version)
        assert all_bits(model) == run.versions[version]
    run.close()


def test_differences_and_xors_in_one_path(run: SmallRun, start: Follow, device: str) -> None:
    run.open(config=Config.of({"values": "xor"}), ranks=3, max_bytes=32)
    run.step(7, share=0.5)
    run.open(ranks=1, max_bytes=4096)
    run.step(8, share=0.5)
    for first, last in ((0, 5), (3, 5), (5, 0), (4, 2)):
        model = on(run.model(first), device)
        _go(start(model), last)
        assert all_bits(model) == run.versions[last]


def test_strided_parameters_and_views(tmp_path: Path, start: Follow, device: str) -> None:
    g = torch.Generator().manual_seed(3)
    base = {"weight": torch.randn(6, 8, generator=g), "bias": torch.randn(7, generator=g)}
    run = SmallRun(tmp_path, weights=base)
    run.step(1, share=0.7)
    memory = torch.zeros(100, device=device)
    bias = memory[3:10].copy_(base["bias"])
    model = {"weight": base["weight"].to(device).T.contiguous().T, "bias": bias}
    receiver = start(model, store=run.store)
    _go(receiver)
    assert all_bits(model) == run.versions[1]
    assert not memory[:3].any()
    assert not memory[10:].any()
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    run.close()


def test_back_and_forward_again(run: SmallRun, start: Follow, device: str) -> None:
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    _go(receiver, 1)
    _go(receiver)
    receiver.prepare(version=2).wait()
    assert receiver.rollback().version == 1
    assert all_bits(model) == run.versions[1]
    _go(receiver)
    assert all_bits(model) == run.versions[3]


def _changed(run: SmallRun, name: str, *, width: int) -> int:
    """The first element of a tensor that version 1 changes."""
    before, after = run.versions[0][name], run.versions[1][name]
    return next(i for i in range(len(before)) if before[i] != after[i]) // width


def test_weights_edited_before_and_after_prepare(run: SmallRun, start: Follow, device: str) -> None:
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    first = _changed(run, "a", width=2)
    edit(model["a"], first)
    with pytest.raises(StateMismatch, match="'a'"):
        receiver.prepare(version=1).wait()
    edit(model["a"], first)
    receiver.attach()
    preparation = receiver.prepare(version=1)
    preparation.wait()
    edit(model["b"], _changed(run, "b", width=4), 1 << 20)
    with pytest.raises(StateMismatch, match="edited after prepare"):
        receiver.apply()
    assert receiver.state == "DIRTY"
    others = {n: b for n, b in all_bits(model).items() if n != "b"}
    assert others == {n: b for n, b in run.versions[0].items() if n != "b"}, "put back"
    with pytest.raises(Dirty):
        receiver.prepare()
    model["b"].copy_(run.model()["b"])
    assert receiver.attach() == 0
    _go(receiver)
    assert all_bits(model) == run.versions[3]


@contextmanager
def _launches(site: Any, *, fail_at: int, error: Exception) -> Iterator[None]:
    """A device whose kernels store, but whose n-th launch in the pause fails."""
    count = 0

    plain = site.ops

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def scatter(self, *args: Any, **options: Any) -> None:
            nonlocal count
            count += 1
            if count == fail_at:
                raise error
            plain.scatter(*args, **options)

    site.ops = Failing()
    try:
        yield
    finally:
        site.ops = plain


def test_an_interrupted_apply_is_finished_by_another(
    run: SmallRun, start: Follow, device: str
) -> None:
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    receiver.prepare().wait()
    with (
        _launches(receiver._sites[0], fail_at=3, error=KeyError("interrupted")),
        pytest.raises(KeyError),
    ):
        receiver.apply()
    assert receiver.state == "APPLYING"
    assert all_bits(model) not in run.versions
    receiver.apply()
    assert (receiver.state, all_bits(model)) == ("CLEAN", run.versions[3])
    receiver.rollback()
    assert all_bits(model) == run.versions[0]


def test_a_failed_launch_leaves_dirty_weights(run: SmallRun, start: Follow, device: str) -> None:
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    receiver.prepare().wait()
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with _launches(receiver._sites[0], fail_at=2, error=lost), pytest.raises(DeviceLost):
        receiver.apply()
    assert receiver.state == "DIRTY"
    for name, tensor in run.model().items():
        model[name].copy_(tensor)
    assert receiver.attach() == 0
    _go(receiver)
    assert all_bits(model) == run.versions[3]


def test_out_of_memory_while_staging_goes_on_in_smaller_batches(
    run: SmallRun, follow: Follow, device: str
) -> None:
    model = on(run.model(), device)
    receiver = follow(model, config=config())
    plain = receiver._sites[0].ops

    class Small:
        """A device that stages few changes at once."""

        most = 6

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def stage(self, planes: Any, **options: Any) -> Any:
            if len(planes.values) > self.most:
                raise torch.OutOfMemoryError("out of memory, for once")
            return plain.stage(planes, **options)

    receiver._sites[0].ops = small = Small()
    _go(receiver, 1)
    assert all_bits(model) == run.versions[1]
    small.most = 0
    with pytest.raises(DeviceMemory, match="no room left"):
        receiver.prepare(version=2).wait()
    assert all_bits(model) == run.versions[1]


def test_tied_weights_change_together_or_not_at_all(
    tmp_path: Path, start: Follow, device: str
) -> None:
    w = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    run = SmallRun(tmp_path, weights={"embed": w, "head": w.clone()})
    for tensor in run.live.values():
        tensor[1] += 1
    run.publish()
    run.live["embed"][0] += 1
    run.publish()
    model = {"embed": w.clone().to(device)}
    model["head"] = model["embed"]
    receiver = start(model, store=run.store)
    _go(receiver, 1)
    assert all_bits(model) == run.versions[1]
    with pytest.raises(LayoutMismatch, match="'embed' and 'head' share memory"):
        receiver.prepare(version=2).wait()
    run.close()


def test_a_part_is_followed(run: SmallRun, start: Follow, device: str) -> None:
    whole = on(run.model(), device)
    model = {"a": whole["a"], "s": whole["s"]}
    receiver = start(model, partial=True)
    for version in (1, 3, 2):
        receiver.prepare(version=version).wait()
        assert receiver.apply().integrity == "partial"
        assert all_bits(model) == {n: run.versions[version][n] for n in model}


def test_two_updates_share_the_budget_with_the_way_back(
    tmp_path: Path, follow: Follow, device: str
) -> None:
    """The way back moves to host memory where both do not fit, and still leads back."""
    weights = {"w": torch.zeros(60_000)}
    run = SmallRun(tmp_path, weights=weights, max_bytes=32_768)
    run.step(1, share=0.6)
    run.step(2, share=0.6)
    model = on(run.model(), device)
    tight = config()
    tight = tight.model_copy(
        update={"device": tight.device.model_copy(update={"staging_bytes": 1_000_000})}
    )
    receiver = follow(model, config=tight, store=run.store)
    _go(receiver, 1)
    assert receiver._undo is not None
    first = receiver._undo.staged
    assert first.device_bytes
    receiver.prepare().wait()
    assert first.pinned_bytes
    receiver.rollback()
    assert all_bits(model) == run.versions[0]
    _go(receiver)
    assert all_bits(model) == run.versions[2]
    run.close()


@pytest.mark.parametrize("edited", ["a", "m"])
def test_devices_that_have_finished_are_put_back_when_another_finds_a_mismatch(
    run: SmallRun,
    start: Follow,
    device: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    edited: str,
) -> None:
    """Two sites on one device stand in for two devices; streamed lists store before they look."""

    def two(residents: Any, *, layout: Any, config: Any) -> list[Site]:
        found = [r for r in residents if r.on_device]
        return [
            Site(group, device=torch.device(device), layout=layout, config=config)
            for group in (found[:2], found[2:])
        ]

    monkeypatch.setattr(receiver_module, "sites_of", two)
    model = on(run.model(), device)
    receiver = start(model, store=run.store)
    receiver.prepare(version=3).wait()
    changed = [
        i
        for i, (old, new) in enumerate(
            zip(run.versions[0][edited], run.versions[3][edited], strict=True)
        )
        if old != new
    ]
    edit(model[edited], changed[0] // model[edited].element_size(), 2)
    before = all_bits(model) if mode == "staged" else run.versions[0]
    with pytest.raises(StateMismatch, match="put back"):
        receiver.apply()
    assert receiver.state == "DIRTY"
    assert all_bits(model) == before
