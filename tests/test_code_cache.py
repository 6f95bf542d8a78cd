"""Kernels on disk: each signature has its own file, and what is not whole or its own is not run."""

import ast
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.kernels.code_cache import CodeFiles, sources

KERNEL = """
from weightdelta.kernels.compiled import jit

@jit
def total(array):
    found = 0
    for i in range(len(array)):
        found += array[i]
    return found
"""

#: Sums strided or contiguous integers; with another process's name, keeps its code only when that
#: one is about to do the same.
PROCESS = """
import os, sys, time
from pathlib import Path
import numpy as np
import kernel

folder, mine, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
replace = os.replace

def together(source, target):
    (folder / mine).touch()
    deadline = time.monotonic() + 60
    while not (folder / other).exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    replace(source, target)

if other:
    os.replace = together
array = np.arange(40)[::2] if mine == "strided" else np.arange(20)
print(kernel.total(array) == array.sum(), sum(kernel.total.stats.cache_hits.values()))
"""


def _start(folder: Path, mine: str, other: str = "") -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), mine, other],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_processes_that_compile_two_signatures_at_once(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    names = ("strided", "whole")
    cold = [_start(tmp_path, mine, other) for mine, other in zip(names, names[::-1], strict=True)]
    assert [p.communicate()[0].split() for p in cold] == [["True", "0"]] * 2
    warm = [_start(tmp_path, mine) for mine in names]
    assert [p.communicate()[0].split() for p in warm] == [["True", "1"]] * 2


@given(st.dictionaries(st.text() | st.tuples(st.integers()), st.binary(), max_size=6))
def test_each_key_has_its_own(codes: dict[object, bytes]) -> None:
    with TemporaryDirectory() as folder:
        _keep_all(Path(folder), codes)


def _keep_all(folder: Path, codes: dict[object, bytes]) -> None:
    for key, code in codes.items():
        CodeFiles(folder, prefix="f", stamp=b"1").save(key, code)
    files = CodeFiles(folder, prefix="f", stamp=b"1")
    assert {key: files.load(key) for key in codes} == codes
    assert all(CodeFiles(folder, prefix="f", stamp=b"2").load(key) is None for key in codes)
    assert all(CodeFiles(folder, prefix="g", stamp=b"1").load(key) is None for key in codes)
    files.flush()
    assert all(files.load(key) is None for key in codes)


class _Alike:
    """A key that prints like another one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "alike"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


def test_a_key_that_prints_like_another_is_compiled(tmp_path: Path) -> None:
    files = CodeFiles(tmp_path, prefix="f", stamp=b"")
    files.save(_Alike(1), b"one")
    assert files.load(_Alike(1)) == b"one"
    assert files.load(_Alike(2)) is None


@given(data=st.data())
def test_damage_means_compiling_again(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        _damage(CodeFiles(Path(folder), prefix="f", stamp=b""), data)


def _damage(files: CodeFiles, data: st.DataObject) -> None:
    files.save("key", b"code" * 20)
    path = files.path("key")
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
    else:
        path.write_bytes(whole[:at])
    assert files.load("key") is None
    files.save("key", b"anew")
    assert files.load("key") == b"anew"


def test_no_room_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    files = CodeFiles(tmp_path / "file", prefix="f", stamp=b"")
    with caplog.at_level(logging.WARNING):
        files.save("key", b"code")
    assert "compiles its own" in caplog.text
    assert files.load("key") is None


def _imported(path: Path) -> set[Path]:
    """Files of ours that a module takes names from."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    names = {n.module for n in nodes if n.module and n.module.startswith("weightdelta")}
    specs = [importlib.util.find_spec(name) for name in names]
    return {Path(spec.origin) for spec in specs if spec is not None and spec.origin}


def test_every_file_that_a_kernel_may_hold_counts() -> None:
    compiled = [path for path in sources() if _takes(path, "jit")]
    assert len(compiled) > 5
    for path in compiled:
        assert _imported(path) <= set(sources())


def _takes(path: Path, name: str) -> bool:
    """Whether a module imports ``name``."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(name in {a.name for a in n.names} for n in nodes if isinstance(n, ast.ImportFrom))
