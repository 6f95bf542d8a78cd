"""What all codecs share: an encoded frame is up to fifteen parts, told apart by their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import zstd
from weightdelta.errors import DamagedObject
from weightdelta.kernels import ops
from weightdelta.kernels.planes import SLOTS as SLOTS
from weightdelta.kernels.planes import Elements

U8 = npt.NDArray[np.uint8]


def damaged(where: str, problem: str) -> DamagedObject:
    """The error for anything in a frame that cannot be."""
    return DamagedObject(f"{where}: {problem}; fetch the object again, or write it anew")


def outer(plane: U8) -> bytes:
    """A plane's stored form: one Zstd frame, or nothing when it is empty or all zero."""
    return zstd.compress(plane.data) if len(plane) and plane.max() else b""


@dataclass(frozen=True, slots=True)
class SlotReader:
    """Cuts an encoded frame into its parts; every size is checked before a part is decoded.

    Attributes:
        names: What each slot is called in messages.
    """

    data: memoryview
    ends: tuple[int, ...]
    names: Sequence[str]
    where: str

    @classmethod
    def of(
        cls, data: bytes | memoryview, sizes: npt.ArrayLike, *, names: Sequence[str], where: str
    ) -> "SlotReader":
        """Check the sizes against the bytes.

        Raises:
            DamagedObject: They do not add up.
        """
        table = np.asarray(sizes).astype(np.int64)
        view = memoryview(data).cast("B")
        if table.shape != (SLOTS,) or table.min() < 0:
            raise damaged(where, f"expected {SLOTS} plane sizes, found {table.tolist()}")
        if int(table.sum()) != len(view):
            raise damaged(where, f"plane sizes promise {int(table.sum())} bytes, found {len(view)}")
        return cls(view, (0, *np.cumsum(table).tolist()), names, where)

    def raw(self, slot: int) -> memoryview:
        """A part as it is stored."""
        return self.data[self.ends[slot] : self.ends[slot + 1]]

    def plane(self, slot: int, size: int) -> U8 | None:
        """Part of ``size`` bytes once its Zstd frame is taken off; None when it is left out."""
        part = self.raw(slot)
        if len(part) > (zstd.bound(size) if size else 0):
            raise damaged(
                self.where,
                f"plane {self.names[slot]!r} takes {len(part)} bytes for {size} bytes of content",
            )
        if not len(part):
            return None
        name = f"{self.where}, plane {self.names[slot]!r}"
        return np.frombuffer(zstd.decompress(part, size=size, where=name), np.uint8)

    def joined(self, slot: int, *, width: int, count: int, planes: int) -> Elements:
        """Elements of ``width`` bytes from ``planes`` byte planes, missing bytes zero."""
        parts = [self.plane(slot + i, count) for i in range(planes)]
        return ops().join([*parts, *[None] * (width - planes)], width=width, count=count)

    def unused(self, slots: Sequence[int]) -> None:
        """Check that parts which nothing calls for are absent."""
        for slot in slots:
            self.plane(slot, 0)
