"""Damage to a real run in memory: found before a weight changed, or harmless, every time."""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from damage import ALL_CODECS, Repository, draw, follow, judge, kind_of
from fuzz.texts import scratch


@dataclass
class _Tally:
    """How the receivers ended, and how often each kind of object was damaged."""

    ends: Counter[str] = field(default_factory=Counter)
    objects: Counter[str] = field(default_factory=Counter)
    unsound: list[str] = field(default_factory=list)

    def line(self, done: int, seconds: float) -> str:
        """One line of progress."""
        ends = ", ".join(f"{end} {count}" for end, count in sorted(self.ends.items()))
        return f"{done} damages, {len(self.unsound)} unsound, {seconds:.0f} s: {ends}"


def run(*, count: int, seed: int) -> int:
    """Damage ``count`` times and judge each; 0 when nothing slipped through."""
    folder = scratch()
    one = Repository(folder / "one", 1, ALL_CODECS)
    other = Repository(folder / "other", 60, ALL_CODECS[::-1])
    versions, size = one.run.newest, sum(map(len, one.objects.values()))
    print(f"{len(one.objects)} objects, {versions} versions, {size} B, seed {seed}")
    if follow(one) != ("", versions):
        sys.exit("the run is not whole to begin with")
    started, tally = time.monotonic(), _Tally()
    for number in range(count):
        damage = draw(random.Random(f"{seed} {number}"), one, other)
        try:
            error, version = one.suffer(damage)
            judge(damage, one, error=error, version=version)
        except Exception as e:  # noqa: BLE001 - an escape is what is looked for
            tally.unsound.append(f"number {number}: {damage}: {type(e).__name__}: {e}")
            print(tally.unsound[-1])
            continue
        tally.ends[error or f"version {version}"] += 1
        tally.objects.update(map(kind_of, damage.changes))
        if (number + 1) % 1000 == 0:
            print(tally.line(number + 1, time.monotonic() - started))
    print(f"damaged objects: {dict(tally.objects)}")
    print("summary:", tally.line(count, time.monotonic() - started))
    return 1 if tally.unsound else 0
