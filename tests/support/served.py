"""A prefill and a decode engine behind a router, as their users see them: HTTP, metrics, and the KV bytes.

Axes: KV is [B,H,N,C] per layer, digested by kv_bytes.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.connector.step_loads import step_hold
from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import CPU_ENVIRONMENT, ServerGroup, vllm_command
from tests.support.fork_server import fork_server
from tests.support.kv_bytes import compare, prompt_digest
from tests.support.server import PATIENCE_SECONDS, Server, metric_sum

LONG_SECONDS = 200.0
PATIENT = {"lease_seconds": 3 * LONG_SECONDS, "handover_timeout_seconds": 12 * LONG_SECONDS}
"""vLLM's workers spin on all cores of a small machine. A transfer thread has been seen to wait 60 seconds for one."""


class ForkedServerGroup(ServerGroup):
    """Engines on the CPU that import nothing at their start, see ``engine_process``."""

    step_patience = step_hold.PATIENCE_SECONDS
    """How long their steps wait for loads that go inside them."""

    def spawn(self, name: str, command: Sequence[str], **options: Any) -> Server:
        prefix = vllm_command()
        if list(command[: len(prefix)]) != prefix:
            return super().spawn(name, command, **options)
        log = self.logs / f"{name}.log"
        read_end, write_end = os.pipe()
        how = str(self._grace), str(self.step_patience), options.get("netns") or ""
        arguments = ("-m", "tests.support.engine_process", *how, *command[len(prefix) :])
        with log.open("wb") as file, open(os.devnull) as nothing:
            files = (nothing.fileno(), file.fileno(), file.fileno(), read_end)
            server = fork_server("tests.support.preload_vllm", CPU_ENVIRONMENT)
            process: Any = server.start_with(files, *arguments, environment=options["environment"])
        os.close(read_end)
        self.servers.append(Server(name, process, write_end, log, options["host"], options["port"]))
        return self.servers[-1]


class PatientServerGroup(ForkedServerGroup):
    """Engines that wait long for one another, where a test says nothing else."""

    step_patience = LONG_SECONDS

    def engine(self, name: str, model: Path, **options: Any) -> Server:
        if "connector" not in options:  # settings of ours mean nothing to another
            options["extra"] = {**PATIENT, **options.get("extra", {})}
        return super().engine(name, model, **options)


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(2, 1000) for _ in range(tokens)]


