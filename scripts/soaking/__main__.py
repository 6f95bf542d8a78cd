"""``python -m soaking fuzz`` and ``python -m soaking damage``."""

import argparse
import sys
from pathlib import Path

from soaking import damages, fuzz


def main() -> int:
    """Run one proof; 0 when it held."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    proofs = parser.add_subparsers(dest="proof", required=True)
    long = proofs.add_parser("fuzz", help="hostile input to every parser")
    long.add_argument("--minutes", type=float, default=30.0)
    long.add_argument("--seed", type=int, default=1)
    long.add_argument("--resume", type=Path, help="go on where this progress file stands")
    long.add_argument("--progress", type=Path, default=Path("runs/soak-fuzz.json"))
    long.add_argument("--finds", type=Path, help="where to keep finds (tests/fuzz/finds)")
    long.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    harm = proofs.add_parser("damage", help="damage to the objects of a real run")
    harm.add_argument("--count", type=int, default=100_000)
    harm.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.proof == "damage":
        return damages.run(count=args.count, seed=args.seed)
    progress = args.resume or args.progress
    if args.worker:
        return fuzz.work(progress, finds=args.finds)
    if not args.resume:
        fuzz.Progress(seed=args.seed).save(progress)
    return fuzz.supervise(progress, minutes=args.minutes, finds=args.finds)


if __name__ == "__main__":
    sys.exit(main())
