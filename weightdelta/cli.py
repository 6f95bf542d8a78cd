"""The ``weightdelta`` command. Exit codes: 0 ok, 1 something is bad, 2 usage."""

import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from weightdelta import report
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.errors import InputError, NotYet, WeightDeltaError
from weightdelta.log import Log
from weightdelta.progress import progress
from weightdelta.store import Store
from weightdelta.verify import verify as run_verify

app = typer.Typer(
    name="weightdelta",
    help=(
        "Look into a run's store: what was published, how large, and whether it is whole; turn "
        "any version into a checkpoint.\n\nSTORE is what the trainer was given as store=: a "
        "folder or a URL (s3://bucket/run). A version is a number or a ref such as eval; "
        "0, or base, is the base checkpoint. Exit codes: 0 ok, 1 something is wrong (or not "
        "there yet), 2 usage."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[str, typer.Argument(metavar="STORE", help="URL or folder of the run's store")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
Settings = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME|FILE", help="Preset (local, s3, gcs, ..) or YAML file"),
]
Version = Annotated[
    str | None,
    typer.Option("--version", metavar="N|REF", help="Version; the newest by default"),
]

#: A file or a pipe is as wide as the tables need: names and digests are not folded there.
out = Console(width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True)


@app.command()
def log(store: Url, *, as_json: AsJson = False, config: Settings = None) -> None:
    """List the versions of a run and what each cost."""
    found = _read_log(store, Config.load(config))
    if as_json:
        _print(report.log_rows(found))
    else:
        out.print(report.log_table(found, url=store))


@app.command()
def top(
    store: Url,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the store")
    ] = 2.0,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Watch a running job: newest version, step, rate, payload, refs, writer. Ctrl-C ends it.

    A store that fails or is silent is waited for, and the view says so. Where the output is no
    terminal, and with --json, one look is printed, as with --once.
    """
    from weightdelta.top import live, look, render

    found = Log(Store.of(store, config=Config.load(config)))
    if not (once or as_json) and out.is_terminal:
        live(found, console=out, interval_s=interval)
        return
    with progress(err, "reading the log"):
        seen = look(found)
    now = time.time()
    if as_json:
        _print(seen.as_dict(now))
    else:
        out.print(render(seen, now=now))


@app.command()
def inspect(
    store: Url,
    *,
    version: Version = None,
    frame: Annotated[
        int | None, typer.Option(metavar="N", help="Show this frame: planes, segments, tensors")
    ] = None,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Show one version's delta frame by frame, or one frame down to its planes."""
    from weightdelta import report_detail

    settings = Config.load(config)
    found = _read_log(store, settings)
    chosen = _version(found, version)
    if chosen not in found.versions:
        raise NotYet(f"{store}: expected a version from 1 to {found.newest}, found {chosen}")
    reader = DeltaReader(found.store, config=settings)
    with progress(err, f"reading version {chosen}"):
        layout = reader.layout(found.opened.layout if found.opened else "")
        delta = reader.delta(found.versions[chosen], layout=layout)
        row = None if frame is None else report_detail.frame_row(delta, frame, reader=reader)
    if as_json:
        _print(row or {"version": chosen, "frames": report.delta_rows(delta)})
    elif row:
        out.print(report_detail.frame_view(row))
    else:
        out.print(report.delta_table(delta))
        out.print(
            f"{report.tensors_changed(delta)} of {len(layout.tensors)} tensors changed, "
            f"{report.size(delta.entry.payload_bytes)} in all"
        )


@app.command()
def diff(
    store: Url,
    start: Annotated[str, typer.Argument(metavar="A", help="A version or ref, such as base")],
    end: Annotated[str, typer.Argument(metavar="B", help="Another, earlier or later")],
    *,
    limit: Annotated[int, typer.Option(min=0, help="Tensors to list; 0 lists all")] = 20,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Tell what lies between two versions: tensors, elements, bytes, densities.

    The deltas between A and B are folded: what one takes back of another does not count.
    """
    from weightdelta import report_detail
    from weightdelta.diff import diff as run_diff

    settings = Config.load(config)
    found = _read_log(store, settings)
    with progress(err, "comparing") as update:
        difference = run_diff(
            found,
            start=_version(found, start),
            end=_version(found, end),
            config=settings,
            progress=update,
        )
    if as_json:
        _print(difference.as_dict())
    else:
        out.print(report_detail.diff_view(difference, limit=limit))


@app.command()
def verify(
    store: Url,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read, hash and decode every frame")] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Base checkpoint: with --deep, rebuild every version's weights"
        ),
    ] = None,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Check that a run is whole; exits with 1 and names each damaged object if it is not."""
    if base and not deep:
        raise InputError("--base: expected --deep as well; without it no weights are rebuilt")
    settings = Config.load(config)
    with progress(err, "verifying") as update:
        found = run_verify(
            Store.of(store, config=settings),
            config=settings,
            deep=deep,
            base=base,
            progress=lambda what: update(f"verifying {what}", 0, 0),
        )
    if as_json:
        _print({"ok": found.ok, **asdict(found)})
    else:
        out.print(report.findings_table(found, url=store))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def materialize(
    store: Url,
    *,
    base: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Checkpoint that holds any version of the run, usually the base"
        ),
    ],
    target: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to make; must not exist yet")
    ],
    version: Version = None,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Write a version as a checkpoint that transformers loads.

    Config, tokenizer and sharding are the base's, weights are the version's, bit for bit. The
    folder appears only after the digest of all of it has been found to be the version's own.
    """
    from weightdelta.materialize import materialize as run_materialize

    settings = Config.load(config)
    found = _read_log(store, settings)
    with progress(err, "materializing") as update:
        made = run_materialize(
            found,
            version=_version(found, version),
            base=base,
            out=target,
            config=settings,
            progress=update,
        )
    if as_json:
        _print({"out": str(target), **asdict(made)})
        return
    out.print(
        f"{escape(str(target))}: version {made.version}, {report.size(made.nbytes)} in "
        f"{len(made.files)} files, {made.hops} delta(s) from version {made.start}, digest "
        f"{made.digest[:16]} checked",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if made.left_out:
        err.print(
            f"left out, they hold other weights: {escape(', '.join(made.left_out))}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
def export(
    store: Url,
    *,
    target: Annotated[
        Path, typer.Option("--out", metavar="FILE.parquet", help="Gets one row a version")
    ],
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Write statistics of every version, and all indexes, as Parquet.

    FILE.parquet gets one row a version; FILE.frames.parquet beside it one row a frame of each
    version, as in the indexes.
    """
    from weightdelta.export import export as run_export

    settings = Config.load(config)
    found = _read_log(store, settings)
    with progress(err, "exporting") as update:
        made = run_export(found, out=target, config=settings, progress=update)
    if as_json:
        _print(asdict(made) | {"versions": str(made.versions), "frames": str(made.frames)})
        return
    for path, rows, what in (
        (made.versions, made.version_rows, "versions"),
        (made.frames, made.frame_rows, "frames"),
    ):
        out.print(f"{escape(str(path))}: {rows} {what}", highlight=False, soft_wrap=True)


def _read_log(url: str, config: Config) -> Log:
    found = Log(Store.of(url, config=config))
    with progress(err, "reading the log"):
        found.refresh()
    if found.opened is None:
        raise InputError(f"{url}: expected a run's store, found no log")
    return found


def _version(log: Log, text: str | None) -> int:
    """A version by number or ref; the newest when none is named."""
    if text is None:
        return log.newest
    if re.fullmatch(r"-?[0-9]{1,19}", text):
        return int(text)
    refs = {**log.refs, "base": 0}
    if text not in refs:
        known = ", ".join(sorted(refs))
        raise NotYet(f"{log.store.url}: expected a version or a ref ({known}), found {text!r}")
    return refs[text]


def _print(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Run the command; a known error is one line, not a traceback."""
    try:
        app()
    except WeightDeltaError as e:
        err.print(f"[red]{e.kind}[/]: {escape(str(e))}", soft_wrap=True, highlight=False)
        raise SystemExit(2 if isinstance(e, InputError) else 1) from e
