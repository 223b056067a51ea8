"""KV of a prefix, read from another engine; with histories at random."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvferry.connector.decode_side.fetch import ReadPhase
from kvferry.connector.wire.messages import Ask, Resolve
from kvferry.connector.worker import worker
from kvferry.transport.errors import ConfigError
from tests.support.engines import free_port
from tests.vllm.labelled import prompt
from tests.vllm.paused_transfer import PausedTransfer, in_phase, job_of
from tests.vllm.prefix_histories import SEEN_AS, play, switched_off
from tests.vllm.stepped import PREFILL, ROOM, Engine, EngineGroup, Pair, eventually, loaded, run, settle
from tests.vllm.test_handover_steps import adapter

pytestmark = pytest.mark.vllm
READS: dict[str, Any] = {**ROOM, "prefix_reads": True, "prefix_wait_seconds": 600.0}


def source(*engines: Engine, **more: Any) -> dict[str, Any]:
    """The parameters of a request that names these sources."""
    addresses = [(engine.engine_id, engine.address) for engine in engines]
    return {
        "sources": [
            {"remote_host": address.host, "remote_port": address.port, "remote_engine_id": engine_id, **more}
            for engine_id, address in addresses
        ]
    }


def counted(engine: Engine) -> Counter[str]:
    """What became of prefixes."""
    settle(engine)
    return engine.prefixes


def turn(engine: Engine, ids: list[int], new: int = 20, **options: Any) -> list[int]:
    """One turn of a conversation, to its end; the history after it, with what the user says next."""
    answer = engine.finish(engine.add(ids, max_tokens=20, **options))
    settle(engine)  # the ranks learn of its blocks in a step after the last one
    return [*ids, *answer.tokens, *prompt(new, len(ids))]


def both(group: EngineGroup, of_a: dict[str, Any] | None = None, **options: Any) -> Pair:
    extra = READS | options.pop("extra", {})
    return group.engine(0, extra=extra, **options | (of_a or {})), group.engine(1, extra=extra, **options)


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp"])
def test_the_next_turn_is_read(group: EngineGroup, plane: str, runner: str) -> None:
    """The source takes no step meanwhile, and nothing of it is held. D computes what is new."""
    a, b = both(group, extra={"plane": plane}, runner=runner)
    history = turn(a, prompt(100))
    free = a.free_blocks
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == 112, "of 119 tokens with KV, those up to the last boundary"
    assert a.free_blocks == free == a.baseline
    assert counted(b) == {"loaded": 1}
    assert (b.totals["prefix_tokens_read"], b.totals["prefix_tokens_wasted"]) == (112, 0)
    run([a], lambda: counted(a) == {"lent read": 1})


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_of_one_process_asks_before_it_schedules(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, alone: bool, has: bool
) -> None:
    """No step without tokens comes first, but where another request would wait for the answer."""
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 600.0)
    a, b = both(group, one_process=True)
    history = turn(a, prompt(100)) if has else prompt(120)
    if not alone:
        b.add(prompt(40, 9), max_tokens=50)
        b.step()
    name = b.add(history, source(a), max_tokens=8)
    b.step()
    assert b.loads[name] + b.step_loads[name] == (alone and has)
    assert (b.computed[name] > 0) == (alone and not has) or b.step_loads[name]
    b.finish(name)
    assert b.origins[name].theirs == (112 if has else 0)
    assert counted(b) == ({"loaded": 1} if has else {"local no_lease": 1})


def test_a_lease_that_is_planned_goes_before_the_question(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """D waits for it; the question goes along with it."""
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 600.0)
    a, b = both(group, one_process=True)
    history = turn(a, prompt(100))
    prefilled = b.add(prompt(40, 9), PREFILL)
    b.step()
    assert not b.leases[prefilled]
    name = b.add(history, source(a), max_tokens=8)
    b.step()
    assert b.leases[prefilled] and not b.loads[name] + b.step_loads[name]
    b.finish(name)
    assert b.origins[name].theirs == 112


@pytest.mark.parametrize(
    ("edit", "common"),
    [
        (lambda ids: [*ids[:50], 7, *ids[50:]], 48),
        (lambda ids: [*ids[:64], *ids[65:]], 64),
        (lambda ids: [*ids[:100], *ids[120:]], 96),
        (lambda ids: [*ids, 7], 112),
        (lambda ids: [8, *ids], 0),
    ],
    ids=["inserted", "removed", "thinking dropped", "appended", "before all"],
)
def test_of_an_edited_history_only_what_is_common(group: EngineGroup, edit: Any, common: int) -> None:
    a, b = both(group)
    history = edit(turn(a, prompt(100)))
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == common
    assert counted(b) == ({"loaded": 1} if common else {"local no_lease": 1})


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("what", ["salt", "adapter"])
def test_two_tenants_share_nothing(group: EngineGroup, tmp_path: Path, what: str, alike: bool) -> None:
    a, b = both(group)
    of_a: dict[str, Any] = {"salt": "one"}
    of_b: dict[str, Any] = {"salt": "one" if alike else "two"}
    if what == "adapter":
        of_a = {"lora": LoRARequest("helper", 1, adapter(tmp_path / "a"))}
        of_b = {"lora": LoRARequest("helper", 1, adapter(tmp_path / "b", rank=8 if alike else 16))}
    history = turn(a, prompt(100), **of_a)
    for options in ({}, of_b):
        name = b.add(history, source(a), max_tokens=8, **options)
        b.finish(name)
        assert b.origins[name].theirs == (112 if options and alike else 0)
        settle(b)


def test_of_an_adapter_that_was_replaced_on_disk_nothing_is_read(group: EngineGroup, tmp_path: Path) -> None:
    """The source still runs the one before."""
    a, b = both(group)
    before = LoRARequest("helper", 11, adapter(tmp_path))
    turn(a, prompt(60), lora=before)
    after = LoRARequest("helper", 12, adapter(tmp_path, rank=16))
    history = turn(a, prompt(100, 5), lora=before)
    name = b.add(history, source(a), max_tokens=8, lora=after)
    b.finish(name)
    assert b.origins[name].theirs == 0
    settle(b)
    assert b.scheduler.reset_prefix_cache()
    adapter(tmp_path, rank=32)
    name = b.add(history, source(a), max_tokens=8, lora=after)
    b.finish(name)
    assert b.origins[name].theirs == 0, "two that were replaced are not alike"


def test_of_an_adapter_that_is_replaced_while_its_first_request_runs_nothing_is_read(
    group: EngineGroup, tmp_path: Path
) -> None:
    """``load_inplace``: the request names no sources, and its KV is that of both."""
    a, b = both(group)
    name = a.add(prompt(100), max_tokens=20, lora=LoRARequest("helper", 21, adapter(tmp_path / "a"), load_inplace=True))
    a.step()
    adapter(tmp_path / "a", rank=16)
    history = [*prompt(100), *a.finish(name).tokens, *prompt(20, 9)]
    settle(a)
    read = b.add(history, source(a), max_tokens=8, lora=LoRARequest("helper", 22, adapter(tmp_path / "b", rank=16)))
    b.finish(read)
    assert b.origins[read].theirs == 0


@pytest.mark.parametrize("plane", ["cma", "shm"])
def test_blocks_that_are_reused_in_the_middle_of_the_read(group: EngineGroup, plane: str) -> None:
    """The source's next request gets them, and writes into them; D computes the prompt itself."""
    a, b = both(group, {"num_blocks": 20}, extra={"plane": plane})
    history = turn(a, prompt(200))
    paused = PausedTransfer(a, reader=b, chunks=1)
    name = b.add(history, source(a), max_tokens=8)
    run([b], lambda: job_of(b, name) is not None)
    in_phase(b, name, ReadPhase.MOVING, lambda job: job.nbytes > 0)
    a.finish(a.add(prompt(250, 1)))
    paused.open()
    b.finish(name)
    assert b.origins[name].theirs == 0
    assert counted(b) == {"failed expired": 1}
    assert (b.totals["prefix_tokens_read"], b.totals["prefix_tokens_wasted"]) == (0, 208)
    run([a], lambda: counted(a)["lent reused"] == 1)


