"""The index: exact bytes back, offsets within each owner's object, and no lie accepted."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdelta.errors import DamagedObject, InputError, UnsupportedFormat
from weightdelta.frame import FramePlan
from weightdelta.index import SLOTS, Index
from weightdelta.layout import Box, Layout, TensorSpec
from weightdelta.ownership import Owned, OwnerMap

LAYOUT = Layout.of([TensorSpec("a", "BF16", (6, 16)), TensorSpec("b", "F32", (9,))])
PLAN = FramePlan.build(
    OwnerMap(
        (
            Owned(0, Box((0, 0), (4, 16)), 0),
            Owned(0, Box((4, 0), (2, 16)), 2),
            Owned(1, Box((0,), (9,)), 2),
        ),
        3,
    ),
    layout=LAYOUT,
    max_bytes=64,
)
FRAMES = len(PLAN)


def make(seed: int = 0, *, unchanged: tuple[int, ...] = (), slots: int = SLOTS) -> Index:
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 200, (FRAMES, SLOTS)).astype(np.uint32)
    sizes[:, slots:] = 0
    sizes[:, 0] = 7
    changed = random.integers(1, 9, FRAMES).astype(np.uint32)
    digest_change = random.integers(0, 2**64, FRAMES, dtype=np.uint64)
    for i in unchanged:
        sizes[i], changed[i], digest_change[i] = 0, 0, 0
    return Index(
        plan=PLAN,
        version=5,
        parent=4,
        write_id="0123456789abcdef" * 2,
        codecs=np.where(changed > 0, random.integers(0, 5, FRAMES), 0).astype(np.uint8),
        sizes=sizes,
        hashes=random.integers(0, 256, (FRAMES, 16)).astype(np.uint8),
        digest_change=digest_change,
        changed=changed,
        tensor_digest=random.integers(0, 2**64, 2, dtype=np.uint64),
    )


COLUMNS = ("codecs", "sizes", "hashes", "digest_change", "changed", "tensor_digest")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    unchanged=st.sets(st.integers(0, FRAMES - 1)),
    slots=st.integers(1, SLOTS),
)
def test_bytes_round_trip(seed: int, unchanged: set[int], slots: int) -> None:
    index = make(seed, unchanged=tuple(unchanged), slots=slots)
    data = index.to_bytes()
    again = Index.from_bytes(data, plan=PLAN, layout=LAYOUT)
    for name in COLUMNS:
        ours, theirs = getattr(index, name), getattr(again, name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert (again.version, again.parent, again.write_id) == (5, 4, index.write_id)
    assert again.to_bytes() == data
    present = int(index.sizes.any(axis=0).sum())
    assert len(data) == 90 + 2 * 8 + FRAMES * (29 + 4 * present)


def test_a_frame_lies_behind_its_owners_earlier_frames() -> None:
    index = make(1, unchanged=(1,))
    assert [list(PLAN.owned(rank)) for rank in range(3)] == [[0, 1], [], [2, 3]]
    lengths = index.sizes.sum(axis=1).tolist()
    assert [index.length(i) for i in range(FRAMES)] == lengths
    assert lengths[1] == 0
    assert [index.offset(i) for i in range(FRAMES)] == [0, lengths[0], 0, lengths[2]]
    assert index.payload_bytes == sum(lengths)
    assert index.hash_of(2) == index.hashes[2].tobytes()
    assert index.sizes_of(3).tolist() == index.sizes[3].tolist()


def test_every_wrong_length_is_refused() -> None:
    data = make().to_bytes()
    for bad in [data[:n] for n in range(len(data))] + [data + b"\0", data + data]:
        with pytest.raises((DamagedObject, UnsupportedFormat), match="data/w/index"):
            Index.from_bytes(bad, plan=PLAN, layout=LAYOUT, where="data/w/index")


@pytest.mark.parametrize("at", [8, 16], ids=["frames", "tensors"])
@pytest.mark.parametrize("count", [0, 10**9, 2**63, 2**64 - 1])
def test_wrong_counts_are_refused_before_anything_is_allocated(at: int, count: int) -> None:
    data = bytearray(make().to_bytes())
    data[at : at + 8] = count.to_bytes(8, "little")
    with (
        patch.object(np, "zeros", side_effect=MemoryError),
        pytest.raises(DamagedObject, match=f"idx: expected .*{count}"),
    ):
        Index.from_bytes(bytes(data), plan=PLAN, layout=LAYOUT, where="idx")


def test_an_index_for_another_plan_or_format_is_refused() -> None:
    data = make().to_bytes()
    other = replace(PLAN, max_bytes=65)
    with pytest.raises(DamagedObject, match="idx: expected .*" + other.digest):
        Index.from_bytes(data, plan=other, layout=LAYOUT, where="idx")
    with pytest.raises(UnsupportedFormat, match=r"idx: .*WDINDEX2"):
        Index.from_bytes(b"WDINDEX2" + data[8:], plan=PLAN, layout=LAYOUT, where="idx")
    with pytest.raises(DamagedObject, match="idx: starts with"):
        Index.from_bytes(b"{" + data[1:], plan=PLAN, layout=LAYOUT, where="idx")


def test_a_flipped_bit_never_passes_for_the_same_index() -> None:
    # A reader checks the hash first; without it, the bytes must at least not be the same index.
    data = make(unchanged=(1,), slots=4).to_bytes()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        assert blake3(bad).digest() != blake3(data).digest()
        try:
            other = Index.from_bytes(bytes(bad), plan=PLAN, layout=LAYOUT, where="idx")
        except (DamagedObject, UnsupportedFormat) as e:
            assert "idx" in str(e)  # noqa: PT017
        else:
            assert other.to_bytes() == bytes(bad)


def set_at(array: np.ndarray[Any, Any], i: int, value: int) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed[i] = value
    return changed


GOOD = make(unchanged=(1,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"changed": set_at(GOOD.changed, 0, 33)}, "frame 0: 33 changes of 32"),
        ({"changed": set_at(GOOD.changed, 1, 1)}, "frame 1: 1 changes in 0 bytes"),
        ({"changed": set_at(GOOD.changed, 2, 0)}, "frame 2: 0 changes in"),
        ({"digest_change": set_at(GOOD.digest_change, 1, 5)}, "frame 1: .* digest change 5"),
        ({"sizes": set_at(GOOD.sizes, 3, 2**32 - 1)}, "frame 3: 64424509425 encoded bytes"),
        ({"sizes": GOOD.sizes[:-1]}, "sizes has shape"),
        ({"sizes": GOOD.sizes[:, :-1]}, "sizes has shape"),
        ({"codecs": set_at(GOOD.codecs, 1, 2)}, "frame 1: codec 2 for 0 changes"),
        ({"codecs": set_at(GOOD.codecs, 2, 5)}, "frame 2: codec 5 for"),
        ({"codecs": GOOD.codecs[1:]}, "codecs has shape"),
        ({"hashes": GOOD.hashes[:, :8]}, "hashes has shape"),
        ({"changed": GOOD.changed[1:]}, "changed has shape"),
        ({"digest_change": GOOD.digest_change[1:]}, "digest_change has shape"),
        ({"tensor_digest": GOOD.tensor_digest[None]}, "tensor_digest has 2 dimensions"),
        ({"write_id": "ABC"}, "write id 'ABC'"),
        ({"parent": 5}, "from version 5 to 5"),
        ({"parent": -1}, "from version -1"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(GOOD, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"changed": set_at(GOOD.changed, 0, 33)}, "frame 0"),
        ({"sizes": set_at(GOOD.sizes, 3, 2**32 - 1)}, "frame 3"),
        ({"parent": 5}, "from version 5 to 5"),
    ],
)
def test_the_same_in_bytes_is_damage_that_names_the_object(
    change: dict[str, Any], words: str
) -> None:
    with patch("weightdelta.index._fault", return_value=None):
        data = replace(GOOD, **change).to_bytes()
    with pytest.raises(DamagedObject, match=f"data/w/index: .*{words}"):
        Index.from_bytes(data, plan=PLAN, layout=LAYOUT, where="data/w/index")


def test_a_codec_of_the_future_is_another_format() -> None:
    with patch("weightdelta.index._fault", return_value=None):
        data = replace(GOOD, codecs=set_at(GOOD.codecs, 2, 5)).to_bytes()
    with pytest.raises(UnsupportedFormat, match=r"data/w/index: a frame has codec 5.*lz4\+zstd"):
        Index.from_bytes(data, plan=PLAN, layout=LAYOUT, where="data/w/index")


def test_codecs_are_known_by_frame_and_together() -> None:
    index = replace(GOOD, codecs=np.array([4, 0, 0, 2], np.uint8))
    assert [index.codec_of(i) for i in (0, 2, 3)] == ["none", "sparse+zstd", "lz4+zstd"]
    assert index.codec_names == ("lz4+zstd", "none", "sparse+zstd")
    assert make(unchanged=tuple(range(FRAMES))).codec_names == ()


def test_a_plane_mask_that_is_not_the_canonical_one_is_refused() -> None:
    data = bytearray(make(slots=2).to_bytes())
    data[88:90] = (0x8003).to_bytes(2, "little")
    with pytest.raises(DamagedObject, match="mask 0x8003"):
        Index.from_bytes(bytes(data), plan=PLAN, layout=LAYOUT)
    data[88:90] = (7).to_bytes(2, "little")
    padded = bytes(data[: -16 * FRAMES]) + b"\0" * 4 * FRAMES + bytes(data[-16 * FRAMES :])
    with pytest.raises(DamagedObject, match="plane 2 is empty"):
        Index.from_bytes(padded, plan=PLAN, layout=LAYOUT)
