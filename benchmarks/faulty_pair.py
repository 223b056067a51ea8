"""The engines of ``wrong_tokens.py``: P that may be killed and comes again, D, and what lies between them.

D reaches P's control port by way of a proxy of this process, which can cut the connection. D's worker asks this process
to act in the middle of a copy; see ``planted_faults.py``.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from examples.lib.pd_router import PREFILL_TAG
from tests.support.served import START_SECONDS, PatientServerGroup, eventually, kill
from tests.support.server import EngineError, Server

RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: a connection that is closed is reset."""


class Proxy:
    """Carries the connections to one port until they are cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                try:
                    theirs = socket.create_connection(self._target)
                except OSError:
                    ours.close()
                    continue
                with self._lock:
                    self._sockets += [ours, theirs]
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Reset all connections. New ones are carried."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Prefill:
    """P. After ``kill`` it is started again; who needs it meanwhile waits."""

    def __init__(self, group: PatientServerGroup, start: Callable[[], Server]) -> None:
        self._group, self._start = group, start
        self.server = start()
        self.killed = 0
        self._up = threading.Event()
        self._proxies: dict[tuple[str, int], Proxy] = {}
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def ready(self) -> None:
        """Wait until the server answers."""
        self._group.wait_ready(START_SECONDS, [self.server])
        self._up.set()

    def kill(self) -> None:
        """End all processes of P at once, and begin to start it again."""
        with self._lock:
            if not self._up.is_set():
                return
            self._up.clear()
            self.killed += 1
        kill(self.server)
        eventually(lambda: not self.server.alive, "P has ended")
        threading.Thread(target=self._again, daemon=True).start()

    def _again(self) -> None:
        try:
            self._group.stop(self.server)
            self.server = self._start()
            self.ready()
        except BaseException as error:
            self.error = error
            self._up.set()

    def wait(self) -> Server:
        """The server, once it is up.

        Raises:
            EngineError: it did not come again.
        """
        self._up.wait(2 * START_SECONDS)
        if self.error is not None or not self._up.is_set():
            raise EngineError(f"P was killed and did not start again: {self.error!r}")
        return self.server

    def leg(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        """Have P compute a prompt, again where P was killed; the ``kv_transfer_params`` for D, by way of the proxy."""
        while True:
            server, killed = self.wait(), self.killed
            try:
                request = body | {"max_tokens": 1, "kv_transfer_params": PREFILL_TAG}
                answer = server.post("/v1/completions", request, timeout=120, headers={"X-Request-Id": name})
            except EngineError:
                if self.killed == killed:
                    raise
                continue
            params: dict[str, Any] = answer["kv_transfer_params"]
            for rank in params["kvferry"]["ranks"]:
                rank[3] = self._proxy(rank[2], rank[3]).port
            params["remote_port"] = params["kvferry"]["ranks"][0][3]
            return params

    def _proxy(self, host: str, port: int) -> Proxy:
        with self._lock:
            if (host, port) not in self._proxies:
                self._proxies[host, port] = Proxy(host, port)
            return self._proxies[host, port]

    def cut(self) -> None:
        """Cut D's connections to P."""
        with self._lock:
            proxies = list(self._proxies.values())
        for proxy in proxies:
            proxy.cut()

    def end_lease(self, name: str, *, reuse: bool = False) -> bool:
        """Whether there was one to end: none where P is killed first."""
        server, killed = self.wait(), self.killed
        try:
            ended: bool = server.rpc("wt_end_lease", name, str(int(reuse)))[0]
        except EngineError:
            if self.killed == killed:
                raise
            return False
        return ended

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()


class Actor:
    """Does what D's worker asks for in the middle of a copy: ``act(name, kind)``. D waits meanwhile."""

    def __init__(self, path: Path, act: Callable[[str, str], None]) -> None:
        self._act = act
        self.errors: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)  # of an earlier run in this folder
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                asker, _ = self._listener.accept()
                with asker, asker.makefile("rb") as lines:
                    wanted = json.loads(lines.readline())
                    try:
                        self._act(wanted["name"], wanted["kind"])
                    except Exception as error:  # the benchmark reports it; D must not wait for ever
                        self.errors.append(f"{wanted['kind']} of {wanted['name']}: {error!r}")
                    with suppress(OSError):
                        asker.sendall(b".")

    def close(self) -> None:
        self._listener.close()
