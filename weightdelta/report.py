"""Tables for people: a run's log, one version's frames, what a verification found."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.box import SQUARE
from rich.markup import escape
from rich.table import Table

from weightdelta.delta import Delta
from weightdelta.log import Log
from weightdelta.record import OpenEntry, RefEntry, VersionEntry
from weightdelta.verify import Findings

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Bytes for people: three significant digits and a binary unit."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if not unit else f"{value:.3g} {UNITS[unit]}"


def log_rows(log: Log) -> list[dict[str, Any]]:
    """Every entry of a log as JSON-ready values."""
    return [_entry_row(entry) for entry in log.entries]


def _entry_row(entry: OpenEntry | VersionEntry | RefEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seq": entry.seq,
        "kind": entry.kind,
        "epoch": entry.epoch,
        "time": entry.time,
    }
    if isinstance(entry, VersionEntry):
        row |= {
            "version": entry.version,
            "parent": entry.parent,
            "step": entry.step,
            "changed_fraction": entry.changed / entry.elements if entry.elements else 0.0,
            "raw_bytes": entry.raw_bytes,
            "payload_bytes": entry.payload_bytes,
            "index_bytes": entry.index_bytes,
            "bound_ratio": ratio(entry),
            "codec": entry.codec,
            "values": entry.values,
            "digest": entry.digest,
        }
    elif isinstance(entry, RefEntry):
        row |= {"name": entry.name, "version": entry.version}
    else:
        row |= {"parent": entry.parent, "digest": entry.parent_digest, "layout": entry.layout}
    return row


def ratio(entry: VersionEntry) -> float | None:
    """Payload over the entropy bound, where the bound was measured and is not 0."""
    return entry.payload_bytes / entry.bound_bytes if entry.bound_bytes else None


def refs_by_version(refs: Mapping[str, int]) -> dict[int, list[str]]:
    """Names of each version, sorted."""
    found: dict[int, list[str]] = {}
    for name, version in sorted(refs.items()):
        found.setdefault(version, []).append(name)
    return found


def log_table(log: Log, *, url: str) -> Table:
    """A run's versions and what they cost."""
    table = Table(
        title=f"{escape(url)}: version {log.newest}, writer epoch {log.epoch}", title_justify="left"
    )
    for column in (
        "version",
        "step",
        "changed",
        "payload",
        "x of full",
        "x of bound",
        "digest",
        "refs",
    ):
        table.add_column(
            column, justify="left" if column in {"digest", "refs"} else "right", overflow="fold"
        )
    refs = refs_by_version(log.refs)
    table.add_row(
        "0", "", "", "", "", "", log.digest(0)[:16], ", ".join(["base", *refs.get(0, [])])
    )
    for entry in log.versions.values():
        table.add_row(*_version_cells(entry), ", ".join(refs.get(entry.version, [])))
    return table


def _version_cells(entry: VersionEntry) -> Iterable[str]:
    bound = ratio(entry)
    full = entry.payload_bytes / entry.raw_bytes if entry.raw_bytes else 0.0
    return (
        str(entry.version),
        "" if entry.step is None else str(entry.step),
        f"{100 * entry.changed / max(entry.elements, 1):.3f} %",
        size(entry.payload_bytes),
        f"{full:.5f}",
        "" if bound is None else f"{bound:.3f}",
        entry.digest[:16],
    )


def delta_rows(delta: Delta) -> list[dict[str, Any]]:
    """Every frame of a delta as JSON-ready values."""
    index, plan = delta.index, delta.plan
    return [
        {
            "frame": i,
            "object": delta.object_of(i),
            "offset": index.offset(i),
            "bytes": index.length(i),
            "raw_bytes": plan.frame(i).nbytes,
            "changed": int(index.changed[i]),
            "width": plan.frame(i).width,
            "tensors": sorted(
                {delta.layout.tensors[s.tensor].name for s in plan.frame(i).segments}
            ),
            "blake3": index.hash_of(i).hex(),
        }
        for i in range(len(plan))
    ]


def delta_table(delta: Delta) -> Table:
    """One version's frames."""
    entry = delta.entry
    table = Table(
        title=f"version {entry.version} from {entry.parent}, {entry.codec}, values {entry.values}",
        title_justify="left",
    )
    for column in ("frame", "object", "bytes", "raw", "changed", "tensors"):
        table.add_column(
            column, justify="left" if column in {"object", "tensors"} else "right", overflow="fold"
        )
    for row in delta_rows(delta):
        names = row["tensors"]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        share = 100 * row["changed"] * row["width"] / max(row["raw_bytes"], 1)
        table.add_row(
            str(row["frame"]), row["object"], size(row["bytes"]), size(row["raw_bytes"]),
            f"{share:.3f} %", escape(names[0]) + more,
        )  # fmt: skip
    return table


def tensors_changed(delta: Delta) -> int:
    """Tensors whose digest changed."""
    return int(np.count_nonzero(delta.index.tensor_digest))


def findings_table(found: Findings, *, url: str) -> Table:
    """A verification's result."""
    verdict = "[green]ok[/]" if found.ok else f"[red]{len(found.problems)} problem(s)[/]"
    read = f"{found.frames} frames" if found.frames else "log and indexes (--deep reads frames)"
    table = Table(
        title=f"{escape(url)}: {found.versions} versions, {read}: {verdict}",
        title_justify="left",
        show_header=False,
        box=None if found.ok and not found.notes else SQUARE,
    )
    table.add_column("problem", overflow="fold")
    for problem in found.problems:
        table.add_row(escape(problem))
    for note in found.notes:
        table.add_row(f"[yellow]harmless:[/] {escape(note)}")
    return table
