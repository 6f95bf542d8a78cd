"""``scripts/bench gpus``: deltas beside a dense NCCL broadcast on one host with several GPUs.

A Ray job of FSDP2 trainer ranks publishes its steps in each codec to a store in tmpfs, samplers
follow, and every byte is compared with what the trainers broadcast. In the same run the same
weights are broadcast whole: packed, double-buffered, from rank 0. Results are written after each
part, and what the time does not allow is left out and named.
"""

import faulthandler
import sys
from dataclasses import asdict
from math import prod

import ray

from bench_gpus.cluster import plan_gpus
from bench_gpus.limits import Budget
from bench_gpus.machine import machine
from bench_gpus.model import SHAPES, wire
from bench_gpus.options import options
from bench_gpus.packed import ITEM
from bench_gpus.report import Report
from bench_gpus.run import run

#: What closing down may take once the time is over [s].
AFTER = 45.0


def main() -> None:
    """Run it, print the tables; exit 1 when something is missing, wrong or late."""
    chosen = options(__doc__)
    # The last resort, should even the limits hang: all stacks, then the end.
    faulthandler.dump_traceback_later(chosen.seconds + AFTER, exit=True)
    budget = Budget(chosen.seconds, wait=chosen.wait)
    plan = plan_gpus(chosen.gpus, trainers=chosen.trainers, samplers=chosen.samplers)
    head = {
        "machine": machine(chosen.device, chosen.gpus),
        "options": {name: str(value) for name, value in vars(chosen).items()},
        "plan": {**asdict(plan), "members": plan.members, "shared": plan.shared},
        "dense_bytes": sum(ITEM * prod(shape) for shape in wire(SHAPES[chosen.model]).values()),
    }
    report = Report(head, file=chosen.json)
    try:
        run(chosen, plan, report, budget)
    except BaseException as e:
        report.leave_out(f"the rest, after {type(e).__name__}: {str(e)[:500]}")
        raise
    finally:
        print(report.markdown(), flush=True)
        budget.within(ray.shutdown, doing="shutdown", seconds=20.0)
    sys.exit(1 if report.document["left_out"] else 0)


if __name__ == "__main__":
    main()
