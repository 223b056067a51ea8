"""Engines that are drained by the router's HTTP interface, end, and come back at their addresses under load."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from kvferry.router.engines import Role
from tests.router.stand_ins import PUSH, Clients, Engine, Front, decode_engine, prefill_engine, routed, served
from tests.router.test_run_time import OFTEN, TOKEN, change
from tests.support.engines import free_port
from tests.support.served import eventually


class Restarted:
    """An engine at one address, with a new engine id in each of its lives. While it is away, it refuses connections."""

    def __init__(self, role: Role) -> None:
        self.role, self.port, self.lives = role, free_port(), 0
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine: Engine
        self._stack = ExitStack()

    def start(self) -> None:
        self.lives += 1
        if self.role is Role.PREFILL:
            self.engine = prefill_engine(0.01, params=PUSH | {"remote_engine_id": f"{self.port}-{self.lives}"})
        else:
            self.engine = decode_engine(gap=0.005)
        self._stack.enter_context(served(self.engine.app, socket.create_server(("127.0.0.1", self.port))))

    def stop(self) -> None:
        self._stack.close()


def seen(front: Front, engine: Restarted) -> tuple[str, int]:
    """Its state, and how many requests the router counts for it."""
    (found,) = [each for each in front.get("/router/status").json()["engines"] if each["url"] == engine.url]
    return found["state"], found["requests"]


def test_a_rolling_restart_loses_no_request() -> None:
    """One P and one D are drained and resumed, the others removed and added again."""
    engines = [Restarted(role) for role in (Role.PREFILL, Role.DECODE) for _ in range(2)]
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        p, d = ([engine.url for engine in engines if engine.role is role] for role in Role)
        front = stack.enter_context(routed(p, d, admin_token=TOKEN, checks=OFTEN))
        clients = Clients(front)
        with clients.running():
            clients.more(12)
            for number, engine in enumerate(engines):
                change(front, url=engine.url, drain=True)
                eventually(lambda e=engine: seen(front, e)[1] == 0, "its requests have ended", 120)
                if number % 2:
                    change(front, "DELETE", url=engine.url)
                engine.stop()
                clients.more(12)
                engine.start()
                change(front, url=engine.url, **({"role": engine.role} if number % 2 else {"drain": False}))
                eventually(lambda e=engine: seen(front, e)[0] == "up", "its health check has passed", 120)
                eventually(lambda e=engine: e.engine.seen, "it is asked again", 120)
        after = front.get("/router/status").json()
    assert not clients.lost and not after["failed_legs"] and "decode_only" not in after["handovers"]
    assert after["handovers"]["at_once"] > after["handovers"]["serial"] > 0
    assert set(after["requests"]) == {"200"} and all(engine.lives == 2 for engine in engines)
