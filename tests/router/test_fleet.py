"""A router before two P and two D, stand-ins for engines, among clients that leave, lie or stall: no honest request is
lost, and the router's memory and descriptors are afterwards what they were.

``benchmarks/router_fleet.py`` does the same with engines and ``vllm bench serve``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.router.stand_ins import decode_engine, prefill_engine, served
from tests.support.bad_clients import Crowd, honest
from tests.support.engines import ServerGroup, free_port, python_path
from tests.support.fleet import GROWTH_MIB, SPARE, router_of, under_the_usual_limit
from tests.support.served import eventually
from tests.support.server import Server

CROWD = 1000
ROUNDS = 2
HONEST, BESIDE = 200, 8


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        group = stack.enter_context(ServerGroup(tmp_path))
        urls = {}
        for role, make in (("--prefill", prefill_engine), ("--decode", decode_engine)):
            urls[role] = [stack.enter_context(served(make().app)) for _ in range(2)]
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "kvferry.connector.cli",
            "router",
            "--port",
            str(port),
            "--connect-timeout",
            "60",
        ]
        command += [part for role, each in urls.items() for url in each for part in (role, url)]
        environment = {"PYTHONPATH": python_path()}
        command = under_the_usual_limit(command)
        router = group.spawn("router", command, host="127.0.0.1", port=port, environment=environment)
        group.wait_ready()
        yield router


async def among(router: Server, seed: int) -> Crowd:
    """Honest requests while the crowd is there, at its beginning and at its end."""
    crowd = Crowd(router.host, router.port, CROWD, seed)
    running = asyncio.ensure_future(crowd.run())
    free = asyncio.Semaphore(BESIDE)

    async def ask(number: int) -> None:
        stream = number % 2 == 0
        async with free:
            answer = await honest(router.host, router.port, {"model": "m", "prompt": "x" * 50, "stream": stream})
        assert (b"data: [DONE]" if stream else b'{"text":"from D"}') in answer, answer[-300:]

    await asyncio.gather(*map(ask, range(HONEST // 2)))
    await crowd.until_only_stalling_are_left()
    await asyncio.gather(*map(ask, range(HONEST // 2)))  # beside those that stall
    crowd.over.set()
    await running
    return crowd


def test_no_honest_request_is_lost_and_nothing_grows(fleet: Server) -> None:
    process = router_of(fleet)
    for _ in range(20):
        asyncio.run(honest(fleet.host, fleet.port, {"model": "m", "prompt": "x"}))
    descriptors, resident = process.descriptors(), []
    for number in range(ROUNDS):
        crowd = asyncio.run(among(fleet, seed=number * CROWD))
        assert not crowd.refused
        eventually(lambda: process.descriptors() <= descriptors + SPARE, f"{descriptors} descriptors, as before")
        resident.append(process.resident_mib())
    assert resident[-1] - resident[0] < GROWTH_MIB, resident
    log = fleet.log_text()
    assert "Traceback" not in log and "fault of the router" not in log, fleet.log_tail()
    assert len(log) < 200 * ROUNDS * CROWD, "a bad client costs a line of the log, no more"
    status = process.status()
    assert status["requests"].get("500") is None and not status["failed_legs"]
    assert not any(engine["requests"] or engine["passed_over"] for engine in status["engines"])