def test_blocks_that_are_reused_between_the_answer_and_the_read(group: EngineGroup) -> None:
    a, b = both(group, {"num_blocks": 20})
    history = turn(a, prompt(200))
    paused = PausedTransfer(a, Ask)
    name = b.add(history, source(a), max_tokens=8)
    run([b], lambda: job_of(b, name) is not None)
    a.finish(a.add(prompt(250, 1)))
    paused.open()
    b.finish(name)
    assert b.origins[name].theirs == 0 and counted(b) == {"failed expired": 1}


@pytest.mark.parametrize(
    ("of_a", "swapped"),
    [({"tp": 2}, False), ({"block": 32}, True), ({"block": 64, "tp": 2}, True), ({"layout": "NHD", "ahead": 1}, False)],
    ids=str,
)
def test_unequal_engines(group: EngineGroup, of_a: dict[str, Any], swapped: bool) -> None:
    pair = both(group, of_a)
    a, b = reversed(pair) if swapped else pair
    history = turn(a, prompt(100))
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == 112
    settle(a, b)


def test_a_chain_of_three_and_back(group: EngineGroup) -> None:
    """What an engine has read is there for the next one; two read from each other."""
    a, b = both(group)
    c = group.engine(0, extra=READS)
    history = turn(a, prompt(100))
    for reader, other in ((b, a), (c, b), (b, c), (a, b)):
        name = reader.add(history, source(other), max_tokens=20)
        answer = reader.finish(name)
        assert reader.computed[name] <= 20 + 20 + 2 * 16, "the new tokens, and less than a block more"
        settle(reader)
        history = [*history, *answer.tokens, *prompt(20, len(history))]
    assert [counted(engine)["loaded"] for engine in (a, b, c)] == [1, 2, 1]


