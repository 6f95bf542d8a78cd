"""The policy gradient: group-normalised advantages, clipped importance ratios."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Arrays of one batch, by name, all with a row a sequence:
#: tokens int64 [B, P + T], logprobs float32 [B, T], mask bool [B, T], advantages float32 [B].
Batch = dict[str, npt.NDArray[Any]]

#: How far a token's probability may move before its gradient is cut off.
CLIP = 0.2


def advantages(rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rewards [groups, samples] centred and scaled within each group; zero where all agree."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)


def policy_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Clipped policy-gradient loss, a mean over sampled tokens."""
    tokens, mask = batch["tokens"], batch["mask"]
    length = mask.shape[1]
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=length).logits
    spread = logits.float().log_softmax(-1)
    logprobs = spread.gather(2, tokens[:, -length:, None]).squeeze(2)
    ratio = (logprobs - batch["logprobs"]).exp()
    weight = batch["advantages"][:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
    return -(gain * mask).sum() / mask.sum()
