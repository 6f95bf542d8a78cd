"""Raw blocks into weights in host memory, decoded by the CPU: the pipeline without a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import Case, Failing, Interrupted

from weightdelta.apply_blocks import BlockApply
from weightdelta.block_memory import BlockMemory
from weightdelta.codecs.stock import Inner
from weightdelta.errors import DamagedObject, DeviceLost, NotPrepared, StateMismatch
from weightdelta.kernels import torch_masks
from weightdelta.kernels.device import VARIABLE
from weightdelta.kernels.planes import BLOCK_BYTES

INNERS: tuple[Inner, ...] = ("snappy", "lz4")
#: Three blocks or so a frame, and a last one that is short.
SMALL = ((300_001, 2), (90_000, 1), (20_000, 8), (5000, 4))


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's interpreter, which takes minutes."""
    monkeypatch.setenv(VARIABLE, "torch_ops")


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("slot_bytes", [1, 1 << 19, 1 << 27])
def test_weights_change_bit_for_bit_and_back(inner: Inner, slot_bytes: int) -> None:
    case = Case(inner, device="cpu")
    update = case.update(inner, slot_bytes=slot_bytes)
    assert update.dry_run().tolist() == case.digests()
    assert case.holds(case.old)
    update.apply()
    assert case.holds(case.new)
    update.undo()
    assert case.holds(case.old)
    assert update.engine == "CPU: the weights lie in host memory"
    update.clear()
    assert (update.own_bytes, update.pinned_bytes, update.frames) == (8, 0, 0)
    with pytest.raises(NotPrepared):
        update.apply()


@pytest.mark.parametrize("inner", INNERS)
def test_edited_weights_are_found_and_everything_put_back(inner: Inner) -> None:
    case = Case(inner, device="cpu", sizes=SMALL)
    update = case.update(inner, slot_bytes=BLOCK_BYTES)
    update.dry_run()
    where = int(np.flatnonzero(case.old[1] != case.new[1])[-1])
    case.weights[1][where] ^= 1
    case.old[1][where] ^= 1
    for _ in range(2):
        with pytest.raises(StateMismatch, match="Nothing was changed"):
            update.apply()
        assert case.holds(case.old)


def test_a_block_that_has_gone_bad_in_host_memory_ends_in_a_lost_device() -> None:
    case = Case("lz4", device="cpu", sizes=SMALL)
    update = case.update("lz4")
    update.dry_run()
    group = update._groups[-1]
    update._host.numpy()[group.raw][int(group.job.offsets[-1])] ^= 255
    with pytest.raises(DeviceLost, match=r"damaged lz4 block.*memory is not to be trusted"):
        update.apply()


def test_memory_goes_from_update_to_update() -> None:
    case = Case("lz4", device="cpu", sizes=SMALL)
    memory = BlockMemory(torch.device("cpu"), slot_bytes=8 * BLOCK_BYTES)
    options: dict[str, Any] = {"inner": "lz4", "tensors": 4, "device": "cpu", "memory": memory}
    places = set()
    for _ in range(3):
        update = BlockApply(case.frames, **options)
        places.add((update._host.data_ptr(), memory.masks[0].data_ptr()))
        update.clear()
    assert len(places) == 1
    kept = BlockApply(case.frames, **options)
    other = BlockApply(case.frames, **options)
    assert kept._host.data_ptr() != other._host.data_ptr()
    before = len(memory._free["blocks"])
    del other  # a preparation that failed gives back what it had, too
    assert len(memory._free["blocks"]) == before + 1
    memory.release()
    assert memory.nbytes == 0


class Near:
    """Stands in for the memory of a decompression engine, which is nowhere here."""

    capable = True
    closed = 0

    def __init__(self, size: int, *, device: int) -> None:
        self.view = np.zeros(size + 100, np.uint8)
        self.device = device

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.view

    def close(self) -> None:
        """Count."""
        Near.closed += 1


