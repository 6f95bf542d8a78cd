"""Laws of every decoder of many frames at once."""

from typing import Any, Protocol

import numpy as np

from weightdelta.kernels.planes import Planes


class Made(Protocol):
    """Encoded frames in one piece of memory, the first of which starts at byte 3."""

    data: Any
    sizes: Any

    def decode(self) -> Planes | None:
        """All of them at once."""
        ...


def no_damaged_byte_passes(made: Made) -> None:
    """A flipped bit is either found, or does not matter (a header's own redundancy)."""
    right = made.decode()
    assert right is not None
    for at in range(3, len(made.data)):
        made.data[at] ^= 0x20
        found = made.decode()
        assert found is None or all(
            np.array_equal(getattr(found, n), getattr(right, n)) for n in Planes.__slots__
        )
        made.data[at] ^= 0x20


def a_wrong_size_is_refused(made: Made, slot: int) -> None:
    """By one byte, and by many."""
    assert made.decode() is not None
    for step in (1, 1 << 20):
        made.sizes[1, slot] += step
        assert made.decode() is None
        made.sizes[1, slot] -= step
