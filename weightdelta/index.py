"""The index of one delta: where every encoded frame lies, and what it must turn out to be.

Fixed little-endian columns behind a header. A reader checks the hash that the log entry names,
then reads the columns in place; counts and lengths are held against the plan and the layout,
so nothing is allocated from a size that the index itself states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.codecs.names import BY_ID, Codec
from weightdelta.codecs.slots import SLOTS as SLOTS
from weightdelta.digest import U64
from weightdelta.errors import DamagedObject, InputError, UnsupportedFormat
from weightdelta.frame import FramePlan
from weightdelta.layout import Layout
from weightdelta.sharding.explicit import I64

#: Bytes kept of each encoded frame's BLAKE3.
HASH_BYTES: Final = 16

_FAMILY: Final = b"WDINDEX"
_MAGIC: Final = b"WDINDEX1"
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("frames", "<u8"),
        ("tensors", "<u8"),
        ("version", "<u8"),
        ("parent", "<u8"),
        ("plan", "u1", 32),
        ("write_id", "u1", 16),
        ("slots", "<u2"),
    ]
)
#: An encoded frame never takes more than twice its raw bytes plus this, a segment.
_SLACK_FRAME: Final = 1 << 16
_SLACK_SEGMENT: Final = 8


@dataclass(frozen=True, eq=False)
class Index:
    """One delta's frames. Frame i is stored in the object of its owner.

    Attributes:
        plan: How the layout is cut into frames.
        version: The version that the delta leads to.
        parent: The version that it starts from.
        write_id: 32 hex digits; names the objects that hold the frames.
        codecs: uint8 [frames], number of each frame's codec; 0 for an unchanged frame.
        sizes: uint32 [frames, 15], encoded bytes of each plane; all zero for an unchanged frame.
        hashes: uint8 [frames, 16], BLAKE3 of each encoded frame, its first 16 bytes.
        digest_change: uint64 [frames], sum of h(new) - h(old) modulo 2^64.
        changed: uint32 [frames], elements that differ.
        tensor_digest: uint64 [tensors], by how much each tensor's digest changes, modulo 2^64.
    """

    plan: FramePlan
    version: int
    parent: int
    write_id: str
    codecs: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.uint32]
    hashes: npt.NDArray[np.uint8]
    digest_change: U64
    changed: npt.NDArray[np.uint32]
    tensor_digest: U64

    def __post_init__(self) -> None:
        fault = _fault(self)
        if fault:
            raise InputError(f"index of version {self.version}: {fault}")

    @cached_property
    def lengths(self) -> I64:
        """int64 [frames], encoded bytes of each frame."""
        lengths: I64 = self.sizes.sum(axis=1, dtype=np.int64)
        return lengths

    @cached_property
    def offsets(self) -> I64:
        """int64 [frames], where each frame starts in its owner's object."""
        before = np.cumsum(self.lengths) - self.lengths
        leader = np.searchsorted(self.plan.owner, self.plan.owner, side="left")
        return before - before[leader]

    def length(self, i: int) -> int:
        """Encoded bytes of frame ``i``; 0 when nothing in it changed."""
        return int(self.lengths[i])

    def offset(self, i: int) -> int:
        """Where frame ``i`` starts in its owner's object."""
        return int(self.offsets[i])

    def codec_of(self, i: int) -> Codec:
        """Codec of frame ``i``."""
        return BY_ID[int(self.codecs[i])]

    @cached_property
    def codec_names(self) -> tuple[Codec, ...]:
        """Codecs of the changed frames, sorted."""
        used = np.unique(self.codecs[self.changed > 0]).tolist()
        return tuple(sorted(BY_ID[number] for number in used))

    def sizes_of(self, i: int) -> npt.NDArray[np.uint32]:
        """uint32 [15], encoded bytes of each plane of frame ``i``."""
        sizes: npt.NDArray[np.uint32] = self.sizes[i]
        return sizes

    def hash_of(self, i: int) -> bytes:
        """The first 16 bytes of the BLAKE3 of frame ``i``'s encoded bytes."""
        return bytes(self.hashes[i])

    @property
    def payload_bytes(self) -> int:
        """Encoded bytes of all frames."""
        return int(self.lengths.sum())

    def to_bytes(self) -> bytes:
        """Header and columns (FORMAT.md, "Index"); planes that no frame has take no room."""
        present = np.flatnonzero(self.sizes.any(axis=0))
        header = np.zeros(1, dtype=_HEADER)
        header["magic"] = _MAGIC
        header["frames"], header["tensors"] = len(self.sizes), len(self.tensor_digest)
        header["version"], header["parent"] = self.version, self.parent
        header["plan"] = np.frombuffer(bytes.fromhex(self.plan.digest), dtype=np.uint8)
        header["write_id"] = np.frombuffer(bytes.fromhex(self.write_id), dtype=np.uint8)
        header["slots"] = sum(1 << int(slot) for slot in present)
        columns = [
            self.tensor_digest.astype("<u8"),
            self.digest_change.astype("<u8"),
            self.changed.astype("<u4"),
            self.codecs.astype("u1"),
            self.sizes[:, present].T.astype("<u4"),
            self.hashes,
        ]
        return b"".join([header.tobytes(), *(c.tobytes() for c in columns)])

    @classmethod
    def from_bytes(
        cls, data: bytes, *, plan: FramePlan, layout: Layout, where: str = "index"
    ) -> "Index":
        """Parse bytes whose hash has been checked.

        Args:
            data: What ``to_bytes`` wrote.
            plan: The plan that the version entry names.
            layout: The layout of that plan.
            where: Name of the object, for errors.

        Raises:
            UnsupportedFormat: Written by another format version.
            DamagedObject: Not an index for this plan and layout.
        """
        header, slots = _header(data, where)
        frames, tensors = len(plan), len(layout.tensors)
        expected = {"frames": frames, "tensors": tensors, "plan": plan.digest}
        found = {
            "frames": int(header["frames"]),
            "tensors": int(header["tensors"]),
            "plan": header["plan"].tobytes().hex(),
        }
        if found != expected:
            raise DamagedObject(f"{where}: expected {expected}, found {found}")
        per_frame = 8 + 4 + 1 + 4 * len(slots) + HASH_BYTES
        size = _HEADER.itemsize + 8 * tensors + per_frame * frames
        if len(data) != size:
            raise DamagedObject(f"{where}: expected {size} bytes, found {len(data)}")
        columns = _columns(data, frames, tensors, slots, where)
        unknown = np.setdiff1d(columns["codecs"], list(BY_ID)).tolist()
        if unknown:
            raise UnsupportedFormat(
                f"{where}: a frame has codec {unknown[0]}, this reader knows "
                f"{', '.join(BY_ID.values())}: use a newer weightdelta"
            )
        try:
            return cls(
                plan=plan,
                version=int(header["version"]),
                parent=int(header["parent"]),
                write_id=header["write_id"].tobytes().hex(),
                **columns,
            )
        except InputError as e:
            raise DamagedObject(f"{where}: {e}") from e


