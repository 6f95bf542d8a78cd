"""The state digest: one 64-bit sum per tensor, one hash for a version.

``h(i, bits) = mix64((seed_t + i) * C1 xor bits * C2)``, where ``i`` is an element's canonical
index, ``bits`` its value zero-extended to 64 bits and ``seed_t`` comes from the tensor's name.
A tensor's digest is the sum of ``h`` over its elements modulo 2^64, so parts may be summed in
any order and by anyone: ranks add their shards, and a delta carries only the change
``sum h(new) - h(old)``. A version's digest is the BLAKE3 of the table of tensor digests.

It guards against accidents, not against an adversary: a sum of 64-bit mixes can be forged.
The element-level functions live in ``kernels``; this module holds the constants and the table.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

U64 = npt.NDArray[np.uint64]

C1: Final = 0x9E3779B97F4A7C15
C2: Final = 0xD6E8FEB86659FD93
#: Multipliers of mix64 (the finalizer of SplitMix64; Steele, Lea, Flood, OOPSLA 2014).
M1: Final = 0xBF58476D1CE4E5B9
M2: Final = 0x94D049BB133111EB
MASK: Final = (1 << 64) - 1


@lru_cache(maxsize=1 << 20)
def seed(name: str) -> int:
    """The 64-bit seed of a tensor: the first eight bytes of its name's BLAKE3, little-endian."""
    return int.from_bytes(blake3(name.encode()).digest(length=8), "little")


def version_digest(table: U64) -> str:
    """BLAKE3, in hex, of the little-endian table of tensor digests in layout order."""
    return blake3(table.astype("<u8").tobytes()).hexdigest()
