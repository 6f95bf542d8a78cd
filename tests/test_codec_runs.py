"""Whole runs under every codec, mixed within a delta and along a chain: bit for bit, both ways."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from ranks import POOL, Rank, content, job_for, same, save, wire
from small_runs import SmallRun, Weights, all_bits

import weightdelta as wd
from weightdelta.codecs import stock
from weightdelta.codecs.blocks import BLOCK_BYTES, Inner, block_lengths
from weightdelta.codecs.names import Codec
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader
from weightdelta.errors import ConfigError, DamagedObject, InputError, UnsupportedFormat
from weightdelta.log import Log
from weightdelta.receiver import Receiver
from weightdelta.verify import verify

CODECS: tuple[Codec, ...] = get_args(Codec)
QUIET = Config.of({"threads": 1, "store": {"threads": 1, "fsync": False}})
MIXED = {"a": "lz4+zstd", "b": "zstd", "m": "none", "large.?": "sparse+zstd"}


def _settings(codec: Codec = "sparse+zstd", **more: Any) -> Config:
    return Config.of({"values": "xor", "codec": codec, **more})


def _weights() -> Weights:
    g = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(12, 10, generator=g).bfloat16(),
        "b": torch.randn(7, generator=g),
        "e": torch.zeros(0, 3),
        "large.0": torch.randn(200, 130, generator=g),
        "large.1": torch.randn(70_000, generator=g).bfloat16(),
        "m": torch.rand(9, generator=g) > 0.5,
        "rest": torch.randn(40_000, generator=g).bfloat16(),
        "s": torch.tensor(3.0, dtype=torch.float64),
    }


def _run(folder: Path, config: Config, **more: Any) -> SmallRun:
    return SmallRun(folder, config=config, weights=_weights(), **more)


def _delta(run: SmallRun, version: int) -> Delta:
    log = Log(run.store)
    log.refresh()
    reader = DeltaReader(run.store, config=QUIET)
    assert log.opened is not None
    return reader.delta(log.versions[version], layout=reader.layout(log.opened.layout))


def _follow(run: SmallRun, versions: Iterator[int] | list[int], *, start: int = 0) -> None:
    """One receiver from version to version, compared with what the trainer had."""
    model = run.model(start)
    receiver = Receiver(run.store, model, config=QUIET)
    try:
        for version in versions:
            receiver.prepare(version=version).wait()
            assert receiver.apply().version == version
            assert all_bits(model) == run.versions[version]
        receiver.rollback()
    finally:
        receiver.close()


def _whole(run: SmallRun) -> None:
    found = verify(run.store, config=QUIET, deep=True, base=run.checkpoint)
    assert found.problems == []
    assert found.frames > 0


@pytest.mark.parametrize("max_bytes", [64, 1 << 18])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_carries_a_run(codec: Codec, max_bytes: int, tmp_path: Path) -> None:
    weights = {k: v for k, v in _weights().items() if max_bytes > 64 or v.numel() < 200}
    run = SmallRun(tmp_path, config=_settings(codec), weights=weights, max_bytes=max_bytes)
    for seed, share in enumerate((0.003, 0.15, 0.17, 0.9)):
        run.step(seed, share=share)
    run.publish()  # nothing changed
    run.close()
    assert {_delta(run, v).entry.codec for v in range(1, 6)} == {codec}
    _follow(run, [1, 2, 3, 4, 5, 0, 4])
    _whole(run)


def test_tensors_with_codecs_of_their_own_share_a_delta(tmp_path: Path) -> None:
    run = _run(tmp_path, _settings("snappy+zstd", codec_by_tensor=MIXED), max_bytes=1 << 18)
    for seed in range(3):
        run.step(seed, share=0.5)
    run.close()
    delta = _delta(run, 2)
    assert delta.entry.codec == "lz4+zstd,none,snappy+zstd,sparse+zstd,zstd"
    names = [t.name for t in delta.layout.tensors]
    config = _settings("snappy+zstd", codec_by_tensor=MIXED)
    found = set()
    for frame in np.flatnonzero(delta.index.changed).tolist():
        for segment in delta.plan.frame(frame).segments:
            name = names[segment.tensor]
            assert delta.index.codec_of(frame) == config.codec_for(name), name
            found.add(name)
    assert found >= {"a", "b", "large.0", "large.1", "m", "rest"}
    _follow(run, [3, 1, 2, 0])
    _whole(run)


def test_a_chain_may_change_its_codec_with_every_publication(tmp_path: Path) -> None:
    """By the call, and by restarts with other settings, ranks and plans; differences between."""
    run = _run(tmp_path, _settings(), max_bytes=1 << 18)
    for seed, codec in enumerate(CODECS):
        run.step(seed, share=0.01, codec=codec)
    for config, ranks in (
        (Config(), 1),
        (_settings("lz4+zstd", codec_by_ref={"rollout": "zstd"}), 3),
        (_settings("snappy+zstd", codec_by_tensor=MIXED), 2),
    ):
        run.open(config=config, ranks=ranks, max_bytes=1 << 17)
        run.step(ranks, share=0.01)
    run.close()
    codecs = [_delta(run, v).entry.codec for v in range(1, 9)]
    assert codecs[:7] == [*CODECS, "sparse+zstd", "zstd"]
    assert codecs[7].count("+zstd") == 3
    _follow(run, [8, 0, 3, 7, 8, 5])
    _follow(run, [8, 1], start=4)
    _whole(run)


def test_a_patterns_codec_outlasts_the_calls(tmp_path: Path) -> None:
    run = _run(tmp_path, _settings(codec_by_tensor=MIXED), max_bytes=1 << 18)
    run.step(1, share=0.5, codec="snappy+zstd")
    run.close()
    delta = _delta(run, 1)
    assert delta.entry.codec == "lz4+zstd,none,snappy+zstd,sparse+zstd,zstd"
    _follow(run, [1])


@pytest.mark.parametrize("codec", CODECS)
def test_baselines_advance_by_frames_of_every_codec(codec: Codec, tmp_path: Path) -> None:
    """What is kept decodes to the live bytes; what was edited is found."""
    live = _weights()
    base = save(tmp_path, live)
    config = _settings(codec, codec_by_tensor={"a": "lz4+zstd"})
    rank = Rank(job_for(live, base, config=config, max_bytes=1 << 18))
    for seed in range(2):
        live["a"][seed] *= 2
        live["large.0"][seed] += 1
        live["rest"][seed::50] *= -1
        frames = rank.encode(live)
        assert {f.codec for f in frames if f.changed} == {codec, "lz4+zstd"}
        rank.baseline.advance(frames, version=seed + 1)
        assert same(content([rank.baseline]), wire(live, rank.job.layout))
    live["a"][5] *= 2
    hit = next(f for f in rank.encode(live) if f.changed)
    hit.data = hit.data[:-1]
    with pytest.raises(DamagedObject, match=f"frame {hit.frame} kept for the baseline"):
        rank.baseline.advance([hit], version=3)
    assert not rank.baseline.usable


@pytest.mark.parametrize("inner", ["snappy", "lz4"])
def test_fetched_frames_become_blocks_while_serving(inner: Inner, tmp_path: Path) -> None:
    """Out of a store, by what any decoder reads, to the mask between two versions."""
    run = _run(tmp_path, _settings(codec_by_tensor={"b": "none"}), max_bytes=1 << 18)
    run.step(1, share=0.02)
    run.close()
    delta = _delta(run, 1)
    reader = DeltaReader(run.store, config=QUIET)
    checked = 0
    for frame, data in reader.frames(delta, range(len(delta.plan))):
        blocks = delta.blocks(frame, data, inner=inner)
        mask, at = b"", 0
        for length, size in zip(
            block_lengths(blocks.size).tolist(), blocks.sizes.tolist(), strict=True
        ):
            out = np.zeros(length, np.uint8)
            if size:
                part = blocks.arena[at : at + size]
                stock.decompress(part, out=out, inner=inner, where="test")
            at += size
            mask += out.tobytes()
        for segment in delta.plan.frame(frame).segments:
            spec = delta.layout.tensors[segment.tensor]
            part = slice(segment.first * spec.width, (segment.first + segment.run) * spec.width)
            assert segment.rows == 1
            old, new = (np.frombuffer(v[spec.name][part], np.uint8) for v in run.versions)
            assert mask[: len(old)] == (old ^ new).tobytes()
            mask = mask[len(old) :]
        assert not mask
        checked += len(blocks.sizes)
    assert checked > delta.layout.nbytes // BLOCK_BYTES


def test_blocks_of_differences_are_refused(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.step(1)
    run.close()
    delta = _delta(run, 1)
    frame, data = next(DeltaReader(run.store, config=QUIET).frames(delta, range(len(delta.plan))))
    with pytest.raises(InputError, match="publish with `values: xor`"):
        delta.blocks(frame, data, inner="lz4")


def test_an_entry_names_the_codecs_of_its_frames(tmp_path: Path) -> None:
    run = _run(tmp_path, _settings("lz4+zstd"))
    run.step(1)
    run.close()
    delta = _delta(run, 1)
    reader = DeltaReader(run.store, config=QUIET)
    more = replace(delta.entry, codec="lz4+zstd,none")
    assert reader.delta(more, layout=delta.layout).entry is more
    with pytest.raises(DamagedObject, match=r"index: expected frames of none, found lz4\+zstd"):
        reader.delta(replace(delta.entry, codec="none"), layout=delta.layout)
    for entry in (
        replace(delta.entry, codec="brotli,lz4+zstd"),
        replace(delta.entry, values="diff"),
    ):
        with pytest.raises(UnsupportedFormat, match=r"version 1: codec '.*use a newer"):
            reader.delta(entry, layout=delta.layout)


def test_a_publisher_takes_a_codec_for_one_publication(tmp_path: Path) -> None:
    live = {"w": torch.randn(300, 300), "b": torch.zeros(8, dtype=torch.bfloat16)}
    base = save(tmp_path, {k: v.clone() for k, v in live.items()})
    model = {k: v.clone() for k, v in live.items()}
    config = wd.Config.of({"values": "xor", "store": {"fsync": False}})
    publisher = wd.Publisher(str(tmp_path / "run"), live, base=base.path, config=config)
    try:
        for step, codec in enumerate((None, "lz4+zstd", "snappy+zstd")):
            live["w"][step] += 1
            publisher.publish(step=step, codec=codec).wait(60)
    finally:
        publisher.close()
    receiver = wd.Receiver(str(tmp_path / "run"), model)
    receiver.prepare().wait()
    receiver.apply()
    receiver.close()
    assert all_bits(model) == all_bits(live)
    log = Log(publisher._store)
    log.refresh()
    codecs = [entry.codec for entry in log.versions.values()]
    assert codecs == ["sparse+zstd", "lz4+zstd", "snappy+zstd"]


def test_a_codec_that_does_not_fit_captures_nothing(tmp_path: Path) -> None:
    live = {"w": torch.randn(30)}
    base = save(tmp_path, live)
    config = wd.Config.of({"store": {"fsync": False}})
    publisher = wd.Publisher(str(tmp_path / "run"), live, base=base.path, config=config)
    try:
        with pytest.raises(ConfigError, match="needs values 'xor'"):
            publisher.publish(codec="zstd")
        assert publisher.publish().wait(60).version == 1
    finally:
        publisher.close()


def test_the_pool_of_a_rank_encodes_every_codec_alike(tmp_path: Path) -> None:
    """Frames of several codecs on several threads: scratch memory is no one else's."""
    from concurrent.futures import ThreadPoolExecutor

    from weightdelta.encode import encode

    live = _weights()
    base = save(tmp_path, live)
    config = _settings("lz4+zstd", codec_by_tensor=MIXED)
    rank = Rank(job_for(live, base, config=config, max_bytes=1 << 14))
    for tensor in live.values():
        if tensor.is_floating_point():
            tensor.mul_(torch.where(torch.rand(tensor.shape) < 0.3, -1.0, 1.0).to(tensor.dtype))
    planes = rank.capture(live)
    one = encode(planes, baseline=rank.baseline, pool=POOL, config=config)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            many = encode(planes, baseline=rank.baseline, pool=pool, config=config)
            assert [f.data for f in many] == [f.data for f in one]
