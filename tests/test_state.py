"""How live weights are read, and which names are one tensor."""

from typing import Any

import pytest
import torch

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.layout import Layout, TensorSpec
from weightdelta.state import (
    StateSource,
    Tensors,
    find_aliases,
    read_state,
    reading,
    refuse_unknown,
    watched,
)


class Tied(torch.nn.Module):
    """An embedding whose head is the same parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(3)
        self.register_buffer("steps", torch.zeros(()))


def test_a_module_is_read_through_its_state_dict() -> None:
    model = Tied()
    found = read_state(model)
    assert set(found) == set(model.state_dict())
    with torch.no_grad():
        model.norm.weight += 1
    assert torch.equal(found["norm.weight"], model.norm.weight)


def test_a_mapping_is_read_as_it_is() -> None:
    tensors = {"a": torch.zeros(1)}
    assert read_state(tensors) is tensors


def test_a_source_is_asked_each_time() -> None:
    states = [{"a": torch.zeros(1)}, {"a": torch.ones(1)}]
    source = StateSource(lambda: states.pop(0))
    assert [read_state(source)["a"].item() for _ in range(2)] == [0, 1]


def _noting(calls: list[str], *, broken: str = "") -> StateSource:
    def note(name: str) -> None:
        calls.append(name)
        if name == broken:
            raise RuntimeError(name)

    def tensors() -> dict[str, torch.Tensor]:
        note("tensors")
        return {}

    return StateSource(tensors, lambda: note("prepare"), lambda: note("release"))


def test_a_source_is_prepared_read_and_released() -> None:
    calls: list[str] = []
    with reading(_noting(calls)):
        calls.append("body")
    assert calls == ["prepare", "tensors", "body", "release"]


@pytest.mark.parametrize("broken", ["tensors", "body"])
def test_a_source_is_released_after_a_failure(broken: str) -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match=broken), reading(_noting(calls, broken=broken)):
        raise RuntimeError("body")
    assert calls == ["prepare", "tensors", "release"]


def test_what_was_not_prepared_is_neither_read_nor_released() -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError), reading(_noting(calls, broken="prepare")):
        calls.append("body")
    assert calls == ["prepare"]


def test_tied_parameters_of_a_module_are_one_group() -> None:
    assert find_aliases(Tied()) == [("embed.weight", "head.weight")]


def test_tied_tensors_of_a_mapping_are_one_group() -> None:
    w = torch.zeros(4, 3)
    tensors = {"z": w, "a": w, "view": w.view(4, 3), "copy": w.clone()}
    assert find_aliases(tensors) == [("a", "view", "z")]
    assert find_aliases(StateSource(lambda: tensors)) == [("a", "view", "z")]


def test_parts_and_other_views_of_one_memory_are_no_aliases() -> None:
    w = torch.zeros(4, 4)
    views = {"whole": w, "rows": w[:2], "turned": w.t(), "ints": w.view(torch.int32)}
    assert find_aliases(views) == []


def test_empty_and_memoryless_tensors_are_no_aliases() -> None:
    tensors = {
        "a": torch.zeros(0),
        "b": torch.zeros(0),
        "c": torch.zeros(2, device="meta"),
        "d": torch.zeros(2, device="meta"),
    }
    assert find_aliases(tensors) == []


class Extra(torch.nn.Module):
    """A parameter, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> dict[str, int]:
        """What ``state_dict`` holds as ``_extra_state``."""
        return {"calls": 3}


def test_extra_state_is_no_weight_and_yet_not_passed_over() -> None:
    assert list(read_state(Extra())) == ["w"]
    with reading(Extra()) as found:
        assert list(found) == ["w", "_extra_state"]
    with pytest.raises(InputError, match="'_extra_state' is no tensor but a dict"):
        read_state(Extra().state_dict())


def test_names_are_words() -> None:
    numbered: Any = {"a": torch.zeros(1), 7: torch.zeros(1)}
    with pytest.raises(InputError, match=r"expected names.*found the int 7"):
        read_state(numbered)


def test_a_watched_state_is_checked_at_each_reading() -> None:
    calls: list[str] = []

    def check(tensors: Tensors) -> None:
        calls.append(",".join(tensors))

    for _ in range(2):
        with reading(watched(_noting(calls), check=check)):
            calls.append("body")
    assert calls == ["prepare", "tensors", "", "body", "release"] * 2
    with reading(watched(Tied().norm, check=check)):
        assert calls[-1] == "weight,bias"


def test_a_name_that_has_appeared_is_refused_unless_excluded() -> None:
    layout = Layout.of([TensorSpec("w", "F32", (1,))], aliases={"head": "w"})
    tensors = dict.fromkeys(["w", "head", "lora.a"], torch.zeros(1))
    refuse_unknown(tensors, layout=layout, exclude=["lora.*"])
    refuse_unknown({}, layout=layout, exclude=[])
    with pytest.raises(LayoutMismatch, match=r"'lora\.a'.*exclude=\['lora\.a'\]"):
        refuse_unknown(tensors, layout=layout, exclude=["lora"])
