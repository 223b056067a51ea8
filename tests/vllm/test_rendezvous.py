"""Both legs at once under vLLM's scheduler: D waits for P by name, tokens leave as P computes; recorded routers."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvferry.connector.decode_side import links, lookup
from kvferry.connector.prefill_side import prompts
from kvferry.connector.scheduler.load_planner import RequestPhase
from kvferry.connector.worker.worker import IDLE_WAIT_SECONDS
from tests.support.inside import (
    board_of,
    consumer_of,
    early_questions,
    leases_of,
    producer_of,
    prompts_of,
    scheduler_half,
)
from tests.support.turns import TurnLines
from tests.vllm.labelled import labels, prompt
from tests.vllm.stepped import PATIENT, PREFILL, Engine, EngineGroup, Lines, Pair, eventually, loaded, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(300)
TO_P = PREFILL | {"transfer_id": "tx"}
PLANES = pytest.mark.parametrize("plane", ["cma", "tcp"])


def legs(group: EngineGroup, **kwargs: Any) -> tuple[Engine, Engine, dict[str, Any]]:
    """P and D; the parameters of D's leg, named "tx"."""
    p, d = group.pair(**kwargs)
    return p, d, p.named(transfer_id="tx")


def ask(d: Engine, params: object, **kwargs: Any) -> str:
    """D's leg, which has reached P's rank."""
    request_id = d.add(IDS, params, max_tokens=4, **kwargs)
    d.step()
    assert d.phase(request_id) is RequestPhase.AWAITED
    return request_id


def asked(d: Engine, params: object, p: Engine) -> str:
    """D's leg, which waits at P."""
    request_id = ask(d, params)
    eventually(lambda: questions(p) == 1)
    return request_id


def questions(p: Engine) -> int:
    """How many questions wait at P."""
    return len(early_questions(p))


def lookups(d: Engine, rank: int = 0) -> Any:
    return consumer_of(d.threads[rank]).lookups


def stalled(d: Engine) -> bool:
    """Whether D's first rank has a result that D's engine has not taken."""
    return bool(d.thread.results.lookups)


def ends_well(p: Engine, d: Engine, *request_ids: str) -> None:
    for request_id in request_ids:
        loaded(p, d, request_id)
    settle(p, d)


def prefills_locally(p: Engine, d: Engine, request_id: str, lines: Lines, *words: str) -> None:
    loaded(p, d, request_id, 0)
    (line,) = lines("prefills locally", request_id)
    assert all(word in line for word in words) and "\n" not in line, line
    settle(d)


@PLANES
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("name", ["transfer_id", "remote_request_id"])
def test_both_legs_at_once(group: EngineGroup, plane: str, first: str, name: str) -> None:
    p, d = group.pair(extra={"plane": plane}, max_batched=128)
    uuid = "0d9f5b3a-6a3e-4a57-9d0a-0123456789ab"
    to_p = PREFILL | ({"transfer_id": uuid} if name == "transfer_id" else {})
    leg = f"cmpl-{uuid}-0-89abcdef"
    if first == "P":
        p.add(IDS, to_p, request_id=leg)
        p.step()
    request_id = d.add(IDS, p.named(**{name: uuid}), max_tokens=8)
    for _ in range(3):
        d.step()
    if first == "D":
        assert d.free_blocks == d.baseline and d.phase(request_id) is RequestPhase.AWAITED
        p.add(IDS, to_p, request_id=leg)
    ends_well(p, d, request_id)
    assert p.answers[leg].finish is not None and d.answers[request_id].external == len(IDS) and not d.failed


