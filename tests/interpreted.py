"""Triton's kernels in its interpreter, on the CPU: for tests on machines without a GPU.

``conftest`` switches the interpreter on there, before anything imports triton.
"""

import os
from typing import Any

import pytest


def require() -> None:
    """Skip the calling module unless its kernels can run in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed (Linux on x86-64 only)")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off: there is a GPU", allow_module_level=True)
    _mend()


def _mend() -> None:
    """Triton 3.6 takes a scalar out of its array by ``int``, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor
    if plain.__module__ == __name__:
        return

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
