"""A small Llama with random weights and a real tokenizer, built on the spot: no download, same bytes for same seed.

Little compute per token but the KV cache of a real model: 8 KV heads of 128, so that a token weighs
``layers * 8 KiB`` in fp32 (8 layers: 64 KiB, a Llama 3 70B in 8-bit has 160, an 8B in bf16 128).

    python tests/support/tiny_model.py FOLDER [--layers 8] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Stems and endings from which the made-up corpus and the prompts are put together.
_STEMS = ("riv", "cargo", "ferr", "bridg", "harb", "anch", "tid", "wav", "lant", "mast", "sail", "keel", "dock", "pier")
_ENDINGS = ("er", "ing", "ed", "ion", "al", "ous", "ity", "ment", "ly", "s")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of the model; ``kv_bytes_per_token`` is what a hand-over moves per prompt token."""

    layers: int = 8
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 256
    vocabulary: int = 1024
    max_tokens: int = 8192
    dtype: str = "float32"
    seed: int = 7
    text_tokens: bool = False
    """Each token but the special ones is a text of its own, as nearly all of a real model's are. Otherwise many of what
    this model computes are bytes of no character, or in no vocabulary, which a router does not relay."""

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)


def words(count: int, seed: int) -> str:
    """``count`` made-up words, the same for the same seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_STEMS) + rng.choice(_ENDINGS) for _ in range(count))


def prompt_of(tokenizer_folder: Path, tokens: int, seed: int) -> str:
    """A text of exactly ``tokens`` tokens under the tokenizer in the folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = words(2 * tokens + 8, seed)
    ids = tokenizer.encode(text).ids[:tokens]
    # A cut inside a word decodes to a text that may encode to another number of tokens; single letters fill up.
    while ids:
        text = tokenizer.decode(ids)
        for _ in range(8):
            count = len(tokenizer.encode(text).ids)
            if count == tokens:
                return text
            text = text[:-1] if count > tokens else text + " x"
        ids = ids[:-1]
    raise ValueError(f"no text of {tokens} tokens found; give at least 1")


def build_model(folder: Path, spec: ModelSpec | None = None, weights: bool = True) -> Path:
    """Write the model into ``folder`` unless the same one is there already; returns the folder.

    Without ``weights`` it is for ``--load-format dummy``.

    Raises:
        OSError: the folder cannot be written.
    """
    spec = spec or ModelSpec()
    stamp = folder / "kvferry_model.json"
    wanted = json.dumps(asdict(spec) | {"weights": weights}, sort_keys=True)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    write_tokenizer(folder, spec)
    _write_model(folder, spec, weights)
    stamp.write_text(wanted)  # last: a folder without it is half-built
    return folder


def write_tokenizer(folder: Path, spec: ModelSpec) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if spec.text_tokens:
        vocabulary = {"<s>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, spec.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        _save(tokenizer, folder, spec)
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.train_from_iterator([words(400, seed) for seed in range(50)], trainer)
    _save(tokenizer, folder, spec)


def _save(tokenizer: Tokenizer, folder: Path, spec: ModelSpec) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "model_max_length": spec.max_tokens, "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_model(folder: Path, spec: ModelSpec, weights: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config = LlamaConfig(
        vocab_size=spec.vocabulary, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=spec.max_tokens, bos_token_id=0, eos_token_id=1,
        initializer_range=0.1,  # wide enough that the logits of greedy decoding are far apart against fp32 rounding
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype=spec.dtype,
    )  # fmt: skip
    if not weights:
        config.save_pretrained(folder)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = LlamaForCausalLM(config).to(getattr(torch, spec.dtype))
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=ModelSpec.layers)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=ModelSpec.dtype)
    args = parser.parse_args()
    spec = ModelSpec(layers=args.layers, dtype=args.dtype)
    print(f"{build_model(args.folder, spec)}: {spec.kv_bytes_per_token >> 10} KiB of KV per token")


if __name__ == "__main__":
    main()