def test_p_reads_its_prefix_from_d(group: EngineGroup) -> None:
    """The next turn's prefill leg: P computes what is new, and hands all of it over."""
    p, d = both(group)
    history = turn(d, prompt(100))
    params = p.prefill(history, PREFILL | source(d))
    other = group.engine(1, extra=READS)
    name = other.add(history, params, max_tokens=8)
    run([p, other], lambda: other.answers[name].finish is not None)
    (name,) = p.computed
    assert p.computed[name] == len(history) - 112 and counted(p)["loaded"] == 1
    settle(other)


def test_the_legs_of_llm_ds_p2p_sidecar(group: EngineGroup) -> None:
    """As its connector_p2p.go makes them (llm-d/llm-d-router at 0545789098a6): P's leg to its end, then D's."""
    p, d = both(group)
    other = group.engine(1, extra=READS)
    history, name = turn(d, prompt(100)), {"kv_request_id": "0d6c6c4e-5d4f-4d8c-9b0e-1c1a2f3b4c5d"}
    source = {"kv_request_id": "another", "remote_host": d.address.host, "remote_port": d.address.port}
    p.finish(p.add(history, {"remote_decoder": name, "remote_kv_source": source}))
    leg = {"remote_prefiller": name | {"remote_host": p.address.host, "remote_port": p.address.port}}
    other.finish(other.add(history, leg), beside=[p])
    settle(p, other)
    assert counted(p)["loaded"] == 1 and other.prompts == {"loaded": 1}


def test_a_router_for_nixl_sends_p_what_d_answered(group: EngineGroup) -> None:
    """P has the prompt, and reads what D has said."""
    p, d = both(group)
    ids = prompt(100)
    name = d.add(ids, p.prefill(ids), max_tokens=40)
    answer = d.finish(name, beside=[p])
    settle(p, d)
    history = [*ids, *answer.tokens, *prompt(20, 7)]
    params = p.prefill(history, answer.params)
    d.finish(d.add(history, params), beside=[p])
    settle(p, d)
    assert counted(p)["loaded"] == 1 and list(p.computed.values())[-1] == len(history) - 128


