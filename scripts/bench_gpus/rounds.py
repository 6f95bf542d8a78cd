"""What is run with deltas: steps alone, then steps that publish, in each codec."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weightdelta as wd
from bench_gpus import receipts
from bench_gpus.cluster import Cluster
from bench_gpus.dense import compare
from bench_gpus.limits import Budget
from weightdelta.codecs.names import Codec, takes

#: Begin and end of a step on each rank, in Unix time [s].
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Settings:
    """How much is run.

    Attributes:
        tokens: Sequences of a rank's step, and their length.
        steps: Measured steps of each kind; as many warm-up steps as ``warm`` come first.
        nbytes: Wire bytes of all weights.
        config: Settings of trainers and samplers that all codecs share.
    """

    tokens: tuple[int, int]
    steps: int
    warm: int
    nbytes: int
    config: dict[str, Any]

    def of(self, codec: Codec) -> wd.Config:
        """The settings for a codec, in the form of values that suits it best."""
        values = "diff" if takes(codec, "diff") else "xor"
        return wd.Config.of({**self.config, "codec": codec, "values": values})


def model_of(actor: Any) -> Any:
    """The ``state=`` of all runs."""
    return actor.model


def alone(cluster: Cluster, settings: Settings, budget: Budget) -> list[Times]:
    """Steps back to back with nothing attached; the times of each, the warm-up left out."""
    count = settings.warm + settings.steps
    calls = [cluster.all_trainers("step", n, settings.tokens) for n in range(count)]
    return [budget.get(step) for step in calls][settings.warm :]


class CodecRun:
    """A fresh run in one codec: steps alone, attach, single steps, steps back to back, close."""

    def __init__(
        self, cluster: Cluster, settings: Settings, budget: Budget, *, codec: Codec, store: Path
    ) -> None:
        self._cluster, self._settings, self._budget = cluster, settings, budget
        self._codec, self._store = codec, str(store)
        self.found: dict[str, Any] = {"codec": codec, "compared_bytes": 0, "comparisons": 0}

    def measure(self, base: Path) -> dict[str, Any]:
        """All of it."""
        # Right before, so that both kinds of steps share the machine's state.
        self.found["alone"] = alone(self._cluster, self._settings, self._budget)
        group = self._attach(base)
        try:
            self.found["owned_bytes"] = group.job.owned_bytes()
            count = self._settings.warm + self._settings.steps
            singles = [self._single(group, n) for n in range(count)]
            self.found["first"] = singles[0]
            self.found["single"] = singles[self._settings.warm :]
            self._budget.say(f"{self._codec}: {count} single steps published, served, compared")
            self.found["beside"] = self._beside(group, count)
            self._compare("the last of the steps back to back")
        finally:
            self._budget.within(group.close, doing="close", seconds=15.0)
            self._budget.get(self._cluster.all_samplers("leave"))
        return self.found

    def _attach(self, base: Path) -> wd.TrainerGroup:
        budget, cluster = self._budget, self._cluster
        budget.get(cluster.all_trainers("reset") + cluster.all_samplers("load", str(base)))
        self._compare("version 0")
        budget.get([t.__ray_call__.remote(receipts.watch) for t in cluster.trainers])
        config, began = self._settings.of(self._codec), budget.spent
        group: wd.TrainerGroup = budget.within(
            lambda: wd.attach(
                cluster.trainers, state=model_of, store=self._store, base=base, config=config
            ),
            doing="attach",
        )
        self.found["attach_s"] = budget.spent - began
        versions = budget.get(cluster.all_samplers("follow", self._store, config))
        assert set(versions) == {0}, versions
        budget.say(f"{self._codec}: attached in {self.found['attach_s']:.1f} s")
        return group

    def _single(self, group: wd.TrainerGroup, number: int) -> dict[str, Any]:
        """A step, its version, the samplers' update, and a comparison of everything."""
        cluster, budget = self._cluster, self._budget
        training = cluster.all_trainers("step", number, self._settings.tokens)
        began = budget.spent
        publication = group.publish(step=number)
        call_s = budget.spent - began
        times = budget.get(training)
        found = self._served(publication, times)
        self._compare(f"version {found['version']}")
        return {**found, "call_s": call_s, "ranks": self._receipts()[-len(cluster.trainers) :]}

    def _beside(self, group: wd.TrainerGroup, first: int) -> dict[str, Any]:
        """Steps back to back, each published, while samplers follow; a warm-up step leads in."""
        cluster, count = self._cluster, self._settings.steps + 1
        steps, served, calls = [], [], []
        with ThreadPoolExecutor(1) as follower:
            for number in range(first, first + count):
                steps.append(cluster.all_trainers("step", number, self._settings.tokens))
                began = self._budget.spent
                publication = group.publish(step=number)
                calls.append(self._budget.spent - began)
                served.append(follower.submit(self._follow, publication, steps[-1]))
            versions = [job.result(self._budget.wait) for job in served]
        return {
            "steps": [self._budget.get(step) for step in steps],
            "versions": versions,
            "call_s": calls,
            "ranks": self._receipts(),
        }

    def _follow(self, publication: wd.Publication, step: Sequence[Any]) -> dict[str, Any]:
        return self._served(publication, self._budget.get(list(step)))

    def _served(self, publication: wd.Publication, times: Times) -> dict[str, Any]:
        """Wait for a version and let the samplers take it."""
        stats = publication.wait(self._budget.wait)
        assert stats.committed, stats
        updates = self._budget.get(self._cluster.all_samplers("update", self._budget.wait))
        assert {u["version"] for u in updates} == {stats.version}, (stats, updates)
        served = max(u["served"] for u in updates)
        return {
            "version": stats.version,
            "step_s": max(end - begin for begin, end in times),
            "end_to_end_s": served - max(end for _, end in times),
            "stats": stats.as_dict(),
            "samplers": updates,
        }

    def _compare(self, what: str) -> None:
        nbytes = self._settings.nbytes
        what = f"{self._codec}, {what}"
        compared = compare(self._cluster, self._budget, nbytes=nbytes, what=what)
        self.found["compared_bytes"] += compared
        self.found["comparisons"] += 1

    def _receipts(self) -> list[dict[str, Any]]:
        found = self._budget.get(
            [t.__ray_call__.remote(receipts.noted) for t in self._cluster.trainers]
        )
        return [receipt for rank in found for receipt in rank]
