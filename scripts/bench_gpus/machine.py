"""Where and on what a run was made."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch

PACKAGES = ("weightdelta", "torch", "ray", "triton", "numpy", "numba", "zstandard", "safetensors")
DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")


def machine(device: str, gpus: int) -> dict[str, Any]:
    """Where and on what this ran."""
    cuda, nccl = device == "cuda", cast(Any, torch.cuda.nccl)
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "CPU",
        "gpus": gpus if cuda else 0,
        "topology": _said("nvidia-smi", "topo", "-m") if cuda else None,
        "driver": _said("nvidia-smi", *DRIVER) if cuda else None,
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def _said(*command: str) -> str:
    """What a program printed, or why it could not."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as e:
        return f"{type(e).__name__}: {e}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
