"""One sampler: a Ray actor that generates without a break while updates come and go."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import weightdelta as wd
from demo_rl.generate import sample
from demo_rl.loss import advantages
from demo_rl.precision import widen
from demo_rl.task import TASKS
from weightdelta.errors import RetryError

#: Longest outage of the store that a sampler sits out [s].
OUTAGE_S = 300.0
#: The lowest priority; Ray's workers run at 15, so anything less would push ahead of trainers.
NICE = 19

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]


def _sit_out(call: Callable[[], T]) -> T:
    """Do it again for as long as the store is away."""
    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return call()
        except RetryError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@ray.remote(max_concurrency=4)  # a wait for rollouts must not hold up an update
class SamplerActor:
    """A policy in bf16 that answers questions from its own stream in a background thread."""

    def __init__(
        self,
        *,
        kind: str,
        folder: str,
        seed: int,
        prompts: int,
        group: int,
        device: str,
        bf16: bool,
    ) -> None:
        torch.set_num_threads(1)  # actors share the machine's cores
        self.task, self.seed = TASKS[kind], seed
        self.prompts, self.group = prompts, group
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.model.to(device)
        if not bf16:
            widen(self.model)
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.engine = wd.TransformersEngine(self.model)
        self.receiver: wd.Receiver | None = None
        self.tokens = 0
        self.random = torch.Generator(device).manual_seed(seed)
        # One batch ahead of the trainer: older ones make way, so that rollouts stay fresh.
        self.ready: queue.Queue[Arrays] = queue.Queue(maxsize=1)
        self.failure: BaseException | None = None
        threading.Thread(target=self._generate, daemon=True).start()

    def rollouts(self, *, timeout: float = 120.0) -> Arrays:
        """The freshest batch: tokens, logprobs, mask, advantages and rewards, a row a text."""
        deadline = time.monotonic() + timeout
        while self.failure is None and time.monotonic() < deadline:
            try:
                return self.ready.get(timeout=0.5)
            except queue.Empty:
                continue
        raise RuntimeError(f"no rollouts after {timeout} s") from self.failure

    def follow(self, store: str) -> int:
        """Attach to a run; returns the version that the weights are."""
        self.receiver = _sit_out(lambda: wd.Receiver(store, self.engine))
        return self.receiver.version

    def prepare(self) -> wd.PrepareStats:
        """Fetch and check the newest version while texts are being generated.

        A store that is away for a while costs nothing but time: the old weights serve on.
        """
        return _sit_out(lambda: self.receiver.prepare().wait())

    def apply(self) -> wd.ApplyStats:
        """Switch to the prepared version between two tokens."""
        return self.receiver.apply()

    def rollback(self) -> wd.ApplyStats:
        """Go back to the version before, between two tokens."""
        return self.receiver.rollback()

    def differs(self, truth: Arrays) -> list[str]:
        """Names of weights whose bits are not those of ``truth``; missing and extra ones too."""
        state = self.model.state_dict()
        with self.engine.paused():
            wrong = [
                name
                for name in state.keys() & truth.keys()
                if not np.array_equal(state[name].cpu().view(torch.uint16).numpy(), truth[name])
            ]
        return sorted(wrong + list(state.keys() ^ truth.keys()))

    def status(self) -> dict[str, int]:
        """The version in use and the number of tokens sampled so far."""
        return {"version": self.receiver.version if self.receiver else 0, "tokens": self.tokens}

    def _generate(self) -> None:
        if sys.platform == "linux":  # there a thread has a priority of its own
            # Rollouts run ahead of the trainer; where cores are few, they yield to it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            number = 0
            while True:
                batch = self._batch(number)
                number += self.prompts
                if self.ready.full():
                    self._drop()
                self.ready.put(batch)
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for rollouts
            self.failure = error

    def _drop(self) -> None:
        try:
            self.ready.get_nowait()
        except queue.Empty:
            return  # somebody took it meanwhile, which is as good

    def _batch(self, number: int) -> Arrays:
        questions = [
            self.task.question(number + i, seed=self.seed)
            for i in range(self.prompts)
            for _ in range(self.group)
        ]
        encoded = self.tokenizer([q.prompt for q in questions], add_special_tokens=False)
        prompts = torch.tensor(encoded["input_ids"])
        texts = sample(
            self.model,
            prompts.to(self.device),
            length=self.task.length,
            end=self.tokenizer.eos_token_id,
            random=self.random,
            engine=self.engine,
        )
        self.tokens += texts.tokens.numel()
        found = texts.tokens.cpu()
        rewards = [
            self.task.reward(q, self.tokenizer.decode(t[m], skip_special_tokens=True))
            for q, t, m in zip(questions, found, texts.mask.cpu(), strict=True)
        ]
        grid = np.array(rewards, dtype=np.float32).reshape(self.prompts, self.group)
        return {
            "tokens": torch.cat([prompts, found], dim=1).numpy(),
            "logprobs": texts.logprobs.cpu().numpy(),
            "mask": texts.mask.cpu().numpy(),
            "advantages": advantages(grid).reshape(-1),
            "rewards": grid.reshape(-1),
        }
