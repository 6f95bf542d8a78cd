"""Four FSDP2 ranks through attach, against torch's own gather, byte for byte."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdpjob
import pytest
import ray
import torch
from rayjobs import LONG, SETTINGS
from safetensors.torch import load_file

import weightdelta as wd
from weightdelta.config import Config
from weightdelta.store import Store
from weightdelta.verify import verify


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    return fsdpjob.save_base(folder)


@pytest.fixture
def ranks(cluster: None, base: Path) -> Iterator[list[Any]]:  # noqa: ARG001 (starts Ray)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    actor = ray.remote(fsdpjob.ShardedTrainer).options(num_cpus=0)
    handles = [
        actor.remote(rank, address=address, folder=str(base)) for rank in range(fsdpjob.WORLD)
    ]
    yield handles
    for handle in handles:
        ray.kill(handle)


def as_bytes(model: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in model.items()}


def test_every_version_is_what_torch_gathers(ranks: list[Any], base: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    # scale, embed, up.weight, up.bias, down: the last rank has one row in all
    assert ray.get(ranks[3].sizes.remote()) == [0, 6, 0, 0, 0]
    config = wd.Config.of({**SETTINGS, "measure_bound": True})
    group = wd.attach(ranks, store=store, base=base, config=config)
    assert group.job.layout.alias_of == {"head.weight": "embed.weight"}
    truth = []
    for step in range(3):
        ray.get([h.step.remote(step) for h in ranks])
        publication = group.publish(step=step)
        gathered = ray.get([h.gathered.remote() for h in ranks])
        truth.append({n: part.tobytes() for n, part in gathered[0].items()})
        stats = publication.wait(LONG)
        assert stats.version == step + 1
        assert stats.bound_bytes
    owned = group.job.owned_bytes()
    assert sum(owned) == sum(len(part) for n, part in truth[0].items() if n != "head.weight")
    group.close()

    model = load_file(str(base / fsdpjob.FILE))
    tied = {**model, "head.weight": model["embed.weight"]}
    receiver = wd.Receiver(store, tied)
    for version in (1, 3, 2):
        receiver.prepare(version=version).wait(LONG)
        assert receiver.apply().integrity == "verified"
        assert as_bytes(tied) == truth[version - 1]
    receiver.release()
    assert len({part["count"] for part in truth}) == 3
    assert verify(Store(store), config=Config(), deep=True, base=base).ok
