"""The relay of P's first token: which requests take it, and how P's token and D's answer become one stream.

P computes a token that D otherwise computes again. Relayed, it reaches the client when P has it, and D's part (its
queue, the load, one step) no longer delays the first token. Two ways:

- D was not asked yet (both legs one after the other): D is asked for the rest, with prompt plus token.
- D was asked for the whole answer while P computed (both legs at once): D's own first token is dropped where it is P's.
  Where it is another one (sampling; rounding), D's answer is dropped, and D is asked for the rest; it has the KV.

The rest is asked of ``/v1/completions``, for chats too: it takes the token ids that P's answer names.

Only streamed requests are relayed, and only those whose parameters are in ``RELAYED`` and have a value that it names:
everything else would show that two requests make the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

ANY = None
_OFF = (None, False)
_NONE: tuple[Any, ...] = (None, [], "", {})
RELAYED: dict[str, tuple[Any, ...] | None] = {
    # What P and D do alike, and what only P needs, which makes the prompt's token ids.
    "model": ANY, "prompt": ANY, "messages": ANY, "stream": (True,), "stream_options": ANY, "user": ANY,
    "max_tokens": ANY, "max_completion_tokens": ANY, "ignore_eos": ANY, "skip_special_tokens": ANY,
    "temperature": ANY, "top_p": ANY, "top_k": ANY, "min_p": ANY, "allowed_token_ids": ANY, "cache_salt": ANY,
    "priority": ANY, "add_special_tokens": ANY, "add_generation_prompt": ANY,
    "chat_template": ANY, "chat_template_kwargs": ANY,
    # Choices and tokens that the answer must name, of the prompt too: P's and D's are not in one list.
    "n": (None, 1), "best_of": (None, 1), "use_beam_search": _OFF, "echo": _OFF, "return_token_ids": _OFF,
    "logprobs": _OFF, "top_logprobs": (None, 0), "prompt_logprobs": (None,),
    # What counts from the first token, or looks back at it: D takes P's token for a part of the prompt.
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "repetition_penalty": (None, 1),
    "min_tokens": (None, 0), "stop": _NONE, "stop_token_ids": _NONE, "bad_words": _NONE, "logit_bias": _NONE,
    "seed": (None,), "thinking_token_budget": (None,), "repetition_detection": (None,),
    # What a grammar or a parser follows from the first token on.
    "response_format": (None, {"type": "text"}), "structured_outputs": (None,), "tools": _NONE,
    "tool_choice": (None, "none"),
}  # fmt: skip
"""By name of a parameter, the values with which a request is relayed; ``ANY``: all. A name that is not here: none."""
MAX_EVENT_BYTES = 64 << 20


def relayed(body: dict[str, Any], chat: bool) -> bool:
    """Whether P's token may go to the client before D's answer."""
    if body.get("stream") is not True or not all(_allowed(name, value) for name, value in body.items()):
        return False
    limit = token_limit(body, chat)
    if not (limit is None or (type(limit) is int and limit > 0)):
        return False
    return not chat or _only_text(body.get("messages"))


def _allowed(name: str, value: Any) -> bool:
    if name not in RELAYED:
        return False
    values = RELAYED[name]
    # True and 1 are one value for Python and two for vLLM: "logprobs": 0 asks for logprobs.
    return values is ANY or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _only_text(messages: Any) -> bool:
    """Token ids name no images."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def token_limit(body: dict[str, Any], chat: bool) -> Any:
    """The most tokens that the client wants; None: as many as fit. Not checked."""
    if chat:
        limit = body.get("max_completion_tokens")
        return body.get("max_tokens") if limit is None else limit
    return body.get("max_tokens", 16)  # vLLM's default


