"""vLLM worker extension that digests the KV bytes of prompts, to compare what D decodes from with what P computed.

Plain torch indexing over the tensors that the attention layers hold; nothing of KVFerry is imported. Use:

    vllm serve ... --worker-extension-cls tests.support.kv_bytes.KVBytes        (.typing on PYTHONPATH)
    POST /collective_rpc {"method": "kv_watch"}                   once, after start-up (VLLM_SERVER_DEV_MODE=1)
    POST /collective_rpc {"method": "kv_records"}                 the records since the last call

A record is made of what computing a prompt's last token needs of those before it (D computes the last one itself), per
layer: all their KV, with a sliding window or a local chunk the KV of those in it, and of a layer that keeps a state
(Mamba, GDN, short convolutions) the state after them.

- ``loaded``: in the step that first runs a request of which tokens are already there (D). States just before its
  forward, which changes them, but after the connector has loaded what it loads inside the step; all else after it.
  ``inside``: vLLM's scheduler has had the connector load in this step;
- ``computed``: after the step that ran the prompt's last tokens, where those were not there (P, or D on its own).

Both say how many tokens were digested: a comparison of anything but all of them is none. Both carry the digest of the
ids of those tokens, by which the two sides are matched: P may have been given all of the prompt, or, because a state
cannot be wound back, all but its last token. Tokens are digested one after the other, whatever the block size and
however a block is packed inside. ``blocks`` is the request's block table, per KV cache group. Axes: [B,H,N,C] per
layer, [B,...] for states."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.server import EngineError, Server


@dataclass(frozen=True)
class Cached:
    """One layer's cache. ``kind``: what the computation of a token needs of the tokens before it.

    ``all`` of them, those of a ``window`` of ``span`` tokens with itself, those of its ``chunk`` of ``span`` tokens, or
    the ``state`` after them: then ``tensors`` are its parts, and a block holds one state; with ``aligned`` that after
    its last token, else a request has but one block.
    """

    group: int
    page_tokens: int
    tensors: tuple[torch.Tensor, ...]
    places: torch.Tensor | None = None
    kind: str = "all"
    span: int = 0
    aligned: bool = False

    def first_needed(self, token: int) -> int:
        """The first token that the computation of this one attends to."""
        if self.kind == "window":
            return max(0, token - self.span + 1)
        return token // self.span * self.span if self.kind == "chunk" else 0

    def content(self, block_ids: list[int], tokens: int) -> torch.Tensor:
        """What is to be digested, before the token number ``tokens`` is computed."""
        if self.kind != "state":
            first = self.first_needed(tokens)
            return rows_of(self.tensors[0], block_ids, self.page_tokens, tokens, self.places, first)
        block = block_ids[-(-tokens // self.page_tokens) - 1 if self.aligned else 0]
        return torch.cat([part[block].contiguous().view(torch.uint8).flatten() for part in self.tensors])

    def flip(self, block_ids: list[int], tokens: int, byte: int = 0, bits: int = 1) -> None:
        """Flip the lowest bit of what is digested first, however blocks are packed; or these bits of another byte of
        that element."""
        if self.kind == "state":
            block = self.tensors[0][block_ids[-(-tokens // self.page_tokens) - 1 if self.aligned else 0]]
            block[(0,) * block.ndim].unsqueeze(0).view(torch.uint8)[byte] ^= bits
            return
        cache = self.tensors[0].unsqueeze(1) if self.tensors[0].ndim == 3 else self.tensors[0]
        first, per_page = self.first_needed(tokens), self.page_tokens // cache.shape[2]
        block = cache[block_ids[first // self.page_tokens] * per_page + first % self.page_tokens // cache.shape[2]]
        inside = first % cache.shape[2]
        place = (inside, 0) if self.places is None else divmod(int(self.places[inside, 0]), cache.shape[3])
        block[0, *place].unsqueeze(0).view(torch.uint8)[byte] ^= bits


@dataclass
class _Seen:
    prompt: list[int]
    computed: int
    blocks: list[list[int]] = field(default_factory=list)
    inside: bool = False
    states: dict[str, str] = field(default_factory=dict)
    """The digests of the states that were loaded, by layer."""


def prompt_digest(token_ids: list[int]) -> str:
    """How a prompt is named in records."""
    return hashlib.sha256(b",".join(b"%d" % i for i in token_ids)).hexdigest()


def rows_of(
    cache: torch.Tensor, block_ids: list[int], page_tokens: int, tokens: int, places: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:  # fmt: skip
    """KV of the tokens from ``first`` up to ``tokens``, from a cache [B,H,N,C] or, for MLA, [B,N,C].

    ``block_ids`` are the manager's, of ``page_tokens`` tokens; B may count smaller kernel blocks. The answer is
    [H,T,C]. Where a block is packed inside, ``places`` [N,C] says where each element of a token lies.
    """
    if cache.ndim == 3:
        cache = cache.unsqueeze(1)
    block_tokens = cache.shape[2]
    per_page = page_tokens // block_tokens
    start, stop = first // block_tokens, -(-tokens // block_tokens)
    ids = [block_ids[i // per_page] * per_page + i % per_page for i in range(start, stop)]
    picked = cache[torch.tensor(ids, dtype=torch.long, device=cache.device)]  # a copy, [b,H,N,C]
    if places is not None:
        picked = picked.flatten(-2)[..., places]
    heads = picked.permute(1, 0, 2, 3).reshape(picked.shape[1], len(ids) * block_tokens, picked.shape[3])
    return heads[:, first - start * block_tokens : tokens - start * block_tokens].contiguous()


def places_of(layer: Any, cache: torch.Tensor) -> torch.Tensor | None:
    """Where each element of a token lies inside a (block, head), [N,C], key before value; None for the plain order.

    vLLM's CPU attention keeps K transposed or in pairs inside a block, by instruction set: found by writing one token,
    and then one channel of all tokens, at a time into a scratch block with the backend's own writer.
    """
    if cache.device.type != "cpu" or cache.ndim != 4:
        return None
    block_tokens, content = cache.shape[2:]
    elements = torch.eye(content, dtype=cache.dtype)
    of_token, of_element = (torch.full((block_tokens * content,), -1) for _ in range(2))
    for token in range(block_tokens):
        of_token[_written(layer, cache, torch.ones(1, content, dtype=cache.dtype), token)] = token
    for element in range(content):
        of_element[_written(layer, cache, elements[element].expand(block_tokens, -1), 0)] = element
    places = torch.argsort(of_token * content + of_element)
    if not torch.equal((of_token * content + of_element)[places], torch.arange(block_tokens * content)):
        raise RuntimeError("the attention backend puts two elements in one place: its packing is not understood")
    return places.view(block_tokens, content)


def _written(layer: Any, cache: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
    """Which elements of an empty (block, head) are not zero after ``values`` [T,C] were written from token ``first``
    on."""
    scratch = torch.zeros(1, 1, *cache.shape[2:], dtype=cache.dtype)
    key, value = values[:, None].tensor_split(2, dim=-1)
    layer.impl.do_kv_cache_update(layer, key, value, scratch, torch.arange(first, first + len(values)))
    return scratch.flatten() != 0


def digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def compare(loaded: list[dict[str, Any]], source: list[dict[str, Any]]) -> str | None:
    """Whether the one prompt that D loaded is, byte for byte, what P has; None, or what differs.

    ``loaded`` and ``source`` are the records of D and of P.
    """
    got = [record for record in loaded if record["when"] == "loaded"]
    if len(got) != 1:
        return f"D has {len(got)} records of loaded prompts, expected 1"
    mine, wanted = got[0], got[0]["prompt_tokens"] - 1
    theirs = [r for r in source if r["covers"] == mine["covers"]]
    if mine["tokens"] != wanted:
        return f"D had {mine['tokens']} of {wanted} tokens before its first step"
    if not theirs:
        return "P has no record of this prompt"
    if mine["layers"].keys() != theirs[-1]["layers"].keys():
        return "the layers of D and P differ by name"
    differ = [name for name, value in mine["layers"].items() if value != theirs[-1]["layers"][name]]
    return (
        f"KV bytes differ in {len(differ)} of {len(mine['layers'])} layers: {', '.join(differ[:3])}" if differ else None
    )


class KVBytes:
    """Mixed into vLLM's worker; its methods are called through ``collective_rpc``."""

    def kv_watch(self) -> dict[str, Any]:
        """Start to record. Idempotent."""
        if "_kvb_seen" not in self.__dict__:
            self._kvb_seen: dict[str, _Seen] = {}
            self._kvb_records: list[dict[str, Any]] = []
            self._kvb_due: list[tuple[str, _Seen]] = []  # loaded, to be recorded in this step
            self._kvb_corrupt = 0
            self._kvb_on = True
            runner: Any = self.model_runner  # type: ignore[attr-defined]
            original = runner.execute_model

            def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                self._kvb_before(scheduler_output)
                result = original(scheduler_output, *args, **kwargs)
                self._kvb_after(scheduler_output)
                return result

            runner.execute_model = execute_model
            connector = self._kvb_connector()
            if connector is not None:
                start = connector.start_load_kv

                def start_load_kv(*args: Any, **kwargs: Any) -> None:
                    start(*args, **kwargs)
                    self._kvb_take_states()

                connector.start_load_kv = start_load_kv
        self._kvb_on = True
        layers = self._kvb_layers()
        return {"layers": sorted(layers), "states": sorted(n for n in layers if layers[n].kind == "state")}

    def _kvb_connector(self) -> Any:
        """vLLM's, on this worker; None where it has none."""
        from vllm.distributed import kv_transfer

        return kv_transfer.get_kv_transfer_group() if kv_transfer.has_kv_transfer_group() else None

    def kv_unwatch(self) -> dict[str, Any]:
        """Stop to record: for timings, since a digest costs time in the step it is taken in."""
        self._kvb_on = False
        return {}

    def kv_records(self) -> list[dict[str, Any]]:
        """The records since the last call, oldest first."""
        records, self._kvb_records = self._kvb_records, []
        return records

    def kv_corrupt(self, count: str = "1") -> dict[str, Any]:
        """Plant a fault: flip one bit in the cache under the next ``count`` loaded prompts, before it is digested."""
        self._kvb_corrupt = int(count)
        return {}

    def _kvb_layers(self) -> dict[str, Cached]:
        """Every layer that has a cache of its own; looked up once."""
        if "_kvb_table" not in self.__dict__:
            self._kvb_table = self._kvb_look_up()
        return self._kvb_table

    def _kvb_look_up(self) -> dict[str, Cached]:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        return {
            name: cached_layer(index, group.kv_cache_spec, name, context[name])
            for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if not getattr(context[name], "kv_sharing_target_layer_name", None)
        }

    def _kvb_before(self, step: Any) -> None:
        if not self._kvb_on:
            return
        for request_id in step.finished_req_ids:
            self._kvb_seen.pop(request_id, None)
        inside = bool(getattr(step, "has_sync_kv_loads", False))
        for new in step.scheduled_new_reqs:
            blocks = [list(ids) for ids in new.block_ids]
            seen = _Seen(list(new.prompt_token_ids), new.num_computed_tokens, blocks, inside)
            self._kvb_seen[new.req_id] = seen
            if seen.computed:
                self._kvb_due.append((new.req_id, seen))
            if seen.computed and seen.computed >= len(seen.prompt) - 1:  # all there: what is added is not compared
                del self._kvb_seen[new.req_id]
        cached = step.scheduled_cached_reqs
        columns = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        for request_id, more, computed in zip(*columns, strict=True):
            seen_before = self._kvb_seen.get(request_id)
            if seen_before is None:
                continue
            seen_before.computed = computed
            if request_id in cached.resumed_req_ids and more is not None:
                seen_before.blocks = [list(ids) for ids in more]
            elif more is not None:
                for have, ids in zip(seen_before.blocks, more, strict=True):
                    have.extend(ids)
        if not inside:  # vLLM starts the loads beside the steps after the forward
            self._kvb_take_states()

    def _kvb_take_states(self) -> None:
        """The forward is about to begin: what the step computes with has come."""
        for _, seen in self._kvb_due:
            if not seen.states:
                self._kvb_flip(seen, states=True)
                seen.states = self._kvb_digests(seen, self._kvb_loaded(seen), states=True)

    def _kvb_after(self, step: Any) -> None:
        if not self._kvb_on:
            return
        while self._kvb_due:
            request_id, loaded = self._kvb_due.pop(0)
            self._kvb_flip(loaded, states=False)
            self._kvb_record("loaded", request_id, loaded, self._kvb_loaded(loaded))
        for request_id, count in step.num_scheduled_tokens.items():
            seen = self._kvb_seen.get(request_id)
            if seen is not None and seen.computed < len(seen.prompt) <= seen.computed + count:
                kinds = {layer.kind for layer in self._kvb_layers().values()}
                if "state" not in kinds and len(seen.prompt) > 1:  # a state before the last token is gone
                    self._kvb_record("computed", request_id, seen, len(seen.prompt) - 1)
                if kinds != {"all"}:
                    self._kvb_record("computed", request_id, seen, len(seen.prompt))

    @staticmethod
    def _kvb_loaded(seen: _Seen) -> int:
        return min(seen.computed, len(seen.prompt) - 1)

    def _kvb_flip(self, seen: _Seen, *, states: bool) -> None:
        for layer in self._kvb_layers().values():
            if self._kvb_corrupt and (layer.kind == "state") is states:
                self._kvb_corrupt -= 1
                layer.flip(seen.blocks[layer.group], self._kvb_loaded(seen))

    def _kvb_digests(self, seen: _Seen, tokens: int, *, states: bool) -> dict[str, str]:
        layers = {name: layer for name, layer in self._kvb_layers().items() if (layer.kind == "state") is states}
        return {name: digest(layer.content(seen.blocks[layer.group], tokens)) for name, layer in layers.items()}

    def _kvb_record(self, when: str, request_id: str, seen: _Seen, tokens: int) -> None:
        started = time.perf_counter()
        states = seen.states if when == "loaded" else self._kvb_digests(seen, tokens, states=True)
        record = {
            "when": when, "request_id": request_id, "prompt": prompt_digest(seen.prompt), "tokens": tokens,
            "prompt_tokens": len(seen.prompt), "covers": prompt_digest(seen.prompt[:tokens]), "inside": seen.inside,
            "blocks": [list(ids) for ids in seen.blocks],
            "layers": states | self._kvb_digests(seen, tokens, states=False), "span": (started, time.perf_counter()),
        }  # fmt: skip
        self._kvb_records.append(record)


