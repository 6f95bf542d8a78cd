"""A run as Parquet: what each version cost, and every delta's index, for notebooks and SQL."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from weightdelta.batches import Progress
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader
from weightdelta.errors import InputError, StoreUnavailable, WeightDeltaError
from weightdelta.index import SLOTS
from weightdelta.log import Log
from weightdelta.record import VersionEntry
from weightdelta.report import ratio, refs_by_version

#: One row a version.
VERSIONS: Final = pa.schema(
    [
        ("version", pa.int64()),
        ("parent", pa.int64()),
        ("step", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),
        ("epoch", pa.int64()),
        ("codec", pa.string()),
        ("values", pa.string()),
        ("changed", pa.int64()),
        ("elements", pa.int64()),
        ("raw_bytes", pa.int64()),
        ("payload_bytes", pa.int64()),
        ("index_bytes", pa.int64()),
        ("bound_bytes", pa.int64()),
        ("bound_ratio", pa.float64()),
        ("frames", pa.int64()),
        ("frames_changed", pa.int64()),
        ("tensors_changed", pa.int64()),
        ("digest", pa.string()),
        ("write_id", pa.string()),
        ("plan", pa.string()),
        ("refs", pa.list_(pa.string())),
    ]
)
#: The last time that a column of microseconds holds.
_LAST: Final = 2**63 - 1
#: One row a frame of a version: its index.
FRAMES: Final = pa.schema(
    [
        ("version", pa.int64()),
        ("frame", pa.int64()),
        ("owner", pa.int32()),
        ("object", pa.dictionary(pa.int32(), pa.string())),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("raw_bytes", pa.int64()),
        ("width", pa.int8()),
        ("codec", pa.dictionary(pa.int32(), pa.string())),
        ("elements", pa.int64()),
        ("changed", pa.int64()),
        ("digest_change", pa.uint64()),
        ("blake3", pa.binary(16)),
        ("planes", pa.list_(pa.uint32(), SLOTS)),
        ("tensor", pa.dictionary(pa.int32(), pa.string())),
        ("segments", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class Exported:
    """The files written and their rows.

    Attributes:
        versions, frames: Paths.
        version_rows, frame_rows: Rows in each.
    """

    versions: Path
    frames: Path
    version_rows: int
    frame_rows: int


def frames_path(out: Path) -> Path:
    """Where the index goes: ``run.parquet`` has ``run.frames.parquet`` beside it."""
    return out.with_suffix(f".frames{out.suffix}")


def export(
    log: Log, *, out: Path, config: Config, progress: Progress = lambda *_: None
) -> Exported:
    """Write per-version statistics to ``out`` and all indexes to a second file beside it.

    Both are written aside and renamed; older files of these names are replaced. One version's
    index is held at a time.

    Args:
        log: The run's log, refreshed.
        out: A name that ends in ``.parquet``.
        config: Reader limits.
        progress: Called with what is being done.

    Raises:
        InputError: ``out`` does not end in ``.parquet``.
        DamagedObject, MissingObject: An index is not what the log names.
        StoreUnavailable: The store failed, or a file could not be written.
    """
    if out.suffix != ".parquet":
        raise InputError(f"{out}: expected a name that ends in .parquet")
    reader = DeltaReader(log.store, config=config)
    layout = reader.layout(log.opened.layout if log.opened else "")
    refs = refs_by_version(log.refs)
    rows = list[dict[str, Any]]()
    count = 0
    with _written(frames_path(out), FRAMES) as frames, _written(out, VERSIONS) as versions:
        for entry in log.versions.values():
            delta = reader.delta(entry, layout=layout)
            table = pa.Table.from_pydict(_frame_columns(delta), schema=FRAMES)
            frames.write_table(table)
            rows.append(_version_row(entry, delta) | {"refs": refs.get(entry.version, [])})
            count += len(table)
            progress("exporting", len(rows), log.newest)
        versions.write_table(pa.Table.from_pylist(rows, schema=VERSIONS))
    return Exported(out, frames_path(out), len(rows), count)


def _version_row(entry: VersionEntry, delta: Delta) -> dict[str, Any]:
    same = {n: getattr(entry, n) for n in VERSIONS.names if hasattr(entry, n)}
    return same | {
        "time": min(round(entry.time * 1e6), _LAST),
        "bound_ratio": ratio(entry),
        "frames": len(delta.plan),
        "frames_changed": int((delta.index.lengths > 0).sum()),
        "tensors_changed": int((delta.index.tensor_digest != 0).sum()),
    }


def _frame_columns(delta: Delta) -> dict[str, Any]:
    """Columns of one version; constants and numpy arrays, no loop over planes."""
    plan, index = delta.plan, delta.index
    count = len(plan)
    first = plan.tensor[plan.bounds[:-1]].tolist()
    return {
        "version": [index.version] * count,
        "frame": range(count),
        "owner": plan.owner.astype("int32"),
        "object": _dictionary(delta.object_of(i) for i in range(count)),
        "offset": index.offsets,
        "bytes": index.lengths,
        "raw_bytes": plan.numel * plan.width,
        "width": plan.width.astype("int8"),
        "codec": _dictionary(index.codec_of(i) for i in range(count)),
        "elements": plan.numel,
        "changed": index.changed.astype("int64"),
        "digest_change": index.digest_change,
        "blake3": [bytes(row) for row in index.hashes],
        "planes": pa.FixedSizeListArray.from_arrays(pa.array(index.sizes.reshape(-1)), SLOTS),
        "tensor": _dictionary(delta.layout.tensors[t].name for t in first),
        "segments": (plan.bounds[1:] - plan.bounds[:-1]).astype("int32"),
    }


def _dictionary(texts: Iterable[str]) -> Any:
    return pa.array(list(texts), pa.string()).dictionary_encode()


@contextmanager
def _written(path: Path, schema: Any) -> Iterator[Any]:
    """A Parquet writer whose file appears under its name when the block has ended well."""
    draft = path.absolute().with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
                yield writer
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except WeightDeltaError:  # a store's errors are OSErrors too
        raise
    except OSError as e:
        raise StoreUnavailable(e.errno or 0, f"{path}: cannot be written: {e.strerror or e}") from e