@dataclass
class FirstToken:
    """What P's answer says. ``finish``: why the answer ends with this token, "stop" or "length"; None: it goes on."""

    chat: bool
    token: int
    prompt: list[int]
    text: str
    finish: str | None
    role: str
    answer: dict[str, Any]
    options: dict[str, Any]

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks with P's token; those of vLLM for a chat begin with the role."""
        if self.chat:
            role = {"index": 0, "delta": {"role": self.role, "content": ""}, "logprobs": None, "finish_reason": None}
            yield self._chunk([role], 0) | {"prompt_token_ids": None, "prompt_text": None}
        choice = self._choice(self.text, self.finish, self.answer["choices"][0].get("stop_reason"))
        last = self.finish is not None and not self.options.get("include_usage")
        yield self._chunk([choice], 1) | (self._fingerprint() if last else {})

    def closing(self) -> Iterator[dict[str, Any] | None]:
        """What follows where the answer ends with P's token: the usage, if the client wants it, and the end."""
        if self.options.get("include_usage"):
            yield self._chunk([]) | {"usage": self._usage(1)} | self._fingerprint()
        yield None

    def rest_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """What D is asked for after P's token, at ``/v1/completions``."""
        own = ("messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt")
        limit = token_limit(body, self.chat)
        rest = {name: value for name, value in body.items() if name not in own}
        return rest | {"prompt": [*self.prompt, self.token], "max_tokens": None if limit is None else limit - 1}

    def of_rest(self, event: dict[str, Any]) -> dict[str, Any]:
        """D's chunk of the rest as a chunk of the client's answer. An error is left as it is."""
        if "choices" not in event:
            return event
        usage = event.get("usage")
        if usage:  # P's token was a part of D's prompt, and is one of the answer; the sum stays
            usage["prompt_tokens"] -= 1
            usage["completion_tokens"] += 1
        if self.chat:
            given = event["choices"]
            event["choices"] = [self._choice(c["text"], c["finish_reason"], c.get("stop_reason")) for c in given]
        return event | self._name()

    def of_whole(self, event: dict[str, Any]) -> dict[str, Any]:
        """D's chunk of a whole answer as a chunk of the client's. An error is left as it is."""
        return unmarked(event) | self._name()

    def without(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """D's first chunk with tokens without P's token; None where nothing is left. Raises SeamError."""
        choice = event["choices"][0]
        if choice["token_ids"][0] != self.token:
            raise SeamError
        text = (choice["delta"].get("content") or "") if self.chat else choice["text"]
        if not text.startswith(self.text):
            raise SeamError
        if len(choice["token_ids"]) == 1 and choice["finish_reason"] is None:
            return None
        if self.chat:
            choice["delta"]["content"] = text[len(self.text) :]
        else:
            choice["text"] = text[len(self.text) :]
        return self.of_whole(event)

    def _choice(self, text: str, finish: str | None, stop_reason: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if not self.chat:
            return choice | {"text": text, "stop_reason": stop_reason, "prompt_token_ids": None, "token_ids": None}
        choice |= {"delta": {"content": text}, "token_ids": None}
        return choice if finish is None else choice | {"stop_reason": stop_reason}

    def _chunk(self, choices: list[dict[str, Any]], completion_tokens: int | None = None) -> dict[str, Any]:
        chunk = self._name() | {"model": self.answer.get("model"), "choices": choices}
        if completion_tokens is not None and self.options.get("continuous_usage_stats"):
            chunk["usage"] = self._usage(completion_tokens)
        return chunk

    def _name(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.answer.get("id"), "object": kind, "created": self.answer.get("created")}

    def _fingerprint(self) -> dict[str, Any]:
        """What vLLM's last chunk has, where the engine has one."""
        fingerprint = self.answer.get("system_fingerprint")
        return {} if fingerprint is None else {"system_fingerprint": fingerprint}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self.prompt)
        total = prompt + completion_tokens
        return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": completion_tokens}


class SeamError(Exception):
    """D's answer does not begin with P's token."""


def first_token(
    answer: dict[str, Any], params: dict[str, Any] | None, body: dict[str, Any], chat: bool
) -> FirstToken | None:
    """The token of P's answer to a request that may be relayed; None where it must not go to the client.

    It must not where P computed less than the prompt (D is to compute the rest first), where P has another connector
    (NixlConnector ends D's engine by an assertion if D's prompt needs one block more than P's), where the answer holds
    more than text (reasoning, tool calls), and where the token is not the whole of a character: D's text goes on after
    a character. ``params``: what P handed over; None: P was not asked to, and the answer ends with its token.
    """
    try:
        (choice,) = answer["choices"]
        (token,) = choice["token_ids"]
        prompt = (answer if chat else choice)["prompt_token_ids"]
        message = choice["message"] if chat else {"content": choice["text"], "role": ""}
        text, role, finish = message["content"], message["role"], choice["finish_reason"]
    except (KeyError, TypeError, ValueError):
        return None
    if not (isinstance(text, str) and isinstance(prompt, list) and prompt and type(token) is int):
        return None
    if finish not in ("stop", "length") or any(message.get(name) for name in message.keys() - {"content", "role"}):
        return None
    options = body.get("stream_options") or {}
    if finish == "length" and token_limit(body, chat) != 1:
        finish = None
        if not text or "\ufffd" in text:
            return None
    if params is not None and (params.get("remote_num_tokens") != len(prompt) or "kvferry" not in params):
        return None
    return FirstToken(chat, token, prompt, text, finish, role, answer, options)


def unmarked(event: dict[str, Any]) -> dict[str, Any]:
    """D's chunk without the token ids, which the router asked for."""
    for holder in (event, *event.get("choices", ())):
        for name in ("prompt_token_ids", "token_ids"):
            if name in holder:
                holder[name] = None
    return event


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream as vLLM sends it, None for ``[DONE]``.

    Raises:
        ValueError: it is not such a stream.
    """
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of over {MAX_EVENT_BYTES} bytes")
        for event in whole:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield None
            elif data:
                try:
                    found = msgspec.json.decode(data)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise ValueError(f"an event that is not JSON: {error}") from None
                if not isinstance(found, dict):
                    raise ValueError("an event that is not an object")
                yield found


def sse(event: dict[str, Any] | None) -> bytes:
    """An event as vLLM writes it."""
    return b"data: " + (b"[DONE]" if event is None else msgspec.json.encode(event)) + b"\n\n"
