"""The kinds of requests whose first token the router leaves to D: a path, and what makes a request one of them."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NOT_RELAYED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"logprobs": 2}),
    (COMPLETIONS, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, {"presence_penalty": 1.5}),
    (COMPLETIONS, {"frequency_penalty": 1.5}),
    (COMPLETIONS, {"repetition_penalty": 1.5}),
    (CHAT, {"stop": ["e", "a"]}),
    (COMPLETIONS, {"stop": "e"}),
    (COMPLETIONS, {"stop_token_ids": list(range(300, 600))}),
    (CHAT, {"min_tokens": 3}),
    (COMPLETIONS, {"seed": 5, "temperature": 1.0}),
    (COMPLETIONS, {"logit_bias": {"300": 5}}),
    (COMPLETIONS, {"bad_words": ["riv"]}),
    (COMPLETIONS, {"n": 2, "temperature": 1.0, "seed": 5}),
    (CHAT, {"n": 2, "temperature": 1.0, "seed": 5}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"structured_outputs": {"choice": ["river", "harbor"]}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["riv"]}}}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"}),
    (CHAT, {"include_reasoning": False}),
    (COMPLETIONS, {"truncate_prompt_tokens": 50}),
    (COMPLETIONS, {"a_parameter_of_a_later_release": 1}),
]