def checking_seconds(records: list[dict[str, Any]], until: float) -> float:
    """Seconds before ``until`` (of ``time.perf_counter``, one for a host) in which a record was made: those of P and D
    may lie over each other."""
    total, end = 0.0, 0.0
    for start, stop in sorted(record["span"] for record in records):
        total += max(0.0, min(stop, until) - max(start, end))
        end = max(end, stop)
    return total


def cached_layer(group: int, spec: Any, name: str, layer: Any) -> Cached:
    """What vLLM's specification of a layer's cache says, by what it has."""
    spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)  # layers of one group whose sizes differ
    tensors = tuple(layer.kv_cache) if isinstance(layer.kv_cache, list | tuple) else (layer.kv_cache,)
    if hasattr(spec, "mamba_cache_mode"):
        return Cached(group, spec.block_size, tensors, kind="state", aligned=spec.mamba_cache_mode != "none")
    places = None if "MLA" in type(spec).__name__ else places_of(layer, tensors[0])
    kind, span = "all", 0
    if "SlidingWindow" in type(spec).__name__:
        kind, span = "window", spec.sliding_window
    elif "ChunkedLocal" in type(spec).__name__:
        kind, span = "chunk", spec.attention_chunk_size
    return Cached(group, spec.block_size, tensors[:1], places, kind, span)


