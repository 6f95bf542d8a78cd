"""Tables for people that go into detail: one frame, the difference of two versions."""

from collections import Counter
from typing import Any, Final

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weightdelta.codecs.blocks import PARTS
from weightdelta.codecs.names import DEFAULT
from weightdelta.codecs.sparse import PLANES
from weightdelta.delta import Delta, DeltaReader, canonical
from weightdelta.diff import DensityClass, Difference
from weightdelta.errors import InputError
from weightdelta.frame import chunks_of
from weightdelta.kernels.planes import GAP_FACTOR
from weightdelta.report import size

#: Width of the longest bar in a histogram, in characters.
_BAR: Final = 30
_INEXACT: Final = (
    "An upper bound: deltas of both forms (diff, xor) met in some elements, and only the weights "
    "tell whether they cancel out."
)


def frame_row(delta: Delta, frame: int, *, reader: DeltaReader) -> dict[str, Any]:
    """One frame down to its planes and segments as JSON-ready values; reads and decodes it.

    Raises:
        InputError: The delta has no such frame.
        DamagedObject, MissingObject: The frame is not what the index names.
    """
    if not 0 <= frame < len(delta.plan):
        raise InputError(
            f"version {delta.entry.version}: expected a frame from 0 to {len(delta.plan) - 1}, "
            f"found {frame}"
        )
    spec, index = delta.plan.frame(frame), delta.index
    names = [delta.layout.tensors[s.tensor].name for s in spec.segments]
    forms, changed = Counter[str](), Counter[int]()
    sparse = index.codec_of(frame) == DEFAULT
    for number, data in reader.frames(delta, [frame]):
        forms = _forms(delta, number, data) if sparse else forms
        for segment, at, _ in canonical(delta, number, data):
            changed[spec.segments.index(segment)] += len(at)
    return {
        "version": delta.entry.version,
        "frame": frame,
        "object": delta.object_of(frame),
        "offset": index.offset(frame),
        "bytes": index.length(frame),
        "raw_bytes": spec.nbytes,
        "owner": spec.owner,
        "width": spec.width,
        "elements": spec.numel,
        "changed": int(index.changed[frame]),
        "digest_change": f"{int(index.digest_change[frame]):016x}",
        "blake3": index.hash_of(frame).hex(),
        "codec": index.codec_of(frame),
        "values": delta.entry.values,
        "planes": [
            {"plane": name, "bytes": nbytes}
            for name, nbytes in zip(
                PLANES if sparse else PARTS, index.sizes_of(frame).tolist(), strict=False
            )
            if nbytes
        ],
        "chunks": dict(forms),
        "tensors": sorted(set(names)),
        "segments": [
            s._asdict() | {"tensor": name, "elements": s.numel, "changed": changed[i]}
            for i, (name, s) in enumerate(zip(names, spec.segments, strict=True))
        ],
    }


def _forms(delta: Delta, frame: int, data: memoryview) -> Counter[str]:
    """How many chunks took which form (FORMAT.md, "Frame")."""
    k = delta.decode(frame, data).counts.astype(np.int64)
    n = chunks_of(delta.plan.frame(frame), layout=delta.layout).length
    cases = [k == 0, k == n, GAP_FACTOR * k < n]
    names = np.select(cases, ["unchanged", "all values", "gaps"], "bitmap")
    return Counter(names.tolist())


def frame_view(row: dict[str, Any]) -> Group:
    """A frame's planes, and its segments."""
    planes = Table()
    planes.add_column("plane")
    planes.add_column("bytes", justify="right")
    planes.add_column("share", justify="right")
    for plane in row["planes"]:
        share = 100 * plane["bytes"] / row["bytes"]
        planes.add_row(plane["plane"], str(plane["bytes"]), f"{share:.1f} %")
    chunks = ", ".join(f"{n} {form}" for form, n in row["chunks"].items())
    return Group(
        Text(
            f"version {row['version']}, frame {row['frame']}: {size(row['bytes'])} for "
            f"{row['changed']} changes of {row['elements']} elements of {row['width']} B, "
            f"{row['codec']}, values {row['values']}"
        ),
        Text(f"{row['object']} from byte {row['offset']}, BLAKE3 {row['blake3']}"),
        *([Text(f"chunks: {chunks}")] if chunks else []),
        planes,
        _segments(row),
    )


def _segments(row: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("segment of tensor", overflow="fold")
    for column in ("first", "rows", "run", "stride", "changed"):
        table.add_column(column, justify="right")
    for s in row["segments"]:
        table.add_row(
            escape(s["tensor"]), str(s["first"]), str(s["rows"]), str(s["run"]), str(s["stride"]),
            f"{100 * s['changed'] / max(s['elements'], 1):.3f} %",
        )  # fmt: skip
    return table


def diff_view(found: Difference, *, limit: int) -> Group:
    """The tensors that changed most, and how densely tensors changed.

    Args:
        found: The difference.
        limit: Tensors to list at most; 0 lists all.
    """
    share = 100 * found.changed / max(found.elements, 1)
    head = Text(
        f"version {found.start} to {found.end}: {found.changed} elements ({share:.3f} %) in "
        f"{len(found.differing)} of {len(found.tensors)} tensors, {size(found.changed_bytes)} raw, "
        f"{size(found.fetched_bytes)} in {found.hops} delta(s)"
    )
    table = Table()
    table.add_column("tensor", overflow="fold")
    for column in ("dtype", "shape"):
        table.add_column(column)
    for column in ("changed", "share", "raw", "one step"):
        table.add_column(column, justify="right")
    for t in found.differing[: limit or None]:
        step = "" if t.one_step is None else f"{100 * t.one_step / t.changed:.1f} %"
        table.add_row(
            escape(t.name), t.dtype, "x".join(map(str, t.shape)), str(t.changed),
            f"{100 * t.density:.3f} %", size(t.changed_bytes), step,
        )  # fmt: skip
    parts: list[Text | Table] = [head, table] if found.differing else [head]
    if limit and len(found.differing) > limit:
        parts.append(Text(f"{len(found.differing) - limit} more; --limit 0 lists all"))
    if not found.exact:
        parts.append(Text(_INEXACT, style="yellow"))
    return Group(*parts, _histogram(found.histogram()))


def _histogram(classes: tuple[DensityClass, ...]) -> Table:
    table = Table()
    table.add_column("share of elements changed")
    table.add_column("tensors", justify="right")
    table.add_column("", min_width=_BAR)
    most = max((c.tensors for c in classes), default=0) or 1
    for c in classes:
        name = f"{100 * c.low:g} % to {100 * c.high:g} %" if c.high else "unchanged"
        bar = "#" * -(-_BAR * c.tensors // most)
        table.add_row(name, str(c.tensors), bar)
    return table
