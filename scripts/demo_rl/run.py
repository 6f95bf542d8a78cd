"""The run itself: what happens in each step, and when samplers come, go and come back."""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

import weightdelta as wd
from demo_rl.job import RATES, collect, start_ray, start_sampler, start_trainers
from demo_rl.precision import is_bf16_fast
from weightdelta.codecs.names import Codec, takes
from weightdelta.errors import RetryError
from weightdelta.log import Log
from weightdelta.materialize import materialize
from weightdelta.store import Store


@dataclass
class Row:
    """One version: what it cost, and what it cost the samplers."""

    stats: wd.PublishStats
    reward: float
    prepare_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    compared: int = 0


@dataclass
class Run:
    """A training run with its samplers.

    Attributes:
        rows: One per version.
        wrong: A line for each weight that differed from the truth.
        lost: Publications that an outage of the store cost.
    """

    model: str
    base: Path
    store: str
    ranks: int
    samplers: int
    lr: float | None
    codec: Codec
    checkpoints: bool
    device: str
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    comparisons: int = 0
    lost: int = 0

    def start(self) -> None:
        """Start Ray, trainers and all samplers but the late one; attach."""
        start_ray(self.device)
        self.bf16 = is_bf16_fast(self.device)
        self.trainers = start_trainers(
            self.ranks,
            folder=self.base,
            lr=self.lr or RATES[self.model],
            device=self.device,
            bf16=self.bf16,
        )
        self.live = [self._sampler(i) for i in range(self.samplers - 1)]
        started = time.monotonic()
        values = "diff" if takes(self.codec, "diff") else "xor"
        self.group = wd.attach(
            self.trainers,
            state=lambda self: self.model,
            store=self.store,
            base=self.base,
            config=wd.Config.of({"measure_bound": True, "codec": self.codec, "values": values}),
        )
        owned = self.group.job.owned_bytes()
        self.say(
            f"attached to {self.ranks} FSDP2 ranks in {time.monotonic() - started:.1f} s; they own "
            f"{min(owned) / 1e6:.1f} to {max(owned) / 1e6:.1f} MB each"
        )
        truth = self._truth()
        for sampler in self.live:
            self._join(sampler)
        self._compare(truth, "version 0")

    def step(self, step: int, *, last: int) -> None:
        """Train on fresh rollouts, publish, and bring every live sampler to the new version."""
        if step == 3:
            self.live.append(self._sampler(self.samplers - 1))
            self._join(self.live[-1])
        if step == 6:
            self._revive()
        batch = collect(self.live, ranks=self.ranks)
        reward = float(batch.pop("rewards").mean())
        training = [t.train_step.remote(batch) for t in self.trainers]
        # The actors run their calls in order: the capture comes after the step, and the gather
        # of the truth after the capture. Nobody waits for anybody here.
        publication = self.group.publish(step=step)
        truth, saved = self._truth(), self._saved(step)
        if step == 5:
            ray.kill(self.live.pop(0))
            self.say("killed sampler 0 while a version was being published")
        seconds = ray.get(training)[0]["seconds"]
        stats = self._committed(publication, step)
        if stats is None:
            return
        self.rows.append(Row(stats, reward))
        self._update()
        self.say(
            f"step {step}: trained in {seconds:.1f} s, reward {reward:.3f}; "
            f"version {stats.version}: {100 * stats.changed_fraction:.2f} % changed, "
            f"{stats.payload_bytes / 1e3:.0f} kB, pause {1e3 * max(self.rows[-1].pause_s):.1f} ms"
        )
        self._compare(truth, f"version {stats.version}")
        if saved:
            self._compare_checkpoint(stats.version, saved)
        if step == last - 1:
            self._back_and_forth(truth)
        self._previous = truth

    def _committed(self, publication: wd.Publication, step: int) -> wd.PublishStats | None:
        """The version, or None if it was lost: training goes on, the next one covers its span."""
        why = "ranks busy with the one before"
        try:
            stats = publication.wait(timeout=300)
            if stats.committed:
                return stats
        except RetryError as e:
            why = e.kind
        self.lost += 1
        self.say(f"step {step}: no version ({why}); the next one covers the span")
        return None

    def close(self) -> None:
        """Take weightdelta off the trainers and end Ray."""
        if hasattr(self, "group"):
            self.group.close()
        ray.shutdown()

    @property
    def bit_exact(self) -> bool:
        """Whether every comparison was made and found no difference."""
        return bool(self.rows) and not self.wrong and all(row.compared for row in self.rows)

    def _sampler(self, number: int) -> Any:
        return start_sampler(
            self.model, device=self.device, folder=self.base, seed=number, bf16=self.bf16
        )

    def _join(self, sampler: Any) -> None:
        """Attach a sampler, which holds the base checkpoint, and bring it to the newest version."""
        found = ray.get(sampler.follow.remote(self.store))
        stats = ray.get(sampler.prepare.remote())
        if stats.hops:
            applied = ray.get(sampler.apply.remote())
            self.say(
                f"a sampler joined at version {found}, caught up over {stats.hops} versions to "
                f"{applied.version}, paused {1e3 * applied.pause_s:.1f} ms"
            )
            self._compare(self._previous, "joining", only=sampler)

    def _revive(self) -> None:
        self.live.insert(0, self._sampler(0))
        self.say("sampler 0 is back, with the base checkpoint")
        self._join(self.live[0])

    def _update(self) -> None:
        """Prepare on all samplers while they generate, then apply."""
        prepared = ray.get([s.prepare.remote() for s in self.live])
        applied = ray.get([s.apply.remote() for s in self.live])
        self.rows[-1].prepare_s += [p.prepare_s for p in prepared]
        self.rows[-1].pause_s += [a.pause_s for a in applied]

    def _back_and_forth(self, truth: Any) -> None:
        """Roll the newest step back on all samplers, check, and go forward again."""
        back = ray.get([s.rollback.remote() for s in self.live])
        self._compare(self._previous, f"rolled back to version {back[0].version}")
        self._update()
        self._compare(truth, "forward again")
        self.say(f"rolled back to version {back[0].version} and forward again, compared both times")

    def _truth(self) -> Any:
        """All weights, gathered by torch alone; a reference to rank 0's answer."""
        gathered = [t.full_gather.remote() for t in self.trainers]
        return gathered[0]

    def _saved(self, step: int) -> Path | None:
        """Where the trainer saves this step's checkpoint, if it is asked for."""
        if not self.checkpoints:
            return None
        folder = Path(tempfile.mkdtemp(prefix=f"weightdelta-step{step}-"))
        for trainer in self.trainers:
            trainer.save_checkpoint.remote(str(folder))
        return folder

    def _compare_checkpoint(self, version: int, saved: Path) -> None:
        """The version made from base and deltas against what the trainer's own save wrote."""
        ray.get([t.full_gather.remote() for t in self.trainers])  # calls run in order: it is saved
        log = Log(Store.of(self.store, config=wd.Config()))
        log.refresh()
        made = saved / "materialized"
        materialize(log, version=version, base=self.base, out=made, config=wd.Config())
        files = sorted(saved.glob("*.safetensors"))
        assert files, f"{saved}: the trainer saved no weights"
        bad = [f.name for f in files if f.read_bytes() != (made / f.name).read_bytes()]
        self.wrong += [f"version {version}: materialized {name}" for name in bad]
        verdict = f"{bad} differ from" if bad else "byte-equal to"
        self.say(f"version {version} materialized: {verdict} the trainer's save_pretrained")
        self.comparisons += 1
        shutil.rmtree(saved)

    def _compare(self, truth: Any, what: str, *, only: Any = None) -> None:
        for sampler in [only] if only else self.live:
            names = ray.get(sampler.differs.remote(truth))
            self.wrong += [f"{what}: {name}" for name in names]
            self.comparisons += 1
            if self.rows:
                self.rows[-1].compared += 1
