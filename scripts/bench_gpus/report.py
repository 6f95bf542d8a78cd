"""What was found: tables for people, JSON for programs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_gpus.results import codec_row, crossings, dense_seconds, rank_rows

SHARED = (
    "A sampler shares a GPU with a trainer rank here. The device divides its time between the two: "
    "gather and broadcast together wait for each other there, by themselves they do not."
)

#: A column's head, and its cell.
Column = tuple[str, Callable[[dict[str, Any]], str]]


def _seconds(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[name]:.3f} s" if row[name] >= 1 else f"{row[name] * 1e3:.1f} ms"


#: The rows of a table that has a column for each codec.
CODECS: list[Column] = [
    ("measured", lambda r: f"`{r['codec']}`"),
    ("changed elements", lambda r: f"{100 * r['changed']:.3f} %"),
    ("payload of a version", lambda r: f"{r['payload_bytes'] / 1e6:.3f} MB"),
    ("payload, of all weights", lambda r: f"{100 * r['payload_bytes'] / r['dense_bytes']:.3f} %"),
    ("step, nothing attached", _seconds("step_s")),
    ("step, encoding beside it", _seconds("step_beside_s")),
    ("period, nothing attached", _seconds("period_s")),
    ("period, every step published", _seconds("period_beside_s")),
    ("inflation of the period", lambda r: f"{r['period_beside_s'] / r['period_s']:.3f} x"),
    ("the driver's call of publish()", _seconds("call_s")),
    ("capture: trainer held", _seconds("capture_s")),
    ("encode, after the capture", _seconds("encode_s")),
    ("hand-over, after the encoding", _seconds("hand_over_s")),
    ("commit", _seconds("commit_s")),
    ("prepare", _seconds("prepare_s")),
    ("pause", _seconds("pause_s")),
    ("end of step to served", _seconds("end_to_end_s")),
    ("end of step to served, training on", _seconds("end_to_end_beside_s")),
    ("owned bytes, most / mean", lambda r: f"{r['balance']:.4f}"),
    ("payload by rank, most / mean", lambda r: f"{r['payload_balance']:.4f}"),
    ("attach", _seconds("attach_s")),
    ("comparisons of all bytes", lambda r: str(r["comparisons"])),
    ("bytes compared, all equal", lambda r: f"{r['compared_bytes'] / 1e9:.3f} GB"),
]
RANKS: list[Column] = [
    ("codec", lambda r: f"`{r['codec']}`"),
    ("rank", lambda r: str(r["rank"])),
    ("owns", lambda r: f"{r['owned_bytes'] / 1e9:.3f} GB"),
    ("payload", lambda r: f"{r['payload_bytes'] / 1e6:.2f} MB"),
    ("held", _seconds("capture_s")),
    ("encode", _seconds("encode_s")),
    ("hand-over", _seconds("hand_over_s")),
]
DENSE: list[Column] = [
    ("packed broadcast of all weights", lambda r: r["name"]),
    ("time", _seconds("seconds")),
    ("rate", lambda r: f"{r['bytes'] / r['seconds'] / 1e9:.2f} GB/s"),
]
COMPUTED: list[Column] = [
    ("codec", lambda r: f"`{r['codec']}`"),
    ("against the broadcast", lambda r: r["broadcast"]),
    ("deltas win on links below", lambda r: _limit(r)),
    ("delta / dense", lambda r: "; ".join(_link(name, *r["links"][name]) for name in r["links"])),
]


def _limit(row: dict[str, Any]) -> str:
    return "any" if row["deltas_always"] else f"{row['deltas_below'] / 1e9:.2f} GB/s"


def _link(name: str, delta: float, dense: float) -> str:
    return f"{name}: {delta:.2f} / {dense:.2f} s"


def table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """A table in Markdown."""
    lines = [
        "| " + " | ".join(head for head, _ in columns) + " |",
        "| " + " | ".join("---" if i == 0 else "---:" for i in range(len(columns))) + " |",
    ]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def turned(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """The same with rows and columns exchanged."""
    (first, name), *rest = columns
    names = [name(row) for row in rows]
    cells: list[Column] = [(first, lambda r: str(r["what"]))]
    cells += [(n, lambda r, i=i: str(r["cells"][i])) for i, n in enumerate(names)]  # type: ignore[misc]
    lines = [{"what": head, "cells": [cell(row) for row in rows]} for head, cell in rest]
    return table(lines, cells)


class Report:
    """The document, written anew whenever something has been added."""

    def __init__(self, head: dict[str, Any], *, file: Path | None) -> None:
        self.document: dict[str, Any] = {**head, "codecs": [], "ranks": [], "dense": [],
                                         "computed": [], "left_out": [], "raw": {}}  # fmt: skip
        self._file = file

    def add_codec(self, run: dict[str, Any]) -> None:
        """Take a codec's run."""
        self.document["raw"][run["codec"]] = run
        self.write()  # as it came, whatever the arithmetic may say to it
        row = codec_row(run)
        self.document["codecs"].append(row | {"dense_bytes": self.document["dense_bytes"]})
        self.document["ranks"] += rank_rows(run)
        self.write()

    def add_peer(self, peer: dict[str, Any]) -> None:
        """Take the broadcast's times."""
        self.document["raw"]["peer"] = peer
        nbytes = self.document["dense_bytes"]
        self.document["dense"] = [
            {"name": name, "seconds": seconds, "bytes": nbytes, "computed": name == "at best"}
            for name, seconds in dense_seconds(peer).items()
        ]
        self.write()

    def leave_out(self, what: str) -> None:
        """Note what was not run, and why."""
        self.document["left_out"].append(what)
        self.write()

    def write(self) -> None:
        """Compute what can be computed by now, and write the files."""
        if "peer" in self.document["raw"]:
            dense = dense_seconds(self.document["raw"]["peer"])
            nbytes = self.document["dense_bytes"]
            rows = [crossings(row, dense, dense_bytes=nbytes) for row in self.document["codecs"]]
            self.document["computed"] = [crossing for found in rows for crossing in found]
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.document, indent=1) + "\n")
            self._file.with_suffix(".md").write_text(self.markdown() + "\n")

    def markdown(self) -> str:
        """All tables, each with what it is."""
        d = self.document
        where, plan = d["machine"], d["plan"]
        head = (
            f"{where['gpus'] or 'no'} GPUs, {where['device']}, {where['cores']} cores; model "
            f"{d['options']['model']}, {d['dense_bytes'] / 1e9:.2f} GB in bf16; FSDP2 ranks on "
            f"{plan['trainers']}, samplers on {plan['samplers']}, shared: {plan['shared']}; "
            f"{where['packages']}, NCCL {where['nccl']}, CUDA {where['cuda']}, {where['date']}"
        )
        parts = [
            head,
            turned(d["codecs"], CODECS),
            *([SHARED] if plan["shared"] else []),
            "Every rank by itself:\n\n" + table(d["ranks"], RANKS),
            "`at best` is computed: the longer one of the parts by themselves.\n\n"
            + table(d["dense"], DENSE),
            "Computed, not measured: what it took here, and the bytes over a slower link.\n\n"
            + table(d["computed"], COMPUTED),
            *(f"Left out: {what}" for what in d["left_out"]),
        ]
        return "\n\n".join(parts)
