"""``scripts/bench gpu``: every figure beside its peer and its limit, from one run.

Every bit is checked before anything is timed. Sections are functions in :data:`SECTIONS`; a new
one needs an entry there and hands back ``Row`` objects.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import weightdelta
from bench_gpu import encode, pause, receiver, trainer
from bench_gpu.rows import Row, markdown

PACKAGES = ("torch", "triton", "numpy", "numba", "nvidia-nvcomp-cu13", "zstandard")


def _codecs(_: argparse.Namespace, ceiling: float) -> list[Row]:
    from bench_gpu import codecs  # needs nvCOMP, which the other sections do not

    return codecs.rows(nbytes=1 << 30, ceiling=ceiling)


#: Sections by name; each gets the options and the copy ceiling in bytes a second. Those that the
#: CPU has a part in come last.
SECTIONS: dict[str, Callable[[argparse.Namespace, float], list[Row]]] = {
    "encode": lambda o, ceiling: encode.rows(nbytes=o.compared << 20, ceiling=ceiling),
    "pause": lambda o, ceiling: pause.rows(nbytes=int(o.rank * 1e9), ceiling=ceiling),
    "codecs": _codecs,
    "trainer": lambda o, _: trainer.rows(nbytes=int(o.shard * 1e9)),
    "receiver": lambda o, _: receiver.rows(nbytes=int(o.rank * 1e9)),
}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Where and on what this ran."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cores": len(os.sched_getaffinity(0)),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES}
        | {"weightdelta": weightdelta.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Run it, print the table, write JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", choices=["gpu"])
    parser.add_argument("--only", choices=sorted(SECTIONS), action="append", help="just these")
    parser.add_argument("--compared", type=int, default=8192, help="MiB that encode compares")
    parser.add_argument("--rank", type=float, default=111.0, help="GB of resident weights")
    parser.add_argument("--shard", type=float, default=6.95, help="GB that a trainer rank owns")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    ceiling = encode.copy_ceiling(4 << 30)
    rows, failed = [ceiling], []
    for name in options.only or SECTIONS:
        begin = time.perf_counter()
        try:
            rows += SECTIONS[name](options, ceiling.rate)
        except Exception:  # noqa: BLE001 (a section that breaks takes no other with it)
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        if options.json:
            _write(rows, options, failed)
    print(markdown(rows, machine()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _write(rows: list[Row], options: argparse.Namespace, failed: list[str]) -> None:
    document: dict[str, Any] = {
        "machine": machine(),
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "failed": failed,
        "rows": [{**asdict(row), "rate": row.rate} for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=2) + "\n")
    options.json.with_suffix(".md").write_text(markdown(rows, document["machine"]) + "\n")


if __name__ == "__main__":
    main()