class KVHeads(KVBytes):
    """``layers`` of a record are named ``LAYER#HEAD``; each rank has those of its own layers and heads."""

    def kv_corrupt(self, count: str = "1", rank: str = "") -> dict[str, Any]:
        """As ``KVBytes.kv_corrupt``, on one rank of the engine if it is named."""
        return super().kv_corrupt(count) if rank in ("", str(self._kvb_rank)) else {}

    def kv_save_records(self, folder: str) -> dict[str, Any]:
        """``kv_records`` into a file ``dpD-rankN.json``: of several data-parallel ranks vLLM passes one answer on."""
        replica = self.vllm_config.parallel_config.data_parallel_index  # type: ignore[attr-defined]
        (Path(folder) / f"dp{replica}-rank{self._kvb_rank}.json").write_text(json.dumps(self.kv_records()))
        return {}

    @property
    def _kvb_rank(self) -> int:
        """Counted through all pipeline stages."""
        return int(self.rank)  # type: ignore[attr-defined]

    def _kvb_record(self, when: str, request_id: str, seen: Any, tokens: int) -> None:
        super()._kvb_record(when, request_id, seen, tokens)
        in_stage = self._kvb_rank % self.vllm_config.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]
        heads = {}
        for name, layer in self._kvb_layers().items():
            rows = layer.content(seen.blocks[layer.group], tokens)
            first = in_stage * rows.shape[0]
            for number, head in enumerate(rows):
                heads[f"{name}#{first + number}"] = digest(head)
        self._kvb_records[-1]["layers"] = heads


