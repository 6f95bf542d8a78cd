"""What is fuzzed: an object's parser, its valid seeds and the mutators that fit it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuzz.mutate import Mutator, Rng, any_bytes, splice


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        name: What is parsed.
        seeds: Valid inputs; each of them must be accepted.
        check: Parses, and asserts that an accepted value is consistent and comes back.
        mutators: Those that know the structure; mutators of plain bytes join them.
        declared: Bytes that a reader of ``data`` knows of before it reads it.
        weight: How often it is chosen in a long run.
        share: How many of its inputs are mutated by structure.
    """

    name: str
    seeds: Sequence[bytes]
    check: Callable[[bytes], object]
    mutators: tuple[Mutator, ...] = ()
    declared: Callable[[bytes], int] = lambda _: 0
    weight: float = 1.0
    share: float = 0.75

    def make(self, number: int) -> bytes:
        """Input number ``number``: the same every time."""
        rng = random.Random(f"{self.name} {number}")
        data = rng.choice(self.seeds)
        if self.mutators and rng.random() < self.share:
            for _ in range(rng.choice((1, 1, 1, 2))):
                data = self._mutate(rng, data)
            return data
        return splice(rng, data, self.seeds) if rng.random() < 0.1 else any_bytes(rng, data)

    def _mutate(self, rng: Rng, data: bytes) -> bytes:
        """By structure; what an earlier mutation left may give this one nothing to hold on to."""
        try:
            return rng.choice(self.mutators)(rng, data)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return any_bytes(rng, data)


def pick(rng: Rng, targets: Sequence[Target]) -> Target:
    """A target, by weight."""
    return rng.choices(targets, [t.weight for t in targets])[0]
