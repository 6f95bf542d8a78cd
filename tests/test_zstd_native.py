"""Zstd by address: found where the package brings it, one context a thread, else done without."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chunking import change, random_elements, segments

from weightdelta.codecs import batch, sparse, zstd_native
from weightdelta.kernels import cpu_ops
from weightdelta.kernels.planes import Planes


def _decoded() -> Planes | None:
    """What comes of a frame that is encoded and decoded in batches of one."""
    chunks = segments([900])
    old = random_elements(900, width=2, seed=1)
    planes, _ = cpu_ops.encode(old, change(old, np.r_[3:90], seed=2), chunks=chunks, xor=False)
    encoded = batch.encode_frames([planes], width=2, values="diff")
    data, sizes = encoded[0] if encoded else sparse.encode_frame(planes, width=2, values="diff")
    return batch.decode_frames(
        np.frombuffer(data, np.uint8), np.zeros(1, np.int64), sizes[None], chunks=chunks,
        bounds=np.array([0, len(chunks)]), width=2, values="diff",
    )  # fmt: skip


def test_the_package_brings_it() -> None:
    """The wheels that this project is tested with do; elsewhere batches are decoded one by one."""
    assert zstd_native.decompressor() is not None
    assert _decoded() is not None


def test_a_thread_has_a_context_of_its_own_and_takes_it_along() -> None:
    found: list[tuple[int, int] | None] = [zstd_native.decompressor(), zstd_native.decompressor()]
    kept: list[weakref.ref[object]] = []

    def note() -> None:
        found.append(zstd_native.decompressor())
        kept.append(weakref.ref(zstd_native._contexts.decompressor))
        kept.append(weakref.ref(zstd_native._contexts.compressor))

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    own, again, other = found
    assert own == again
    assert other
    assert own
    assert other[0] == own[0]
    assert other[1] != own[1]
    del thread
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize("broken", ["absent", "hidden"])
def test_without_it_batches_are_left_to_the_caller(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstd_native._library.cache_clear()
    if broken == "absent":
        monkeypatch.setattr(zstd_native.importlib.util, "find_spec", lambda _: None)
    else:  # a shared object without the library's names
        spec = zstd_native.importlib.util.find_spec("zstandard.backend_c")
        monkeypatch.setattr(zstd_native.importlib.util, "find_spec", lambda _: spec)
    try:
        with ThreadPoolExecutor(1) as fresh:  # a thread keeps what it has found
            assert fresh.submit(zstd_native.decompressor).result() is None
            assert fresh.submit(zstd_native.compressor).result() is None
            assert fresh.submit(_decoded).result() is None
    finally:
        zstd_native._library.cache_clear()