class KVDrafts(KVBytes):
    """Records are made when a step has drafted; also what it has drafted."""

    _kvd_drafted: list[list[int]]
    _kvd_step: Any = None

    def kv_watch(self) -> dict[str, Any]:
        told = super().kv_watch()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if "_kvd_drafted" not in self.__dict__:
            self._kvd_drafted = []
            sample, take = runner.sample_tokens, runner.take_draft_token_ids

            def sample_tokens(*args: Any, **kwargs: Any) -> Any:
                result = sample(*args, **kwargs)
                super(KVDrafts, self)._kvb_after(self._kvd_step)
                return result

            def take_draft_token_ids() -> Any:
                drafts = take()
                if drafts is not None:
                    self._kvd_drafted += [list(ids) for ids in drafts.draft_token_ids]
                return drafts

            runner.sample_tokens, runner.take_draft_token_ids = sample_tokens, take_draft_token_ids
        return told

    def drafted(self) -> list[list[int]]:
        found, self._kvd_drafted = self._kvd_drafted, []
        return found

    def _kvb_after(self, step: Any) -> None:
        self._kvd_step = step


class KVFailing(KVBytes):
    def kv_fail_inside(self) -> list[int]:
        """Loads beside the steps are as ever."""
        from kvferry.connector.decode_side.read import Reads

        if "_planted" in self.__dict__:
            self.__dict__.pop("_planted").stop()
            return []
        begin = Reads.begin_pull

        def begin_pull(reads: Any, read: Any, *args: Any) -> Any:
            if read.fetch.load.now:
                raise RuntimeError("planted")
            return begin(reads, read, *args)

        self._planted = mock.patch.object(Reads, "begin_pull", begin_pull)
        self._planted.start()
        return []


