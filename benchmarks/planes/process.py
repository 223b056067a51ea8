"""The processes of ``planes.py``: P and D of each contender, each on the GPU that it may see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planes.points import TCP, Config, Contender, Point

HERE = Path(__file__).resolve().parent
OPEN_SECONDS, MOVE_SECONDS, END_SECONDS = 180.0, 30.0, 5.0
SERVES = ("channel", "raw sockets")
"""Kinds whose source works until D has everything, and whose D waits for each transfer before P begins with it; of the
others D reads from a source that sleeps."""
WRITES = "nixl raw write"
"""D writes into P's memory."""
SPINS = "nixl"
"""The kind whose threads spin while they have nothing to do: on few cores they stop meanwhile."""


class ProcessError(Exception):
    """A contender could not do what it was told; one line."""


class Orders:
    """What one end is ordered to do, and answers: lines of JSON over a socket."""

    def __init__(self, config: Config, sock: socket.socket) -> None:
        self.config, self._sock, self._lines = config, sock, sock.makefile("rb")

    def ended(self) -> str:
        """Why it says no more."""
        return "the source has ended; its messages are on the other host"

    def send(self, line: bytes) -> None:
        try:
            self._sock.sendall(line)
        except OSError:
            raise ProcessError(self.ended()) from None

    def receive(self, seconds: float) -> bytes:
        """A line. Raises ProcessError where the end has ended, or says nothing for so long, which ends it."""
        try:
            self._sock.settimeout(seconds)
            line = self._lines.readline()
        except TimeoutError:
            self.close(0)
            raise ProcessError(f"no answer within {seconds:g} s; {self.ended()}") from None
        except OSError:
            line = b""
        if not line:
            raise ProcessError(self.ended())
        return line

    def tell(self, do: str, **arguments: Any) -> None:
        self.send(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, seconds: float = MOVE_SECONDS) -> Any:
        """Raises ProcessError as ``receive`` does, and where the end fails."""
        reply = json.loads(self.receive(seconds))
        if "error" in reply:
            raise ProcessError(reply["error"])
        return reply["answer"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def close(self, seconds: float = END_SECONDS) -> None:
        """Wait so long for the end, or make it."""
        self._lines.close()
        self._sock.close()


class Process(Orders):
    """One end; what it prints besides its answers is kept in ``printed``."""

    def __init__(self, config: Config, gpus: str, environ: dict[str, str]) -> None:
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        shown = {"CUDA_VISIBLE_DEVICES": gpus} if config.device == "cuda" else {}
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "ends.py"), msgspec.json.encode(config).decode()],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self.printed,
                env=os.environ | {"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"} | shown | environ,
            )  # fmt: skip
        super().__init__(config, ours)

    def ended(self) -> str:
        lines = self.text().strip().splitlines()
        said = f"last line printed: {lines[-1][:200]}" if lines else "it printed nothing"
        return f"the {self.config.role} ended with status {self.process.wait()}; {said}"

    def text(self) -> str:
        """All that it printed."""
        self.printed.seek(0)
        return self.printed.read().decode(errors="replace")

    def end(self) -> None:
        """Ask it to end; without it, what a library printed may be lost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self, seconds: float = END_SECONDS) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        super().close()


def gpus() -> list[str]:
    """Those that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]


class Pair:
    """P and D of one kind of contender, or one process where ``alone``. ``open`` is told to all before any answers."""

    def __init__(self, contender: Contender, device: Any, points: tuple[Point, ...]) -> None:
        settings = contender.settings
        config = Config(contender.kind, "target", device, points, settings)
        environ = {"UCX_TLS": "tcp"} if contender.link == TCP else {}
        if settings.get("plane") == "ucx":
            environ["UCX_PROTO_INFO"] = "y"
        first, second = (gpus() * 2)[:2]
        self.target = Process(config, second, environ)
        self.ends = [self.target]
        if not contender.alone:
            self.ends.insert(0, Process(msgspec.structs.replace(config, role="source"), first, environ))
        self.source = self.ends[0]
        self._stops = contender.kind == SPINS and device == "cpu"
        self._channel = contender.name if contender.kind == "channel" else None
        for end in self.ends:
            end.tell("open")

    def join(self) -> None:
        """Wait until both are ready, and introduce them."""
        for end in self.ends:
            end.answer(OPEN_SECONDS)
        if self.source is not self.target:
            introduce(self.source, self.target)
        if self._channel is not None:  # else its connection would wait for P longer than a plane permits
            self.move(self._channel, self.target.config.points[0].name)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for end in self.ends if self._stops else ():
            end.process.send_signal(number)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Ask both to end."""
        self._signal(signal.SIGCONT)
        for end in self.ends:
            end.end()

    def move(self, way: str, point: str, repeats: int = 1) -> list[float]:
        """Seconds of each of ``repeats`` transfers, taken on D."""
        with self._awake():
            return move(self.source, self.target, way, point, repeats)

    def verify(self, way: str, point: str) -> None:
        """One transfer. Raises ProcessError unless it brings the bytes."""
        with self._awake():
            verify(self.source, self.target, way, point)


def introduce(source: Orders, target: Orders, peer: str = "main") -> None:
    """Blobs go to and fro until one is None."""
    blob = source.ask("exchange", blob=None)
    while blob is not None:
        blob = target.ask("exchange", blob=blob, peer=peer)
        if blob is not None:
            blob = source.ask("exchange", blob=blob)


def move(source: Orders, target: Orders, way: str, point: str, repeats: int, peer: str = "main") -> list[float]:
    """Seconds of each of ``repeats`` transfers, taken on D."""
    alone, serves = source is target, target.config.kind in SERVES
    if serves and repeats > 1:
        return [second for _ in range(repeats) for second in move(source, target, way, point, 1, peer)]
    order = {"point": point, "way": way, "repeats": repeats}
    ticket = None if alone else source.ask("serve", **order)
    if serves:
        target.ask("serve", **order)
    target.tell("move", ticket=ticket, peer=peer, **order)
    if serves:
        source.tell("synchronize")
    try:
        seconds: list[float] = target.answer()
    except ProcessError:
        with contextlib.suppress(ProcessError):  # the first error tells more
            _settle(source, alone, serves)
        raise
    _settle(source, alone, serves)
    return seconds


def _settle(source: Orders, alone: bool, serves: bool) -> None:
    if serves:
        source.tell("rest")  # a line on its stdin ends its work
        source.answer()
        source.answer()
    elif not alone:
        source.ask("synchronize")


def verify(source: Orders, target: Orders, way: str, point: str, peer: str = "main") -> float:
    """One transfer. Raises ProcessError unless one end has the other's bytes after it, and had not before."""
    ends = [(source, "p"), (target, "d")]
    (giver, its_side), (taker, other) = ends[::-1] if way == WRITES else ends
    taker.ask("scrub", point=point, way=way)
    wanted = giver.ask("digest", point=point, way=way, side=its_side)
    if taker.ask("digest", point=point, way=way, side=other) == wanted:
        raise ProcessError("the bytes are there before they are moved: the check would see nothing")
    (seconds,) = move(source, target, way, point, 1, peer)
    if taker.ask("digest", point=point, way=way, side=other) != wanted:
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
