"""The odd requests that a router must answer as a D alone does, as a table; and the model that can be asked them.

``TABLE``: name, path, and what the request has besides, or instead of, what every request to that path has
(``USUAL``). Where it can be streamed, it is asked both ways.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_model import ModelSpec, build_model, words

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
LEFT_OUT = "this key is left out"
TEXT = words(70, 1)
MESSAGES = [{"role": "user", "content": TEXT}]
USUAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "model", "prompt": TEXT, "max_tokens": 8, "temperature": 0},
    CHAT: {"model": "model", "messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    RESPONSES: {"model": "model", "input": TEXT, "max_output_tokens": 8, "temperature": 0},
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
PARTS = [{"type": "text", "text": text} for text in (TEXT, "x")]
IMAGE = "data:image/png;base64,AA"
SCHEMA = {"type": "object", "properties": {"port": {"enum": ["Kiel", "Riga"]}}, "required": ["port"]}
NAMED = {"name": "port", "schema": SCHEMA}
SHORT_THOUGHTS = {"allowed_token_ids": [*range(300, 320), THINK_END], "temperature": 1, "seed": 4, "max_tokens": 24}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
USAGE = {"stream_options": {"include_usage": True}}
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
NULLS = dict.fromkeys(
    (
        "stop",
        "seed",
        "user",
        "top_p",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "stream_options",
        "logprobs",
    )
)
CALL = {"max_tokens": 40} | NO_THOUGHTS

TABLE: tuple[Odd, ...] = (
    # What is asked of a completion.
    Odd("a text", COMPLETIONS),
    Odd("token ids", COMPLETIONS, {"prompt": ids(70)}),
    Odd("a list of one text", COMPLETIONS, {"prompt": [TEXT]}),
    Odd("a list of two texts", COMPLETIONS, {"prompt": [TEXT, words(9, 2)]}),
    Odd("lists of token ids", COMPLETIONS, {"prompt": [ids(40), ids(41, 2), ids(3, 3)]}),
    Odd("one token", COMPLETIONS, {"prompt": [7]}),
    Odd("an empty text", COMPLETIONS, {"prompt": ""}),
    Odd("no ids", COMPLETIONS, {"prompt": []}),
    Odd("prompt null", COMPLETIONS, {"prompt": None}),
    Odd("prompt_embeds", COMPLETIONS, {"prompt": None, "prompt_embeds": embeddings(40)}),
    Odd("prompt_embeds beside a text", COMPLETIONS, {"prompt_embeds": embeddings(40)}),
    Odd("ids beyond the vocabulary", COMPLETIONS, {"prompt": [5, 100_000]}),
    Odd("suffix", COMPLETIONS, {"suffix": "end"}),
    # What it shall answer.
    Odd("n 3", COMPLETIONS, {"n": 3, "temperature": 1, "seed": 5}),
    Odd("n null", COMPLETIONS, {"n": None}),
    Odd("n a word", COMPLETIONS, {"n": "x"}),
    Odd("nulls", COMPLETIONS, NULLS | {"echo": None}),
    Odd("best_of", COMPLETIONS, {"best_of": 3}),
    Odd("beam search", COMPLETIONS, {"use_beam_search": True, "n": 2, "prompt": ids(64)}),
    Odd("echo", COMPLETIONS, {"echo": True}),
    Odd("echo and no token", COMPLETIONS, {"echo": True, "max_tokens": 0}),
    Odd("echo with logprobs", COMPLETIONS, {"echo": True, "logprobs": 1}),
    Odd("logprobs", COMPLETIONS, {"logprobs": 2}),
    Odd("prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1}, streams=False),
    Odd("streamed prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, streams=False),
    Odd("return_token_ids", COMPLETIONS, {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}),
    Odd("skip_special_tokens", COMPLETIONS, {"skip_special_tokens": False, "spaces_between_special_tokens": False}),
    # Where it ends.
    Odd("stop", COMPLETIONS, {"stop": ["er", "a"], "max_tokens": 60}),
    Odd("stop in the answer", COMPLETIONS, {"stop": "er", "include_stop_str_in_output": True, "max_tokens": 60}),
    Odd("stop_token_ids", COMPLETIONS, {"stop_token_ids": list(range(300, 400)), "max_tokens": 60}),
    Odd("min_tokens", COMPLETIONS, {"min_tokens": 5, "ignore_eos": True}),
    Odd("max_tokens null", COMPLETIONS, {"max_tokens": None, "prompt": ids(200)}),
    Odd("max_tokens 0", COMPLETIONS, {"max_tokens": 0}),
    Odd("max_tokens 1", COMPLETIONS, {"max_tokens": 1}),
    Odd("max_tokens as a text", COMPLETIONS, {"max_tokens": "5"}),
    Odd("max_tokens one below the context", COMPLETIONS, {"prompt": ids(200), "max_tokens": CONTEXT - 201}),
    Odd("max_tokens up to the context", COMPLETIONS, {"prompt": ids(200), "max_tokens": CONTEXT - 200}),
    Odd("max_tokens one over the context", COMPLETIONS, {"prompt": ids(200), "max_tokens": CONTEXT - 199}),
    Odd("a prompt one below the context", COMPLETIONS, {"prompt": ids(CONTEXT - 1), "max_tokens": LEFT_OUT}),
    Odd("that prompt and max_tokens 1", COMPLETIONS, {"prompt": ids(CONTEXT - 1), "max_tokens": 1}),
    Odd("a prompt of the context", COMPLETIONS, {"prompt": ids(CONTEXT), "max_tokens": 1}),
    Odd("a prompt over the context", COMPLETIONS, {"prompt": ids(CONTEXT + 1), "max_tokens": 1}),
    Odd("truncate_prompt_tokens", COMPLETIONS, {"truncate_prompt_tokens": 20}),
    # How tokens are chosen.
    Odd("a seed", COMPLETIONS, {"temperature": 1, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    Odd("penalties", COMPLETIONS, {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    Odd("logit_bias", COMPLETIONS, {"logit_bias": {"300": 50}}),
    Odd("allowed_token_ids", COMPLETIONS, {"allowed_token_ids": [300, 301, 302]}),
    Odd("bad_words", COMPLETIONS, {"bad_words": ["river", "sail"]}),
    Odd("bytes of no character", COMPLETIONS, {"allowed_token_ids": [*range(130, 200)], "temperature": 1, "seed": 2}),
    Odd("structured: choice", COMPLETIONS, {"structured_outputs": {"choice": ["river", "harbor"]}}),
    Odd("structured: regex", COMPLETIONS, {"structured_outputs": {"regex": "[ab]{5}c"}}),
    Odd("structured: a list", COMPLETIONS, {"structured_outputs": [1]}),
    Odd("structured: two forms", COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
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
    Odd("temperature -1", COMPLETIONS, {"temperature": -1}),
    Odd("logprobs 1000", COMPLETIONS, {"logprobs": 1000}),
    Odd("an unknown parameter", COMPLETIONS, {"of_a_later_release": {"a": [1]}}),
    Odd("an unknown model", COMPLETIONS, {"model": "another"}),
    Odd("no model", COMPLETIONS, {"model": None}),
    Odd("stream a word", COMPLETIONS, {"stream": "yes"}, streams=False),
    Odd("stream 1", COMPLETIONS, {"stream": 1}, streams=False),
    Odd("stream null", COMPLETIONS, {"stream": None}, streams=False),
    Odd("stream a list", COMPLETIONS, {"stream": [1]}, streams=False),
    # Chats.
    Odd("a chat", CHAT),
    Odd("a chat with a history", CHAT, {"messages": [message("system", "be brief"), *MESSAGES,
        message("assistant", "er"), message("user", "riv", name="x")]}),
    Odd("content in parts", CHAT, {"messages": [message("user", PARTS)]}),
    Odd("an image", CHAT, {"messages": [message("user", [{"type": "image_url", "image_url": {"url": IMAGE}}])]}),
    Odd("emoji", CHAT, {"messages": [message("user", "\U0001f469\u200d\U0001f680 \u0085 é \u0000")]}),
    Odd("no messages", CHAT, {"messages": []}),
    Odd("messages a text", CHAT, {"messages": "hello"}),
    Odd("an unknown role", CHAT, {"messages": [message("captain", "sail")]}),
    Odd("a message without content", CHAT, {"messages": [{"role": "user"}]}),
    Odd("a chat over the context", CHAT, {"messages": [message("user", words(400, 3))]}),
    Odd("a chat without max_tokens", CHAT, {"max_tokens": LEFT_OUT} | USAGE),
    Odd("max_tokens null in a chat", CHAT, {"max_tokens": None, "messages": [message("user", words(70, 4))]}),
    Odd("max_completion_tokens", CHAT, {"max_tokens": LEFT_OUT, "max_completion_tokens": 4}),
    Odd("both limits", CHAT, {"max_tokens": 3, "max_completion_tokens": 5}),
    Odd("n 2 in a chat", CHAT, {"n": 2, "temperature": 1, "seed": 5}),
    Odd("n null in a chat", CHAT, {"n": None}),
    Odd("nulls in a chat", CHAT, NULLS | {"tools": None, "tool_choice": None, "response_format": None}),
    Odd("logprobs in a chat", CHAT, {"logprobs": True, "top_logprobs": 2}),
    Odd("top_logprobs without logprobs", CHAT, {"top_logprobs": 2}),
    Odd("prompt_logprobs in a chat", CHAT, {"prompt_logprobs": 1}, streams=False),
    Odd("thoughts that end", CHAT, SHORT_THOUGHTS),
    Odd("thoughts left out", CHAT, SHORT_THOUGHTS | {"include_reasoning": False}),
    Odd("no thoughts", CHAT, NO_THOUGHTS),
    Odd("no thoughts, usage", CHAT, NO_THOUGHTS | USAGE),
    Odd("reasoning_effort", CHAT, {"reasoning_effort": "low"}),
    Odd("tools, chosen by the model", CHAT, CALL | {"tools": TOOLS}),
    Odd("a tool is required", CHAT, CALL | {"tools": TOOLS, "tool_choice": "required"}),
    Odd("a named tool", CHAT, CALL | chosen("set_sail")),
    Odd("an unknown tool", CHAT, chosen("fly")),
    Odd("tools, none of them", CHAT, {"tools": TOOLS, "tool_choice": "none"}),
    Odd("a tool_choice without tools", CHAT, {"tool_choice": "required"}),
    Odd("a tool was called", CHAT, {"messages": CALLED, "tools": TOOLS, "parallel_tool_calls": False}),
    Odd("response_format json_schema", CHAT, CALL | {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    Odd("response_format json_object", CHAT, CALL | {"response_format": {"type": "json_object"}}),
    Odd("response_format unknown", CHAT, {"response_format": {"type": "yaml"}}),
    Odd("echo in a chat", CHAT, {"echo": True}),
    Odd("the answer goes on", CHAT, {"messages": [*MESSAGES, message("assistant", "the riv")],
        "add_generation_prompt": False, "continue_final_message": True}),
    Odd("a template of the client", CHAT, {"chat_template": "{{ messages }}"}),
    Odd("beam search in a chat", CHAT, {"use_beam_search": True, "n": 2}),
    Odd("stop in a chat", CHAT, {"stop": ["er"], "max_tokens": 60} | NO_THOUGHTS),
    Odd("usage at each event of a chat", CHAT, EACH_USAGE),
    # Responses.
    Odd("a response", RESPONSES),
    Odd("a response with instructions", RESPONSES, {"input": [message("user", TEXT)], "instructions": "be brief"}),
    Odd("a response without a limit", RESPONSES, {"max_output_tokens": None}),
    Odd("a response after an unknown one", RESPONSES, {"previous_response_id": "resp_none"}),
    Odd("an unknown response", RESPONSES + "/resp_none", b"", method="GET"),
    # Bytes that a client library does not send.
    Odd("half an emoji", COMPLETIONS, raw(COMPLETIONS, '"user": "\\ud83d"')),
    Odd("half an emoji as prompt", COMPLETIONS, rb'{"model": "model", "max_tokens": 8, "prompt": "riv \ud83d"}'),
    Odd("half an emoji in a chat", CHAT,
        rb'{"model": "model", "max_tokens": 8, "messages": [{"role": "user", "content": "\ud83d"}]}'),
    Odd("a byte order mark", COMPLETIONS, b"\xef\xbb\xbf" + json.dumps(USUAL[COMPLETIONS]).encode()),
    Odd("NaN", COMPLETIONS, raw(COMPLETIONS, '"top_p": NaN')),
    Odd("a number beyond floats", COMPLETIONS, raw(COMPLETIONS, '"top_p": 1e999')),
    Odd("an integer beyond 64 bits", COMPLETIONS, raw(COMPLETIONS, '"seed": 18446744073709551616')),
    Odd("a limit as 8.0", COMPLETIONS, b'{"model": "model", "prompt": "riv", "max_tokens": 8.0, "temperature": 0}'),
    Odd("a key twice", COMPLETIONS, raw(COMPLETIONS, '"max_tokens": 3')),
    Odd("no JSON", COMPLETIONS, b'{"model": "model", '),
    Odd("a JSON list", COMPLETIONS, b"[1, 2]"),
    Odd("no body", COMPLETIONS, b""),
    Odd("bytes of no text", COMPLETIONS, b'{"model": "model", "prompt": "\xff"}'),
    Odd("no content type", COMPLETIONS, json.dumps(USUAL[COMPLETIONS]).encode(), headers={"Content-Type": ""}),
    Odd("a content type of a form", CHAT, b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    # Other paths and methods.
    Odd("a list of models", "/v1/models", b"", method="GET"),
    Odd("an unknown path", "/v1/nowhere", b"{}", own=404),
    Odd("tokenize", "/tokenize", b'{"model": "model", "prompt": "riv er"}', own=404),
    Odd("an engine's own affairs", "/reset_prefix_cache", b"{}", own=404),
    Odd("GET of a chat", CHAT, b"", method="GET", own=405),
    Odd("a browser asks first", CHAT, b"", method="OPTIONS", headers={"Origin": "http://a.example",
        "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}),
    Odd("a browser asks", COMPLETIONS, json.dumps(USUAL[COMPLETIONS]).encode(), headers={"Origin": "http://a.example"}),
)  # fmt: skip
