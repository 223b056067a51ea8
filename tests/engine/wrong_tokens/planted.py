"""What ``run.py`` installs in its engines: failures in chosen hand-overs, digests of the KV behind answers.

    vllm serve ... --worker-extension-cls tests.engine.wrong_tokens.planted.FaultProbe

Its methods are called through vLLM's ``/collective_rpc``. A request is known by the name in its ``X-Request-Id``, the
same on P and on D. A fault that concerns both engines acts in the middle of D's copy: D's transfer thread stops after
about half of the bytes, sends the fault to the benchmark's process over a socket, and goes on when that has answered.

The digest of an answer is taken in the step that samples its last token: the KV of all tokens before that one, of each
layer the scalar products with two random vectors. KV that an engine computed in another batch differs by rounding.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvferry.connector.decode_side import read as reads
from kvferry.connector.wire.step_plan import unpack_ids
from kvferry.transport.planes import cma
from tests.support.inside import (
    consumer_of,
    expire_lease,
    leases_of,
    listener_of,
    plans_of,
    producer_of,
    thread_of,
    worker_half,
)
from tests.support.kv_bytes import Cached, cached_layer

NAME = re.compile(r"wt\d+-\d+")
ANSWER_SECONDS = 300.0
NOBODY = (1 << 22) + 1
"""A process id that Linux does not give."""
GIVEN_UP = "given up"
COPY_ERROR = "copy error"
LOOK_SECONDS = 200.0
"""How long P's transfer thread may take to end a lease; it takes milliseconds."""


def name_of(request_id: str) -> str | None:
    """The part of a request's id by which the benchmark knows it."""
    found = NAME.search(request_id)
    return found[0] if found else None


@dataclass
class Followed:
    """A request on its way: where its KV lies. ``stop``: the tokens whose KV is there when its last one is sampled."""

    stop: int
    computed: int
    blocks: list[list[int]]