def eventually(condition: Callable[..., Any], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that has a deadline of its own."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.1)


@dataclass
class Count:
    """What one engine counts of hand-overs into it. ``lost``: of prompts that it computed though they name a P."""

    external: float
    failed: float
    by_plane: Counter[str]
    lost: Counter[str]  # by the reason

    def __sub__(self, other: Count) -> Count:
        planes, lost = self.by_plane - other.by_plane, self.lost - other.lost
        return Count(self.external - other.external, self.failed - other.failed, planes, lost)


def count(server: Server, replica: int | None = None) -> Count:
    """Of all data-parallel ranks, or of this one."""
    samples = server.metrics()
    if replica is not None:
        samples = {key: value for key, value in samples.items() if dict(key[1]).get("engine") == str(replica)}
    planes, lost = Counter[str](), Counter[str]()
    for (name, pairs), value in samples.items():
        labels = dict(pairs)
        if name == "vllm:kvferry_handover_time_seconds_count":
            planes[labels["plane"]] += int(value)
        if name == "vllm:kvferry_prompts_total" and labels["result"] in ("local", "failed"):
            lost[labels["reason"]] += int(value)
    return Count(
        metric_sum(samples, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") or 0,
        metric_sum(samples, "vllm:kvferry_num_failed_handovers_total") or 0,
        planes,
        lost,
    )


def usage(server: Server) -> float:
    """The share of the engine's blocks that some request holds."""
    value = metric_sum(server.metrics(), "vllm:kv_cache_usage_perc")
    assert value is not None
    return value


def no_block_held(*servers: Server) -> None:
    """Wait until all blocks are free. A client that left between the legs leaves a lease that ends by time."""
    for server in servers:
        eventually(lambda server=server: usage(server) == 0, f"blocks of {server.name} are free")


def ended_leases(server: Server) -> tuple[float, float]:
    """How many leases of P were released, and how many ended by time."""
    samples = server.metrics()
    released, expired = (metric_sum(samples, f"vllm:kvferry_num_{how}_leases_total") for how in ("released", "expired"))
    return released or 0, expired or 0


def released(server: Server, before: tuple[float, float]) -> None:
    """Wait until D has released a lease of P since ``before``, and no block is held. No lease has ended by time."""
    eventually(lambda: ended_leases(server) != before, f"a lease of {server.name} is released")
    no_block_held(server)
    assert ended_leases(server)[1] == before[1], "a lease has ended by time"


def complete(server: Server, ids: Sequence[int], *, replica: int | None = None, **options: Any) -> dict[str, Any]:
    """One completion, not streamed; the whole answer. ``replica``: the data-parallel rank that shall compute it."""
    body = {"model": "model", "prompt": list(ids), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | options
    headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    answer: dict[str, Any] = server.post("/v1/completions", body, headers=headers)
    return answer


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def prefill_leg(server: Server, ids: Sequence[int], **options: Any) -> dict[str, Any]:
    """What a router asks of P; the kv_transfer_params for D."""
    answer = complete(server, ids, **{"max_tokens": 1, "kv_transfer_params": PREFILL_TAG, **options})
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def records(server: Server) -> list[dict[str, Any]]:
    """The byte records since the last call; those of several ranks are put together by layer and head."""
    first, *others = server.rpc("kv_records")
    for other in others:
        for record, more in zip(first, other, strict=True):
            assert (record["when"], record["prompt"]) == (more["when"], more["prompt"])
            record["layers"].update(more["layers"])
    return list(first)


def counted(
    server: Server, before: Count, tokens: int, replica: int | None = None, requests: int = 1, ranks: int = 1
) -> Count:
    """What has been loaded since ``before``, once it is all but the last of each request's tokens, none of them failed.
    ``tokens``: of all ``requests`` together. ``ranks``: of D, each of which counts.

    vLLM counts the tokens as it processes the step's output, and what the worker counted of the hand-overs with a later
    step's, which is taken here.
    """
    end, steps = time.monotonic() + PATIENCE_SECONDS, 0
    while True:
        grown = count(server, replica) - before
        told, missing = grown.failed == 0 and grown.external <= tokens, grown.external < tokens - requests
        assert told, (grown, [line for line in server.log_text().splitlines() if " failed" in line][-5:])
        if not missing and sum(grown.by_plane.values()) >= requests * ranks:
            return grown
        late = time.monotonic() > end or (missing and (grown.lost or steps > 5))
        assert not late, f"{tokens} tokens of {requests} hand-overs were to be loaded: {grown}"
        time.sleep(0.1)
        complete(server, [7], max_tokens=1, replica=replica)
        steps += 1


def loaded_prompt(p: Server, d: Server, ids: Sequence[int], **options: Any) -> list[int]:
    """Hand one prompt over without a router: all bytes of all ranks equal, all tokens counted, nothing left held.

    Its first tokens on D. ``options`` go with D's request.
    """
    records(p), records(d)
    before = count(d)
    answer = complete(d, ids, kv_transfer_params=prefill_leg(p, ids), **options)
    assert counted(d, before, len(ids)).by_plane
    assert differ(records(d), records(p), ids) is None
    no_block_held(p, d)
    (tokens,) = tokens_of(answer)
    return tokens


def differ(of_d: list[dict[str, Any]], of_p: list[dict[str, Any]], ids: Sequence[int]) -> str | None:
    """What is wrong with the one load of this prompt on D; None where all its bytes are those of P."""
    name = prompt_digest(list(ids))
    return compare([record for record in of_d if record["prompt"] == name], of_p)


def corrupted(p: Server, d: Server, ids: Sequence[int], *where: str) -> str:
    """What the comparison says of a hand-over of which one bit is flipped on D, after the load and before its first
    decode step. ``where``: what the engine's ``kv_corrupt`` is told."""
    records(p), records(d)
    d.rpc("kv_corrupt", *where)
    complete(d, ids, kv_transfer_params=prefill_leg(p, ids))
    said = str(differ(records(d), records(p), ids))
    no_block_held(p, d)
    return said


def at_once(
    p: Server,
    d: Server,
    prompts: Sequence[list[int]],
    ask: Callable[[list[int]], dict[str, Any]],
    ranks: int = 1,
) -> tuple[list[dict[str, Any]], Count]:
    """Hand all of them over at the same time: all bytes equal, all tokens counted.

    Args:
        ask: sends one prompt; its answer.
        ranks: of D, each of which counts.

    Returns:
        the answers, and what D counted.
    """
    records(p), records(d)
    before, tokens = count(d), sum(map(len, prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    of_d, of_p = records(d), records(p)
    assert [differ(of_d, of_p, ids) for ids in prompts] == [None] * len(prompts)
    return answers, counted(d, before, tokens, requests=len(prompts), ranks=ranks)


class Pair:
    """P, D and a router. Tests leave it idle, without blocks held and without records."""

    def __init__(self, group: ServerGroup, prefill: Server, decode: Server) -> None:
        self.group, self.prefill, self.decode = group, prefill, decode
        self.router = group.router(prefill, decode)
        for server in (prefill, decode):
            server.rpc("kv_watch")

    def forget(self) -> None:
        """Drop the records of earlier hand-overs."""
        records(self.prefill), records(self.decode)

    def check(self, ids: Sequence[int], plane: str | None = None, **options: Any) -> dict[str, Any]:
        """Hand one prompt over through the router: all bytes equal, all tokens counted, nothing left held."""
        self.forget()
        before = count(self.decode)
        answer = complete(self.router, ids, **options)
        grown = counted(self.decode, before, len(ids))
        problem = differ(records(self.decode), records(self.prefill), ids)
        assert problem is None, problem
        assert plane is None or set(grown.by_plane) == {plane}
        no_block_held(self.prefill, self.decode)
        return answer


@contextmanager
def started_pair(
    logs: Path, model: Path, of_p: Mapping[str, Any] = {}, of_d: Mapping[str, Any] = {}, **of_both: Any
) -> Iterator[Pair]:
    """A pair of engines with these options."""
    with PatientServerGroup(logs) as group:
        prefill = group.engine("prefill", model, **of_both, **of_p)
        decode = group.engine("decode", model, **of_both, **of_d)
        group.wait_ready()
        yield Pair(group, prefill, decode)


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill(server: Server) -> None:
    """SIGKILL to the whole engine at once, as a machine that goes does; its guard process tidies up after."""
    for pid in descendants(server.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def terminate(server: Server) -> None:
    """SIGTERM to the engine's API server, as the one process that an init system or a container runtime knows."""
    os.kill(descendants(server.process.pid)[0], signal.SIGTERM)


def freeze(server: Server) -> None:
    """SIGSTOP to all of the engine but its API server, which goes on to take requests."""
    for pid in descendants(server.process.pid)[1:]:
        os.kill(pid, signal.SIGSTOP)


def stream_and_leave(server: Server, ids: Sequence[int], after_bytes: int, seconds: float, **options: Any) -> None:
    """A client that goes away after so many bytes of the answer, or after so long without any."""
    body = {"model": "model", "prompt": list(ids), "max_tokens": 200, "ignore_eos": True, "stream": True}
    body |= options
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with suppress(TimeoutError, OSError), urllib.request.urlopen(request, timeout=seconds) as response:
        response.read(after_bytes)