def test_what_p_has_read_streams_on_with_what_it_computes(group: EngineGroup) -> None:
    """Both legs of the next turn are sent at once; P computes what is new in several steps."""
    p, d = both(group, extra={"plane": "shm"}, max_batched=32)
    other = group.engine(1, extra=READS | {"plane": "shm"})
    history = turn(d, prompt(100), 100)
    p.add(history, PREFILL | source(d) | {"transfer_id": "tx"})
    name = other.add(history, p.named(transfer_id="tx"), max_tokens=8)
    run([p, other], lambda: other.answers[name].finish is not None)
    assert name in other.streamed_loads and other.computed[name] == 8, "the last prompt token, and its answer"
    settle(p, other)
    assert counted(p)["loaded"] == 1


@pytest.mark.parametrize("gone", ["closed", "another engine", "no such prompt", "reset"])
def test_a_source_that_has_nothing(group: EngineGroup, gone: str) -> None:
    a, b = both(group)
    history = turn(a, prompt(100))
    named = source(a)
    if gone == "closed":
        group.engines.remove(a)
        a.close()
    elif gone == "another engine":
        named = source(a, remote_engine_id="another")
    elif gone == "no such prompt":
        history = prompt(150, 3)
    else:
        assert a.scheduler.reset_prefix_cache() and a.connector.has_pending_push_work()
        a.step()
    name = b.add(history, named, max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == 0
    assert set(counted(b)) <= {"local no_lease", "local no_answer", "local unreachable"}


def test_a_source_that_restarts_under_its_address(group: EngineGroup) -> None:
    a, b = group.engine(0, extra={**READS, "side_channel_port": free_port()}), group.engine(1, extra=READS)
    history = turn(a, prompt(100))
    loaded_once = b.add(history, source(a), max_tokens=8)
    b.finish(loaded_once)
    settle(b)
    named, port = source(a), a.address.port
    group.engines.remove(a)
    a.close()
    eventually(lambda: not a.thread.alive)
    again = group.engine(0, extra={**READS, "side_channel_port": port}, engine_id=a.engine_id)
    turn(again, prompt(60, 5))
    history = [*history, *prompt(105, 6)]
    for expected in (0, 240):
        name = b.add(history, named, max_tokens=8, salt="other life")
        b.finish(name)
        assert b.origins[name].theirs == expected
        settle(b)
        assert b.scheduler.reset_prefix_cache()
        turn(again, history, salt="other life")


def test_a_source_that_answers_late(group: EngineGroup) -> None:
    a, b = both(group, extra={"prefix_wait_seconds": 0.02})
    history = turn(a, prompt(100))
    paused = PausedTransfer(a, Resolve)
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    paused.open()
    assert b.origins[name].theirs == 0 and counted(b) == {"local no_answer": 1}
    assert b.totals["prefix_wait_seconds"] > 20_000


def test_nothing_changes_without_the_setting(group: EngineGroup) -> None:
    a, b = group.engine(0), group.engine(1)
    history = turn(a, prompt(100))
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == 0 and not counted(b) and not counted(a)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"window": 32}, "2 KV cache groups"),
        ({"drafts": 2}, "speculative decoding is on"),
    ],
    ids=["policy", "window", "drafts"],
)
def test_what_cannot_be_read_is_refused(group: EngineGroup, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"prefix_reads: .*{why}"):
        group.engine(0, extra=READS, **options)


def test_a_hand_over_beside_it(group: EngineGroup) -> None:
    """The same engines hand a prompt over as ever."""
    a, b = both(group)
    turn(a, prompt(100))
    ids = prompt(90, 4)
    name = b.add(ids, a.prefill(ids))
    loaded(a, b, name)
    settle(a, b)


SEED = 1
SEEN_SOON = ("no salt", "digests are not chained")
"""Whether few cases see the others depends on the order of threads: ``prefix_histories.py --fault``."""


def test_no_token_and_no_kv_is_wrong(tiny: Any) -> None:
    loaded = 0
    for number in range(2):
        events, failure = play(tiny, SEED, number)
        assert not failure, failure
        loaded += events["prefixes loaded"]
    assert loaded


@pytest.mark.parametrize("fault", SEEN_SOON)
def test_a_guard_that_is_off_is_seen(tiny: Any, fault: str) -> None:
    with switched_off(fault):
        for number in range(12):  # the first one or two, as a rule
            _, failure = play(tiny, SEED, number)
            if failure:
                assert any(text in failure for text in SEEN_AS), failure
                return
    pytest.fail("no history has seen it")
