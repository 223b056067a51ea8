"""The self-test: a known pattern from one process to another over each data plane, every byte checked, with its rate.

The two processes are ranks without an engine (``self_test_rank.py``), with a key made for the test. A process that
crashes, or that does not answer in time, is a fault of that plane only.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import zmq

from kvferry.connector.doctor.findings import Finding, fault, ok
from kvferry.connector.doctor.planes import PlaneOnDevice

RANK_PROGRAM = (sys.executable, "-m", "kvferry.connector.doctor.self_test_rank")
ROUNDS = 3
"""Hand-overs that are measured; one before them connects the ranks and allocates staging memory."""
PLANE_SECONDS = 60.0
"""Bound on the test of one plane, with the start of its processes."""
MAX_LINE_BYTES = 1 << 20
_MIB = 1 << 20
_REPORT = "report it with the file of `kvferry doctor --share`; until then set another plane"


class SelfTestError(Exception):
    """The test of one plane has failed; the message gives the reason in one line."""


class RankProcess:
    """The parent's end of one rank."""

    def __init__(self, program: Sequence[str]) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
        )
        self._buffered = b""

    def ask(self, do: str, deadline: float, **arguments: Any) -> Any:
        """Send an order and wait for its answer until ``deadline`` (``time.monotonic``).

        Raises:
            SelfTestError: no answer in time, the process has ended, or it answers with an error.
        """
        self.order(do, **arguments)
        return self.answer(deadline)

    def order(self, do: str, **arguments: Any) -> None:
        """Send an order; ``answer`` takes its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # ``answer`` reports the end
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """The next answer. Raises SelfTestError as ``ask`` does."""
        answer = self._line(deadline)
        if "error" in answer:
            raise SelfTestError(answer["error"])
        return answer["ok"]

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._buffered.partition(b"\n")
            if newline:
                self._buffered = rest
                with suppress(ValueError):  # libraries may print to stdout, too
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise SelfTestError("no answer in time: the process hangs, or the machine is overloaded")
            data = os.read(fd, 1 << 16)
            self._buffered += data
            if not data or len(self._buffered) > MAX_LINE_BYTES:
                status = self._process.wait(10) if not data else "unknown"
                raise SelfTestError(f"its process has ended with status {status}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


class SelfTest:
    """Two processes that test planes in turn. ``host``: the address that the planes listen on. ``program``: the command
    of a rank's process."""

    def __init__(
        self, host: str, *, program: Sequence[str] = RANK_PROGRAM, seconds: float = PLANE_SECONDS, rounds: int = ROUNDS
    ) -> None:
        self._host, self._program, self._seconds, self._rounds = host, program, seconds, rounds
        self._ranks: list[RankProcess] = []

    def run(self, planes: Sequence[PlaneOnDevice]) -> Iterator[Finding]:
        """Test planes, each as one finding."""
        try:
            for plane in planes:
                yield self._judge(plane)
        finally:
            self.close()

    def _judge(self, plane: PlaneOnDevice) -> Finding:
        what = str(plane)
        try:
            wrong, nbytes, rates = self._hand_over(plane, time.monotonic() + self._seconds)
        except SelfTestError as error:
            self.close()  # the next plane gets new processes
            return fault(what, f"the hand-over failed: {error}", _REPORT, expected="every byte within the time")
        if wrong:
            return fault(what, f"{wrong} of {nbytes} bytes are wrong on D", f"do not use this plane; {_REPORT}",
                         expected="P's bytes")  # fmt: skip
        rate = statistics.median(rates)
        return ok(what, f"{rate:.2f} GB/s; each of {nbytes // _MIB} MiB is right, in {len(rates)} hand-overs")

    def _hand_over(self, plane: PlaneOnDevice, deadline: float) -> tuple[int, int, list[float]]:
        """Returns the wrong bytes of all rounds, the bytes of one hand-over, and the rates in GB/s."""
        while len(self._ranks) < 2:
            self._ranks.append(RankProcess(self._program))
        p, d = self._ranks
        secret = zmq.curve_keypair()[1].decode()
        for seed, (rank, side) in enumerate(((p, "p"), (d, "d"))):
            device = _device(plane.device, side)
            rank.order(
                "start", side=side, plane=plane.name, device=device, host=self._host, secret=secret, seed=seed
            )  # fmt: skip
        for rank in (p, d):
            rank.answer(deadline)
        peer = p.ask("address", deadline)
        wrong, nbytes, rates = 0, 0, []
        for number in range(self._rounds + 1):
            request, token = f"self-test {number}", base64.b64encode(secrets.token_bytes(16)).decode()
            p.ask("fill", deadline, salt=number)
            p.ask("grant", deadline, request=request, token=token)
            seconds = max(1.0, deadline - time.monotonic() - 1.0)
            loaded = d.ask("load", deadline, request=request, token=token, peer=peer, seconds=seconds)
            if "failed" in loaded:
                raise SelfTestError(loaded["failed"])
            wrong += d.ask("differing", deadline, salt=number)
            nbytes = loaded["nbytes"]
            if number:
                rates.append(nbytes / max(1, loaded["microseconds"]) / 1e3)
        for rank in (d, p):
            rank.ask("close", deadline)
        return wrong, nbytes, rates

    def close(self) -> None:
        """End the processes."""
        while self._ranks:
            self._ranks.pop().close()


def _device(device: torch.device, side: str) -> str:
    """P takes the first GPU, and D another one where there is one."""
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{1 if side == 'd' and torch.cuda.device_count() > 1 else 0}"
