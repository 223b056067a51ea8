"""Engines by a DNS name, with a real name server: the router's process resolves as its host does, by /etc/resolv.conf.

The router runs in a network namespace of its own, whose resolv.conf names the test's server.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from examples.two_node.run_netns import enter
from tests.router.stand_ins import PARAMS, Engine, Site, decode_engine, prefill_engine, served
from tests.support.engines import python_path
from tests.support.name_server import NameServer
from tests.support.served import eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, ip"),
]
T = TypeVar("T")
PORT, ROUTER = 8000, "http://127.0.0.1:9000"
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
COMMAND = """
from kvferry.cli.main import app
from kvferry.router import command, health, membership
membership.LOOK_SECONDS = 0.1
command.Checks = lambda interval, timeout: health.Checks(interval, timeout=60.0)
app()
"""
"""``kvferry router`` that looks more often, and whose health checks wait longer."""


class Host:
    """A network namespace with a name server, in which engines and a router run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._name = f"kvferry-dns-{os.getpid()}"
        self._stack = stack
        self._log = folder / "router.log"
        settings = Path("/etc/netns") / self._name
        settings.mkdir(parents=True)
        stack.callback(shutil.rmtree, settings)
        (settings / "resolv.conf").write_text(RESOLV_CONF)
        subprocess.run(["ip", "netns", "add", self._name], check=True, timeout=60)
        stack.callback(subprocess.run, ["ip", "netns", "delete", self._name], check=True, timeout=60)
        subprocess.run(["ip", "-n", self._name, "link", "set", "lo", "up"], check=True, timeout=60)
        self._inside = stack.enter_context(ThreadPoolExecutor(1, initializer=enter, initargs=(self._name,)))
        listener = self.run(lambda: socket.socket(type=socket.SOCK_DGRAM))
        listener.bind(("127.0.0.1", 53))
        self.names = NameServer(listener)
        stack.callback(self.names.close)

    def run(self, call: Callable[[], T]) -> T:
        """Its result; sockets that it makes are in the namespace."""
        return self._inside.submit(call).result(120)

    def engine(self, address: str, engine: Engine) -> None:
        listener = self.run(lambda: socket.create_server((address, PORT)))
        self._stack.enter_context(served(engine.app, listener))

    def router(self, *arguments: str) -> None:
        command = ["ip", "netns", "exec", self._name, sys.executable, "-c", COMMAND, "router", *arguments]
        with self._log.open("wb") as log:
            environment = os.environ | {"PYTHONPATH": python_path()}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.terminate)

    def get(self, path: str) -> Any:
        """None: the router does not answer yet."""
        try:
            return self.run(lambda: httpx.get(ROUTER + path, trust_env=False, timeout=60)).json()
        except httpx.ConnectError:
            return None

    def ask(self) -> httpx.Response:
        return self.run(lambda: Site(ROUTER).ask({"prompt": "x"}))

    def engines(self) -> dict[str, tuple[str, str]]:
        """Role and state, by address."""
        found = self.get("/router/status")["engines"]
        return {httpx.URL(each["url"]).host: (each["role"], each["state"]) for each in found}

    def until(self, **wanted: tuple[str, str]) -> None:
        by_address = {f"127.0.0.{name[1:]}": state for name, state in wanted.items()}
        eventually(lambda: self.engines() == by_address, f"the engines are {by_address}", 120)

    def looks_in_vain(self, why: str) -> None:
        """Wait until the router has asked for P's name again, several times, and has logged why it has no answer."""
        asked, logged = self.names.questions["p.test"], len(self._log.read_text())
        eventually(lambda: self.names.questions["p.test"] > asked + 4, "it asks again", 120)
        said = f"the DNS name p.test of prefill engines is not usable, and nothing is changed: {why}"
        eventually(lambda: said in self._log.read_text()[logged:], "it says why", 120)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(tmp_path, stack)


P, D = ("prefill", "up"), ("decode", "up")
NO_ANSWER, NO_NAME = "Temporary failure in name resolution", "Name or service not known"
"""EAI_AGAIN, EAI_NONAME."""


def test_engines_follow_the_name_server(host: Host) -> None:
    """One comes, one goes; a server that is silent, and a name that is gone, change nothing; a router that starts
    without its name server has engines as soon as the server answers."""
    p, d = prefill_engine(), decode_engine()
    for address, engine in (("127.0.0.2", p), ("127.0.0.3", d), ("127.0.0.4", p), ("127.0.0.5", d)):
        host.engine(address, engine)
    host.names.addresses = {"p.test": ["127.0.0.2"], "d.test": ["127.0.0.3"]}
    host.names.silent = True
    host.router("--prefill", f"dns://p.test:{PORT}", "--decode", f"dns://d.test:{PORT}", "--health-interval", "0.2")
    eventually(lambda: (host.get("/health") or {}).get("status") == "down", "it serves without engines", 120)
    host.names.silent = False
    host.until(_2=P, _3=D)
    assert host.ask().json() == {"text": "from D"} and d.seen[-1][0]["kv_transfer_params"] == PARAMS

    host.names.addresses["p.test"] = ["127.0.0.2", "127.0.0.4"]
    host.until(_2=P, _3=D, _4=P)
    host.names.addresses["p.test"] = ["127.0.0.4"]
    host.until(_3=D, _4=P)

    host.names.silent = True
    host.looks_in_vain(NO_ANSWER)
    host.until(_3=D, _4=P)
    assert host.ask().status_code == 200
    host.names.silent = False
    host.names.addresses["d.test"] = ["127.0.0.3", "127.0.0.5"]
    host.until(_3=D, _4=P, _5=D)

    del host.names.addresses["p.test"]
    host.looks_in_vain(NO_NAME)
    host.until(_3=D, _4=P, _5=D)
    host.names.addresses["p.test"] = ["127.0.0.2"]
    host.until(_2=P, _3=D, _5=D)
    assert host.ask().json() == {"text": "from D"} and d.seen[-1][0]["kv_transfer_params"] == PARAMS
