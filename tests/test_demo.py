"""The parts of the demo that decide whether its verdict can be believed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import weightdelta as wd
from demo_rl.generate import sample
from demo_rl.loss import advantages, policy_loss
from demo_rl.models import checkpoint
from demo_rl.precision import widen
from demo_rl.task import TASKS, Question


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("tiny", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def test_checkpoint_is_built_once_and_the_same(folder: Path, tmp_path: Path) -> None:
    again = checkpoint("tiny", cache=tmp_path)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (folder / name).read_bytes()
    (again / "mark").touch()
    assert (checkpoint("tiny", cache=tmp_path) / "mark").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_prompts_are_deterministic_and_equally_long(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for task in TASKS.values():
        assert task.question(5, seed=1) == task.question(5, seed=1)
        assert len({task.question(i, seed=1) for i in range(30)}) > 1
    prompts = [TASKS["tiny"].question(i, seed=1).prompt for i in range(30)]
    assert len({len(ids) for ids in tokenizer(prompts)["input_ids"]}) == 1
    assert tokenizer.decode(tokenizer(prompts[0])["input_ids"]) == prompts[0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [(" 42", 1.0), (" 42.\n", 1.0), (" 42 inches", 0.5), (" 420", 0.0), ("", 0.0), ("x 42", 0.0)],
)
def test_sums_reward(text: str, reward: float) -> None:
    assert TASKS["smollm2"].reward(Question("40+2", "42"), text) == reward


def test_wide_layers_keep_their_weights_and_compute_the_same(folder: Path, model: Any) -> None:
    wide: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    widen(wide)
    tokens = torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = wide(tokens).logits, model(tokens).logits
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.05)
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in wide.state_dict().items())


def test_advantages_compare_within_a_group() -> None:
    found = advantages(np.array([[0, 1, 1, 0], [1, 1, 1, 1]], dtype=np.float32))
    assert np.allclose(found, [[-1, 1, 1, -1], [0, 0, 0, 0]], atol=1e-3)


def test_sampled_logprobs_are_the_trainers(model: Any) -> None:
    """With equal weights every ratio is 1, so the loss is minus the mean advantage of tokens."""
    prompts = torch.randint(2, 96, (4, 7), generator=torch.Generator().manual_seed(0))
    texts = sample(
        model,
        prompts,
        length=6,
        end=0,
        random=torch.Generator().manual_seed(1),
        engine=wd.TransformersEngine(model),
    )
    batch = {
        "tokens": torch.cat([prompts, texts.tokens], dim=1),
        "logprobs": texts.logprobs,
        "mask": texts.mask,
        "advantages": torch.tensor([1.0, -1.0, 2.0, 0.5]),
    }
    expected = -(batch["advantages"][:, None] * texts.mask).sum() / texts.mask.sum()
    # bf16 with and without a cache round differently: three digits.
    assert policy_loss(model, batch).item() == pytest.approx(expected.item(), abs=2e-2)