@pytest.mark.parametrize(("plane", "streamed"), [("cma", False), ("tcp", True)])
def test_d_takes_blocks_before_the_grant_only_where_p_sends(group: EngineGroup, plane: str, streamed: bool) -> None:
    p, d, params = legs(group, extra={"plane": plane}, max_batched=64)
    request_id = ask(d, params)
    p.add(IDS, TO_P)
    p.step()
    assert not p.leases
    if streamed:
        run([d], lambda: d.free_blocks < d.baseline)
        assert d.all_loads[request_id] == 1
    else:
        eventually(lambda: questions(p) == 1)  # until it is granted
        d.step()
        assert d.free_blocks == d.baseline and d.phase(request_id) is RequestPhase.AWAITED
    ends_well(p, d, request_id)
    counted: Counter[str] = Counter()
    for stats in d.stats:
        counted.update({series: sum(counts.values()) for series, counts in stats.data["counts"].items()})
    assert counted["num_streamed_handovers"] == streamed == (counted["streamed_block_seconds"] > 0)


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
def test_one_rank_asks_for_all(group: EngineGroup, tp: tuple[int, int]) -> None:
    p, d = group.engine(0, tp=tp[0]), group.engine(1, tp=tp[1])
    request_id = ask(d, p.named(transfer_id="tx"))
    eventually(lambda: bool(lookups(d).open))
    assert not any(lookups(d, rank).open for rank in range(1, d.tp))
    p.add(IDS, TO_P)
    ends_well(p, d, request_id)


def test_an_engine_in_which_all_requests_wait_does_not_spin(group: EngineGroup) -> None:
    p, d, params = legs(group)
    ask(d, params)
    waits: list[float] = []
    results = d.thread.results
    results.wait = waits.append
    for _ in range(5):
        d.step()
    assert waits == [IDLE_WAIT_SECONDS] * 5
    del results.wait
    p.add(IDS, TO_P)
    results.ready.clear()
    run([p], lambda: bool(p.leases))
    assert results.ready.wait(60.0), "the answer ends such a wait"


# --- names --------------------------------------------------------------------------------------------------------
def test_two_prompts_of_one_name(group: EngineGroup, lines: Lines) -> None:
    """The first keeps the name. The second can be asked for by its request id."""
    p, d, params = legs(group)
    other = prompt(300, 7)
    p.add(IDS, TO_P)
    p.add(other, TO_P, request_id="cmpl-second-0-01234567")
    run([p], lambda: len(p.leases) == 2)
    eventually(lambda: lines("cmpl-second-0-01234567 has the name 'tx' of a prompt that this engine holds"))
    ends_well(p, d, d.add(IDS, params, max_tokens=4), d.add(other, p.named(remote_request_id="second"), max_tokens=4))


@pytest.mark.parametrize("end", ["refused", "aborted", "aborted early", "aborted before P has it", "rejected"])
def test_another_prompt_under_a_name_ends_no_hand_over(group: EngineGroup, lines: Lines, end: str) -> None:
    """Two clients chose one name. D must not release what it cannot use."""
    p, d, params = legs(group)
    theirs = prompt(300, 7)
    if end == "aborted before P has it":
        d.abort(d.add(IDS, params))
    elif end != "rejected":
        request_id = asked(d, params, p)
        if end == "aborted early":
            d.abort(request_id)
            settle(d)
    p.finish(p.add(theirs, TO_P))
    run([p], lambda: bool(p.leases))
    if end == "refused":
        prefills_locally(p, d, request_id, lines, "the prefill engine prefilled another prompt")
    elif end == "aborted":
        eventually(lambda: stalled(d))
        d.abort(request_id)
        settle(d)
    else:
        if end == "rejected":
            d.add([0], params, rejected=True)  # as vLLM submits it
        settle(d)
        eventually(lambda: not lookups(d).live)
    ends_well(p, d, d.add(theirs, params, max_tokens=4))


# --- requests that end --------------------------------------------------------------------------------------------
BEFORE, MEANWHILE, AFTER = "before P has begun", "while P computes", "while the answer comes"
LONG_BEFORE, LOST = "half a minute before P has begun", "before P has begun, and the connection is lost"


