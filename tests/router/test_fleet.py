"""A router before two P and two D, stand-ins for engines, among clients that leave, lie or stall: no honest request is
lost, and the router's memory and descriptors are afterwards what they were.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.router.stand_ins import PARAMS
from tests.support.bad_clients import Crowd, honest
from tests.support.engines import ServerGroup, free_port, python_path
from tests.support.fleet import GROWTH_MIB, SPARE, USUAL_DESCRIPTORS, grown_mib, router_of, under_the_usual_limit
from tests.support.served import eventually
from tests.support.server import Server, metric_sum

CROWD = 1000
FEWEST, MOST = 2, 6
"""Crowds. What an allocator has not given back after one, it has after another; what is kept becomes more with each."""
HONEST, BESIDE = 100, 8
STREAMS = re.compile(rb'"stream": ?true')
WHOLE, PIECES = b'{"text":"from D"}', [b"data: {}\n\n"] * 3 + [b"data: [DONE]\n\n"]


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """An engine's that decodes no body, and keeps none."""
    body = await request.read()
    if b'"do_remote_decode":true' in body:
        return web.Response(body=json.dumps({"kv_transfer_params": PARAMS, "choices": []}).encode())
    if STREAMS.search(body) is None:
        return web.Response(body=WHOLE)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in PIECES:
        await response.write(piece)
    return response


@contextmanager
def engines(count: int) -> Iterator[list[str]]:
    """Their URLs. They have one thread."""
    loop = asyncio.new_event_loop()
    ports = [free_port() for _ in range(count)]

    async def start() -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0)
        await runner.setup()
        for port in ports:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        group = stack.enter_context(ServerGroup(tmp_path))
        urls = stack.enter_context(engines(4))
        port = free_port()
        command = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", str(port)]
        command += ["--connect-timeout", "60", "--health-interval", "60"]
        command += [part for number, url in enumerate(urls) for part in (("--prefill", "--decode")[number % 2], url)]
        # So that the C library gives back what is free: else what it keeps depends on how the crowd's clients meet.
        thresholds = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
        environment = {"PYTHONPATH": python_path(), **thresholds}
        command = under_the_usual_limit(command)
        router = group.spawn("router", command, host="127.0.0.1", port=port, environment=environment)
        group.wait_ready()
        yield router


async def among(router: Server, seed: int) -> Crowd:
    """Honest requests while the crowd is there, at its beginning and at its end."""
    crowd = Crowd(router.host, router.port, CROWD, seed)
    running = asyncio.ensure_future(crowd.run())
    # In threads: where the crowd's loop stands still, they send nothing, and the router takes them for silent ones.
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(BESIDE)

    async def ask(number: int) -> None:
        stream = number % 2 == 0
        request = honest(router.host, router.port, {"model": "m", "prompt": "x" * 50, "stream": stream})
        said = await loop.run_in_executor(threads, asyncio.run, request)
        assert (PIECES[-1] if stream else WHOLE) in said, said[-300:]

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
    assert process.most_descriptors() > USUAL_DESCRIPTORS, "the router raises its limit"
    descriptors, resident = process.descriptors(), []
    for number in range(MOST):
        crowd = asyncio.run(among(fleet, seed=number * CROWD))
        assert not crowd.refused
        eventually(lambda: process.descriptors() <= descriptors + SPARE, f"{descriptors} descriptors, as before")
        resident.append(process.resident_mib())
        if len(resident) >= FEWEST and grown_mib(resident) < GROWTH_MIB:
            break
    assert grown_mib(resident) < GROWTH_MIB, resident
    log = fleet.log_text()
    assert "Traceback" not in log and "fault of the router" not in log, fleet.log_tail()
    assert len(log) < 200 * len(resident) * CROWD, "a bad client costs a line of the log, no more"
    samples = fleet.metrics()
    assert not metric_sum(samples, "kvferry_router_requests_total", status="500")
    assert not metric_sum(samples, "kvferry_router_failed_legs_total")
    assert not any(engine["requests"] or engine["passed_over"] for engine in process.status()["engines"])
