"""What D counts of each prompt: loaded, or not and why. It is on D's page once the request's answer has ended."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from kvferry.connector.decode_side import load
from kvferry.connector.scheduler import planning
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import PROMPT_ENDS
from kvferry.router.engines import identity_of
from kvferry.transport.control.key_file import make_key_file, read_key_file
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import TO_DO
from kvferry.transport.limited_log import RateLimitedLog
from tests.support.inside import (
    consumer_of,
    producer_of,
    scheduler_half,
)
from tests.vllm import stepped
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import PausedTransfer
from tests.vllm.stepped import (
    PREFILL,
    ROOM,
    Engine,
    EngineGroup,
    Lines,
    Pair,
    eventually,
    hand_over,
    loaded,
    run,
    settle,
)
from tests.vllm.test_handover_steps import adapter

pytestmark = pytest.mark.vllm
IDS = prompt(6 * BLOCK + 1)
"""All but the last token lie in whole blocks, which the prefix cache of D can have."""


# --- each cause of "nothing is handed over" -----------------------------------------------------------------------

One = Callable[[list[int]], str]
"""Sends a prompt, and returns what D's page says of it."""
Change = Callable[[dict[str, Any]], object]


@dataclass
class Asked:
    """P and D, and the prompts that D asks P for: in turn, or both legs at once as the router sends them."""

    group: EngineGroup
    at_once: bool
    folder: Path
    patch: pytest.MonkeyPatch
    numbers: Iterator[int] = field(default_factory=count)

    def pair(self, of_p: dict[str, Any] | None = None, of_d: dict[str, Any] | None = None, **kwargs: Any) -> Pair:
        extras = ({**ROOM, "plane": "shm", **(extra or {})} for extra in (of_p, of_d))
        p, d = (self.group.engine(n, extra=extra, num_blocks=400, **kwargs) for n, extra in enumerate(extras))
        return p, d

    def params(self, p: Engine, ids: list[int], *, other: list[int] | None = None, **kwargs: Any) -> dict[str, Any]:
        """Of D's leg. P computes the prompt, or ``other``."""
        answer = p.prefill(other or (prompt(20, 999) if self.at_once else ids), **kwargs)
        if not self.at_once:
            return answer
        name = {"transfer_id": f"t{next(self.numbers)}"}
        p.add(other or ids, PREFILL | name, **kwargs)
        return {"do_remote_prefill": True, "do_remote_decode": False, **(identity_of(answer) or {}), **name}

    def ends(
        self, pair: Pair, change: Change = lambda params: None, act: Callable[[str], object] = lambda name: None,
        **kwargs: Any,
    ) -> One:  # fmt: skip
        """``change``: of D's parameters. ``act``: once D's request is there."""

        def one(ids: list[int]) -> str:
            params = self.params(pair[0], ids)
            change(params)
            return self.end(pair, params, ids, act, **kwargs)

        return one

    def end(
        self, pair: Pair, params: Any, ids: list[int], act: Callable[[str], object] = lambda name: None, **kwargs: Any
    ) -> str:
        p, d = pair
        before = d.prompts.copy()
        act(d.add(ids, params, **kwargs))
        run([p, d], lambda: d.prompts != before)
        ((end, number),) = (d.prompts - before).items()
        assert number == 1 and tuple(end.split()) in PROMPT_ENDS
        return end

    def entry(self, params: dict[str, Any], in_turn: dict[str, Any], **at_once: Any) -> None:
        """Change P's entry in its answer, or what the router keeps of it."""
        params.update(at_once) if self.at_once else params["kvferry"].update(in_turn)


Cause = Callable[[Asked], One]


def other_keys(ask: Asked) -> list[dict[str, Any]]:
    files = [ask.folder / f"{next(ask.numbers)}.key" for _ in range(2)]
    return [{"key_file": str(file)} for file in files if make_key_file(file)]


def key_of_p(ask: Asked) -> One:
    return ask.ends(ask.pair(*other_keys(ask)))


def key_of_d(ask: Asked) -> One:
    of_p, of_d = other_keys(ask)
    public = Keys(read_key_file(Path(of_p["key_file"]))).public
    return ask.ends(ask.pair(of_p, of_d | {"peer_keys": [public]}))


def key_that_the_router_does_not_name(ask: Asked) -> One:
    return ask.ends(ask.pair(*other_keys(ask)), lambda params: params.pop("remote_key"))


