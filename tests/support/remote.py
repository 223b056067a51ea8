"""Objects in processes of their own, from the fork server: what a test can call, kill, stop and start again."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from types import GeneratorType
from typing import Any

from tests.support.fork_server import fork_server

PROGRAM = "from tests.support.remote import serve; serve()"


class RemoteError(RuntimeError):
    """A call raised an error, which is in the text, or its process has ended or says nothing."""


class Remote:
    """The tests' end. ``kind``: the object's class, as ``module:Class``. Every method of the object is one here."""

    timeout = 600.0
    """Seconds for each answer."""

    program = PROGRAM

    def __init__(self, kind: str, **options: Any) -> None:
        """``options``: those of the object. Its making answers ``None``, as the first call."""
        self.connection, theirs = Pipe()
        with theirs:
            files = theirs.fileno(), 2
            self.process = fork_server().start_with(files, "-c", self.program, kind)
        self.start("", **options)

    def start(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call, and do not wait for the answer."""
        self.connection.send((method, arguments, options))

    def answer(self) -> Any:
        """The answer of the first call that has had none. Raises RemoteError."""
        if not self.connection.poll(self.timeout):
            raise RemoteError(f"the process said nothing for {self.timeout:g} s")
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RemoteError(f"the process has ended, status {self.process.wait(60)}") from None
        if kind == "error":
            raise RemoteError(value)
        return value

    def order(self, method: str, **options: Any) -> None:
        """Call, and take no notice of the answer, nor of an end of the process."""
        with suppress(OSError):
            self.start(method, **options)

    def events(self) -> Iterator[Any]:
        """What has come since, without the answers. Raises EOFError where the process has ended, RemoteError where a
        call raised an error."""
        while not self.connection.closed and self.connection.poll():
            try:
                kind, value = self.connection.recv()
            except ConnectionError:
                raise EOFError from None
            if kind == "error":
                raise RemoteError(value)
            if kind == "event":
                yield value

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.start(method, *arguments, **options)
        return self.answer()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended. Until then its memory may still be read."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.process.close()
        self.connection.close()


class RemoteApart(Remote):
    """In a process namespace of its own."""

    program = "from tests.support.apart import leave; leave(); " + PROGRAM


# --- the other end --------------------------------------------------------------------------------------------------

_connections: list[Connection] = []
_sends = threading.Lock()


def tell(event: Any, kind: str = "event") -> None:
    """Send what no call has asked for. Any thread may."""
    with _sends:
        _connections[0].send((kind, event))


def serve() -> None:
    """Be the object. A method that yields gives its answer so, and goes on. Between calls ``idle``, where there is one,
    is called again and again; it returns how many seconds to wait for a call."""
    import torch

    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(":")
    connection = Connection(0)
    _connections.append(connection)
    served: Any = None
    idle: Callable[[], float | None] = lambda: None  # noqa: E731
    while True:
        try:
            while not connection.poll(idle()):
                pass
            method, arguments, options = connection.recv()
        except EOFError:
            break
        try:
            if method:
                value = getattr(served, method)(*arguments, **options)
            else:
                served, value = getattr(import_module(module), name)(**options), None
                idle = getattr(served, "idle", idle)
            rest = value if isinstance(value, GeneratorType) else iter(())
            tell(next(value) if isinstance(value, GeneratorType) else value, "answer")
        except Exception:
            rest = iter(())
            tell(traceback.format_exc(), "error")
        for _ in rest:
            pass
    served.close()
