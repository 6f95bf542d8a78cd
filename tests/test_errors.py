"""The tree that the docstring draws is the tree that is there, and kinds never change."""

import builtins
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest

from weightdelta import errors
from weightdelta.errors import WeightDeltaError

#: Programs match on these: a change here breaks them.
KINDS = {
    "WeightDeltaError": "error",
    "RetryError": "retry",
    "StoreUnavailable": "store-unavailable",
    "StoreTimeout": "store-timeout",
    "NotYet": "not-yet",
    "Busy": "busy",
    "CaptureDropped": "capture-dropped",
    "CaptureSkew": "capture-skew",
    "PublicationLost": "publication-lost",
    "CommitInDoubt": "commit-in-doubt",
    "DeviceMemory": "device-memory",
    "ResyncError": "resync",
    "DamagedObject": "damaged-object",
    "MissingObject": "missing-object",
    "StateMismatch": "state-mismatch",
    "NoPath": "no-path",
    "Dirty": "dirty",
    "DeviceLost": "device-lost",
    "StopError": "stop",
    "Fenced": "fenced",
    "UnsupportedFormat": "unsupported-format",
    "UnsafeStore": "unsafe-store",
    "ReplicaDivergence": "replica-divergence",
    "InputError": "input",
    "LayoutMismatch": "layout-mismatch",
    "OwnershipError": "ownership",
    "UnsupportedSharding": "unsupported-sharding",
    "ConfigError": "config",
    "UnfencedWriter": "unfenced-writer",
    "NotPrepared": "not-prepared",
}

CLASSES: dict[str, type[WeightDeltaError]] = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, WeightDeltaError)
}


def _bases(cls: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in cls.__bases__)


def _drawn() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Class and bases of each line of the tree; "(also X)" holds for a whole branch or a leaf."""
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([|` -]*)([A-Z]\w+)\b(?: .*?\(also (\w+)\))?", line)
        if not found:
            continue
        depth, name, also = len(found[1]), found[2], found[3]
        while path and path[-1][0] >= depth:
            path.pop()
        parent = path[-1][1] if path else "Exception"
        path.append((depth, name))
        yield name, (parent, *([also] if also else []))


def test_the_docstring_draws_the_real_tree() -> None:
    assert dict(_drawn()) == {name: _bases(cls) for name, cls in CLASSES.items()}


def test_kinds_are_the_promised_ones() -> None:
    assert {name: cls.kind for name, cls in CLASSES.items()} == KINDS


def test_kinds_are_unique() -> None:
    assert len({cls.kind for cls in CLASSES.values()}) == len(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_survive_a_process_boundary(name: str) -> None:
    """Ranks send errors to each other; type, kind and message must arrive."""
    error = CLASSES[name]("tensor 'w': expected 1, found 2")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is CLASSES[name]
    assert str(copy) == str(error)


def test_a_store_error_keeps_its_code_across_a_process_boundary() -> None:
    error = errors.StoreUnavailable(28, "store x: could not write y: No space left on device")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), copy.errno, str(copy)) == (type(error), 28, str(error))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_names_hide_no_builtin(name: str) -> None:
    assert not hasattr(builtins, name)
