"""What a section of the bench hands back, how it is timed, and how it is shown."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        section: The part of the bench.
        name: What was done, to what.
        seconds: Median of the repeats; None for an amount of memory.
        moved: Bytes that the figure's rate counts, or that amount.
        fraction: Of the limit named in ``limit``: 1 is the limit reached.
        limit: What bounds it.
        goal: The fraction to reach, as a comparison (">= 0.90", "<= 8 ms"); "" where none is set.
        met: Whether it was; None without a goal.
        details: Anything else worth keeping.
    """

    section: str
    name: str
    seconds: float | None
    moved: int
    fraction: float | None = None
    limit: str = ""
    goal: str = ""
    met: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Bytes a second; 0 for an amount of memory."""
        return self.moved / self.seconds if self.seconds else 0.0

    @property
    def amount(self) -> str:
        """The rate, or the memory."""
        if self.seconds is None:
            return f"{self.moved / 1e6:.0f} MB"
        return f"{self.rate / 1e9:.0f} GB/s" if self.moved else ""


def median_seconds(
    work: Callable[[], object],
    *,
    repeats: int = 9,
    warm: int = 2,
    before: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """Median and worst time of ``work`` between two events; ``before`` is not timed."""
    times = []
    for i in range(warm + repeats):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times), max(times)


def markdown(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """A table for people."""
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items() if found)
    lines = [
        f"`scripts/bench gpu` on one {machine['gpu']} ({machine['cores']} cores), "
        f"{machine['date']}; CUDA {machine['cuda']}, {packages}.",
        "",
        "Rates count weights once; for shares of the copy ceiling old and new count, as the bytes "
        "that a copy reads and writes do. torch's XOR and nonzero had a quarter of the data.",
        "",
        "| section | what | time | rate | of the limit | goal | met |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for r in rows:
        part = "" if r.fraction is None else f"{r.fraction:.2f} of {r.limit}"
        met = {None: "", True: "yes", False: "**no**"}[r.met]
        time = "" if r.seconds is None else f"{r.seconds * 1e3:.3f} ms"
        lines.append(
            f"| {r.section} | {r.name} | {time} | {r.amount} | {part} | {r.goal} | {met} |"
        )
    return "\n".join(lines)
