"""The main job: a Ray RL run trains, publishes every step, and live samplers follow it.

Four FSDP2 ranks train a language model on what two samplers generate; every step becomes a
version; the samplers fetch, check and apply it while they generate. On the way one sampler joins
late, one is killed and comes back, and one step is rolled back and forward again. At the end
every byte of every sampler at every version has been compared with a gather that torch made.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from demo_rl.models import CACHE, checkpoint
from demo_rl.report import as_json, table
from demo_rl.run import Run
from weightdelta.codecs.names import DEFAULT, IDS

#: A log file is as wide as the table needs.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--steps", type=int, default=10, help="training steps, 8 or more")
    parser.add_argument("--ranks", type=int, help="FSDP2 trainer ranks: 4, or 1 with --device cuda")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where trainers and samplers compute; all of them share one GPU",
    )
    parser.add_argument("--samplers", type=int, default=2, help="sampler actors, 2 or more")
    parser.add_argument("--store", help="folder or URL of the run's store; a new folder by default")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--codec", choices=list(IDS), default=DEFAULT, help="form of the deltas")
    parser.add_argument(
        "--checkpoints",
        action="store_true",
        help="also compare each version, materialized, with the trainer's own save_pretrained",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    found = parser.parse_args()
    found.ranks = found.ranks or (1 if found.device == "cuda" else 4)
    if found.device == "cuda" and found.ranks > 1:
        parser.error("--ranks: NCCL takes one rank a GPU, and this demo uses one GPU")
    for name, least in (("steps", 8), ("ranks", 1), ("samplers", 2)):
        if getattr(found, name) < least:
            parser.error(f"--{name}: expected at least {least}, found {getattr(found, name)}")
    return found


def main() -> None:
    """Run it; exit 1 if a byte differs."""
    chosen = options()
    store = chosen.store or str(CACHE / "runs" / time.strftime("%Y%m%d-%H%M%S"))
    started = time.monotonic()
    out.print(f"preparing {chosen.model}, then starting Ray, trainers and samplers ..")
    base = checkpoint(chosen.model)
    run = Run(
        model=chosen.model,
        base=base,
        store=store,
        ranks=chosen.ranks,
        samplers=chosen.samplers,
        lr=chosen.lr,
        codec=chosen.codec,
        checkpoints=chosen.checkpoints,
        device=chosen.device,
        say=lambda line: out.print(f"[dim]{time.monotonic() - started:6.1f} s[/]  {line}"),
    )
    try:
        run.start()
        for step in range(1, chosen.steps + 1):
            run.step(step, last=chosen.steps)
    finally:
        run.close()
    out.print(table(run))
    if chosen.json:
        chosen.json.write_text(json.dumps(as_json(run), indent=2) + "\n")
    command = Path(sys.executable).with_name("weightdelta")
    out.print("look into it:")
    for what in (f"log {store}", f"verify --deep --base {run.base} {store}"):
        out.print(f"  {command} {what}", soft_wrap=True)
    sys.exit(0 if run.bit_exact else 1)


if __name__ == "__main__":
    main()
