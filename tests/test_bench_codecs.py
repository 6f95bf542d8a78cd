"""The contest behind `scripts/bench codecs`: every contestant is proven before it is quoted."""

import numpy as np
import pytest
from bench_codecs.contest import Contestant, Encoded, contestants, measure, transcode_s
from lib.bench_codec import bf16_pair, byte_pair, xor_bound

from weightdelta.kernels.planes import Chunks, Planes

PAIRS = {"bytes": byte_pair(300_000, density=0.001), "bf16": bf16_pair(200_000, density=0.02)}


@pytest.mark.parametrize("kind", PAIRS)
def test_all_contestants_code_the_same_weights(kind: str) -> None:
    old, new = PAIRS[kind]
    rows = {who.name: measure(who, old, new, repeats=1) for who in contestants()}
    assert len(rows) == 8
    bound = xor_bound(old, new)
    assert (
        bound
        < rows["sparse, XOR"].payload
        < min(r.payload for n, r in rows.items() if not n.startswith("sparse"))
    )
    for inner in ("snappy", "lz4"):
        ours, stock = rows[f"{inner} blocks"], rows[f"{inner} blocks, stock"]
        assert ours.payload < stock.payload < (stock.inner or 0)
    assert {n for n, r in rows.items() if r.inner is not None} == {n for n in rows if "blocks" in n}
    assert transcode_s("lz4", old, new, repeats=1) >= 0


class Forgetful(Contestant):
    """Loses the last change."""

    name = "forgetful"

    def encode(self, planes: Planes, chunks: Chunks, width: int) -> Encoded:  # noqa: ARG002
        """Keeps the planes as they are."""
        self.planes = planes
        return Encoded(b"", np.zeros(15, np.uint32))

    def decode(self, frame: Encoded, chunks: Chunks, width: int) -> Planes:  # noqa: ARG002
        """Changes one value."""
        self.planes.values[-1] ^= self.planes.values.dtype.type(1)
        return self.planes


def test_a_wrong_contestant_ends_the_bench() -> None:
    with pytest.raises(SystemExit, match="forgetful does not give the weights back"):
        measure(Forgetful(), *PAIRS["bf16"], repeats=1)
