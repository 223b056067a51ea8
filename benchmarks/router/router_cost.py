"""What ``kvferry router`` costs: its own time for each request, and how many requests one core serves.

    python benchmarks/router/router_cost.py [--rounds 20] [--json FILE]

Stub engines, the router and the client are processes of their own, with kept connections on loopback. The stubs answer
at once. Own cost: one client, one request at a time, through the router and then, in the same round, both legs sent to
the engines directly; the difference of the medians. Requests of one core: 16 clients at a time; requests divided by the
time that the router's process has run on cores, because client and stubs share the machine.

Waits beside a large body: ``/health`` is asked every few milliseconds, while bodies of 60 MiB of the worst shapes come
one after the other. In each round the longest wait; the median of the rounds, because a host may stand still.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import uvloop

from benchmarks.harness import report
from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import free_port

CHUNKS = 16
PROMPT_TOKENS = 500
CLIENTS = 16
REQUESTS = 30
"""Of each client in one round."""
LEASE = {"do_remote_prefill": True, "remote_engine_id": "p-0", "remote_host": "127.0.0.1", "remote_port": 5600}
LEASE |= {"remote_num_tokens": PROMPT_TOKENS, "kvferry": {"v": 1, "token": "00" * 16}}
CASES: dict[str, tuple[bool, bool]] = {
    "whole answer, one leg after the other": (False, False),
    "whole answer, both legs at once": (False, True),
    f"stream of {CHUNKS} chunks, one leg after the other": (True, False),
    f"stream of {CHUNKS} chunks, both legs at once": (True, True),
}
"""Whether the answer is streamed, and whether P can be asked at once."""
LARGE = 60 << 20
SHAPES: dict[str, tuple[bytes, bytes, bytes]] = {
    "a text": (b'"', b"word", b'"'),
    "a text of escapes": (b'"', b"\\n", b'"'),
    "empty lists": (b"[", b"[],", b"[]]"),
    "token ids": (b"[", b"1234567,", b"1]"),
}
"""The beginning, the repeated part and the end of a prompt."""
LARGE_ROUNDS = 5
WAITS = "waits beside a large body"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%s\r\ncontent-length: %d\r\n\r\n"


def started(run: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = get_context("spawn").Process(target=run, args=arguments, daemon=True)
    process.start()
    return process


def answer(role: str, at_once: bool) -> tuple[bytes, bytes]:
    choice = {"index": 0, "text": "word", "finish_reason": "length", "token_ids": [7], "prompt_token_ids": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    ids = {"prompt_token_ids": list(range(PROMPT_TOKENS))} if role == "prefill" else {}
    body: dict[str, Any] = head | {"choices": [choice | ids]}
    if role == "prefill":
        body["kv_transfer_params"] = LEASE | ({"transfer_mode": "push"} if at_once else {})
    content = json.dumps(body).encode()
    lines = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    events = [json.dumps(head | {"choices": [choice | {"finish_reason": None}]}).encode() for _ in range(CHUNKS)]
    pieces = [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + chunked
    return lines % len(content) + content, stream


def serve(role: str, port: int, at_once: bool) -> None:
    """In a process of its own: an engine that answers each request with the same bytes."""
    whole, stream = answer(role, at_once)

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # the client has left
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, found, rest = head.partition(b"content-length:")
                body = await reader.readexactly(int(rest.split(b"\r\n")[0]) if found else 0)
                writer.write(stream if b'"stream":true' in body else whole)

    async def forever() -> None:
        await (await asyncio.start_server(answer_all, "127.0.0.1", port)).serve_forever()

    uvloop.run(forever())


class Client:
    """One kept connection."""

    async def open(self, port: int) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def ask(self, body: dict[str, Any]) -> None:
        content = json.dumps(body, separators=(",", ":")).encode()
        await self.exchange(POST % (b"content-type: application/json", len(content)) + content)

    async def exchange(self, request: bytes) -> None:
        self._writer.write(request)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in answered[:16]:
            raise RuntimeError(answered.decode())
        if b"chunked" in answered:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await self._reader.readexactly(int(answered.split(b"content-length:")[1].split(b"\r\n")[0]))


def core_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_open(port: int) -> None:
    for _ in range(600):
        with suppress(OSError):
            return (await asyncio.open_connection("127.0.0.1", port))[1].close()
        await asyncio.sleep(0.2)
    raise RuntimeError(f"nothing listens on port {port}")


async def ask_health(port: int, sending: BaseProcess) -> float:
    """The longest wait in ms, while a process lives."""
    client, longest = await Client().open(port), 0.0
    while sending.is_alive():
        begun = time.perf_counter()
        await client.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        longest = max(longest, time.perf_counter() - begun)
        await asyncio.sleep(0.002)
    return longest * 1e3


async def waits(port: int) -> dict[str, float]:
    """By shape of a large body."""
    found = {}
    for name in SHAPES:
        longest = []
        for _ in range(LARGE_ROUNDS):
            sending = started(send, name, port)  # a process of its own: this one only asks
            longest.append(await ask_health(port, sending))
        found[name] = round(statistics.median(longest), 1)
    return found


def send(shape: str, port: int) -> None:
    """In a process of its own: a large body."""
    begin, part, end = SHAPES[shape]
    body = b'{"model":"m","prompt":' + begin + part * (LARGE // len(part)) + end + b"}"
    content = POST % (b"connection: close", len(body)) + body
    with socket.create_connection(("127.0.0.1", port)) as connection:
        with suppress(OSError):  # it may be refused before its end
            connection.sendall(content)
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass


async def measure(name: str, rounds: int) -> dict[str, Any]:
    """One row; that of ``WAITS`` has the waits beside large bodies."""
    stream, at_once = CASES.get(name, (False, False))
    p, d, own = free_port(), free_port(), free_port()
    urls = ["--prefill", f"http://127.0.0.1:{p}", "--decode", f"http://127.0.0.1:{d}"]
    router = subprocess.Popen([sys.executable, "-m", "kvferry.cli.main", "router", "--port", str(own), *urls])
    stubs = [started(serve, role, port, at_once) for role, port in (("prefill", p), ("decode", d))]
    try:
        for port in (p, d, own):
            await until_open(port)
        if name == WAITS:
            return {"case": name, "longest_wait_ms": await waits(own)}
        body = {"model": "m", "prompt": "some words of a prompt " * 90, "max_tokens": 16, "stream": stream}
        prefill = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_TAG}
        decode = body | {"kv_transfer_params": LEASE}
        one, to_p, to_d = [await Client().open(port) for port in (own, p, d)]
        many = [await Client().open(own) for _ in range(CLIENTS)]
        through, direct, per_core = [], [], []

        async def load(client: Client) -> None:
            for _ in range(REQUESTS):
                await client.ask(body)

        for number in range(-2, rounds):
            for _ in range(REQUESTS):
                begun = time.perf_counter()
                await one.ask(body)
                middle = time.perf_counter()
                if at_once:
                    await asyncio.gather(to_p.ask(prefill), to_d.ask(decode))
                else:
                    await to_p.ask(prefill)
                    await to_d.ask(decode)
                if number >= 0:
                    through.append(middle - begun)
                    direct.append(time.perf_counter() - middle)
            before = core_seconds(router.pid)
            await asyncio.gather(*map(load, many))
            if number >= 0:
                per_core.append(core_seconds(router.pid) - before)
        p50 = [statistics.median(times) * 1e3 for times in (through, direct)]
        return {
            "case": name, "through_router_ms_p50": round(p50[0], 3), "direct_ms_p50": round(p50[1], 3),
            "own_cost_ms_p50": round(p50[0] - p50[1], 3),
            "requests_per_core_second": round(rounds * CLIENTS * REQUESTS / sum(per_core)),
        }  # fmt: skip
    finally:
        router.terminate()
        for stub in stubs:
            stub.terminate()
        router.wait(30)


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    rows = []
    for name in CASES:
        rows.append(asyncio.run(measure(name, args.rounds)))
        report.line(rows[-1])
    large = asyncio.run(measure(WAITS, args.rounds))
    report.line(large)
    report.write(args.json, {"rows": rows, "waits": large["longest_wait_ms"]})


if __name__ == "__main__":
    main()
