"""A small Llama and EAGLE heads for it, whose drafts are right as a rule if the head has its KV of the prompt, and else
hardly ever. No download, same bytes for same seed.

A head gets the embedding of the next token beside what the model made of this token, takes the former alone, and has
copies of the model's layers. So it is the model on the prompt without its first token. vLLM's head does not normalise
its input or its output: embeddings that are normal make up for the first, and a greedy choice does not depend on the
second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_model import ModelSpec, write_tokenizer

SPEC = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=128, max_tokens=2048)


def build_drafting_model(folder: Path, spec: ModelSpec = SPEC) -> tuple[Path, Path]:
    """Write the model and its head below ``folder``; returns their folders."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "vocab_size": spec.vocabulary, "hidden_size": spec.hidden, "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "max_position_embeddings": spec.max_tokens, "bos_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.1, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
        "dtype": spec.dtype,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt()
    target, head = folder / "model", folder / "head"
    target.mkdir(parents=True)
    head.mkdir()
    model.save_pretrained(target)
    write_tokenizer(target, spec)
    layers = {
        name.removeprefix("model."): weight.clone()
        for name, weight in model.state_dict().items()
        if ".layers." in name and name != "model.layers.0.input_layernorm.weight"
    }
    takes = torch.cat([torch.eye(spec.hidden), torch.zeros(spec.hidden, spec.hidden)], dim=1)
    save_file({**layers, "fc.weight": takes}, head / "model.safetensors", {"format": "pt"})
    LlamaConfig(**sizes).save_pretrained(head)
    return target, head
