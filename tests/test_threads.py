"""Threads of a pool work on one core each, and change nothing for others."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightdelta.threads import pool

#: Large operations of torch in four threads of a pool; prints how many threads torch takes there,
#: how many the process has got beside the four, and how many torch takes in other threads.
PROCESS = """
import os, threading, torch
from concurrent.futures import ThreadPoolExecutor
from weightdelta.threads import pool

torch.ones(1 << 20) + 1
before = len(os.listdir("/proc/self/task"))
gate = threading.Barrier(4)

def work(_):
    gate.wait()
    (torch.ones(1 << 20) + 1).sum()
    gate.wait()
    return torch.get_num_threads()

with pool(4, "ours") as ours:
    found = list(ours.map(work, range(4)))
    more = len(os.listdir("/proc/self/task")) - before - 4
with ThreadPoolExecutor(1) as others:
    other = others.submit(torch.get_num_threads).result()
print(found, more, torch.get_num_threads(), other)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch makes no teams on one core")
def test_no_teams_of_openmp() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "[1, 1, 1, 1] 0 2 2"


def test_a_pool_without_torch() -> None:
    code = (
        "import sys; from weightdelta.threads import pool\n"
        "with pool(2, 'a') as p: print(list(p.map(abs, [-1, 2])), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 2] False\n"


def test_names_and_size() -> None:
    with pool(3, "weightdelta-test") as found:
        assert isinstance(found, ThreadPoolExecutor)
        assert found._max_workers == 3
        assert found._thread_name_prefix == "weightdelta-test"
