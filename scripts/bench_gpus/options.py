"""What is asked for on the command line, and what follows from it."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from bench_gpus.cluster import Plan
from bench_gpus.model import SHAPES
from bench_gpus.rounds import Settings

CODECS = ("sparse+zstd", "lz4+zstd", "snappy+zstd")
MIB = 1 << 20


def options(description: str | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench gpus",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["gpus"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, help="GPUs to use; all, or 2 on a CPU")
    parser.add_argument("--trainers", type=int, help="FSDP2 ranks, one a GPU")
    parser.add_argument("--samplers", type=int, help="samplers, one a GPU, not on the first")
    parser.add_argument("--model", choices=list(SHAPES), default="7b", help="its shape")
    parser.add_argument("--codec", choices=CODECS, action="append", help="just these")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each kind")
    parser.add_argument("--sequences", type=int, default=2, help="of a rank's step")
    parser.add_argument("--length", type=int, default=1024, help="of a sequence, in tokens")
    parser.add_argument("--bucket-mib", type=float, default=1024, help="packed by the broadcast")
    parser.add_argument("--frame-mib", type=float, default=64, help="of a frame, raw")
    parser.add_argument("--threads", type=int, help="of each actor; the cores are shared out")
    parser.add_argument("--repeats", type=int, default=5, help="of each broadcast")
    parser.add_argument("--seconds", type=float, default=270.0, help="that all of it may take")
    parser.add_argument("--wait", type=float, default=90.0, help="longest wait for one thing [s]")
    parser.add_argument("--folder", type=Path, help="of the base checkpoint; tmpfs if it has room")
    parser.add_argument(
        "--masked", action="store_true", help="let Ray show each actor its own GPU alone"
    )
    parser.add_argument("--json", type=Path, help="file for all figures, a .md beside it")
    found = parser.parse_args()
    found.gpus = found.gpus or (torch.cuda.device_count() if found.device == "cuda" else 2)
    found.codec = found.codec or list(CODECS)
    return found


def settings_of(chosen: argparse.Namespace, plan: Plan, nbytes: int) -> tuple[Settings, int]:
    """How much is run, and the threads of each actor."""
    actors = len(plan.trainers) + len(plan.samplers)
    threads = chosen.threads or max((os.cpu_count() or 1) // actors, 1)
    config: dict[str, Any] = {
        "threads": threads,
        "frame_bytes": int(chosen.frame_mib * MIB),
        "scrub_every": 0,
        "busy_wait_s": chosen.wait,
        "max_step_delay_s": chosen.wait,
        "publish_timeout_s": chosen.wait,
        "heartbeat_s": chosen.wait,
        "store": {"fsync": False, "threads": threads},
        "device": {"staging_bytes": 2 << 30},
    }
    tokens = (chosen.sequences, chosen.length)
    return Settings(tokens, chosen.steps, warm=1, nbytes=nbytes, config=config), threads
