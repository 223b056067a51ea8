"""Small models that draft, whose drafts are right as a rule if the layers that draft have their KV of the prompt, and
else hardly ever. No download, same bytes for same seed.

What drafts gets the embedding of the next token beside what the model made of this token, takes the former alone, and
has copies of the model's layers. So it is the model on the prompt without its first token. vLLM's EAGLE head does not
normalise its input or its output: embeddings that are normal make up for the first, and a greedy choice does not depend
on the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_model import ModelSpec, write_tokenizer

SPEC = ModelSpec(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, max_tokens=2048)
_MIMO, _NORMS = "model.mtp_layers.0.", ("pre_fc_norm_hidden", "pre_fc_norm_embedding")
_QUIET = 0.1
"""What the layers below the copied one add is so much of what it were."""


def build_with_eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a Llama and a head below ``folder``. Returns the model's folder, and what vLLM calls its
    ``speculative_config``, without the number of tokens."""
    from transformers import LlamaConfig

    config = LlamaConfig(**_sizes(SPEC.layers), architectures=["LlamaForCausalLM"])
    layers = _layers(_written(folder / "model", config, "LlamaForCausalLM", {}))
    del layers["layers.0.input_layernorm.weight"]  # a head has none
    _save(folder / "head", layers | {"fc.weight": _taking(first=True)})
    config.save_pretrained(folder / "head")
    return folder / "model", {"method": "eagle", "model": str(folder / "head")}


def build_with_mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """As ``build_with_eagle``: a MiMo of one layer beside that of its MTP module."""
    import torch
    from transformers import Qwen2Config

    facts: dict[str, Any] = {**_sizes(1), "num_nextn_predict_layers": 1}
    config = Qwen2Config(**facts, architectures=["MiMoForCausalLM"])
    ones = {f"{name}_layernorm.weight": torch.ones(SPEC.hidden) for name in ("token", "hidden", "final")}
    module = {"input_proj.weight": _taking(first=False), **ones}
    _written(folder / "model", config, "Qwen2ForCausalLM", {f"{_MIMO}{name}": of for name, of in module.items()})
    return folder / "model", {"method": "mtp"}


def build_hybrid_with_mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """As ``build_with_mtp``: a dense Qwen3.5 of three gated delta nets and one layer that attends. The former change
    little, so that the module, which lacks them, is right as a rule."""
    import torch
    from transformers import Qwen3_5TextConfig

    kinds = [*["linear_attention"] * 3, "full_attention"]
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    facts = {**_sizes(len(kinds)), **heads, "layer_types": kinds, "mtp_num_hidden_layers": 1}
    config = Qwen3_5TextConfig(**facts, architectures=["Qwen3_5ForCausalLM"])
    norms = {f"mtp.{name}.weight": torch.zeros(SPEC.hidden) for name in ("norm", *_NORMS)}  # one is added to them
    module = {"mtp.fc.weight": _taking(first=True), **norms}
    _written(folder / "model", config, "Qwen3_5ForCausalLM", module, "mtp.layers.0.", copied=len(kinds) - 1)
    return folder / "model", {"method": "mtp"}


def _sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": SPEC.vocabulary, "hidden_size": SPEC.hidden, "intermediate_size": SPEC.intermediate,
        "num_hidden_layers": layers, "num_attention_heads": SPEC.heads, "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim, "max_position_embeddings": SPEC.max_tokens, "bos_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.1, "tie_word_embeddings": False, "dtype": SPEC.dtype,
    }  # fmt: skip


def _taking(*, first: bool) -> Any:
    """[hidden, 2 * hidden]: takes one of two inputs alone."""
    import torch

    pair = [torch.eye(SPEC.hidden), torch.zeros(SPEC.hidden, SPEC.hidden)]
    return torch.cat(pair if first else pair[::-1], dim=1)


def _written(
    folder: Path, config: Any, model_class: str, module: Mapping[str, Any], place: str = _MIMO, *, copied: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Write a model, its tokenizer and an MTP ``module``, whose layer, at this ``place``, is one ``copied`` from the
    model. Returns its weights."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SPEC.seed)
        weights = getattr(transformers, model_class)(config).state_dict()
    embeddings = weights["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt()
    for name in weights:
        if name.startswith(tuple(f"model.layers.{n}." for n in range(copied))):
            weights[name] *= _QUIET if name.endswith(("out_proj.weight", "down_proj.weight")) else 1
    if module:
        start = f"layers.{copied}."
        layer = {name: of for name, of in _layers(weights).items() if name.startswith(start)}
        weights |= {**module, **{place + name.removeprefix(start): of for name, of in layer.items()}}
    _save(folder, weights)
    config.save_pretrained(folder)
    write_tokenizer(folder, SPEC)
    return weights


def _layers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """``layers.0.mlp...`` of the weights of a model."""
    return {name.removeprefix("model."): weight for name, weight in weights.items() if ".layers." in name}


def _save(folder: Path, weights: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
