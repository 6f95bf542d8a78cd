"""Sampling, token by token, with a boundary between tokens at which weights may change."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

import weightdelta as wd


@dataclass(frozen=True, slots=True)
class Texts:
    """Sampled continuations.

    Attributes:
        tokens: int64 [B, T], after the prompt.
        logprobs: float32 [B, T], of each token under the weights that sampled it.
        mask: bool [B, T], true up to and including the end token.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor


@torch.no_grad()
def sample(
    model: Any,
    prompts: torch.Tensor,
    *,
    length: int,
    end: int,
    random: torch.Generator,
    engine: wd.TransformersEngine,
) -> Texts:
    """Continue ``prompts`` (int64 [B, P], equally long) by ``length`` tokens at temperature 1.

    Attention state computed before an update stays in use after it, as in any engine that takes
    updates in flight.
    """
    tokens, logprobs = [], []
    cache, last = DynamicCache(), prompts
    for _ in range(length):
        with engine.token():
            out = model(input_ids=last, cache=cache, use_cache=True, logits_to_keep=1)
            spread = out.logits[:, -1].float().log_softmax(-1)
            last = torch.multinomial(spread.exp(), 1, generator=random)
        tokens.append(last)
        logprobs.append(spread.gather(1, last))
    found = torch.cat(tokens, dim=1)
    ended = (found == end).cumsum(1) - (found == end).long()
    return Texts(found, torch.cat(logprobs, dim=1), ended == 0)
