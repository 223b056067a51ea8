"""Other P engines that a request names: what D takes of them, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.engine.params import (
    MAX_ALTERNATIVES,
    RemotePrompt,
    alternatives,
    from_transfer_params,
    to_transfer_params,
)
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, RemoteLease

HOST, SIZES = "ab" * 8, (4, 4)


def prompt(number: int, host: str = "10.0.0.1", **other: Any) -> RemotePrompt:
    rank = RankAddress(0, 0, host, 5600 + number, bytes(16))
    peer = PeerEngine(f"engine-{number}", 1, 1, 30.0, (rank,), "cd" * 8)
    return RemotePrompt(**{"token": bytes([number]) * 16, "num_tokens": 9, "digest": "digest", "peer": peer, **other})


def named(*others: object, first: RemotePrompt | None = None) -> tuple[tuple[RemoteLease, ...], list[str]]:
    first = first or prompt(0)
    params = {**to_transfer_params(first), "alternatives": list(others)}
    assert from_transfer_params(params, SIZES) == first, "D of an earlier release ignores them"
    return alternatives(params, first, SIZES, HOST)


def test_complete_parameters_are_taken_in_order() -> None:
    others = [prompt(number) for number in range(1, 1 + MAX_ALTERNATIVES)]
    usable, left_out = named(*map(to_transfer_params, others))
    assert usable == tuple(RemoteLease(other.token, other.peer) for other in others) and not left_out


def test_a_request_without_alternatives() -> None:
    assert alternatives(to_transfer_params(prompt(0)), prompt(0), SIZES, HOST) == ((), [])
    assert alternatives(None, prompt(0), SIZES, HOST) == ((), [])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, "does not say do_remote_prefill"),
        ({"do_remote_prefill": True}, "names no prefill engine"),
        ({**to_transfer_params(prompt(1)), "kvferry": {"v": 1}}, "is malformed"),
        ({**to_transfer_params(prompt(1)), "alternatives": []}, "names alternatives itself"),
        (
            to_transfer_params(prompt(1, digest="another")),
            "its prompt's digest is not that of the first",
        ),
        (
            to_transfer_params(prompt(1, kept=(("full", 4, 4),))),
            "its prompt's kept is not that of the first",
        ),
        (to_transfer_params(prompt(0)), "its lease is named twice"),
        (to_transfer_params(prompt(1, host="127.0.0.1")), "told its loopback address"),
    ],
)
def test_one_that_cannot_be_used_does_not_cost_the_others(other: object, words: str) -> None:
    usable, (why,) = named(other, to_transfer_params(prompt(2)))
    assert [lease.token for lease in usable] == [bytes([2]) * 16]
    assert why.startswith("alternatives[0]: ") and words in why and "\n" not in why and len(why) < 400


@pytest.mark.parametrize("value", [{}, "x", 7, [to_transfer_params(prompt(n)) for n in range(1, MAX_ALTERNATIVES + 2)]])
def test_no_list_or_too_long_a_list(value: object) -> None:
    usable, (why,) = alternatives({"alternatives": value}, prompt(0), SIZES, HOST)
    assert not usable and f"expected a list of at most {MAX_ALTERNATIVES}" in why


def test_no_line_has_a_token() -> None:
    ((lease,), _) = named(to_transfer_params(prompt(1)))
    assert repr(lease) == "RemoteLease('engine-1')"
