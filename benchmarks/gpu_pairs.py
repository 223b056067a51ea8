"""The processes of ``gpu_planes.py``: P and D of each contender, each on the GPU that it may see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from gpu_cases import Config, Point
from gpu_methods import MOVING

HERE = Path(__file__).resolve().parent
OPEN_SECONDS, MOVE_SECONDS, END_SECONDS = 180.0, 30.0, 5.0
PUSHES = ("ucxx_raw",)
"""Kinds whose source has to work while the target receives."""


class ProcessError(Exception):
    """A contender could not do what it was told; one line."""


class Process:
    """One end; what it prints besides its answers is kept in ``printed``."""

    def __init__(self, config: Config, gpus: str, environ: dict[str, str]) -> None:
        self.config = config
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        shown = {"CUDA_VISIBLE_DEVICES": gpus} if config.device == "cuda" else {}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_processes.py"), msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            env=os.environ | {"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"} | shown | environ,
        )
        self._buffered = b""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ProcessError(self._ended()) from None

    def answer(self, seconds: float = MOVE_SECONDS) -> Any:
        """Raises ContenderError where the process fails, ends, or says nothing for so long, which ends it."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffered:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.process.kill()
                self.process.wait()
                raise ProcessError(f"no answer within {seconds:g} s; {self.last_words()}")
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                raise ProcessError(self._ended())
            self._buffered += data
        line, self._buffered = self._buffered.split(b"\n", 1)
        reply = json.loads(line)
        if "error" in reply:
            raise ProcessError(reply["error"])
        return reply["answer"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def _ended(self) -> str:
        return f"the {self.config.role} ended with status {self.process.wait()}; {self.last_words()}"

    def text(self) -> str:
        """All that it printed."""
        self.printed.seek(0)
        return self.printed.read().decode(errors="replace")

    def last_words(self) -> str:
        lines = self.text().strip().splitlines()
        return f"last line printed: {lines[-1][:200]}" if lines else "it printed nothing"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Ask it to end; without it, what a library printed may be lost."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Wait for the end, or make it."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self._selector.close()
        self.process.stdout.close()


def gpus() -> list[str]:
    """Those that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]


class Pair:
    """P and D of one kind of contender, or one process where ``alone``. ``open`` is told to all before any answers."""

    def __init__(
        self,
        kind: str,
        device: Any,
        points: tuple[Point, ...],
        settings: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        alone: bool = False,
    ) -> None:
        self.kind, self.points = kind, points
        first, second = (gpus() * 2)[:2]
        config = Config(kind, "target", device, points, settings or {})
        both = f"{first},{second}" if kind == "torch" else second
        self.target = Process(config, both, environ or {})
        self.ends = [self.target]
        if not alone:
            as_source = msgspec.structs.replace(config, role="source")
            self.ends.insert(0, Process(as_source, first, environ or {}))
        self.source = self.ends[0]
        for end in self.ends:
            end.tell("open")

    def join(self) -> None:
        """Wait until both are ready, and introduce them."""
        for end in self.ends:
            end.answer(OPEN_SECONDS)
        if self.source is self.target:
            return
        introduce(self.source, self.target)

    @property
    def alive(self) -> bool:
        return all(end.alive for end in self.ends)

    def kill(self) -> None:
        for end in self.ends:
            end.process.kill()
            end.end()
            end.close()

    def move(self, way: str, point: str, repeats: int = 1) -> list[float]:
        return move(self.source, self.target, way, point, repeats)

    def verify(self, way: str, point: str) -> float:
        """Seconds of one transfer that is known to have brought P's bytes."""
        return verify(self.source, self.target, way, point)


def introduce(source: Process, target: Process, peer: str = "main") -> None:
    blob = source.ask("exchange", blob=None)
    while blob is not None:
        blob = target.ask("exchange", blob=blob, peer=peer)
        if blob is not None:
            blob = source.ask("exchange", blob=blob)


def move(source: Process, target: Process, way: str, point: str, repeats: int, peer: str = "main") -> list[float]:
    """Seconds of each of ``repeats`` transfers, taken on D; of those that begin on P, by the clock that both read."""
    alone = source is target
    ticket = None if alone else source.ask("serve", point=point, way=way, repeats=repeats)
    pushes = not alone and source.config.kind in PUSHES
    if pushes:
        source.tell("synchronize")
    target.tell("move", point=point, way=way, repeats=repeats, ticket=ticket, peer=peer)
    try:
        seconds: list[float] = target.answer()
    except ProcessError:
        with contextlib.suppress(ProcessError):  # the first error tells more
            _settle(source, alone, pushes)
        raise
    starts = _settle(source, alone, pushes)
    if way.endswith(MOVING):
        return [end - start for start, end in zip(starts, seconds, strict=True)]
    return seconds


def _settle(source: Process, alone: bool, serving: bool) -> Any:
    if serving:
        return source.answer()
    return None if alone else source.ask("synchronize")


def verify(source: Process, target: Process, way: str, point: str, peer: str = "main") -> float:
    """One transfer. Raises ContenderError unless D holds P's bytes after it, and did not before."""
    target.ask("scrub", point=point, way=way)
    wanted = source.ask("digest", point=point, way=way, side="p")
    if target.ask("digest", point=point, way=way, side="d") == wanted:
        raise ProcessError("D holds P's bytes before they are moved: the check would see nothing")
    (seconds,) = move(source, target, way, point, 1, peer)
    if target.ask("digest", point=point, way=way, side="d") != wanted:
        raise ProcessError("other bytes on D than on P")
    return seconds


def transports(printed: str) -> list[str]:
    """What UCX chose for large messages, out of what ``UCX_PROTO_INFO=y`` prints: operation, method, transport."""
    found: dict[str, None] = {}
    operation = ""
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 2:
            operation = cells[1]
        elif len(cells) == 3 and re.search(r"\binf$", cells[0]):
            found[f"{operation}: {cells[1]}, {cells[2]}"] = None
    return list(found)
