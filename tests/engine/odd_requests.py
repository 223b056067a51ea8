"""Odd requests of the official clients, through the router and to D alone: each answer must be the same.

    python tests/engine/odd_requests.py [--only WORD] [--json FILE]

A P, a D, and two routers before them: one asks both at once, the other asks D after P. Each request of ``TABLE`` goes
to D directly, then through each router, with empty prefix caches; where it can be streamed, both ways. Status, headers
and body must be equal byte for byte, but for ids, times and what belongs to a connection. Where bytes differ:

- Log probabilities may differ by ``LOGPROB_DIFFERENCE``: D computes a prompt's last token alone where it has the rest
  from P, and floating-point sums depend on what is computed together.
- D itself may put several tokens into one event of a stream. Then the events are compared joined: all text, all log
  probabilities, the last usage, and what follows what.
- In ``usage``, ``created_cache_tokens`` and ``cache_write_tokens`` are what D itself computed; and ``cached_tokens`` of
  several choices has those that the first choice left to the others. They are left out; Anthropic's API takes what D
  computed from ``input_tokens``, and the sum is compared.

After each request no block is held on either engine, and no lease of P has ended by time. Exit status 1: a difference.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import anthropic
import httpx2
import openai

from benchmarks.harness import report
from tests.support.served import PatientServerGroup, count, ended_leases
from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum
from tests.support.tiny_model import ModelSpec, build_model, words

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 256
"""Tokens: the engines' ``--max-model-len``."""
SPEC = ModelSpec(layers=2, vocabulary=516, max_tokens=CONTEXT)
"""Its tokenizer has 512 tokens, so with ``SPECIAL`` each of the model's tokens has a text."""
SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINK_END = 513
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] or '' }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ENGINE_ARGUMENTS = (
    "--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--enable-prompt-embeds", "--enable-prompt-tokens-details", "--scheduling-policy", "priority",
)  # fmt: skip

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANTHROPIC = "/v1/messages"
LEFT_OUT = "this key is left out"
TEXT = words(70, 1)
MESSAGES = [{"role": "user", "content": TEXT}]
USUAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "model", "prompt": TEXT, "max_tokens": 8, "temperature": 0},
    CHAT: {"model": "model", "messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    RESPONSES: {"model": "model", "input": TEXT, "max_output_tokens": 8, "temperature": 0},
    ANTHROPIC: {"model": "model", "messages": MESSAGES, "max_tokens": 8, "temperature": 0},
}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Odd:
    """``content``: a dict is a change of the usual body, sent by the official client; bytes are sent as they are.
    ``streams``: it is also asked with ``"stream": true``. ``times``: it is sent so often; the last answer counts.
    ``own``: it is nothing that a router passes on; the status of the error with which the router answers."""

    name: str
    path: str
    content: dict[str, Any] | bytes = field(default_factory=dict)
    streams: bool = True
    times: int = 1
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    own: int | None = None

    @property
    def choices(self) -> int:
        """How many it asks for."""
        n = self.content.get("n") if isinstance(self.content, dict) else 1
        return n if isinstance(n, int) else 1

    def body(self, stream: bool) -> dict[str, Any]:
        assert isinstance(self.content, dict)
        body = USUAL.get(self.path, {}) | self.content | ({"stream": True} if stream else {})
        return {key: value for key, value in body.items() if value is not LEFT_OUT}


def ids(count: int, seed: int = 1) -> list[int]:
    """Token ids, all but the first tokens of the vocabulary."""
    return [2 + (seed * 7919 + number * 31) % 500 for number in range(count)]


def chat_model(folder: Path) -> Path:
    """The model, with a tokenizer and a template for reasoning and tools. Raises OSError."""
    from tokenizers import AddedToken, Tokenizer

    build_model(folder, SPEC)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    assert tokenizer.get_vocab_size() == SPEC.vocabulary and tokenizer.token_to_id("</think>") == THINK_END
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def embeddings(tokens: int) -> str:
    """``prompt_embeds``: a tensor [tokens, hidden], as ``torch.save`` writes it, in base64."""
    import torch

    generator, file = torch.Generator().manual_seed(3), io.BytesIO()
    torch.save(torch.randn(tokens, SPEC.hidden, generator=generator), file)
    return base64.b64encode(file.getvalue()).decode()


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def raw(path: str, text: str, usual: bool = True) -> bytes:
    """The usual body with this JSON text after its first brace."""
    return ("{" + text + ", " + json.dumps(USUAL[path])[1:] if usual else text).encode()