@PLANES
@pytest.mark.parametrize(
    ("when", "tp"),
    [(BEFORE, (1, 1)), (BEFORE, (2, 1)), (BEFORE, (1, 2)), (LONG_BEFORE, (1, 1)), (LOST, (1, 1)), (MEANWHILE, (1, 1)),
     (AFTER, (1, 1))],
)  # fmt: skip
def test_a_d_that_is_aborted_releases_the_lease(group: EngineGroup, plane: str, when: str, tp: tuple[int, int]) -> None:
    """Before P has begun P's engine may have the prompt, and D's engine takes no further step; while P computes D knows
    the token before P has granted it. The lease is longer than any test."""
    p, d = (group.engine(n, tp=tp[n], extra={"plane": plane}, max_batched=128) for n in range(2))
    request_id = asked(d, p.named(transfer_id="tx"), p)
    if when in (BEFORE, LONG_BEFORE, LOST):
        d.abort(request_id)
        settle(d)
        eventually(lambda: bool(lookups(d).left))
    if when == LONG_BEFORE:
        d.let_time_pass(30.0)
        turns = TurnLines(d)
        eventually(lambda: turns.count > 1)
    if when == LOST:
        (link,) = consumer_of(d).links
        link.connection.lose("ended by P")
    leg = p.add(IDS, TO_P)
    if when == MEANWHILE:
        p.step()
        eventually(lambda: any(meeting.answer for meeting in lookups(d).open.values()) or stalled(d))
        d.abort(request_id)
        while d.scheduler.has_requests():
            d.step()
    p.finish(leg)
    if when == AFTER:
        run([p], lambda: bool(p.leases))
        eventually(lambda: stalled(d))
        d.abort(request_id)
        settle(d)
    settle(p)
    eventually(lambda: not lookups(d).live)
    assert not d.all_loads


@pytest.mark.parametrize("how", ["rejected", "computes its prompt"])
def test_a_request_that_loads_nothing_releases_the_lease(group: EngineGroup, how: str) -> None:
    p, d, params = legs(group)
    if how == "rejected":
        d.add(IDS, params, rejected=True)
        settle(d)
    else:
        request_id = d.add(IDS, params, max_tokens=200, prompt_logprobs=1)
        d.step()
    leg = p.add(IDS, TO_P)
    run([p] if how == "rejected" else [p, d], lambda: p.answers[leg].finish is not None and p.idle)
    if how != "rejected":  # the lease is longer than any test, and D decodes on
        assert d.answers[request_id].finish is None
        d.abort(request_id)
    settle(p, d)


# --- patience -----------------------------------------------------------------------------------------------------
def test_a_p_that_aborts_lets_d_prefill_at_once(group: EngineGroup, lines: Lines) -> None:
    p, d, params = legs(group, max_batched=128)
    leg = p.add(IDS, TO_P)
    request_id = ask(d, params)
    p.abort(leg)
    prefills_locally(p, d, request_id, lines, "the prompt was not handed over, or its lease has ended")
    settle(p)


def put_deadline_forward(d: Engine, seconds: float) -> None:
    """For D's scheduler half it is so many seconds later than it is."""
    scheduler_half(d).clock = lambda: time.monotonic() + seconds


def test_a_leg_that_never_comes(group: EngineGroup, lines: Lines) -> None:
    p, d, params = legs(group)
    request_id = asked(d, params, p)
    put_deadline_forward(d, 700.0)
    prefills_locally(p, d, request_id, lines, "has told nothing of 'tx' in 600 s; does the router send both legs")
    d.let_time_pass(lookup.LEFT_SECONDS)
    p.let_time_pass(700.0)  # it has held the question long enough
    eventually(lambda: questions(p) == 0)


def behind_another(group: EngineGroup) -> tuple[Engine, Engine, str]:
    """P, D, and D's request whose prompt is in P's queue, behind another one. P's ranks know of it."""
    p, d, params = legs(group, max_batched=64)
    p.add(prompt(300, 7))
    p.step()
    p.add(IDS, TO_P)
    p.step()
    request_id = asked(d, params, p)
    assert "tx" in producer_of(p).prompts.by_name
    return p, d, request_id


def test_the_time_in_p_s_queue_does_not_count(group: EngineGroup) -> None:
    p, d, request_id = behind_another(group)
    p.step()  # P's engine does something, if not this
    put_deadline_forward(d, 500.0)
    p.let_time_pass(700.0)  # P has held the question long enough
    eventually(lambda: stalled(d))
    d.step()
    put_deadline_forward(d, 1000.0)
    d.step()
    assert d.phase(request_id) is RequestPhase.AWAITED
    ends_well(p, d, request_id)


def test_a_p_whose_engine_stands_still_vouches_for_nothing(group: EngineGroup, lines: Lines) -> None:
    p, d, request_id = behind_another(group)
    before = lookups(d).asked
    put_deadline_forward(d, 500.0)
    p.let_time_pass(700.0)
    eventually(lambda: lookups(d).asked > before)  # P's answer has come
    d.step()
    assert d.phase(request_id) is RequestPhase.AWAITED
    put_deadline_forward(d, 700.0)
    d.step()
    assert d.phase(request_id) is not RequestPhase.AWAITED
    prefills_locally(p, d, request_id, lines, "has told nothing of 'tx' in 600 s")
    settle(p)


