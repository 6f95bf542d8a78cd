"""What ``import weightdelta`` offers, and what it must not load."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

import weightdelta

#: Seconds each, and no business of a reader that only lists versions.
HEAVY = ("numba", "pyarrow", "pydantic", "ray", "torch", "transformers", "triton")


def _fresh(code: str) -> str:
    """Standard output of a new interpreter that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_all_is_sorted_and_unique() -> None:
    assert list(weightdelta.__all__) == sorted(set(weightdelta.__all__))


def test_namespace_is_all() -> None:
    code = (
        "import json, types, weightdelta as w\n"
        "print(json.dumps([n for n in dir(w) if not n.startswith('_')"
        " and not isinstance(getattr(w, n), types.ModuleType)]))"
    )
    public = {n for n in weightdelta.__all__ if not n.startswith("_")}
    assert set(json.loads(_fresh(code))) == public


@pytest.mark.parametrize("name", weightdelta.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(weightdelta, name)
    assert not isinstance(value, ModuleType)
    assert isinstance(value, str) or value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        weightdelta.no_such_name  # noqa: B018


def test_a_trainer_without_dtensors_does_not_load_them() -> None:
    """They and what they need (sympy among it) take most of a second, in each of its processes."""
    code = "import sys, ray_actors.trainer; print('torch.distributed.tensor' in sys.modules)"
    assert _fresh(code).strip() == "False"


@pytest.mark.parametrize("library", HEAVY)
def test_import_is_light(library: str) -> None:
    code = f"import sys, weightdelta; print({library!r} in sys.modules)"
    assert _fresh(code).strip() == "False"