def test_an_engine_reads_host_memory_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slots for raw blocks, and offsets from the beginning of all."""
    monkeypatch.setattr("weightdelta.block_memory.EngineBuffer", Near)
    case = Case("lz4", device="cpu", sizes=SMALL)
    memory = BlockMemory(torch.device("cpu"), slot_bytes=5 * BLOCK_BYTES)
    for inner in INNERS:
        memory.decoder(inner).refusal = ""
    update = BlockApply(case.frames, inner="lz4", tensors=4, device="cpu", memory=memory)
    assert update.dry_run().tolist() == case.digests()
    update.apply()
    assert case.holds(case.new)
    assert memory.raws == []
    assert len({id(group.job.source) for group in update._groups}) == 1
    assert len(update._groups) > 2
    first = update._groups[0].job.source
    update.clear()
    other = BlockApply(case.frames[:5], inner="lz4", tensors=4, device="cpu", memory=memory)
    assert other._groups[0].job.source is first
    other.close()
    assert Near.closed == 1


def test_unsound_blocks_of_one_frame_stop_everything() -> None:
    case = Case("snappy", device="cpu", sizes=SMALL)
    case.frames[2].blocks.arena[-30:] = 255
    with pytest.raises(DamagedObject, match="frame 2, block"):
        case.update("snappy")
    assert case.holds(case.old)


@given(
    inner=st.sampled_from(INNERS),
    slots=st.sampled_from([1, 3, 40]),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), min_size=1, max_size=4),
    back=st.booleans(),
)
def test_a_pass_that_was_interrupted_anywhere_any_number_of_times_ends_exactly(
    inner: Inner, slots: int, cuts: list[tuple[int, float]], back: bool
) -> None:
    case = Case(inner, device="cpu", sizes=((60_001, 2), (9_000, 1)))
    update = case.update(inner, slot_bytes=slots * BLOCK_BYTES)
    update.dry_run()
    if back:
        update.apply()
    for at, share in cuts:
        update._memory.kernels = Failing(torch_masks, at=at, share=share)
        try:
            (update.undo if back else update.apply)()
        except Interrupted:
            continue
        assert case.holds(case.old if back else case.new), "done, and perhaps done again"
    update._memory.kernels = torch_masks
    (update.undo if back else update.apply)()
    assert case.holds(case.old if back else case.new)
    (update.apply if back else update.undo)()
    assert case.holds(case.new if back else case.old)


@given(at=st.integers(0, 6), share=st.floats(0, 1), tensor=st.integers(0, 1), back=st.booleans())
def test_an_edit_after_an_interruption_is_found_and_the_rest_put_back(
    at: int, share: float, tensor: int, back: bool
) -> None:
    case = Case("lz4", device="cpu", sizes=((60_001, 2), (9_000, 1)))
    update = case.update("lz4", slot_bytes=BLOCK_BYTES)
    update.dry_run()
    if back:
        update.apply()
    update._memory.kernels = Failing(torch_masks, at=at, share=share)
    with pytest.raises(Interrupted):
        (update.undo if back else update.apply)()
    update._memory.kernels = torch_masks
    where = int(np.flatnonzero(case.old[tensor] != case.new[tensor])[0])
    case.weights[tensor][where] ^= 2
    with pytest.raises(StateMismatch, match="They were left as they are, and all others put back"):
        (update.undo if back else update.apply)()
    start = case.new if back else case.old
    for values, weights in zip(start, case.weights, strict=True):
        found = weights.numpy().view(values.dtype)
        wrong = np.flatnonzero(found != values)
        assert len(wrong) == 0 or wrong[-1] - wrong[0] < BLOCK_BYTES // values.itemsize
        assert len(wrong) == 0 or weights is case.weights[tensor]


def test_a_pass_that_ended_may_be_asked_for_again() -> None:
    """An interruption may come after the last store, where nobody has noted the end."""
    case = Case("snappy", device="cpu", sizes=SMALL)
    update = case.update("snappy", slot_bytes=BLOCK_BYTES)
    update.dry_run()
    for _ in range(3):
        update.apply()
        assert case.holds(case.new)
    for _ in range(3):
        update.undo()
        assert case.holds(case.old)
    update.begin(back=False)  # and never finished
    update.apply()
    assert case.holds(case.new)
