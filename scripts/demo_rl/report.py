"""What the run found: a table for people, JSON for programs."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from demo_rl.run import Row, Run


def as_json(run: Run) -> dict[str, Any]:
    """Versions, verdict, rewards."""
    return {
        "codec": run.codec,
        "versions": [_version(row) for row in run.rows],
        "bit_exact": run.bit_exact,
        "comparisons": run.comparisons,
        "lost": run.lost,
        "reward": [row.reward for row in run.rows],
    }


def _version(row: Row) -> dict[str, Any]:
    stats = row.stats
    return {
        "version": stats.version,
        "changed_fraction": stats.changed_fraction,
        "raw_bytes": stats.raw_bytes,
        "payload_bytes": stats.payload_bytes,
        "bound_ratio": stats.payload_bytes / stats.bound_bytes if stats.bound_bytes else None,
        "capture_s": stats.capture_s,
        "encode_s": stats.encode_s,
        "commit_s": stats.commit_s,
        "prepare_s": max(row.prepare_s),
        "pause_s": max(row.pause_s),
    }


def table(run: Run) -> Group:
    """One line a version, then reward and verdict."""
    found = Table(title=f"{run.model}: {len(run.rows)} versions, {run.codec}", title_justify="left")
    columns = ("version", "changed", "payload", "x of full", "x of bound", "capture", "encode")
    for name in (*columns, "commit", "prepare", "pause", "reward"):
        found.add_column(name, justify="right")
    for row in run.rows:
        found.add_row(*_cells(row))
    verdict = (
        Text(f"bit_exact: true ({run.comparisons} comparisons of all weights)", "bold green")
        if run.bit_exact
        else Text("bit_exact: false\n" + "\n".join(run.wrong[:20]), "bold red")
    )
    third = max(len(run.rows) // 3, 1)
    early = sum(r.reward for r in run.rows[:third]) / third
    late = sum(r.reward for r in run.rows[-third:]) / third
    return Group(
        found, Text(f"reward: {early:.3f} in the first third, {late:.3f} in the last"), verdict
    )


def _cells(row: Row) -> list[str]:
    v = _version(row)
    bound = v["bound_ratio"]
    return [
        str(v["version"]),
        f"{100 * v['changed_fraction']:.2f} %",
        f"{v['payload_bytes'] / 1e3:.0f} kB",
        f"{v['payload_bytes'] / v['raw_bytes']:.5f}",
        "" if bound is None else f"{bound:.3f}",
        *(f"{1e3 * v[name]:.0f} ms" for name in ("capture_s", "encode_s", "commit_s")),
        f"{1e3 * v['prepare_s']:.0f} ms",
        f"{1e3 * v['pause_s']:.1f} ms",
        f"{row.reward:.3f}",
    ]
