"""How many multimodal items a step may encode.

A modality (image, video, audio) has a limit of items per prompt. An item takes up to a number of encoder tokens. A step
may encode tokens up to the compute budget, and keep tokens up to the size of the encoder cache: the lesser of the two
is the step's encoder budget. An item that neither budget covers raises it, for an item is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.transport.errors import ConfigError, did_you_mean


class MultiModalBudget:
    """The encoder budget of a step, and the items of each modality that fit it.

    A modality whose limit is 0 has no items that pass through the encoder. With ``enable_mm_embeds`` its embeddings
    come ready made: they take room in the cache and have no entry in the mappings below. Raises ConfigError: a number
    of tokens below 0, or an item that one step cannot take where items may not be cut. ``config``: with
    ``model_config`` and ``scheduler_config`` as vLLM's. ``mm_registry``: with ``create_processor(model_config)``; where
    the processor's ``info.get_mm_max_tokens_per_item`` returns ``None``, items of its ``get_dummy_mm_inputs`` are
    counted. ``cache``: the processor's cache of inputs, or ``None``."""

    max_model_len: int  # Tokens of a request at most
    max_num_reqs: int  # Requests of a step at most
    encoder_compute_budget: int  # Encoder tokens of a step; 0 where no modality is in use
    encoder_cache_size: int  # Encoder tokens that the cache holds; 0 where no modality is in use
    mm_limits: Mapping[str, int]  # Items of each modality in a prompt, as the processor allows
    mm_max_toks_per_item: dict[str, int]
    """Encoder tokens of an item at most. Modalities whose placeholders are another modality's have no entry."""
    mm_max_items_per_prompt: dict[str, int]  # At least 1, where an item has tokens
    mm_max_items_per_batch: dict[str, int]
    """The lesser of the encoder budget and the prompts of a step, at least 1, where an item has tokens."""

    def __init__(self, config: Any, mm_registry: Any, *, cache: Any = None) -> None:
        self.model_config, self.scheduler_config = config.model_config, config.scheduler_config
        self.max_model_len = int(self.model_config.max_model_len)
        self.max_num_reqs = int(self.scheduler_config.max_num_seqs)
        self.cache = cache
        self.processor = mm_registry.create_processor(self.model_config)
        self.mm_limits = self.processor.info.allowed_mm_limits

        encoded = [name for name in self.processor.info.supported_mm_limits if self.mm_limits.get(name, 0) > 0]
        tokens = self._max_tokens_per_item(encoded)
        self.encoder_compute_budget, self.encoder_cache_size = _budgets(self.scheduler_config, tokens)
        self.mm_max_toks_per_item = {name: tokens[name] for name in encoded if name in tokens}
        self.mm_max_items_per_prompt, self.mm_max_items_per_batch = {}, {}
        for name, each in self.mm_max_toks_per_item.items():
            self.mm_max_items_per_prompt[name], self.mm_max_items_per_batch[name] = self._max_items(name, each)

    def get_encoder_budget(self) -> int:
        """Encoder tokens of a step: the lesser of compute budget and cache size."""
        return min(self.encoder_compute_budget, self.encoder_cache_size)

    def get_modality_with_max_tokens(self) -> str:
        """The modality whose items have the most encoder tokens; of several, the last by name. Raises ConfigError: no
        modality passes through the encoder."""
        if not self.mm_max_toks_per_item:
            raise ConfigError("no modality passes through the encoder, expected at least one with a limit above 0")
        return max(self.mm_max_toks_per_item, key=lambda name: (self.mm_max_toks_per_item[name], name))

    def get_dummy_encoder_profile_inputs(
        self, modality: str | None = None, max_items_per_batch: int | None = None
    ) -> list[tuple[str, Any]]:
        """Items that fill the encoder budget of a step, to measure how much memory the encoder takes. Raises
        ConfigError: a modality that does not pass through the encoder, or an item that the cache held back.
        ``modality``: ``None`` for the modality with the most tokens per item. ``max_items_per_batch``: ``None`` for the
        modality's own number. Returns ``(modality, item)``, the same item each time; empty where there is no budget or
        no modality."""
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
            raise ConfigError(
                f"the dummy item of modality {modality!r} is in the cache already, call reset_cache first"
            )
        return [(modality, item)] * max_items_per_batch

    def reset_cache(self) -> None:
        """Empty the processor's cache of inputs, where there is one."""
        if self.cache is not None:
            self.cache.clear_cache()

    def _max_tokens_per_item(self, encoded: list[str]) -> dict[str, int]:
        """Encoder tokens of an item at most, by modality in use: encoded, or with embeddings that come ready made."""
        multimodal = self.model_config.get_multimodal_config()
        ready_made = multimodal is not None and multimodal.enable_mm_embeds
        in_use = [
            name
            for name in self.processor.info.supported_mm_limits
            if name in encoded or (ready_made and self.mm_limits.get(name, 0) == 0)
        ]
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
    return (
        max(int(scheduler_config.max_num_encoder_input_tokens), longest),
        max(int(scheduler_config.encoder_cache_size), longest),
    )
