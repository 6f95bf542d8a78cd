"""The ``weightdelta`` command. Exit codes: 0 ok, 1 something is bad, 2 usage."""

import json
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
from weightdelta.store import Store
from weightdelta.verify import verify as run_verify

app = typer.Typer(
    name="weightdelta",
    help="Look into a run's store: what was published, how large, and whether it is whole.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[str, typer.Argument(metavar="STORE", help="URL or folder of the run's store")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
Settings = Annotated[str | None, typer.Option("--config", help="Preset name or YAML file")]

out = Console()
err = Console(stderr=True)


@app.command()
def log(store: Url, *, as_json: AsJson = False, config: Settings = None) -> None:
    """List the versions of a run and what each cost."""
    found = _read_log(_open(store, config))
    if as_json:
        _print(report.log_rows(found))
    else:
        out.print(report.log_table(found, url=store))


@app.command()
def inspect(
    store: Url,
    *,
    version: Annotated[int | None, typer.Option(help="Version; the newest by default")] = None,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Show one version's delta, frame by frame."""
    opened = _open(store, config)
    found = _read_log(opened)
    chosen = found.newest if version is None else version
    if chosen not in found.versions:
        raise NotYet(f"{store}: expected a version from 1 to {found.newest}, found {chosen}")
    reader = DeltaReader(opened, config=Config.load(config))
    layout = reader.layout(found.opened.layout if found.opened else "")
    delta = reader.delta(found.versions[chosen], layout=layout)
    if as_json:
        _print({"version": chosen, "frames": report.delta_rows(delta)})
    else:
        out.print(report.delta_table(delta))
        out.print(
            f"{report.tensors_changed(delta)} of {len(layout.tensors)} tensors changed, "
            f"{report.size(delta.entry.payload_bytes)} in all"
        )


@app.command()
def verify(
    store: Url,
    *,
    deep: Annotated[bool, typer.Option(help="Read, hash and decode every frame")] = False,
    base: Annotated[
        Path | None, typer.Option(help="Base checkpoint: with --deep, rebuild every version")
    ] = None,
    as_json: AsJson = False,
    config: Settings = None,
) -> None:
    """Check that a run is whole; exits with 1 and names each damaged object if it is not."""
    if base and not deep:
        raise InputError("--base: expected --deep as well; without it no weights are rebuilt")
    settings = Config.load(config)
    with err.status("verifying") as status:
        found = run_verify(
            _open(store, config),
            config=settings,
            deep=deep,
            base=base,
            progress=lambda what: status.update(f"verifying {what}"),
        )
    if as_json:
        _print(
            {
                "ok": found.ok,
                "versions": found.versions,
                "frames": found.frames,
                "problems": found.problems,
            }
        )
    else:
        out.print(report.findings_table(found, url=store))
    if not found.ok:
        raise typer.Exit(1)


def _open(url: str, config: str | None) -> Store:
    return Store.of(url, config=Config.load(config))


def _read_log(store: Store) -> Log:
    found = Log(store)
    found.refresh()
    if found.opened is None:
        raise InputError(f"{store.url}: expected a run's store, found no log")
    return found


def _print(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Run the command; a known error is one line, not a traceback."""
    try:
        app()
    except WeightDeltaError as e:
        err.print(f"[red]{e.kind}[/]: {escape(str(e))}", soft_wrap=True, highlight=False)
        raise SystemExit(2 if isinstance(e, InputError) else 1) from e