def another_host(ask: Asked) -> One:
    return ask.ends(ask.pair(), lambda params: ask.entry(params, {"host_id": "0a"}, remote_host_id="0a"))


def role_of_d(ask: Asked) -> One:
    return ask.ends((ask.group.engine(0), ask.group.engine(1, role="kv_producer")))


def no_connector_on_p(ask: Asked) -> One:
    pair, left = ask.pair(), {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t"}
    return lambda ids: ask.end(pair, left, ids)


def another_connector_on_p(ask: Asked) -> One:
    return ask.ends(ask.pair(), lambda params: params.update(kvferry=None, remote_block_ids=[[1, 2]]))


def parameters_that_were_changed(ask: Asked) -> One:
    return ask.ends(ask.pair(), lambda params: params.update(kvferry=None if ask.at_once else [1], remote_port="x"))


def other_model(ask: Asked) -> One:
    return ask.ends(ask.pair({"model_tag": "one"}, {"model_tag": "another"}))


def other_release(ask: Asked) -> One:
    def older(frames: list[bytes]) -> Any:
        raise messages.VersionError(9)

    if ask.at_once:
        ask.patch.setattr(messages, "decode_request", older)
    return ask.ends(ask.pair(), lambda params: ask.entry(params, {"v": 99}))


def plane_missing(ask: Asked) -> One:
    return ask.ends(ask.pair(of_d={"plane": "tcp"}))


def network_refuses(ask: Asked) -> One:
    def nobody(params: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        params["remote_port"] = port
        if not ask.at_once:
            params["kvferry"]["ranks"][0][3] = port

    return ask.ends(ask.pair(), nobody)


def peer_not_allowed(ask: Asked) -> One:
    return ask.ends(ask.pair(of_d={"allowed_peers": ["10.0.0.0/8"]}))


def no_such_lease(ask: Asked) -> One:
    return ask.ends(ask.pair({"lease_seconds": 0.9}), lambda params: params["kvferry"].update(token="ab" * 16))


def p_never_had_the_prompt(ask: Asked) -> One:
    return ask.ends(ask.pair(of_d={"handover_timeout_seconds": 0.3}), lambda params: params.update(transfer_id="none"))


def p_refuses_the_read(ask: Asked) -> One:
    pair = ask.pair()
    producer = producer_of(pair[0].thread)

    def refuses(identity: bytes, request: Any, now: float, address: str, handle: Any = producer.handle) -> None:
        if isinstance(request, messages.Ask):
            producer.deny(identity, request.read, "bounds", "planted")
        else:
            handle(identity, request, now, address)

    producer.handle = refuses
    return ask.ends(pair)


def our_own_fault(ask: Asked) -> One:
    pair = ask.pair()
    ask.patch.setattr(consumer_of(pair[1]).loads, "begin", breaks)
    return ask.ends(pair)


def breaks(*_: object) -> None:
    raise RuntimeError("planted")


def caches_are_reset(ask: Asked) -> One:
    _, d = pair = ask.pair()
    return ask.ends(pair, act=lambda name: d.scheduler.reset_prefix_cache(reset_connector=True))


def client_leaves_before(ask: Asked) -> One:
    return ask.ends(ask.pair(), rejected=True)


def another_prompt(ask: Asked) -> One:
    p, _ = pair = ask.pair()
    return lambda ids: ask.end(pair, ask.params(p, ids, other=prompt(len(ids), 700 + next(ask.numbers))), ids)


def another_adapter(ask: Asked) -> One:
    p, _ = pair = ask.pair()
    ours, theirs = (LoRARequest("helper", 1, adapter(ask.folder / f"{rank}", rank=rank)) for rank in (8, 16))
    return lambda ids: ask.end(pair, ask.params(p, ids, lora=theirs), ids, lora=ours)


def embeddings(ask: Asked) -> One:
    p, _ = pair = ask.pair()

    def one(ids: list[int]) -> str:
        params = ask.params(p, ids)
        with mock.patch.object(stepped, "Request", partial(Request, prompt_embeds=torch.zeros(len(ids), 8))):
            return ask.end(pair, params, ids)

    return one


def other_block_size(ask: Asked) -> One:
    p, d = (ask.group.engine(n, extra=ROOM, num_blocks=200, window=64, block=(16, 48)[n]) for n in range(2))
    return lambda ids: ask.ends((p, d))((ids * 9)[:230])


def d_has_it_in_its_cache(ask: Asked) -> One:
    _, d = pair = ask.pair()
    return lambda ids: (d.finish(d.add(ids)), ask.ends(pair)(ids))[1]


def all_of_the_prompt(ask: Asked) -> One:
    return ask.ends(ask.pair(), prompt_logprobs=1)


def router_without_parameters(ask: Asked) -> One:
    pair = ask.pair()
    return lambda ids: ask.end(pair, None, ids)


CAUSES: dict[Cause, tuple[str, str]] = {
    key_of_p: ("failed key", "local key"),
    key_of_d: ("failed key", "local key"),
    key_that_the_router_does_not_name: ("failed key", "local key"),
    another_host: ("local loopback", "local loopback"),
    role_of_d: ("local wrong_role", "local wrong_role"),
    no_connector_on_p: ("local no_p_named", "local no_p_named"),
    another_connector_on_p: ("local no_kvferry_params", "local no_kvferry_params"),
    parameters_that_were_changed: ("local malformed", "local malformed"),
    other_model: ("failed incompatible", "failed incompatible"),
    other_release: ("local other_release", "local other_release"),
    plane_missing: ("failed plane", "failed plane"),
    network_refuses: ("failed unreachable", "local unreachable"),
    peer_not_allowed: ("failed not_allowed", "local not_allowed"),
    no_such_lease: ("failed expired", ""),  # at once, P itself tells D the token, while the lease stands
    p_never_had_the_prompt: ("", "local no_answer"),  # in turn, P has answered before D is asked
    p_refuses_the_read: ("failed denied", "failed denied"),
    our_own_fault: ("failed internal", "failed internal"),
    caches_are_reset: ("local reset", "local reset"),
    client_leaves_before: ("local ended", "local ended"),
    another_prompt: ("local other_prompt", "local other_prompt"),
    another_adapter: ("local other_adapter", "local other_adapter"),
    embeddings: ("local embeddings", "local embeddings"),
    other_block_size: ("local window", "local window"),
    d_has_it_in_its_cache: ("local cached", "local cached"),
    all_of_the_prompt: ("local whole_prompt", "local whole_prompt"),
    router_without_parameters: ("plain no_params", ""),  # such a request is asked for in neither way
}
"""What D's page says where P and D are asked in turn, and both at once; empty where the cause cannot be."""
CASES = [
    (cause, way)
    for number, (cause, ends) in enumerate(CAUSES.items())
    for way in ({number % 2} if ends[0] == ends[1] else {0, 1}) if ends[way]
]  # fmt: skip
"""Where both say the same, they take turns."""


@pytest.mark.parametrize(("cause", "way"), CASES, ids=[f"{cause.__name__}-{way}" for cause, way in CASES])
def test_the_cause_is_the_reason_on_ds_page(
    group: EngineGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Cause, way: int
) -> None:
    """The first prompt's, and those of the ones that follow."""
    one = cause(Asked(group, bool(way), tmp_path, monkeypatch))
    assert [one(prompt(2 * BLOCK + 1, seed)) for seed in range(3)] == [CAUSES[cause][way]] * 3


ELSEWHERE = {
    "no_lease": "tests/vllm/test_rendezvous.py", "timeout": "tests/handover/test_retries.py",
    "peer_lost": "tests/handover/test_lost_peers.py", "data": "tests/handover/test_misfits.py",
    "cancelled": "tests/handover/test_aborts.py", "other_connector": "tests/unit/test_request_lifetime.py",
}  # fmt: skip
"""Reasons that one prompt each is made to have, by the file."""


def test_every_reason_has_a_cause() -> None:
    caused = {end.split()[1] for ends in CAUSES.values() for end in ends if end}
    assert (
        not caused & ELSEWHERE.keys()
        and caused | ELSEWHERE.keys() == {reason for _, reason in PROMPT_ENDS if reason} == TO_DO.keys()
    )


# --- once for each prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_a_hand_over_is_counted_once_for_an_engine(group: EngineGroup, tp: int) -> None:
    p, d = group.pair(tp=tp, ahead=1)
    for seed in range(4):
        name = hand_over(p, d, prompt(60, seed), max_tokens=1)
        assert d.prompts == {"loaded": seed + 1}, "once its answer has ended"
    settle(p, d)
    assert d.prompts == {"loaded": 4} and not p.prompts and sum(d.all_loads.values()) == 4, name


def test_a_request_that_ends_before_its_load_is_counted_with_the_end_of_the_load(group: EngineGroup) -> None:
    p, d = group.pair(extra={"plane": "shm"})
    params = p.prefill(IDS)
    paused = PausedTransfer(p, messages.Ask)
    d.add(IDS, params, request_id="a")
    d.step()
    d.abort("a")
    assert not d.prompts
    run([d], lambda: not consumer_of(d).loads.running)
    paused.open()
    settle(p, d)
    assert d.prompts == {"failed cancelled": 1}
    d.add(prompt(60, 3), p.prefill(prompt(60, 3)), request_id="b")
    d.abort("b")
    settle(p, d)
    assert d.prompts == {"failed cancelled": 1, "local ended": 1}


# --- what became of one request, for who asks ---------------------------------------------------------------------


def report(d: Engine, name: str) -> dict[str, Any]:
    found = d.answers[name].params
    assert found is not None and found.keys() == {"handed_over"}
    return dict(found["handed_over"])


def test_a_request_that_asks_is_told(group: EngineGroup) -> None:
    """Also after others, whose loads go inside their steps: the load that is told of goes beside."""
    p, d = group.pair(ahead=1, extra={"plane": "cma", "step_hold_seconds": 1.0})
    scheduler_half(d).step_load_rule.hold_seconds = 600.0
    hand_over(p, d, prompt(60, 1))
    settle(p, d)
    name = hand_over(p, d, IDS)
    assert d.answers[name].params is None and d.step_loads[name] == 1, "who does not ask"
    name = d.add(IDS, {**p.prefill(IDS), "report": True})
    d.finish(name, beside=[p])
    told = report(d, name)
    assert told["result"] == "local" and told["reason"] == "cached" and told["tokens"] == 0
    name = d.add(prompt(90, 2), {**p.prefill(prompt(90, 2)), "report": True})
    loaded(p, d, name)
    told = report(d, name)
    assert told.pop("milliseconds") > 0 and d.loads[name] == 1
    assert told == {"result": "loaded", "reason": "", "tokens": 90, "plane": "cma", "peer": p.engine_id[:8]}
    for params in ({"report": True}, {"report": "yes"}, {"report": 1}):
        name = d.add(prompt(50, 5), params)
        d.finish(name)
        if params["report"] is True:
            assert (report(d, name)["result"], report(d, name)["reason"]) == ("plain", "no_params")
        else:
            assert d.answers[name].params is None
    settle(p, d)


def test_a_failed_load_is_told_with_its_reason(group: EngineGroup) -> None:
    p, d = group.engine(0, extra={"plane": "shm"}), group.engine(1, extra={"plane": "tcp"})
    name = d.add(IDS, {**p.prefill(IDS), "report": True})
    d.finish(name, beside=[p])
    told = report(d, name)
    assert (told["result"], told["reason"], told["tokens"], told["plane"]) == ("failed", "plane", 0, "")


def test_lines_beyond_a_rate_have_the_level_debug(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (load, planning):
        monkeypatch.setattr(module, "FAILED_LINES", 2)
        monkeypatch.setattr(module, "RateLimitedLog", partial(RateLimitedLog, clock=lambda: 0.0))
    logging.getLogger("vllm.kvferry").setLevel(logging.DEBUG)
    lines.setLevel(logging.DEBUG)
    p, d = group.pair()
    hand_over(p, d, IDS)
    eventually(lambda: lines("hand-over of", " done: "))
    assert {each.levelname for each in lines.records if " done: " in each.getMessage()} == {"DEBUG"}, "each of them"
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        for seed in range(10, 14):
            d.finish(d.add(prompt(40, 50 + seed), p.prefill(prompt(40, seed))), beside=[p])
            params = p.prefill(prompt(40, seed))
            params["kvferry"]["ranks"][0][3] = taken.getsockname()[1]
            d.finish(d.add(prompt(40, seed), params), beside=[p])
    for words in ("prefills locally", "tokens not loaded"):
        eventually(lambda words=words: len(lines(words)) == 4)
        said = [record.levelname for record in lines.records if words in record.getMessage()]
        assert said == ["WARNING"] * 2 + ["DEBUG"] * 2, words
