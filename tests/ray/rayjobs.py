"""A tiny training job in Ray actors that know nothing of weightdelta, and gates to stop it at.

Every step adds one to every weight, so that a version made of two steps is seen at a glance.
Workers import this module by name.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayActorError
from safetensors.torch import load_file, save_file

import weightdelta as wd
from weightdelta.errors import WeightDeltaError

#: Longest wait for anything [s]; reached only by a failing test.
LONG = 60.0
#: What a broken fence is given to show itself [s].
MOMENT = 0.3
#: Other tests run beside these: a rank may take longer than the default second to hear an outcome.
SETTINGS: dict[str, Any] = {"store": {"fsync": False}, "busy_wait_s": 10.0}
FILE = "model.safetensors"


def save_base(folder: Path) -> Path:
    """A base checkpoint: whole numbers that bf16 holds exactly, and stay exact for 100 steps."""
    shapes = {"a": (64,), "m": (400, 100), "s": (), "z": (64,)}
    save_file({n: torch.full(s, 1.0).bfloat16() for n, s in shapes.items()}, str(folder / FILE))
    return folder


@dataclass(frozen=True)
class Gate:
    """A place where a process stops until another one lets it go; works through files."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> "Gate":
        """A new gate, closed."""
        folder.mkdir(parents=True)
        return cls(folder)

    def reach(self) -> None:
        """Stop here until the gate is open."""
        (self.folder / "reached").touch()
        until((self.folder / "open").exists)

    def wait(self) -> None:
        """Wait until somebody stands at the gate."""
        until((self.folder / "reached").exists)

    def open(self) -> None:
        """Let them go."""
        (self.folder / "open").touch()

    def leave(self) -> None:
        """Say that what came after the gate is done."""
        (self.folder / "left").touch()

    def left(self) -> bool:
        """Whether it is."""
        return (self.folder / "left").exists()


def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition; returns what made it true."""
    stop = time.monotonic() + LONG
    while not (found := condition()):
        if time.monotonic() > stop:
            raise TimeoutError(f"not true within {LONG} s")
        time.sleep(0.01)
    return found


def again(call: Callable[[], Any]) -> Any:
    """Ask an actor that is being restarted until it answers."""

    def attempt() -> Any:
        try:
            return (ray.get(call(), timeout=LONG),)
        except RayActorError:
            return None

    return until(attempt)[0]


class Adder(torch.optim.Optimizer):
    """Adds one to every parameter, one after the other; stops at a gate before the last."""

    gate: Gate | None = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
        """One step."""
        *rest, last = self.param_groups[0]["params"]
        for p in rest:
            p += 1
        if self.gate:
            self.gate.reach()
        last += 1


class GatedTensors(dict[str, torch.Tensor]):
    """Live tensors; whoever reads the one called ``z`` stops at a gate first."""

    gate: Gate | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "z" and self.gate:
            self.gate.reach()
        return super().__getitem__(name)


class Trainer:
    """One rank. The gates are taken by the next step, the next call of ``live``, or its reads."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Module()
        for name, tensor in load_file(str(Path(folder) / FILE)).items():
            self.model.register_parameter(name, torch.nn.Parameter(tensor.float()))
        self.optimizer = Adder(self.model.parameters())
        self.count = 0
        self.at_live: Gate | None = None
        self.at_read: Gate | None = None
        self.on_live: Callable[[], Any] | None = None

    def step(self, gate: Gate | None = None, first: Gate | None = None) -> int:
        """Add one; stop at ``first`` before, and at ``gate`` half way."""
        self.optimizer.gate = gate
        if first:
            first.reach()
        self.optimizer.step()
        self.count += 1
        if first:
            first.leave()
        return self.count

    def put(self, level: int) -> None:
        """Set every weight, as loading a checkpoint would."""
        self.at_live = self.at_read = self.on_live = None
        self.count = level
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(1.0 + level)

    def hook(
        self,
        *,
        at_live: Gate | None = None,
        at_read: Gate | None = None,
        on_live: Callable[[], Any] | None = None,
    ) -> None:
        """Arm gates for the next capture."""
        self.at_live, self.at_read, self.on_live = at_live, at_read, on_live

    def live(self) -> GatedTensors:
        """The live weights, as ``attach`` reads them."""
        tensors = GatedTensors({n: p.detach() for n, p in self.model.named_parameters()})
        gate, hook, tensors.gate = self.at_live, self.on_live, self.at_read
        self.at_live = self.at_read = self.on_live = None
        if gate:
            gate.reach()
        if hook:
            hook()
        return tensors

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def threads(self) -> list[str]:
        """Names of weightdelta's threads in this process."""
        return sorted(t.name for t in threading.enumerate() if "weightdelta" in t.name)


class AsyncTrainer(Trainer):
    """The same with one coroutine, which makes Ray run the actor on an event loop."""

    async def step(  # type: ignore[override]
        self, gate: Gate | None = None, first: Gate | None = None
    ) -> int:
        """Add one, beside the event loop, as trainers do that answer while they train."""
        return await asyncio.to_thread(Trainer.step, self, gate, first)


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "sync": (Trainer, {}),
    "threaded": (Trainer, {"max_concurrency": 4}),
    "asyncio": (AsyncTrainer, {"max_concurrency": 4}),
}


def live(self: Trainer) -> GatedTensors:
    """The ``state=`` of all tests."""
    return self.live()


def mark(self: Trainer) -> int:
    """The ``mark=`` of jobs whose ranks are restarted: their own count of steps."""
    return self.count


def start(kind: str, base: Path, *, ranks: int, **options: Any) -> list[Any]:
    """Trainer actors of a kind."""
    cls, own = KINDS[kind]
    actor = ray.remote(cls).options(num_cpus=0, **own, **options)
    return [actor.remote(str(base)) for _ in range(ranks)]


def inside(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in an actor's process, given the instance."""
    return ray.get(handle.__ray_call__.remote(function, *args), timeout=LONG)


Bits = dict[str, npt.NDArray[np.uint16]]


def read(store: str, base: Path, version: int | None = None) -> Bits:
    """A version's bits by a receiver that starts from base."""
    model = load_file(str(base / FILE))
    receiver = wd.Receiver(store, model)
    receiver.prepare(version=version).wait(LONG)
    assert receiver.apply().integrity == "verified"
    receiver.release()
    return {n: t.view(torch.uint16).numpy() for n, t in model.items()}


def levels(bits: Bits) -> set[int]:
    """How many steps the weights have seen; one number, unless they are torn."""
    floats = [(b.astype(np.uint32) << 16).view(np.float32).reshape(-1) for b in bits.values()]
    return {int(x) - 1 for x in np.concatenate(floats)}


def ended(publication: wd.Publication) -> int | WeightDeltaError:
    """How a publication ended: its version, or why it was lost."""
    try:
        return publication.wait(LONG).version
    except WeightDeltaError as e:
        return e
