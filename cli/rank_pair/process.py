"""The parent's end of the process of one rank of a pair (``rank.py``)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 1 << 20


class PairError(Exception):
    """A hand-over was not possible; the message gives the reason in one line."""


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
            PairError: no answer in time, the process has ended, or it answers with an error.
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
        """The next answer. Raises PairError as ``ask`` does."""
        answer = self._line(deadline)
        if "error" in answer:
            raise PairError(answer["error"])
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
                raise PairError("no answer in time: the process hangs, or the machine is overloaded")
            data = os.read(fd, 1 << 16)
            self._buffered += data
            if not data or len(self._buffered) > MAX_LINE_BYTES:
                status = self._process.wait(10) if not data else "unknown"
                raise PairError(f"its process has ended with status {status}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
