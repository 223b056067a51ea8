"""Both legs of a request sent at once: D's engine waits without blocks until P tells of the prompt, by name."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from typing import Any

import pytest

from kvferry.connector.decode_side import lookup
from kvferry.connector.engine.load_planner import RequestPhase
from kvferry.connector.engine.worker import IDLE_WAIT_SECONDS
from kvferry.connector.wire import messages
from tests.support.inside import consumer_of, producer_of, replies_of, scheduler_half
from tests.support.turns import TurnLines
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, EngineGroup, Lines, eventually, loaded, run, settle

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
    return len(producer_of(p).named.held)


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
    counted: Counter[str] = sum((Counter(stats.data["streamed"]) for stats in d.stats), Counter())
    assert (counted["loads"], counted["block_ms"] > 0) == (int(streamed), streamed)


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


def abort_and_wait(p: Engine, d: Engine, request_id: str) -> None:
    """Abort a request of D whose prompt P does not know; and let the time pass after which D does not ask for it."""
    d.abort(request_id)
    settle(d)
    eventually(lambda: bool(lookups(d).left))
    d.let_time_pass(lookup.LEFT_SECONDS)
    eventually(lambda: questions(p) == 0)


def test_a_p_that_sends_what_nobody_waits_for_is_hung_up_on(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A D that is aborted asks no more after a while."""
    monkeypatch.setattr(lookup, "IDLE_CONTACT_SECONDS", math.inf)
    p, d, params = legs(group)
    request_id = asked(d, params, p)
    (held,) = producer_of(p).named.held.values()
    abort_and_wait(p, d, request_id)
    finder, producer = lookups(d), producer_of(p)
    (contact,) = finder.contacts.values()
    assert not finder.open and not finder.live

    def serve(now: float) -> bool:
        replies_of(producer).send(held.identity, messages.Unresolved(number=1, final=False, detail="x" * 900))
        return bool(type(producer).serve(producer, now))

    producer.serve = serve
    eventually(lambda: not finder.contacts)
    del producer.serve
    assert not contact.connection.inbox and contact.connection.lost
    request_id = ask(d, params)  # over another connection
    p.add(IDS, TO_P)
    ends_well(p, d, request_id)


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
        (contact,) = lookups(d).contacts.values()
        contact.connection.lose("ended by P")
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
    eventually(lambda: questions(p) == 0)


def behind_another(group: EngineGroup) -> tuple[Engine, Engine, str]:
    """P, D, and D's request whose prompt is in P's queue, behind another one. P's ranks know of it."""
    p, d, params = legs(group, max_batched=64)
    p.add(prompt(300, 7))
    p.step()
    p.add(IDS, TO_P)
    p.step()
    request_id = asked(d, params, p)
    assert "tx" in producer_of(p).named.tokens
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
    finder = lookups(d)
    (contact,) = finder.contacts.values()
    contact.connection.lose("ended by P")
    eventually(lambda: contact not in finder.contacts.values() and questions(p) == 2)  # P has not noticed the end
    p.add(IDS, TO_P)
    ends_well(p, d, request_id)


def test_made_up_addresses_do_not_keep_d_from_asking_p(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answers there, and requests waited for all the places that D has for P engines."""
    monkeypatch.setattr(lookup, "MAX_CONTACTS", 3)
    p, d, params = legs(group)
    p.finish(p.add(IDS, TO_P))
    with socket.create_server(("0.0.0.0", 0)) as mute:
        nowhere = params | {"remote_port": mute.getsockname()[1]}
        made_up = [d.add(prompt(300, n), nowhere | {"remote_host": f"127.0.0.{n}"}, max_tokens=4) for n in range(2, 6)]
        loaded(p, d, d.add(IDS, params, max_tokens=4))
        assert lines("prefills locally", made_up[0], "it has not answered, and others are asked")
        for request_id in made_up:
            if d.answers[request_id].finish is None:
                d.abort(request_id)
        settle(p, d)


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