FUNCTION = {
    "name": "set_sail",
    "parameters": {"type": "object", "properties": {"knots": {"enum": [1, 2]}}, "required": ["knots"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}]


def chosen(name: str) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": name}}}


CALLED = [
    message("user", "sail"),
    message("assistant", None, tool_calls=[{"id": "call-1", "type": "function", "function": {"name": "set_sail",
        "arguments": '{"knots": 1}'}}]),
    message("tool", "done", tool_call_id="call-1"),
]  # fmt: skip
IMAGE = "data:image/png;base64,AA"
SCHEMA = {"type": "object", "properties": {"port": {"enum": ["Kiel", "Riga"]}}, "required": ["port"]}
NAMED = {"name": "port", "schema": SCHEMA}
SHORT_THOUGHTS = {"allowed_token_ids": [*range(300, 320), THINK_END], "temperature": 1, "seed": 4, "max_tokens": 24}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
USAGE = {"stream_options": {"include_usage": True}}
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
NULLS = dict.fromkeys((
    "stop", "seed", "user", "top_p", "logit_bias", "presence_penalty", "frequency_penalty", "stream_options",
    "logprobs",
))  # fmt: skip
CALL = {"max_tokens": 40} | NO_THOUGHTS
PACKED = gzip.compress(b'{"prompt": "x"}', mtime=0)
SAIL = {"name": "set_sail", "description": "go", "input_schema": FUNCTION["parameters"]}
SAILED = [
    message("user", "sail"),
    message("assistant", [{"type": "tool_use", "id": "call-1", "name": "set_sail", "input": {"knots": 1}}]),
    message("user", [{"type": "tool_result", "tool_use_id": "call-1", "content": "done"}]),
]

TABLE: tuple[Odd, ...] = (
    # What is asked of a completion.
    Odd("a text", COMPLETIONS),
    Odd("token ids", COMPLETIONS, {"prompt": ids(70)}),
    Odd("a list of two texts", COMPLETIONS, {"prompt": [TEXT, words(9, 2)]}),
    Odd("lists of token ids", COMPLETIONS, {"prompt": [ids(40), ids(41, 2), ids(3, 3)]}),
    Odd("one token", COMPLETIONS, {"prompt": [7]}),
    Odd("an empty text", COMPLETIONS, {"prompt": ""}),
    Odd("no ids", COMPLETIONS, {"prompt": []}),
    Odd("prompt_embeds", COMPLETIONS, {"prompt": None, "prompt_embeds": embeddings(40)}),
    Odd("prompt_embeds beside a text", COMPLETIONS, {"prompt_embeds": embeddings(40)}),
    Odd("ids beyond the vocabulary", COMPLETIONS, {"prompt": [5, 100_000]}),
    # What it shall answer.
    Odd("n 3", COMPLETIONS, {"n": 3, "temperature": 1, "seed": 5}),
    Odd("nulls", COMPLETIONS, NULLS | {"echo": None}),
    Odd("beam search", COMPLETIONS, {"use_beam_search": True, "n": 2, "prompt": ids(64)}),
    Odd("echo", COMPLETIONS, {"echo": True}),
    Odd("echo and no token", COMPLETIONS, {"echo": True, "max_tokens": 0}),
    Odd("echo with logprobs", COMPLETIONS, {"echo": True, "logprobs": 1}),
    Odd("logprobs", COMPLETIONS, {"logprobs": 2}),
    Odd("prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1}, streams=False),
    Odd("streamed prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, streams=False),
    Odd("return_token_ids", COMPLETIONS, {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}),
    # Where it ends.
    Odd("stop", COMPLETIONS, {"stop": ["er", "a"], "max_tokens": 60}),
    Odd("max_tokens null", COMPLETIONS, {"max_tokens": None, "prompt": ids(200)}),
    Odd("max_tokens 0", COMPLETIONS, {"max_tokens": 0}),
    Odd("max_tokens 1", COMPLETIONS, {"max_tokens": 1}),
    Odd("max_tokens up to the context", COMPLETIONS, {"prompt": ids(200), "max_tokens": CONTEXT - 200}),
    Odd("max_tokens one over the context", COMPLETIONS, {"prompt": ids(200), "max_tokens": CONTEXT - 199}),
    Odd("a prompt one below the context", COMPLETIONS, {"prompt": ids(CONTEXT - 1), "max_tokens": LEFT_OUT}),
    Odd("a prompt of the context", COMPLETIONS, {"prompt": ids(CONTEXT), "max_tokens": 1}),
    Odd("truncate_prompt_tokens", COMPLETIONS, {"truncate_prompt_tokens": 20}),
    # How tokens are chosen.
    Odd("allowed_token_ids", COMPLETIONS, {"allowed_token_ids": [300, 301, 302]}),
    Odd("structured: choice", COMPLETIONS, {"structured_outputs": {"choice": ["river", "harbor"]}}),
    # What is counted, and who comes first.
    Odd("usage at each event", COMPLETIONS, EACH_USAGE),
    Odd("stream_options without a stream", COMPLETIONS, USAGE, streams=False),
    Odd("200 new tokens: usage", COMPLETIONS, {"prompt": ids(200)}),
    Odd("200 tokens again: usage", COMPLETIONS, {"prompt": ids(200)}, times=2),
    Odd("priority", COMPLETIONS, {"priority": 5}),
    Odd("a request_id of its own", COMPLETIONS, {"request_id": "mine", "user": "me"}),
    Odd("an empty cache_salt", COMPLETIONS, {"cache_salt": ""}),
    Odd("stream_interval", COMPLETIONS, {"stream_interval": 3}),
    # What is wrong with it.
    Odd("an unknown parameter", COMPLETIONS, {"of_a_later_release": {"a": [1]}}),
    Odd("an unknown model", COMPLETIONS, {"model": "another"}),
    Odd("stream a word", COMPLETIONS, {"stream": "yes"}, streams=False),
    # Chats.
    Odd("a chat", CHAT),
    Odd("a chat with a history", CHAT, {"messages": [message("system", "be brief"), *MESSAGES,
        message("assistant", "er"), message("user", "riv", name="x")]}),
    Odd("an image", CHAT, {"messages": [message("user", [{"type": "image_url", "image_url": {"url": IMAGE}}])]}),
    Odd("emoji", CHAT, {"messages": [message("user", "\U0001f469\u200d\U0001f680 \u0085 é \u0000")]}),
    Odd("no messages", CHAT, {"messages": []}),
    Odd("a chat over the context", CHAT, {"messages": [message("user", words(400, 3))]}),
    Odd("a chat without max_tokens", CHAT, {"max_tokens": LEFT_OUT} | USAGE),
    Odd("max_completion_tokens", CHAT, {"max_tokens": LEFT_OUT, "max_completion_tokens": 4}),
    Odd("logprobs in a chat", CHAT, {"logprobs": True, "top_logprobs": 2}),
    Odd("thoughts that end", CHAT, SHORT_THOUGHTS),
    Odd("no thoughts", CHAT, NO_THOUGHTS),
    Odd("tools, chosen by the model", CHAT, CALL | {"tools": TOOLS}),
    Odd("a tool is required", CHAT, CALL | {"tools": TOOLS, "tool_choice": "required"}),
    Odd("a named tool", CHAT, CALL | chosen("set_sail")),
    Odd("a tool was called", CHAT, {"messages": CALLED, "tools": TOOLS, "parallel_tool_calls": False}),
    Odd("response_format json_schema", CHAT, CALL | {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    Odd("the answer goes on", CHAT, {"messages": [*MESSAGES, message("assistant", "the riv")],
        "add_generation_prompt": False, "continue_final_message": True}),
    # Responses.
    Odd("a response", RESPONSES),
    Odd("a response with instructions", RESPONSES, {"input": [message("user", TEXT)], "instructions": "be brief"}),
    Odd("a response without a limit", RESPONSES, {"max_output_tokens": None}),
    Odd("a response after an unknown one", RESPONSES, {"previous_response_id": "resp_none"}),
    Odd("an unknown response", RESPONSES + "/resp_none", b"", method="GET"),
    # Anthropic's API.
    Odd("a message", ANTHROPIC),
    Odd("a system prompt", ANTHROPIC, {"system": "be brief"}),
    Odd("the answer of a message goes on", ANTHROPIC, {"messages": [*MESSAGES, message("assistant", "the riv")]}),
    Odd("a message without a prompt", ANTHROPIC, {"messages": []}),
    Odd("a message over the context", ANTHROPIC, {"messages": [message("user", words(400, 3))]}),
    Odd("a message without a limit", ANTHROPIC, json.dumps({"model": "model", "messages": MESSAGES}).encode()),
    Odd("a message of no token", ANTHROPIC, {"max_tokens": 0}),
    Odd("a message of one token", ANTHROPIC, {"max_tokens": 1}),
    Odd("a message up to the context", ANTHROPIC, {"max_tokens": 10_000}),
    Odd("stop_sequences", ANTHROPIC, {"stop_sequences": ["er", "a"], "max_tokens": 60}),
    Odd("a message of an unknown parameter", ANTHROPIC, {"of_a_later_release": {"a": [1]}, "n": 2, "echo": True}),
    Odd("a message with cache_salt", ANTHROPIC, {"cache_salt": "salt"}),
    Odd("thinking", ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}),
    Odd("tools of a message", ANTHROPIC, CALL | {"tools": [SAIL]}),
    Odd("a message needs this tool", ANTHROPIC, CALL | {"tools": [SAIL],
        "tool_choice": {"type": "tool", "name": "set_sail"}}),
    Odd("a tool of a message was called", ANTHROPIC, {"messages": SAILED, "tools": [SAIL]}),
    Odd("an output of JSON", ANTHROPIC, CALL | {"output_config": {"format": {"type": "json_schema",
        "schema": SCHEMA}}}),
    Odd("a message again", ANTHROPIC, times=2),
    Odd("a message that is no JSON", ANTHROPIC, b"{"),
    Odd("GET of a message", ANTHROPIC, b"", method="GET"),
    # Bytes that a client library does not send.
    Odd("half an emoji", COMPLETIONS, raw(COMPLETIONS, '"user": "\\ud83d"')),
    Odd("half an emoji as prompt", COMPLETIONS, rb'{"model": "model", "max_tokens": 8, "prompt": "riv \ud83d"}'),
    Odd("a byte order mark", COMPLETIONS, b"\xef\xbb\xbf" + json.dumps(USUAL[COMPLETIONS]).encode()),
    Odd("NaN", COMPLETIONS, raw(COMPLETIONS, '"top_p": NaN')),
    Odd("a limit as 8.0", COMPLETIONS, b'{"model": "model", "prompt": "riv", "max_tokens": 8.0, "temperature": 0}'),
    Odd("a key twice", COMPLETIONS, raw(COMPLETIONS, '"max_tokens": 3')),
    Odd("no JSON", COMPLETIONS, b'{"model": "model", '),
    Odd("no body", COMPLETIONS, b""),
    Odd("bytes of no text", COMPLETIONS, b'{"model": "model", "prompt": "\xff"}'),
    Odd("no content type", COMPLETIONS, json.dumps(USUAL[COMPLETIONS]).encode(), headers={"Content-Type": ""}),
    Odd("a content type of a form", CHAT, b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    # Other paths and methods.
    Odd("a list of models", "/v1/models", b"", method="GET"),
    Odd("an unknown path", "/v1/nowhere", b"{}"),
    Odd("tokenize", "/tokenize", b'{"model": "model", "prompt": "riv er"}'),
    Odd("detokenize", "/detokenize", b'{"model": "model", "tokens": [5, 6]}'),
    Odd("count_tokens", ANTHROPIC + "/count_tokens", json.dumps({"model": "model", "messages": MESSAGES}).encode()),
    Odd("chats in a batch", CHAT + "/batch", json.dumps(USUAL[CHAT] | {"messages": [MESSAGES, MESSAGES]}).encode()),
    Odd("an invocation", "/invocations", json.dumps(USUAL[COMPLETIONS]).encode()),
    Odd("a form", "/v1/audio/transcriptions", b"--x--", headers={"Content-Type": "multipart/form-data; boundary=x"}),
    Odd("the version", "/version", b"", method="GET"),
    Odd("a ping", "/ping", b"", method="POST"),
    Odd("is it asleep", "/is_sleeping?a=%2F", b"", method="GET"),
    Odd("embeddings of a model that has none", "/v1/embeddings", b'{"model": "model", "input": "x"}'),
    Odd("what is packed", "/tokenize", PACKED, headers={"Content-Encoding": "gzip"}),
    Odd("a packed chat", CHAT, PACKED, headers={"Content-Encoding": "gzip"}),
    Odd("a slash at the end", CHAT + "/", b"{}"),
    Odd("an engine's own affairs", "/reset_prefix_cache", b"{}", own=403),
    Odd("hosts for an engine", "/invocations", raw(COMPLETIONS, '"kv_transfer_params": {"remote_host": "x"}'), own=400),
    Odd("GET of a chat", CHAT, b"", method="GET"),
    Odd("a browser asks first", CHAT, b"", method="OPTIONS", headers={"Origin": "http://a.example",
        "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}),
    Odd("a browser asks", COMPLETIONS, json.dumps(USUAL[COMPLETIONS]).encode(), headers={"Origin": "http://a.example"}),
)  # fmt: skip

MODES = {"at once": (), "serial": ("--serial",)}
LOGPROB_DIFFERENCE = 1e-3
LEASE_SECONDS = 60
"""Long against what a release takes on a machine that may stand still, short against a wait for it."""
OF_A_CONNECTION = {
    "date", "server", "connection", "content-length", "transfer-encoding", "x-request-id", "keep-alive",
}  # fmt: skip
IDS = re.compile(rb'"((?:item_|request_|response_)?id|signature)": ?"[^"]*"')
TIMES = re.compile(rb'"(created|created_at|completed_at)": ?[0-9.]+')
CREATED = re.compile(rb'"(created_cache_tokens|cache_write_tokens)": ?[0-9]+')
CACHED = re.compile(rb'"cached_tokens": ?[0-9]+')
INPUT = re.compile(rb'"input_tokens":(\d+)(,"output_tokens":\d+,"cache_creation_input_tokens":)(\d+)')
TEXTS = ("text", "content", "reasoning", "reasoning_content", "arguments", "delta", "thinking", "partial_json")
ORDERED = (*TEXTS, "role", "tool_calls", "finish_reason", "usage")
OF_EVENTS = ("sequence_number", "reasoning_tokens")
"""What D counts by events."""
MISSING, DIFFERENT = "missing", "different"
SHOWN = 300
"""Characters of an answer in the table of differences."""


class Recorded(httpx2.SyncByteStream):
    """A response's bytes, kept beside being read; the client leaves a stream at its first error, this one does not."""

    def __init__(self, stream: Any, pieces: list[bytes]) -> None:
        self._stream, self._rest, self._pieces = stream, iter(stream), pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._rest:
            self._pieces.append(piece)
            yield piece

    def close(self) -> None:
        self._pieces.extend(self._rest)
        self._stream.close()


class Recorder(httpx2.HTTPTransport):
    """Keeps the last response's status, headers and bytes."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        self.pieces: list[bytes] = []
        self.status, self.headers = response.status_code, response.headers
        response.stream = Recorded(response.stream, self.pieces)
        return response


@dataclass(frozen=True)
class Answer:
    """``client``: what an official client made of it: its error's class, or "". ``choices``: asked."""

    status: int
    headers: dict[str, str]
    body: bytes
    client: str
    choices: int

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def comparable(self) -> bytes:
        body = CREATED.sub(rb'"\1":0', TIMES.sub(rb'"\1":0', IDS.sub(rb'"\1":""', self.body)))
        body = INPUT.sub(lambda found: b'"input_tokens":%d%b0' % (int(found[1]) + int(found[3]), found[2]), body)
        return CACHED.sub(b'"cached_tokens":0', body) if self.choices > 1 else body

    def text(self) -> str:
        return f"{self.status} {self.headers.get('content-type', '')} {self.body.decode(errors='replace')}"


class Client:
    """The official clients of one server."""

    def __init__(self, server: Server) -> None:
        self._url, self._recorder = server.url, Recorder()
        self._http = httpx2.Client(transport=self._recorder, timeout=PATIENCE_SECONDS, trust_env=False)
        self._openai = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=self._http, timeout=PATIENCE_SECONDS
        )
        self._anthropic = anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, http_client=self._http, timeout=PATIENCE_SECONDS
        )

    def ask(self, odd: Odd, stream: bool) -> Answer:
        """Raises httpx2.HTTPError: no answer, or a broken one."""
        said = ""
        for _ in range(odd.times):
            if isinstance(odd.content, bytes):
                headers = {name: value for name, value in (JSON | odd.headers).items() if value}
                self._http.request(odd.method, self._url + odd.path, content=odd.content, headers=headers)
            else:
                said = self._by_library(odd.path, odd.body(stream))
        seen = self._recorder
        headers = {name: value for name, value in seen.headers.items() if name not in OF_A_CONNECTION}
        if "location" in headers:  # the router's is one of its own
            headers["location"] = headers["location"].removeprefix(self._url)
        return Answer(seen.status, headers, b"".join(seen.pieces), said, odd.choices)

    def _by_library(self, path: str, body: dict[str, Any]) -> str:
        api, required = self._openai, {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path, "messages")
        resource: Any = {
            COMPLETIONS: api.completions, CHAT: api.chat.completions, RESPONSES: api.responses,
            ANTHROPIC: self._anthropic.messages,
        }[path]  # fmt: skip
        needed = ("max_tokens",) if path == ANTHROPIC else ()
        own = {name: body.pop(name) for name in ("model", required, "stream", *needed) if name in body}
        try:
            answer = resource.create(**own, extra_body=body)
            if isinstance(answer, openai.Stream | anthropic.Stream):
                for _ in answer:
                    pass
        except (openai.APIConnectionError, anthropic.APIConnectionError):
            raise
        except (openai.OpenAIError, anthropic.AnthropicError, ValueError) as error:  # ValueError: no JSON
            return type(error).__name__
        return ""


def difference(alone: Answer, routed: Answer) -> tuple[str, list[str]]:
    """How they are alike, and in what they differ; one of both is empty."""
    if alone.status != routed.status:
        return "", [f"status {routed.status}, alone {alone.status}"]
    found = []
    for name in sorted({*alone.headers, *routed.headers}):
        if alone.headers.get(name) != routed.headers.get(name):
            found.append(f"header {name} {routed.headers.get(name)!r}, alone {alone.headers.get(name)!r}")
    if alone.client != routed.client:
        found.append(f"the client raises {routed.client or 'nothing'}, alone {alone.client or 'nothing'}")
    alike = "equal"
    if alone.comparable != routed.comparable:
        alike, of_values = value_difference(alone, routed)
        found += of_values
    return ("", found) if found else (alike, [])


def own_error(routed: Answer, status: int) -> tuple[str, list[str]]:
    """As ``difference``, of an answer that is to be the router's own error, in OpenAI's form."""
    try:
        right = routed.status == json.loads(routed.body)["error"]["code"] == status
    except (ValueError, LookupError, TypeError):
        right = False
    return ("the router's own error", []) if right else ("", [f"no error {status} in OpenAI's form"])


def value_difference(alone: Answer, routed: Answer) -> tuple[str, list[str]]:
    """As ``difference``, of bodies whose bytes differ."""
    try:
        if not (alone.streamed and routed.streamed):
            return "equal but for rounding", [*unequal(json.loads(alone.comparable), json.loads(routed.comparable))]
        of_alone, of_routed = events(alone), events(routed)
        if not any(unequal(of_alone, of_routed)):
            return "equal but for rounding", []
        return "equal when its events are joined", [*unequal(joined(of_alone), joined(of_routed))]
    except ValueError:
        return "", ["the body"]


def unequal(alone: Any, routed: Any, where: str = "") -> Iterator[str]:
    """The places at which they differ; floats may by ``LOGPROB_DIFFERENCE`` where log probabilities are."""
    if isinstance(alone, dict) and isinstance(routed, dict):
        for key in dict.fromkeys((*alone, *routed)):
            yield from unequal(alone.get(key, MISSING), routed.get(key, MISSING), f"{where}.{key}")
        if alone.keys() == routed.keys() and [*alone] != [*routed]:
            yield f"{where} the order of keys"
    elif isinstance(alone, list) and isinstance(routed, list) and len(alone) == len(routed):
        for number, pair in enumerate(zip(alone, routed, strict=True)):
            yield from unequal(*pair, f"{where}[{number}]")
    elif isinstance(alone, float) and isinstance(routed, float) and "logprob" in where:
        if not math.isclose(alone, routed, abs_tol=LOGPROB_DIFFERENCE):
            yield f"{where} {routed}, alone {alone}"
    elif type(alone) is not type(routed) or alone != routed:
        yield f"{where} {short(routed)}, alone {short(alone)}"


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN // 2 else text[: SHOWN // 2] + " …"


def events(answer: Answer) -> list[Any]:
    """What the events hold; comments are none. ValueError: one is no JSON."""
    found = []
    for event in answer.comparable.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
        if data:
            found.append("[DONE]" if data.strip() == b"[DONE]" else json.loads(data))
    return found


def joined(found: list[Any]) -> dict[str, Any]:
    """All events of a stream as one: texts and lists one after the other; of anything else the last that is not null;
    and in which order each choice has what."""
    whole: dict[str, Any] = {"last event": found[-1] if found[-1:] == ["[DONE]"] else None}
    for event in found:
        if isinstance(event, dict):
            join(whole, without_counts(event))
    joint: dict[str, Any] = in_order(whole)
    return joint


def in_order(value: Any) -> Any:
    """Which event was the first with a key depends on where the engine cuts its events."""
    return {key: in_order(inner) for key, inner in sorted(value.items())} if isinstance(value, dict) else value


def without_counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_counts(inner) for key, inner in value.items() if key not in OF_EVENTS}
    return [without_counts(inner) for inner in value] if isinstance(value, list) else value


def join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if key in ("choices", "tool_calls"):
            for item in value or []:
                join(whole.setdefault(f"{key} {item.get('index')}", {}), item)
        elif isinstance(value, dict) and key != "usage":
            join(whole.setdefault(key, {}), value)
        elif isinstance(value, list) or (isinstance(value, str) and key in TEXTS):
            whole[key] = whole.get(key) or type(value)()
            whole[key] += value
        elif value is not None:
            whole[key] = value
        if key in ORDERED and value:
            order = whole.setdefault("order", [])
            order += [key] if order[-1:] != [key] else []


class Comparison:
    """P, D and the routers, asked one request after the other."""

    def __init__(self, p: Server, d: Server, routers: dict[str, Server]) -> None:
        self._p, self._d, self._routers = p, d, routers
        self._clients = {server.name: Client(server) for server in (d, *routers.values())}
        self._expired = ended_leases(p)[1]
        self.rows: list[dict[str, Any]] = []

    def compare(self, odd: Odd, stream: bool, modes: Collection[str] = MODES) -> None:
        self.until_free()
        alone = self._clients[self._d.name].ask(odd, stream)
        for mode in modes:
            router = self._routers[mode]
            self.until_free()
            routed: Answer | None = None
            try:
                routed = self._clients[router.name].ask(odd, stream)
                alike, found = difference(alone, routed) if odd.own is None else own_error(routed, odd.own)
            except (httpx2.HTTPError, openai.APIConnectionError, anthropic.APIConnectionError) as error:
                alike, found = "", [f"no answer: {error!r}"]
            self.until_free(router)
            expired = ended_leases(self._p)[1]
            held, self._expired = expired - self._expired, expired
            row = {"name": odd.name, "path": odd.path, "streamed": stream, "mode": mode, "alike": alike}
            row |= {"differences": found, "leases_that_ended_by_time": held, "status_alone": alone.status}
            self.rows.append(row)
            if found or held:
                print(line_of(row), flush=True)
                print(f"    alone:  {alone.text()[:SHOWN]!r}")
                print(f"    router: {'' if routed is None else routed.text()[:SHOWN]!r}", flush=True)

    def until_free(self, router: Server | None = None) -> None:
        """Wait until the router has no leg on its way and no block is held; then the prefix caches are empty.

        Raises:
            EngineError: it takes too long.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            idle = router is None or not self._legs(router)
            # both, and in one round: a release may still be on its way from D to P
            if idle and all(server.post("/reset_prefix_cache")["success"] for server in (self._p, self._d)):
                return
            time.sleep(0.02)
        raise EngineError(f"blocks or requests are held for {PATIENCE_SECONDS:g} s after {self.rows[-1:]}")

    @staticmethod
    def _legs(router: Server) -> int:
        status = httpx2.get(f"{router.url}/router/status", trust_env=False, timeout=PATIENCE_SECONDS).json()
        return sum(engine["requests"] for engine in status["engines"])


def line_of(row: dict[str, Any]) -> str:
    held = f" {row['leases_that_ended_by_time']:g} leases ended by time" if row["leases_that_ended_by_time"] else ""
    streamed = ", streamed" if row["streamed"] else ""
    return (
        f"{row['name']}{streamed} [{row['path']}, {row['mode']}]: {'; '.join(row['differences']) or row['alike']}{held}"
    )


def bad(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["differences"] or row["leases_that_ended_by_time"]]


def by_path(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many answers are alike in which way."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["path"], Counter())[DIFFERENT if bad([row]) else row["alike"]] += 1
    return {path: dict(counted) for path, counted in found.items()}


def measure(folder: Path, lease_seconds: float = LEASE_SECONDS, only: str = "", once: bool = False) -> dict[str, Any]:
    """``only``: of a request's name. ``once``: streamed or not and the router by turns."""
    began, model = time.monotonic(), chat_model(folder / "model")
    with PatientServerGroup(folder / "logs") as group:
        options: dict[str, Any] = {"max_model_len": CONTEXT, "kv_bytes": False, "arguments": ENGINE_ARGUMENTS}
        extra = {"lease_seconds": lease_seconds}
        p, d = (group.engine(name, model, extra=extra, **options) for name in ("prefill", "decode"))
        group.wait_ready()
        routers = {
            mode: group.router(p, d, arguments=arguments, name=f"router {mode}") for mode, arguments in MODES.items()
        }
        for router in routers.values():  # the first request of each teaches it P's place
            router.post(COMPLETIONS, {"model": "model", "prompt": [5, 6, 7], "max_tokens": 1})
        before, loaded = count(d), Counter[str]()
        comparison = Comparison(p, d, routers)
        for number, odd in enumerate(TABLE):
            forms = (False, True) if odd.streams and isinstance(odd.content, dict) else (False,)
            if only not in odd.name:
                continue
            had = count(d).external
            if once:
                comparison.compare(odd, forms[number % len(forms)], [[*MODES][number // 2 % 2]])
            else:
                for stream in forms:
                    comparison.compare(odd, stream)
            loaded[odd.path] += int(count(d).external - had)
        grown, rows = count(d) - before, comparison.rows
        how: Counter[str] = Counter()
        for router in routers.values():
            for (name, labels), value in router.metrics().items():
                if name == "kvferry_router_decode_legs_total":
                    how[dict(labels)["how"]] += int(value)
        p_up = metric_sum(p.metrics(), "vllm:kvferry_leases")
    figures = {
        "requests": len({row["name"] for row in rows}), "asked": len(rows), "differences": len(bad(rows)),
        **{alike.replace(" ", "_"): found for alike, found in Counter(row["alike"] for row in rows).items() if alike},
        "handovers_at_once": how["at_once"], "handovers_serial": how["serial"], "decode_only": how["decode_only"],
        "messages": len({row["name"] for row in rows if row["path"] == ANTHROPIC}),
        "messages_from_p": loaded[ANTHROPIC], "tokens_from_p": grown.external,
        "failed_loads": grown.failed, "leases_at_the_end": p_up,
    }  # fmt: skip
    return {"ratios": {}, "figures": figures, "rows": rows, "seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="requests whose name has this word")
    parser.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "odd_requests", help="model and logs")
    args = parser.parse_args()
    try:
        result = measure(args.folder, args.lease_seconds, args.only)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    for name, value in result["figures"].items():
        print(f"{name:34}{value:>12.6g}")
    report.write(args.json, result | {"rows": bad(result["rows"]), "answers": by_path(result["rows"])})
    return int(bool(bad(result["rows"])))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
