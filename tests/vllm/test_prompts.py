"""What D counts of each prompt: loaded, or not and why. It is on D's page once the request's answer has ended."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvferry.connector.decode_side import load
from kvferry.connector.decode_side.load_state import LoadPhase
from kvferry.connector.engine import planning
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import PROMPT_ENDS
from kvferry.transport.control.keys import new_secret
from kvferry.transport.errors import ConfigError
from kvferry.transport.wake import RateLimitedLog
from tests.support.inside import consumer_of, leases_of, scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import PausedTransfer, in_phase
from tests.vllm.stepped import ROOM, Engine, EngineGroup, Lines, eventually, hand_over, loaded, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(6 * BLOCK + 1)
"""All but the last token lie in whole blocks, which the prefix cache of D can have."""


def found(d: Engine, params: object, *, beside: Engine | None = None) -> str:
    """What D's page says of one request, right when its answer has ended."""
    before = d.prompts.copy()
    d.finish(d.add(IDS, params), beside=[beside] if beside else ())
    ((end, count),) = (d.prompts - before).items()
    assert count == 1 and tuple(end.split()) in PROMPT_ENDS
    return end


# --- each cause of "nothing is handed over" -----------------------------------------------------------------------

Cause = Callable[[EngineGroup], str]


def other_key(group: EngineGroup) -> str:
    p, d = (group.engine(number, extra={"secret_key": new_secret()}) for number in range(2))
    return found(d, p.prefill(IDS), beside=p)


def other_key_and_both_legs_at_once(group: EngineGroup) -> str:
    p, d = (group.engine(number, extra={"secret_key": new_secret()}) for number in range(2))
    return found(d, p.named(transfer_id="t", remote_key=p.address.key), beside=p)


def role_of_d(group: EngineGroup) -> str:
    return found(group.engine(1, role="kv_producer"), group.engine(0).prefill(IDS))


def role_of_p(group: EngineGroup) -> str:
    p, d = group.engine(0, role="kv_consumer"), group.engine(1)
    answer = p.finish(p.add(IDS, {"do_remote_decode": True}))
    assert answer.params is None and p.prompts == {"local wrong_role": 1}
    return found(d, {"do_remote_prefill": True})


def no_connector_on_p(group: EngineGroup) -> str:
    return found(group.engine(1), {"do_remote_prefill": True, "do_remote_decode": False})


def another_connector_on_p(group: EngineGroup) -> str:
    params = group.engine(0).prefill(IDS)
    return found(group.engine(1), {**params, "kvferry": None, "remote_block_ids": [[1, 2]]})


def other_model(group: EngineGroup) -> str:
    p, d = (group.engine(number, extra={"model_tag": f"model {number}"}) for number in range(2))
    return found(d, p.prefill(IDS), beside=p)


def other_release(group: EngineGroup) -> str:
    params = group.engine(0).prefill(IDS)
    return found(group.engine(1), {**params, "kvferry": {**params["kvferry"], "v": 99}})


def plane_missing(group: EngineGroup) -> str:
    p, d = group.engine(0, extra={"plane": "shm"}), group.engine(1, extra={"require_plane": ["tcp", "cma"]})
    return found(d, p.prefill(IDS), beside=p)


def network_refuses(group: EngineGroup) -> str:
    p, d = group.pair()
    params = p.prefill(IDS)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        params["kvferry"]["ranks"][0][3] = taken.getsockname()[1]
        return found(d, params, beside=p)


def network_is_silent(group: EngineGroup) -> str:
    p, d = group.pair()
    params = p.prefill(IDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        params["kvferry"]["ranks"][0][3] = silent.getsockname()[1]
        name = d.add(IDS, params)
        d.step()
        in_phase(d, name, LoadPhase.HANDSHAKING)
        d.let_time_pass(700.0)  # the dialer's own time-out goes by the host's clock
        d.finish(name, beside=[p])
    ((end, count),) = d.prompts.items()
    assert count == 1
    return end


def peer_not_allowed(group: EngineGroup) -> str:
    p, d = group.engine(0), group.engine(1, extra={"allowed_peers": ["10.0.0.0/8"]})
    return found(d, p.prefill(IDS), beside=p)


def lease_over(group: EngineGroup) -> str:
    p, d = group.pair(extra={"lease_seconds": 30.0})
    params = p.prefill(IDS)
    run([p], lambda: bool(leases_of(p)))
    p.let_time_pass(60.0)
    settle(p)
    return found(d, params, beside=p)


def p_never_had_the_prompt(group: EngineGroup) -> str:
    p, d = group.pair(extra={"handover_timeout_seconds": 0.3})
    return found(d, p.named(transfer_id="unknown"), beside=p)


def router_without_parameters(group: EngineGroup) -> str:
    return found(group.engine(1), None)


def another_prompt(group: EngineGroup) -> str:
    return found(group.engine(1), group.engine(0).prefill(prompt(len(IDS), 7)))


def d_has_it_in_its_cache(group: EngineGroup) -> str:
    p, d = group.pair()
    d.finish(d.add(IDS))
    return found(d, p.prefill(IDS), beside=p)


CAUSES: dict[Cause, str] = {
    other_key: "failed key",
    other_key_and_both_legs_at_once: "local key",
    role_of_d: "local wrong_role",
    role_of_p: "local no_p_named",
    no_connector_on_p: "local no_p_named",
    another_connector_on_p: "local no_kvferry_params",
    other_model: "failed incompatible",
    other_release: "local other_release",
    plane_missing: "failed plane",
    network_refuses: "failed unreachable",
    network_is_silent: "failed timeout",
    peer_not_allowed: "failed not_allowed",
    lease_over: "failed expired",
    p_never_had_the_prompt: "local no_answer",
    router_without_parameters: "plain no_params",
    another_prompt: "local other_prompt",
    d_has_it_in_its_cache: "local cached",
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_the_cause_is_the_reason_on_ds_page(group: EngineGroup, cause: Cause) -> None:
    assert cause(group) == CAUSES[cause]


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
    p, d = group.engine(0, extra={"plane": "shm"}), group.engine(1, extra={"require_plane": ["tcp"]})
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


# --- planes that are good enough ----------------------------------------------------------------------------------


def test_a_plane_that_is_required_is_taken_and_a_slower_one_is_warned_of(group: EngineGroup, lines: Lines) -> None:
    p, d = group.engine(0, extra=ROOM), group.engine(1, extra={**ROOM, "require_plane": ["tcp", "shm"]})
    hand_over(p, d, IDS)
    assert lines("data plane to", "is shm") and not lines("is cma")
    other = group.engine(1, extra={**ROOM, "require_plane": ["zmq"]})
    other.finish(other.add(IDS, p.prefill(IDS)), beside=[p])
    (said,) = lines("hand-over of", "failed", "no data plane in common")
    assert (
        "zmq: the prefill engine does not offer it" in said
        and "require_plane of this engine is zmq, so it takes no other" in said
    )


def test_an_engine_that_can_have_no_plane_that_is_required_does_not_start(group: EngineGroup) -> None:
    with pytest.raises(ConfigError, match=r"^require_plane: this rank can have none of cuda_ipc: cuda_ipc: "):
        group.engine(0, extra={"require_plane": ["cuda_ipc"]})
