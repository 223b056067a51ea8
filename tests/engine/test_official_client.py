"""Odd requests of the official clients through the router: each answer is that of D alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


def test_each_answer_is_that_of_d_alone(tmp_path: Path) -> None:
    from tests.engine import odd_requests  # it needs the official client

    result = odd_requests.measure(tmp_path, once=True)
    different = odd_requests.bad(result["rows"])
    assert not different, "\n".join(map(odd_requests.line_of, different))
    figures = result["figures"]
    assert figures["requests"] == len(odd_requests.TABLE) == len({odd.name for odd in odd_requests.TABLE}) >= 60
    assert figures["handovers_at_once"] > 30 and figures["handovers_serial"] > 30, "most of them took both legs"
    assert figures["tokens_from_p"] > 60 * 30 and not figures["leases_at_the_end"] and not figures["failed_loads"]
    assert figures["messages"] >= 30 and figures["messages_from_p"] > 20 * 30, "Anthropic's, too, with P's KV cache"
