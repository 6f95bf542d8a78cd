"""Where nvCOMP or a GPU is missing, that is said at once, and nothing else breaks."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from weightdelta.codecs import stock
from weightdelta.codecs.blocks import Blocks, check_blocks
from weightdelta.codecs.engine_memory import EngineBuffer
from weightdelta.codecs.nvcomp import BlockCodec, check
from weightdelta.codecs.stock import Inner
from weightdelta.errors import ConfigError, DamagedObject
from weightdelta.kernels.planes import BLOCK_BYTES

INNERS: tuple[Inner, ...] = ("snappy", "lz4")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_a_cpu_is_no_place_for_nvcomp() -> None:
    with pytest.raises(ConfigError, match=r"works on CUDA devices, not on cpu.*let the CPU decode"):
        check("cpu")
    with pytest.raises(ConfigError, match="not on cpu"):
        BlockCodec("snappy", device="cpu")


@no_gpu
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"nvCOMP cannot be imported .*nvidia-nvcomp-cu12"):
        check()


@no_gpu
def test_without_a_gpu() -> None:
    """What nvCOMP raises is a RuntimeError with code 1000."""
    pytest.importorskip("nvidia.nvcomp", reason="nvCOMP is not installed")
    with pytest.raises(ConfigError, match=r"nvCOMP finds no GPU .*1000.*let the CPU decode"):
        check()


@pytest.mark.parametrize("inner", INNERS)
def test_damaged_blocks_are_named(inner: Inner) -> None:
    """Truncated, of another size, and with a byte changed; good ones pass."""
    mask = np.zeros(3 * BLOCK_BYTES // 2, np.uint8)
    mask[::700] = 5
    parts = [stock.compress(mask[:BLOCK_BYTES], inner=inner)]
    parts.append(stock.compress(mask[BLOCK_BYTES:], inner=inner))

    def packed(*made: np.ndarray) -> Blocks:
        sizes = np.array([len(part) for part in made], np.uint32)
        return Blocks(inner, len(mask), sizes, np.concatenate(made))

    check_blocks(packed(*parts), where="frame 4")
    check_blocks(packed(parts[0], parts[0][:0]), where="frame 4")
    broken = parts[1].copy()
    broken[5:] = 255
    for bad in (parts[1][:-4], parts[0], broken):
        with pytest.raises(DamagedObject, match=f"frame 4, block 1: damaged {inner} block.*32768"):
            check_blocks(packed(parts[0], bad), where="frame 4")


@no_gpu
def test_engine_memory_needs_a_driver() -> None:
    with pytest.raises((ConfigError, RuntimeError), match=r"cuda|CUDA"):
        EngineBuffer(100, device=0)


def test_importing_the_codecs_loads_neither_torch_nor_nvcomp() -> None:
    code = (
        "import sys, weightdelta, weightdelta.codecs.blocks, weightdelta.codecs.registry\n"
        "assert not {'torch', 'triton', 'nvidia.nvcomp', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