def _header(data: bytes, where: str) -> tuple[np.void, list[int]]:
    """The header and the numbers of the planes present."""
    if len(data) < _HEADER.itemsize:
        raise DamagedObject(f"{where}: {len(data)} bytes are too few for an index")
    magic = data[: len(_MAGIC)]
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise UnsupportedFormat(
                f"{where}: index format {magic!r}, this reader knows {_MAGIC!r}"
            )
        raise DamagedObject(f"{where}: starts with {magic!r}, expected {_MAGIC!r}")
    header: np.void = np.frombuffer(data, dtype=_HEADER, count=1)[0]
    mask = int(header["slots"])
    if mask >> SLOTS:
        raise DamagedObject(f"{where}: plane mask {mask:#x}, expected {SLOTS} bits")
    return header, [slot for slot in range(SLOTS) if mask >> slot & 1]


def _columns(
    data: bytes, frames: int, tensors: int, slots: list[int], where: str
) -> dict[str, Any]:
    offset = _HEADER.itemsize

    def take(kind: str, count: int) -> npt.NDArray[Any]:
        nonlocal offset
        column = np.frombuffer(data, dtype=kind, count=count, offset=offset)
        offset += column.nbytes
        return column.astype(column.dtype.newbyteorder("="), copy=False)

    columns: dict[str, Any] = {
        "tensor_digest": take("<u8", tensors),
        "digest_change": take("<u8", frames),
        "changed": take("<u4", frames),
        "codecs": take("u1", frames),
    }
    present = take("<u4", frames * len(slots)).reshape(len(slots), frames)
    empty = np.flatnonzero(~present.any(axis=1)).tolist()
    if empty:
        raise DamagedObject(f"{where}: plane {slots[empty[0]]} is empty, yet present")
    sizes = np.zeros((frames, SLOTS), dtype=np.uint32)
    sizes[:, slots] = present.T
    return {**columns, "sizes": sizes, "hashes": take("u1", frames * HASH_BYTES).reshape(-1, 16)}


def _fault(index: Index) -> str | None:
    """What is inconsistent in an index, or None."""
    plan = index.plan
    shapes: Mapping[str, tuple[int, ...]] = {
        "sizes": (len(plan), SLOTS),
        "hashes": (len(plan), HASH_BYTES),
        "digest_change": (len(plan),),
        "changed": (len(plan),),
        "codecs": (len(plan),),
    }
    if index.tensor_digest.ndim != 1:
        return f"tensor_digest has {index.tensor_digest.ndim} dimensions, expected 1"
    for name, shape in shapes.items():
        if getattr(index, name).shape != shape:
            return f"{name} has shape {getattr(index, name).shape}, expected {shape}"
    if len(index.write_id) != 32 or set(index.write_id) - set("0123456789abcdef"):
        return f"write id {index.write_id!r}, expected 32 hex digits"
    if min(index.version, index.parent) < 0 or index.version == index.parent:
        return f"leads from version {index.parent} to {index.version}"
    return _frame_fault(index, plan)


def _frame_fault(index: Index, plan: FramePlan) -> str | None:
    changed = index.changed.astype(np.int64)
    bad = np.flatnonzero(changed > plan.numel)
    if len(bad):
        i = int(bad[0])
        return f"frame {i}: {changed[i]} changes of {plan.numel[i]} elements"
    unchanged = changed == 0
    bad = np.flatnonzero(
        (unchanged != (index.lengths == 0)) | (unchanged & (index.digest_change != 0))
    )
    if len(bad):
        i = int(bad[0])
        return (
            f"frame {i}: {changed[i]} changes in {index.lengths[i]} bytes "
            f"with digest change {index.digest_change[i]}"
        )
    bad = np.flatnonzero(unchanged & (index.codecs != 0) | ~np.isin(index.codecs, list(BY_ID)))
    if len(bad):
        i = int(bad[0])
        return f"frame {i}: codec {index.codecs[i]} for {changed[i]} changes"
    limit = 2 * plan.numel * plan.width + _SLACK_FRAME + _SLACK_SEGMENT * np.diff(plan.bounds)
    bad = np.flatnonzero(index.lengths > limit)
    if len(bad):
        i = int(bad[0])
        return f"frame {i}: {index.lengths[i]} encoded bytes, at most {limit[i]} are possible"
    return None