class FaultProbe:
    """Mixed into vLLM's worker."""

    # --- digests ------------------------------------------------------------------------------------------------

    def wt_watch(self) -> None:
        """Digest the KV behind each answer from now on."""
        self._wt_followed: dict[str, Followed] = {}
        self._wt_digests: dict[str, str] = {}
        self._wt_wrong_bytes: set[str] = set()
        self._wt_layers = self._wt_find_layers()
        self._wt_vectors = dict[tuple[int, int], torch.Tensor]()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def execute_model(step: Any, *args: Any, **kwargs: Any) -> Any:
            self._wt_note(step)
            result = execute(step, *args, **kwargs)
            self._wt_after(step)
            return result

        runner.execute_model = execute_model

    def wt_take(self) -> dict[str, str]:
        """By name, the digests since the last call: float32 [L, T, 2] in base64."""
        digests, self._wt_digests = self._wt_digests, {}
        return digests

    def wt_wrong_byte(self, name: str) -> None:
        """Change a byte of sign and exponent of this request's KV, after the step that computed with its load."""
        self._wt_wrong_bytes.add(name)

    def _wt_find_layers(self) -> list[Cached]:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        groups = enumerate(runner.kv_cache_config.kv_cache_groups)
        return [
            cached_layer(number, group.kv_cache_spec, name, context[name])
            for number, group in groups
            for name in group.layer_names
        ]

    def _wt_note(self, step: Any) -> None:
        for request_id in step.finished_req_ids:
            self._wt_followed.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.sampling_params is not None and name_of(new.req_id):
                stop = len(new.prompt_token_ids) + new.sampling_params.max_tokens - 1
                blocks = [list(ids) for ids in new.block_ids]
                self._wt_followed[new.req_id] = Followed(stop, new.num_computed_tokens, blocks)
        cached = step.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, more, computed in rows:
            followed = self._wt_followed.get(request_id)
            if followed is None:
                continue
            followed.computed = computed
            if more is not None and request_id in cached.resumed_req_ids:
                followed.blocks = [list(ids) for ids in more]
            elif more is not None:
                for have, ids in zip(followed.blocks, more, strict=True):
                    have.extend(ids)

    def _wt_after(self, step: Any) -> None:
        for request_id, count in step.num_scheduled_tokens.items():
            followed = self._wt_followed.get(request_id)
            name = name_of(request_id)
            if followed is None or name is None:
                continue
            if name in self._wt_wrong_bytes:
                self._wt_wrong_bytes.remove(name)
                self._wt_layers[0].flip(followed.blocks[0], followed.computed, byte=3, bits=0x81)
            if followed.computed + count == followed.stop:
                rows = [self._wt_digest(layer, followed) for layer in self._wt_layers]
                digest = torch.stack(rows).to(torch.float32).numpy().tobytes()
                self._wt_digests[name] = base64.b64encode(digest).decode()

    def _wt_digest(self, layer: Cached, followed: Followed) -> torch.Tensor:
        """[T, 2]."""
        rows = layer.content(followed.blocks[layer.group], followed.stop)  # [H,T,C]
        heads, _, content = rows.shape
        vectors = self._wt_vectors.get((heads, content))
        if vectors is None:
            generator = torch.Generator().manual_seed(7)
            vectors = self._wt_vectors[heads, content] = torch.randn(heads, content, 2, generator=generator)
        return torch.einsum("htc,hcv->tv", rows.to(torch.float32), vectors)

    # --- D ------------------------------------------------------------------------------------------------------

    def wt_plant_here(self, path: str) -> None:
        """Be ready to plant faults in loads. ``path``: the socket of the benchmark's process."""
        self._wt_path = path
        self._wt_planted: dict[str, str] = {}
        self._wt_due: dict[int, tuple[Any, str, str]] = {}  # by the identity of a copy: it, the request, the fault
        self._wt_fired: list[str] = []
        thread = _transfer_thread()
        receiver: Any = consumer_of(thread).reads
        plane: Any = thread.rank_context.plane("cma")
        begin_pull, progress = receiver.begin_pull, plane.progress

        def begin(read: Any, *rest: Any) -> Any:
            name = name_of(read.active_load.load.request_id)
            kind = self._wt_planted.get(name or "")
            event = begin_pull(read, *rest)
            if kind is not None and plane.copies:
                self._wt_due[id(plane.copies[-1])] = plane.copies[-1], name or "", kind
            return event

        def half() -> bool:
            copy = plane.copies[0] if plane.copies else None
            of, name, kind = self._wt_due.pop(id(copy), (None, "", ""))
            if of is not copy or self._wt_planted.pop(name, None) is None:  # else of a copy that ended before its turn
                return bool(progress())
            self._wt_fired.append(name)
            if kind == COPY_ERROR:
                copy.pid = NOBODY
            with mock.patch.object(cma, "TURN_BYTES", max(1, int(copy.left.nbytes.sum()) // 2)):
                progress()
            self._wt_act(name, kind)
            return True

        receiver.begin_pull, plane.progress = begin, half

    def wt_plant(self, name: str, kind: str) -> None:
        """Let the load of this request fail so."""
        self._wt_planted[name] = kind

    def wt_fired(self) -> list[str]:
        """The requests in whose copies a fault was planted and acted."""
        return self._wt_fired

    def _wt_act(self, name: str, kind: str) -> None:
        if kind == COPY_ERROR:
            return
        if kind == GIVEN_UP:
            time.sleep(worker_half(get_kv_transfer_group()).step_hold.patience + 0.3)
            return
        with socket.socket(socket.AF_UNIX) as benchmark:
            benchmark.settimeout(ANSWER_SECONDS)
            benchmark.connect(self._wt_path)
            benchmark.sendall(json.dumps({"name": name, "kind": kind}).encode() + b"\n")
            benchmark.recv(1)

    def wt_trust_all(self) -> None:
        """Break D: it takes every grant for one that stands. The benchmark must see wrong tokens then."""
        mock.patch.object(reads.SourceRead, "grant_stands", True).start()

    # --- P ------------------------------------------------------------------------------------------------------

    def wt_end_lease(self, name: str, reuse: str) -> bool:
        """End this request's lease, as its expiry does; with ``reuse`` write other bytes to its pages. P must not cache
        prefixes. Returns whether there was a lease."""
        thread = _transfer_thread()
        producer: Any = producer_of(thread)
        end = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < end:
            held = next((h for h in list(leases_of(producer).values()) if name_of(h.grant.request_id) == name), None)
            if held is not None:
                break
            if any(name_of(grant.request_id) == name for grant, _ in plans_of(thread).computing):
                continue
            return False
        assert held is not None
        done: list[bool] = []
        _on_thread(thread, lambda: _expire(producer, held, done))
        while not done:
            assert time.monotonic() < end, "P's transfer thread does not turn"
            time.sleep(1e-3)
        if int(reuse):
            for layer in self._wt_find_layers():
                cache, ids = layer.tensors[0], unpack_ids(held.grant.block_ids[layer.group])
                per_page = layer.page_tokens // cache.shape[-2]
                kernel_ids = [int(block) * per_page + part for block in ids for part in range(per_page)]
                cache[kernel_ids] = torch.randn_like(cache[kernel_ids])
        return True

    def wt_cut(self) -> bool:
        """Shut the connections of P's control port down. Returns whether there was one."""
        peers = list(listener_of(_transfer_thread()).streams.values())
        for peer in peers:
            with socket.socket(fileno=os.dup(peer.sock.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        return bool(peers)

    # --- both ---------------------------------------------------------------------------------------------------

    def wt_left(self) -> dict[str, int]:
        """What this rank still holds of hand-overs."""
        if not has_kv_transfer_group():
            return {}
        thread = _transfer_thread()
        return {
            "leases at P": len(leases_of(thread)) + len(plans_of(thread).computing),
            "loads at D": len(consumer_of(thread).loads.running) + len(consumer_of(thread).reads.by_number),
            "leases kept by D": len(consumer_of(thread).renewals.kept),
        }


def _transfer_thread() -> Any:
    return thread_of(worker_half(get_kv_transfer_group()))


def _expire(producer: Any, held: Any, done: list[bool]) -> None:
    expire_lease(producer, held)
    done.append(True)


def _on_thread(thread: Any, act: Callable[[], None]) -> None:
    """Run this on the transfer thread."""
    pump = producer_of(thread).pump

    def once(now: float) -> bool:
        producer_of(thread).pump = pump
        act()
        return bool(pump(now))

    producer_of(thread).pump = once
    thread.wake()
