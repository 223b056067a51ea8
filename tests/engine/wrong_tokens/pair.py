"""P of ``run.py``, which may be killed and comes again, and the socket by which D's worker asks for faults.

D's worker asks in the middle of a copy; see ``planted.py``.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import START_SECONDS
from tests.support.served import PatientServerGroup, eventually, kill
from tests.support.server import EngineError, Server


class Prefill:
    """P. After ``kill`` it is started again; who needs it meanwhile waits."""

    def __init__(self, group: PatientServerGroup, start: Callable[[], Server]) -> None:
        self._group, self._start = group, start
        self.server = start()
        self.killed = 0
        self._up = threading.Event()
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def ready(self) -> None:
        """Wait until the server answers."""
        self._group.wait_ready(servers=[self.server])
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
        """Have P compute a prompt, again where P was killed; the ``kv_transfer_params`` for D."""
        while True:
            server, killed = self.wait(), self.killed
            try:
                request = body | {"max_tokens": 1, "kv_transfer_params": PREFILL_TAG}
                answer = server.post("/v1/completions", request, headers={"X-Request-Id": name})
            except EngineError:
                if self.killed == killed:
                    raise
                continue
            params: dict[str, Any] = answer["kv_transfer_params"]
            return params

    def cut(self) -> None:
        """Cut D's connections to P."""
        self._rpc("wt_cut")

    def end_lease(self, name: str, *, reuse: bool = False) -> bool:
        """Whether there was one to end: none where P is killed first."""
        return self._rpc("wt_end_lease", name, str(int(reuse)))

    def _rpc(self, method: str, *args: str) -> bool:
        """The answer of P's worker; False where P is killed first."""
        server, killed = self.wait(), self.killed
        try:
            answer: bool = server.rpc(method, *args)[0]
        except EngineError:
            if self.killed == killed:
                raise
            return False
        return answer


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
