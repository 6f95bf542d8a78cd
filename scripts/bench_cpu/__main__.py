"""``scripts/bench cpu``: every figure beside its limit, from one run."""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lib.bench_codec import Result, bf16_pair, byte_pair, run
from rich.console import Console
from rich.table import Table

from bench_cpu.stall import measure
from bench_cpu.training import Trainer, masks
from demo_rl.models import checkpoint

PACKAGES = ("weightdelta", "torch", "numpy", "numba", "zstandard", "blake3")


def machine() -> dict[str, Any]:
    """Where and on what this ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def codec(trainer: Trainer, *, warm: int, repeats: int) -> list[Result]:
    """The sparse codec on real masks and on the article's proxy."""
    results = [run(m.name, m.old, m.new, repeats=repeats) for m in masks(trainer, warm=warm)]
    for density in (0.0017, 0.015):
        old, new = bf16_pair(64 << 20, density=density)
        name = f"bf16 synthetic, {100 * density:g} %"
        results.append(run(name, old, new, repeats=repeats))
    old, new = byte_pair(128 << 20, density=0.00085)
    results.append(run("article proxy, 0.085 % of bytes", old, new, repeats=repeats))
    return [*results, run("article proxy, xor", old, new, values="xor", repeats=repeats)]


def row(result: Result) -> dict[str, Any]:
    """A result as JSON-ready values, with the ratios that the goals are stated in."""
    return {
        **asdict(result),
        "changed_fraction": result.density,
        "payload_over_raw": result.payload / result.nbytes,
        "payload_over_bound": result.payload / result.bound,
        "encode_over_memcpy": result.ratio("encode"),
        "apply_over_memcpy": result.ratio("decode"),
        "encode_over_zstd": result.ratio("encode") / result.ratio("zstd encode"),
        "apply_over_zstd": result.ratio("decode") / result.ratio("zstd decode"),
    }


def shown(results: list[Result]) -> Table:
    """Ratios for people; the JSON has everything."""
    table = Table(title="one core; speeds as multiples of memcpy in the same run")
    table.add_column("data")
    for name in ("changed", "/ raw", "/ bound", "zstd / bound", "memcpy", "encode", "apply"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.name,
            f"{100 * r.density:.3g} %",
            f"{r.payload / r.nbytes:.5f}",
            f"{r.payload / r.bound:.3f}",
            f"{r.plain / r.bound:.2f}",
            f"{r.rates['memcpy'].median:.1f} GB/s",
            f"{r.ratio('encode'):.2f} x",
            f"{r.ratio('decode'):.2f} x",
        )
    return table


def main() -> None:
    """Run it, print tables, write JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", choices=["cpu"])
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--warm", type=int, default=14, help="steps before the steady mask")
    parser.add_argument("--steps", type=int, default=5, help="steps timed with and without")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    out = Console(width=None if sys.stdout.isatty() else 110)
    base = checkpoint(options.model)
    trainer = Trainer(base, options.lr)
    started = machine()
    out.print(f"training {options.model} at lr {options.lr:g}, {torch.get_num_threads()} threads")
    results = codec(trainer, warm=options.warm, repeats=options.repeats)
    out.print(shown(results))
    stall = measure(trainer, base=base, steps=options.steps)
    out.print_json(json.dumps(stall.as_dict()))
    document = {
        "machine": started,
        "options": {k: str(v) for k, v in vars(options).items()},
        "codec": [row(r) for r in results],
        "publishing": stall.as_dict(),
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
