"""How many multimodal items a step may encode, by modality (image, video, audio).

A step may encode tokens up to the compute budget, and keep tokens up to the size of the encoder cache: the lesser of
the two is its encoder budget. An item of more tokens raises both, for an item is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.transport.errors import ConfigError, did_you_mean


class MultiModalBudget:
    """The encoder budget of a step, and the items of each modality that fit it. Items of modalities with limit 0 do not
    pass through the encoder, and the mappings have no entry for them; with ``enable_mm_embeds`` their embeddings come
    ready made and take room in the cache. ``config``, ``mm_registry``: as vLLM's. Raises ConfigError: tokens below 0,
    or an item that one step cannot take where items may not be cut."""

    def __init__(self, config: Any, mm_registry: Any, *, cache: Any = None) -> None:
        self.model_config, self.scheduler_config = config.model_config, config.scheduler_config
        self.max_model_len: int = int(self.model_config.max_model_len)  # Tokens of a request at most
        self.max_num_reqs: int = int(self.scheduler_config.max_num_seqs)  # Requests of a step at most
        self.cache: Any = cache  # Of the processor's inputs, or none
        self.processor: Any = mm_registry.create_processor(self.model_config)  # Of the model's inputs
        self.mm_limits: Mapping[str, int] = self.processor.info.allowed_mm_limits  # Items of each modality in a prompt
        encoded = [name for name in self.processor.info.supported_mm_limits if self.mm_limits.get(name, 0) > 0]
        tokens = self._max_tokens_per_item(encoded)
        compute, kept = _budgets(self.scheduler_config, tokens)
        self.encoder_compute_budget: int = compute  # Encoder tokens of a step; 0 where no modality is in use
        self.encoder_cache_size: int = kept  # Encoder tokens that the cache holds; 0 where no modality is in use
        of_items = {name: tokens[name] for name in encoded if name in tokens}
        self.mm_max_toks_per_item: dict[str, int] = of_items  # None of modalities with another's placeholders
        self.mm_max_items_per_prompt: dict[str, int] = {}  # At least 1, where an item has tokens
        self.mm_max_items_per_batch: dict[str, int] = {}  # By the encoder budget and the prompts of a step, likewise
        for name, each in of_items.items():
            self.mm_max_items_per_prompt[name], self.mm_max_items_per_batch[name] = self._max_items(name, each)

    def get_encoder_budget(self) -> int:
        """Encoder tokens of a step: the lesser of compute budget and cache size."""
        return min(self.encoder_compute_budget, self.encoder_cache_size)

    def get_modality_with_max_tokens(self) -> str:
        """The one whose items have the most tokens; of several, the last by name. Raises ConfigError: there is none."""
        if not self.mm_max_toks_per_item:
            raise ConfigError("no modality passes through the encoder, expected at least one with a limit above 0")
        return max(self.mm_max_toks_per_item, key=lambda name: (self.mm_max_toks_per_item[name], name))

    def get_dummy_encoder_profile_inputs(
        self, modality: str | None = None, max_items_per_batch: int | None = None
    ) -> list[tuple[str, Any]]:
        """``(modality, item)``, the same item each time, that fill a step's encoder budget, to measure the memory that
        the encoder takes. By default of the modality with the most tokens per item. Raises ConfigError: a modality that
        does not pass through the encoder, or an item that the cache held back."""
        if self.get_encoder_budget() <= 0 or not self.mm_max_toks_per_item:
            return []
        modality = self.get_modality_with_max_tokens() if modality is None else modality
        if modality not in self.mm_max_toks_per_item:
            raise ConfigError(
                f"modality {modality!r} does not pass through the encoder{did_you_mean(modality, self.mm_limits)}, "
                f"expected one of {', '.join(sorted(self.mm_max_toks_per_item))}"
            )
        if max_items_per_batch is None:
            max_items_per_batch = self.mm_max_items_per_batch[modality]
        inputs = self.processor.get_dummy_mm_inputs(mm_counts={modality: 1}, cache=self.cache)
        item = inputs["mm_kwargs"][modality][0]
        if item is None:
            raise ConfigError(f"the dummy item of modality {modality!r} is in the cache already, call reset_cache")
        return [(modality, item)] * max_items_per_batch

    def reset_cache(self) -> None:
        """Empty the processor's cache of inputs, where there is one."""
        if self.cache is not None:
            self.cache.clear_cache()

    def _max_tokens_per_item(self, encoded: list[str]) -> dict[str, int]:
        """Encoder tokens of an item at most, by modality in use: encoded, or with embeddings that come ready made."""
        multimodal = self.model_config.get_multimodal_config()
        ready_made = multimodal is not None and multimodal.enable_mm_embeds
        supported = self.processor.info.supported_mm_limits
        in_use = [name for name in supported if name in encoded or (ready_made and self.mm_limits.get(name, 0) == 0)]
        counts = dict.fromkeys(in_use, 1)
        known = self.processor.info.get_mm_max_tokens_per_item(seq_len=self.max_model_len, mm_counts=counts)
        if known is None:
            placeholders = self.processor.get_dummy_mm_inputs(counts, cache=self.cache)["mm_placeholders"]
            known = {name: sum(item.get_num_embeds() for item in items) for name, items in placeholders.items()}
        tokens = {name: int(known[name]) for name in in_use if name in known}
        for name, each in tokens.items():
            if each < 0:
                raise ConfigError(f"modality {name!r} has items of {each} tokens, expected at least 0")
        return tokens

    def _max_items(self, modality: str, max_tokens_per_item: int) -> tuple[int, int]:
        """Items per prompt and per step."""
        if max_tokens_per_item == 0:
            return 0, 0
        per_prompt = max(1, min(self.mm_limits[modality], self.max_model_len // max_tokens_per_item))
        prompts = self.max_num_reqs
        if not self.scheduler_config.enable_chunked_prefill:
            prompts = min(prompts, self.scheduler_config.max_num_batched_tokens // max_tokens_per_item)
        return per_prompt, max(1, min(self.get_encoder_budget() // max_tokens_per_item, prompts * per_prompt))


def _budgets(scheduler_config: Any, max_tokens_per_item: Mapping[str, int]) -> tuple[int, int]:
    """Compute budget and cache size of a step, in encoder tokens."""
    if not max_tokens_per_item:
        return 0, 0
    longest = max(max_tokens_per_item.values())
    if scheduler_config.disable_chunked_mm_input and longest > scheduler_config.max_num_batched_tokens:
        raise ConfigError(
            f"an item may have {longest} tokens and disable_chunked_mm_input forbids to cut it, a step takes "
            f"{scheduler_config.max_num_batched_tokens}; raise max_num_batched_tokens to {longest}"
        )
    compute, kept = int(scheduler_config.max_num_encoder_input_tokens), int(scheduler_config.encoder_cache_size)
    return max(compute, longest), max(kept, longest)