OUTPUTS = (0.5, 1.5, 3.0, 6.0)
"""Blocks that a request decodes, of four kinds that run side by side."""


def block_count(engine: Server) -> int:
    """Of the engine's block pool."""
    for name, labels in engine.metrics():
        if name == "vllm:cache_config_info":
            return int(dict(labels)["num_gpu_blocks"])
    raise EngineError(f"{engine.name}: no vllm:cache_config_info among its metrics")


def in_sequence(block_ids: Sequence[int]) -> float:
    """The share of a table's blocks that lie right behind the one before: 1 for fresh tables, near 0 for scattered."""
    steps = [after - before for before, after in pairwise(block_ids)]
    return steps.count(1) / max(1, len(steps))


def scatter(engine: Server, block_tokens: int, beside: int, vocabulary: int, turns: float = 1.5, seed: int = 0) -> None:
    """Send prompts of one to three blocks, ``beside`` at a time, of mixed length and with answers of mixed length.

    It ends when the blocks of the whole pool went through them ``turns`` times.
    """
    rng = random.Random(seed)
    left = turns * block_count(engine)

    def batch(blocks: float) -> dict[str, Any]:
        lengths = [rng.randrange(block_tokens, 3 * block_tokens) for _ in range(beside // len(OUTPUTS))]
        prompts = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
        options = {"max_tokens": int(blocks * block_tokens), "ignore_eos": True, "temperature": 0}
        return {"model": "model", "prompt": prompts, **options}

    with ThreadPoolExecutor(len(OUTPUTS)) as pool:
        while left > 0:
            list(pool.map(lambda body: engine.post("/v1/completions", body), map(batch, OUTPUTS)))
            left -= beside * (2 + sum(OUTPUTS) / len(OUTPUTS))
