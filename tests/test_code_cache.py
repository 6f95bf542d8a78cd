"""Kernels on disk: each signature has its own file, and what is not whole or its own is not run."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.extending import intrinsic

from weightdelta.kernels.code_cache import CodeFiles, content

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


def _files(folder: Path, *, prefix: str = "f", stamp: bytes = b"") -> CodeFiles:
    return CodeFiles(folder, prefix=prefix, stamp=lambda: stamp)


def _keep_all(folder: Path, codes: dict[object, bytes]) -> None:
    for key, code in codes.items():
        _files(folder).save(key, code)
    files = _files(folder)
    assert {key: files.load(key) for key in codes} == codes
    assert all(_files(folder, stamp=b"2").load(key) is None for key in codes)
    assert all(_files(folder, prefix="g").load(key) is None for key in codes)
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
    files = _files(tmp_path)
    files.save(_Alike(1), b"one")
    assert files.load(_Alike(1)) == b"one"
    assert files.load(_Alike(2)) is None


@given(data=st.data())
def test_damage_means_compiling_again(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        _damage(_files(Path(folder)), data)


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


def test_what_cannot_be_read_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = _files(tmp_path)
    files.path("key").mkdir()
    with caplog.at_level(logging.WARNING):
        assert files.load("key") is None
    assert "compiled again" in caplog.text
    with pytest.raises(OSError, match="directory"):
        files.save("key", b"code")
    assert [path.name for path in tmp_path.iterdir()] == [files.path("key").name]


def test_a_file_under_another_name_is_not_run(tmp_path: Path) -> None:
    _files(tmp_path, stamp=b"1").save("key", b"code")
    os.rename(_files(tmp_path, stamp=b"1").path("key"), _files(tmp_path, stamp=b"2").path("key"))
    assert _files(tmp_path, stamp=b"2").load("key") is None


def test_one_stamp_is_kept(tmp_path: Path) -> None:
    for stamp in (b"1", b"2"):
        for key in ("one", "two"):
            _files(tmp_path, stamp=stamp).save(key, stamp)
    _files(tmp_path, prefix="g").save("one", b"")
    files = _files(tmp_path, stamp=b"2")
    assert (files.load("one"), files.load("two")) == (b"2", b"2")
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / f"{files.path('one').name}.half").touch()  # a process was killed
    files.flush()
    assert list(tmp_path.iterdir()) == [_files(tmp_path, prefix="g").path("one")]


#: Sources of a function ``f``; each reaches something else than the others.
SOURCES = (
    "F = 6\ndef f(x): return x * F",
    "F = 7\ndef f(x): return x * F",
    "F = 7.0\ndef f(x): return x * F",
    "F = 7\ndef f(x): return x + F",
    "F = np.uint64(7)\ndef f(x): return x * F",
    "F = np.array([1, 2])\ndef f(x): return F[x]",
    "F = np.array([1, 3])\ndef f(x): return F[x]",
    "F = np.array([1, 3], np.uint8)\ndef f(x): return F[x]",
    "def g(x): return x\ndef f(x): return g(x)",
    "def g(x): return -x\ndef f(x): return g(x)",
    "G = 1\ndef g(x): return G\ndef f(x): return g(x)",
    "G = 2\ndef g(x): return G\ndef f(x): return g(x)",
    "@numba.njit\ndef g(x): return x + 1\ndef f(x): return g(x)",
    "@numba.njit\ndef g(x): return x + 2\ndef f(x): return g(x)",
    "def f(x): return [y + 1 for y in x]",
    "def f(x): return [y + 2 for y in x]",
    "def of(n):\n    def f(x): return x + n\n    return f\nf = of(1)",
    "def of(n):\n    def f(x): return x + n\n    return f\nf = of(2)",
    "def f(x): return f(x - 1) if x else 0",
    "def g(x, n=1): return x + n\ndef f(x): return g(x)",
    "def g(x, n=2): return x + n\ndef f(x): return g(x)",
    "@intrinsic\ndef g(t, x):\n    def m(c, b, s, a): return a[0]\n    return x(x), m\n"
    "def f(x): return g(x)",
    "@intrinsic\ndef g(t, x):\n    def m(c, b, s, a): return b.neg(a[0])\n    return x(x), m\n"
    "def f(x): return g(x)",
)


def _made(source: str) -> Any:
    names: dict[str, Any] = {"np": np, "numba": numba, "intrinsic": intrinsic}
    exec(source, names)  # noqa: S102
    return names["f"]


def test_whatever_a_kernel_reaches_counts() -> None:
    found = [content(_made(source)) for source in SOURCES]
    assert len(set(found)) == len(SOURCES)
    assert found == [content(_made(source)) for source in SOURCES]
    assert found == [content(numba.njit(_made(source))) for source in SOURCES]


def test_a_process_keeps_what_it_runs_not_what_lies_on_disk(tmp_path: Path) -> None:
    """Sources that change under a process leave nothing wrong for the next one."""
    source = "FIRST = 0\n" + KERNEL.replace("found = 0", "found = FIRST")
    (tmp_path / "kernel.py").write_text(source)
    edit = (
        "import kernel; p = Path(kernel.__file__); p.write_text(p.read_text().replace('0', '1', 1))"
    )
    changed = PROCESS.replace("import kernel\n", edit + "\n")
    found = [_run(tmp_path, text) for text in (changed, PROCESS, PROCESS)]
    assert found == [["True", "0"], ["False", "0"], ["False", "1"]]


def _run(folder: Path, text: str) -> list[str]:
    path = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, "-c", text, str(folder), "whole", ""]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_no_compiler_no_cache() -> None:
    code = "from weightdelta.kernels.compiled import mix; print(mix.__name__)"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("mix\n", 0), done.stderr


def test_a_folder_that_goes_away_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kernel", source)
    assert spec is not None
    assert spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    (tmp_path / "__pycache__").touch()
    with caplog.at_level(logging.WARNING):
        assert kernel.total(np.arange(5)) == 10
    assert "every process compiles it" in caplog.text
