"""Verifiable tasks: prompts with a rule that anyone can check, deterministic by seed.

- ``Sums`` (smollm2): add two numbers; the reward is 1 for the sum and nothing else, a half for a
  sum with chatter after it.
- ``Echo`` (tiny): say the letter asked for, again and again; other small letters earn a half.
"""

import random
import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what its reward needs to know."""

    prompt: str
    answer: str


class Task(Protocol):
    """Questions without end, and a reward in [0, 1]."""

    length: int
    """Tokens sampled after a prompt."""

    def question(self, number: int, *, seed: int) -> Question:
        """The ``number``-th question of a stream; all prompts are equally long in tokens."""
        ...

    def reward(self, question: Question, text: str) -> float:
        """What a continuation earns."""
        ...


class Sums:
    """Sums of two-digit numbers for an instruction-tuned model."""

    length = 8

    def question(self, number: int, *, seed: int) -> Question:
        """Two numbers from 10 to 49, so that every prompt has as many tokens as any other."""
        draw = random.Random(f"{seed}/{number}")
        a, b = draw.randint(10, 49), draw.randint(10, 49)
        ask = f"<|im_start|>user\n{a}+{b}<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
        return Question(ask, str(a + b))

    def reward(self, question: Question, text: str) -> float:
        """1 for the bare sum, a half for the sum and more words after it, else 0."""
        found = re.match(r"\s*(\d+)(.*)", text, flags=re.DOTALL)
        if not found or found[1] != question.answer:
            return 0.0
        return 1.0 if not found[2].strip(" .\n") else 0.5


class Echo:
    """A letter to repeat, for a model that knows nothing yet."""

    length = 16

    def question(self, number: int, *, seed: int) -> Question:
        """One of a few letters."""
        letter = random.Random(f"{seed}/{number}").choice("abcd")
        return Question(f"say {letter}: ", letter)

    def reward(self, question: Question, text: str) -> float:
        """By character: 1 for the letter, a half for any other small one."""
        earned = text.count(question.answer) + sum(c.islower() for c in text)
        return earned / (2 * self.length)


TASKS: dict[str, Task] = {"smollm2": Sums(), "tiny": Echo()}