# --- a P that cannot be asked -------------------------------------------------------------------------------------
def test_a_p_that_ends(group: EngineGroup, lines: Lines) -> None:
    p, d, params = legs(group)
    request_id = asked(d, params, p)
    p.workers[0].connector.shutdown()
    loaded(None, d, request_id, 0)
    assert lines("prefills locally: the prefill engine at 127.0.0.1", "cannot be asked for the lease")
    settle(d)


def test_a_p_that_ends_the_connection_is_asked_once_more(group: EngineGroup) -> None:
    """As a P does whose port strangers flood."""
    p, d, params = legs(group)
    request_id = asked(d, params, p)
    (link,) = consumer_of(d).links
    link.connection.lose("ended by P")
    eventually(lambda: link not in consumer_of(d).links and questions(p) == 2)  # P has not noticed the end
    p.add(IDS, TO_P)
    ends_well(p, d, request_id)


def test_made_up_addresses_do_not_keep_d_from_asking_p(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answers there, and requests waited for all the links that D has. The second time P has one of them."""
    monkeypatch.setattr(links, "MAX_LINKS", 3)
    p, d, params = legs(group)

    def flood(first: int) -> list[Any]:
        ids = prompt(300, first)
        p.finish(p.add(ids, TO_P))
        with socket.create_server(("0.0.0.0", 0)) as mute:
            nowhere = params | {"remote_port": mute.getsockname()[1]}
            made_up = [d.add(IDS, nowhere | {"remote_host": f"127.0.0.{first + n}"}, max_tokens=4) for n in range(4)]
            run([d], lambda: bool(lines("prefills locally", made_up[0], "it has not answered, and others are asked")))
            loaded(p, d, d.add(ids, params, max_tokens=4))
        settle(p, d)
        return [link for link in consumer_of(d).links if link.channel is not None]

    assert flood(2) == flood(6) != [] and len(consumer_of(d).links) <= 3


@pytest.mark.parametrize(
    ("extra", "params", "why"),
    [
        ({}, {"remote_engine_id": "an older life"}, "says: 'this is engine "),  # P restarted, the router does not know
        ({}, {"remote_port": 1}, "cannot be asked for the lease: nobody listens there"),
        ({"allowed_peers": ["10.0.0.0/8"]}, {}, "127.0.0.1 is not an allowed peer"),
        ({}, {"remote_key": "0123456789ab"}, "0123456789ab"),
        ({}, {"remote_port": "x"}, "remote_port is 'x', expected a number 1 to 65535"),
        ({}, {"remote_host": "a\nb"}, "remote_host is 'a\\nb', expected a printable text"),
        ({}, {"transfer_id": 7}, "transfer_id is 7, expected a printable text"),
        ({}, {"remote_key": "K"}, "remote_key is 'K', expected the 12 digits"),
        ({}, {"remote_engine_id": ["p"]}, "remote_engine_id is ['p'], expected the engine id of the prefill engine"),
        ({}, {"remote_block_ids": [[1, 2]]}, "the prefill engine runs another connector"),
        ({}, {"remote_host": None, "remote_bootstrap_addr": "http://127.0.0.1:1"}, "remote_bootstrap_addr is taken no"),
    ],
)
def test_parameters_that_cannot_be_used(
    group: EngineGroup, lines: Lines, extra: dict[str, Any], params: dict[str, Any], why: str
) -> None:
    p, d, plain = legs(group, extra=extra)
    prefills_locally(p, d, d.add(IDS, plain | params, max_tokens=4), lines, why)


STEP = 128
NAME = "one-name-for-both-legs"
AHEAD = pytest.mark.parametrize("ahead", [0, 1])


def holds(d: Engine, request_id: str, start: int, stop: int) -> bool:
    """Whether D's blocks hold these tokens, as P has computed them."""
    tables = d.block_tables(request_id)
    if len(tables[0]) * d.block < stop:
        return False
    wanted = [labels(worker.heads, 0, IDS[:stop], 0)[:, :, start:stop] for worker in d.workers]
    return all(
        torch.equal(worker.kv(tables, start, stop), of_rank) for worker, of_rank in zip(d.workers, wanted, strict=True)
    )


def begin(p: Engine, d: Engine, *, reads_early: bool = True) -> tuple[str, str]:
    """Both legs, up to the first step of P, whose tokens D has if it reads so early."""
    leg = p.add(IDS, PREFILL | {"transfer_id": NAME})
    request_id = d.add(IDS, p.named(transfer_id=NAME), max_tokens=8)
    p.step()
    if reads_early:
        run([d], lambda: holds(d, request_id, 0, STEP))
    return leg, request_id


def loads_all(p: Engine, d: Engine, leg: str, request_id: str) -> None:
    assert loaded(p, d, request_id).external == len(IDS)
    p.finish(leg)
    settle(p, d)
    assert not d.failed


@AHEAD
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_the_tokens_of_each_step_leave_before_the_next_step(
    group: EngineGroup, plane: str, runner: str, ahead: int
) -> None:
    p, d = group.pair(extra={"plane": plane}, max_batched=STEP, ahead=ahead, runner=runner)
    leg, request_id = begin(p, d)
    assert p.answers[leg].finish is None and not holds(d, request_id, STEP, 2 * STEP)
    p.step()
    run([d], lambda: holds(d, request_id, 0, 2 * STEP))
    assert p.answers[leg].finish is None and not p.leases
    loads_all(p, d, leg, request_id)


@AHEAD
def test_p_preempts_the_request_and_others_get_its_blocks(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(prompts, "PREEMPTED_SECONDS", 600.0)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, ahead=ahead)
    leg, request_id = begin(p, d)
    p.preempt(leg)
    others = [p.add(prompt(250, seed=seed), max_tokens=2, priority=-1) for seed in (5, 6)]
    while not all(p.answers[other].finish for other in others) and p.status(leg) is not None:
        p.step()
    loads_all(p, d, leg, request_id)
    assert d.computed[request_id] <= 8, "D has computed none of the prompt"


def test_p_aborts_the_request(group: EngineGroup) -> None:
    """D computes the prompt by itself."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    leg, request_id = begin(p, d)
    p.abort(leg)
    assert d.finish(request_id, beside=[p]).finish == "length" and d.computed[request_id] >= len(IDS)
    settle(p, d)


def test_a_forward_that_raises_posts_no_grant(group: EngineGroup) -> None:
    """The V1 model runner ends the connector's step in a ``finally``, and P's engine ends later than that."""
    p, _ = group.pair(extra={"plane": "cma"}, runner="v1", max_batched=512)

    def breaks() -> None:
        raise MemoryError("planted")

    p.device = breaks
    p.add(IDS, PREFILL | {"transfer_id": NAME})
    with pytest.raises(MemoryError, match="planted"):
        p.step()
    producer = producer_of(p)

    def seen() -> bool:
        """The step has ended for KVFerry, one way or the other."""
        found = list(prompts_of(producer).values())
        return bool(board_of(producer).posted or (found and found[0].preempted))

    eventually(seen)
    assert not board_of(producer).posted


REQUEST_ID = "9c5b1ab8-c8ee-11f0-8de9-0242ac120002"
"""X-Request-Id of both legs: a UUID of version 1."""
IDENTITY = {
    "remote_engine_id": True, "remote_host": True, "remote_port": True, "tp_size": True, "transfer_mode": True,
    "pp_size": False, "dcp_size": False,
}  # fmt: skip
"""What llm-d keeps of P's answer, and whether it must be there."""
ENDPOINTS = ["cmpl-{}-0-89abcdef", "chatcmpl-{}-89abcdef"]
"""vLLM's request ids, by ``X-Request-Id``."""


def through_go(params: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of JSON that a Go program has read and written: each number was a float of 64 bits."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() and abs(value) < 1e21 else value

    read: dict[str, Any] = json.loads(json.dumps(params), parse_int=number, parse_float=number)
    return dict(sorted(read.items()))


def llm_d_prefill(transfer_id: str) -> dict[str, Any]:
    return PREFILL | {"transfer_id": transfer_id}


def llm_d_identity(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What llm-d keeps of P's answer; it would go on to send one leg after the other if anything was missing."""
    assert answer["transfer_mode"] == "push"
    kept = {name: answer[name] for name, required in IDENTITY.items() if required or name in answer}
    assert all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in kept.values())
    return through_go(kept)


def llm_d_decode(identity: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
    own = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": REQUEST_ID}
    return {**identity, **own, "transfer_id": transfer_id}


def new_transfer_id() -> str:
    return f"xfer-{uuid.uuid4()}"


def ask_p(p: Engine, params: dict[str, Any], ids: list[int] = IDS, **options: Any) -> dict[str, Any]:
    """One leg of P; the ``kv_transfer_params`` of its answer, as JSON has them."""
    return dict(json.loads(json.dumps(p.prefill(ids, params, **options))))


@pytest.fixture
def pair(group: EngineGroup) -> Pair:
    return group.pair(max_batched=128)


def learn(p: Engine, d: Engine) -> dict[str, Any]:
    """What llm-d knows of P after its first request, whose legs it sends one after the other."""
    other, first = prompt(100, 9), new_transfer_id()
    answer = ask_p(p, llm_d_prefill(first), other)
    leg = d.add(other, through_go(answer) | {"transfer_id": first})
    loaded(p, d, leg)  # a serial leg of D has the transfer_id beside P's answer
    settle(p, d)
    return llm_d_identity(answer)


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_llm_d_sends_both_legs_at_once(pair: Pair, endpoint: str, first: str) -> None:
    p, d = pair
    identity, name = learn(p, d), new_transfer_id()
    p_id, d_id = endpoint.format(REQUEST_ID), endpoint.format(REQUEST_ID)[:-8] + "01234567"
    if first == "P":
        p.add(IDS, llm_d_prefill(name), request_id=p_id)
        p.step()
    d.add(IDS, llm_d_decode(identity, name), max_tokens=4, request_id=d_id)
    d.step()
    if first == "D":
        assert d.phase(d_id) is RequestPhase.AWAITED and d.free_blocks == d.baseline
        p.add(IDS, llm_d_prefill(name), request_id=p_id)
    ends_well(p, d, d_id)


def test_llm_d_sends_d_again_where_another_p_has_answered(group: EngineGroup, pair: Pair) -> None:
    """P was restarted: the identity that llm-d keeps is of its last life."""
    p, d = pair
    other, name = group.engine(0), new_transfer_id()
    stale = learn(p, d)
    told = d.add(IDS, llm_d_decode(stale, name), max_tokens=4, request_id=f"cmpl-{REQUEST_ID}-0-89abcdef")
    d.step()
    answer = ask_p(other, llm_d_prefill(name))
    assert llm_d_identity(answer) != stale
    d.abort(told)
    again = d.add(IDS, through_go(answer) | {"transfer_id": name}, request_id=f"cmpl-{REQUEST_ID}-0-01234567")
    ends_well(other, d, again)
    settle(p)


def test_llm_d_tries_p_again_under_a_new_name(pair: Pair) -> None:
    """The failed attempt may still end on P: D takes the lease of the attempt that it was told of."""
    p, d = pair
    learn(p, d)
    failed, name = new_transfer_id(), new_transfer_id()
    left = ask_p(p, llm_d_prefill(failed), request_id=f"cmpl-{REQUEST_ID}-0-89abcdef")
    answer = ask_p(p, llm_d_prefill(name), request_id=f"cmpl-{REQUEST_ID}-0-01234567")
    leg = d.add(IDS, through_go(answer) | {"transfer_id": name}, max_tokens=4)
    loaded(p, d, leg)
    eventually(lambda: [token.hex() for token in leases_of(p)] == [left["remote_request_id"]])
    p.let_time_pass(PATIENT["lease_seconds"])
    settle(p, d)


# --- Dynamo -------------------------------------------------------------------------------------------------------
def test_dynamos_form_under_the_name_that_it_knows(group: EngineGroup) -> None:
    """Its request ids have no prefix of vLLM's, and D's is P's."""
    known: dict[str, Any] = {"connector": "NixlConnector", "module": "kvferry.connector.vllm.as_nixl"}
    p, d = (group.engine(origin, **known) for origin in (0, 1))
    answer = ask_p(p, PREFILL, request_id=REQUEST_ID, min_tokens=1)
    ends_well(p, d, d.add(IDS, answer, max_tokens=4, request_id=REQUEST_ID))
