"""``scripts/bench codecs``: payloads before and after the outer stage, for every codec.

The masks: the teleportation article's proxy (0.085 % of bytes, uniform random XOR), and steps of
a training run that the bench makes itself, so that no mask repeats within itself. Every payload
stands beside the zero-order entropy bound of its mask.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu.__main__ import machine
from bench_cpu.training import Mask, Trainer, masks
from lib.bench_codec import FRAME, byte_pair, xor_bound

from bench_codecs.contest import Row, contestants, measure, memcpy_s, transcode_s
from demo_rl.models import checkpoint
from weightdelta.kernels.planes import BLOCK_BYTES

MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    """All contestants on one mask; ``transcode_s`` by bitstream."""

    name: str
    nbytes: int
    width: int
    changed: float
    bound: float
    memcpy_s: float
    transcode_s: dict[str, float]
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the ratios that people compare."""
        rows = [
            {
                **asdict(r),
                "payload_over_bound": r.payload / self.bound,
                "payload_over_mask": r.payload / self.nbytes,
                "inner_over_mask": None if r.inner is None else r.inner / self.nbytes,
                "encode_over_memcpy": self.memcpy_s / r.encode_s,
                "apply_over_memcpy": self.memcpy_s / r.decode_s,
            }
            for r in self.rows
        ]
        return {**asdict(self), "rows": rows}


def run(mask: Mask, *, repeats: int) -> Result:
    """Measure all contestants on one mask."""
    old, new = mask.old, mask.new
    return Result(
        name=mask.name,
        nbytes=old.nbytes,
        width=old.itemsize,
        changed=float(np.count_nonzero(old != new)) / len(old),
        bound=xor_bound(old, new),
        memcpy_s=memcpy_s(old, repeats=repeats),
        transcode_s={
            inner: transcode_s(inner, old, new, repeats=repeats) for inner in ("snappy", "lz4")
        },
        rows=[measure(who, old, new, repeats=repeats) for who in contestants()],
    )


def inputs(model: str, *, lr: float, warm: int, proxy_mib: int) -> Iterator[Mask]:
    """The proxy, then the training run's masks."""
    old, new = byte_pair(proxy_mib * MIB, density=0.00085)
    yield Mask("article proxy", old, new)
    yield from masks(Trainer(checkpoint(model), lr), warm=warm)


def markdown(results: list[Result]) -> str:
    """The article's Table 2 and what it lacks: one line a codec, one group of columns a mask."""
    lines = [
        "| | " + " | ".join(f"{r.name}, {r.nbytes / MIB:.0f} MiB" for r in results) + " |",
        "|---|" + "---:|" * len(results),
        "| changed elements | " + " | ".join(f"{100 * r.changed:.3g} %" for r in results) + " |",
        "| entropy bound, of the mask | "
        + " | ".join(f"{100 * r.bound / r.nbytes:.3f} %" for r in results)
        + " |",
    ]
    for i, first in enumerate(results[0].rows):
        cells = [_cell(r, r.rows[i]) for r in results]
        lines.append(f"| {first.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result, row: Row) -> str:
    after = f"{100 * row.payload / result.nbytes:.3f} % ({row.payload / result.bound:.2f} x)"
    return after if row.inner is None else f"{100 * row.inner / result.nbytes:.2f} -> {after}"


def speeds(results: list[Result]) -> str:
    """Encode and decode-and-apply as multiples of memcpy, one core."""
    lines = [
        "| encode, apply: x memcpy | " + " | ".join(r.name for r in results) + " |",
        "|---|" + "---:|" * len(results),
    ]
    for i, first in enumerate(results[0].rows):
        cells = [
            f"{r.memcpy_s / r.rows[i].encode_s:.2f}, {r.memcpy_s / r.rows[i].decode_s:.2f}"
            for r in results
        ]
        lines.append(f"| {first.name} | " + " | ".join(cells) + " |")
    for inner in results[0].transcode_s:
        cells = [f"{r.memcpy_s / r.transcode_s[inner]:.2f}" for r in results]
        lines.append(f"| sparse frames to {inner} blocks | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run it, print Markdown, write JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench codecs", description=__doc__)
    parser.add_argument("what", choices=["codecs"])
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--warm", type=int, default=14, help="steps before the steady masks")
    parser.add_argument("--proxy-mib", type=int, default=128, help="size of the proxy mask [MiB]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    where = machine()
    where["packages"] |= {name: version(name) for name in ("cramjam", "pyarrow")}
    given = inputs(options.model, lr=options.lr, warm=options.warm, proxy_mib=options.proxy_mib)
    results = [run(mask, repeats=options.repeats) for mask in given]
    print(
        f"frames of {FRAME // MIB} MiB of mask, blocks of {BLOCK_BYTES // 1024} KiB, outer pieces "
        "of at most 4 MiB of mask; inner -> payload of the mask (x bound)\n"
    )
    print(markdown(results), "", speeds(results), sep="\n")
    if options.json:
        document = {
            "machine": where,
            "options": {k: str(v) for k, v in vars(options).items()},
            "frame_bytes": FRAME,
            "block_bytes": BLOCK_BYTES,
            "masks": [r.as_dict() for r in results],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
