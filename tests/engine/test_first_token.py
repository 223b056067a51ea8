"""The router's relay of P's first token, between real engines: the answer is that of one engine, whatever was asked.

Most answers of the tiny model have bytes that are no whole character, so that the seam meets them too.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.relay_kinds import CHAT, COMPLETIONS, NOT_RELAYED
from tests.support.served import Pair, eventually, no_block_held, prompt
from tests.support.server import Server, metric_sum
from tests.support.tiny_model import words

pytestmark = [pytest.mark.engine, pytest.mark.engines, pytest.mark.timeout(900)]

USAGE = {"stream_options": {"include_usage": True}}
_numbers = itertools.count()
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass
class Streamed:
    """A streamed answer. ``text``: by choice. ``logprobs``: the tokens that they name."""

    text: dict[int, str] = field(default_factory=dict)
    logprobs: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    names: set[tuple[Any, ...]] = field(default_factory=set)
    roles: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    done: bool = False


def form(event: dict[str, Any]) -> str:
    """What kind of chunk it is: its keys, and those of its choice."""
    choice = (event["choices"] or [{}])[0]
    return json.dumps([sorted(event), sorted(choice), sorted(choice.get("delta", ()))])


def streamed(server: Server, path: str, body: dict[str, Any]) -> Streamed:
    found = Streamed()
    with (
        httpx.Client(trust_env=False, timeout=800) as client,
        client.stream("POST", server.url + path, json={"model": "model", "stream": True} | body) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line:
                continue
            assert not found.done, "something follows [DONE]"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                found.done = True
                continue
            event = json.loads(data)
            assert "error" not in event, event
            found.names.add((event["id"], event["created"], event["object"], event["model"]))
            found.forms.append(form(event))
            if event.get("usage"):
                found.usage.append(event["usage"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                found.text[choice["index"]] = found.text.get(choice["index"], "") + text
                logprobs = choice.get("logprobs") or {}
                found.logprobs += logprobs.get("tokens") or [one["token"] for one in logprobs.get("content", ())]
                found.roles += [choice["delta"]["role"]] if choice.get("delta", {}).get("role") else []
                if choice["finish_reason"]:
                    found.finish.append(choice["finish_reason"])
                    found.stop_reasons.append(choice.get("stop_reason"))
    return found


def asked(path: str, seed: int) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": words(60, seed)}], "temperature": 0, "max_tokens": 12} | USAGE
    return {"prompt": prompt(70, seed), "temperature": 0, "max_tokens": 12} | USAGE


def generated(server: Server) -> float:
    return metric_sum(server.metrics(), "vllm:generation_tokens_total") or 0


@pytest.fixture(scope="module")
def serial_router(running_pair: Pair) -> Server:
    prefill, decode = running_pair.prefill, running_pair.decode
    return running_pair.group.router(prefill, decode, arguments=["--serial"], name="serial")


@pytest.fixture(params=["serial", "at once"])
def router(request: pytest.FixtureRequest, pair: Pair, serial_router: Server) -> Server:
    """``at once``: where P offers it."""
    return serial_router if request.param == "serial" else pair.router


def compare(pair: Pair, router: Server, path: str, body: dict[str, Any]) -> tuple[Streamed, int]:
    """The answer through the router, which is that of P alone; and how many tokens D generated for it: without P's
    where it is asked serially, asked at once with it."""
    alone = streamed(pair.prefill, path, body | {"cache_salt": "alone"})
    before = generated(pair.decode)
    both = streamed(router, path, body | {"cache_salt": f"{router.name}-{next(_numbers)}"})
    assert both.text == alone.text and both.logprobs == alone.logprobs
    assert (both.finish, both.stop_reasons, both.roles) == (alone.finish, alone.stop_reasons, alone.roles)
    assert both.usage and both.usage[-1] == alone.usage[-1]
    assert both.done and alone.done and len(both.names) == 1
    assert {name[2:] for name in both.names} == {name[2:] for name in alone.names}
    assert both.forms[0] == alone.forms[0] and both.forms[-1] == alone.forms[-1]
    seen = set(alone.forms)

    def of_one_engine() -> bool:
        """A busy engine puts all tokens into one chunk; ask until it has made chunks like those of both."""
        if not set(both.forms) <= seen:
            seen.update(streamed(pair.prefill, path, body | {"cache_salt": "alone"}).forms)
        return set(both.forms) <= seen

    eventually(of_one_engine, "an engine alone makes such chunks")
    total = both.usage[-1]["completion_tokens"]
    eventually(lambda: generated(pair.decode) - before >= total - 1 or total == 1, "D's tokens are counted")
    return both, int(generated(pair.decode) - before)


def released(pair: Pair) -> None:
    """No lease is left to expire."""
    no_block_held(pair.prefill, pair.decode)


def token_ids(model: Path, *tokens: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return [id for id in ids if id is not None]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("extra", [{}, {"ignore_eos": True}, EACH_USAGE, {"presence_penalty": 0.0, "n": 1, "stop": []}])
def test_greedy(pair: Pair, router: Server, path: str, extra: dict[str, Any]) -> None:
    by_p = 0
    for seed in range(4):
        answer, of_d = compare(pair, router, path, asked(path, 300 + seed) | extra)
        by_p += answer.usage[-1]["completion_tokens"] - of_d
    assert by_p >= 2 or router.name != "serial", "P's tokens were not relayed"
    released(pair)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_sampled(pair: Pair, router: Server, path: str) -> None:
    body = asked(path, 310) | {"temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    alone, both = (streamed(server, path, body) for server in (pair.prefill, router))
    assert both.usage == alone.usage and both.finish == alone.finish == ["length"] and both.done
    assert both.forms[0] == alone.forms[0] and both.forms[-1] == alone.forms[-1] and len(both.names) == 1
    released(pair)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_token_is_of_p_alone(pair: Pair, router: Server, path: str) -> None:
    _, of_d = compare(pair, router, path, asked(path, 320) | {"max_tokens": 1})
    assert of_d == 0
    no_block_held(pair.prefill)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_end_as_first_token(pair: Pair, router: Server, model: Path, path: str) -> None:
    """D is not asked for an answer, and P's lease is released all the same."""
    answer, _ = compare(pair, router, path, asked(path, 330) | {"allowed_token_ids": token_ids(model, "</s>")})
    assert answer.finish == ["stop"] and answer.usage[-1]["completion_tokens"] == 1
    released(pair)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("tokens", "by_p"),
    [
        pytest.param(["Ã"], 0, id="the first byte of two, again and again"),
        pytest.param(["Ã", "©"], 0, id="bytes of one character"),
        pytest.param(["Ġ"], 1, id="spaces"),
        pytest.param(["Ġriv", "er"], 1, id="parts of words"),
        pytest.param(["<s>"], 0, id="a token without text"),
    ],
)
def test_text_at_the_seam(pair: Pair, router: Server, model: Path, path: str, tokens: list[str], by_p: int) -> None:
    body = asked(path, 340) | {"allowed_token_ids": token_ids(model, *tokens), "ignore_eos": True}
    if path == COMPLETIONS:
        body["prompt"] = words(60, 340)  # it ends with a whole character
    answer, of_d = compare(pair, router, path, body)
    assert answer.usage[-1]["completion_tokens"] - of_d == by_p or router.name != "serial"
    released(pair)


@pytest.mark.parametrize(
    ("path", "extra"), NOT_RELAYED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_what_is_not_relayed(pair: Pair, router: Server, path: str, extra: dict[str, Any]) -> None:
    answer, of_d = compare(pair, router, path, asked(path, 350) | extra)
    assert of_d == answer.usage[-1]["completion_tokens"]
    released(pair)


@pytest.mark.parametrize("after_bytes", [1, 700])
def test_a_client_that_leaves(pair: Pair, router: Server, after_bytes: int) -> None:
    """With P's token, or a few more, and then no more."""
    body = {"model": "model", "stream": True, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=800) as client:
        for seed in range(360, 364):
            with client.stream("POST", router.url + COMPLETIONS, json=body | {"prompt": prompt(500, seed)}) as answer:
                received = 0
                for piece in answer.iter_raw():
                    received += len(piece)
                    if received >= after_bytes:
                        break
    released(pair)
