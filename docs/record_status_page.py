"""Records the picture in docs/routers.md: the router's status page, before real engines under load, in a real browser.

    python docs/record_status_page.py [--seconds 300]

Needs what ``make install`` installs, and the command ``chromium``. The page's plots reach back five minutes.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

from tests.support.pd_client import stream
from tests.support.served import PatientServerGroup, prompt
from tests.support.server import Server
from tests.support.tiny_model import ModelSpec, build_model

TARGET = Path(__file__).with_name("observability") / "router.png"
WIDTH, HEIGHT = 1060, 1250
SHARED_TOKENS = 256
"""Of the prompts of one conversation, so that P is chosen by prefix."""


class Page:
    """One page in a headless Chromium, by its DevTools protocol over two pipes: messages end with a zero byte."""

    def __init__(self, browser: str, profile: str, url: str) -> None:
        down, self._commands = os.pipe()
        self._answers, up = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (down, up)]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        command = [browser, *options, f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}", "about:blank"]
        with open(os.devnull, "w") as nothing:
            files = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 2)]
            files += [(os.POSIX_SPAWN_DUP2, end, number) for number, end in zip((3, 4), ends, strict=True)]
            self._process = os.posix_spawn(browser, command, os.environ, file_actions=files, setpgroup=0)
        for end in (down, up, *ends):
            os.close(end)
        self._number, self._session, self._rest = 0, "", b""
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer of one method; events before it are dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._answers, 1 << 20)
                if not part:
                    raise SystemExit("the browser has ended")
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        for end in (self._commands, self._answers):
            os.close(end)


def work(router: Server, seconds: float) -> None:
    """Conversations whose prompts grow, three at a time, at changing lengths."""
    end = time.monotonic() + seconds

    def conversation(seed: int) -> None:
        rng = random.Random(seed)
        ids = prompt(SHARED_TOKENS, seed)
        for turn in range(4):
            ids = [*ids, *prompt(rng.randrange(50, 500), 1000 * seed + turn)]
            if time.monotonic() < end:
                tokens = rng.randrange(8, 64)
                stream(router.url, {"model": "model", "prompt": ids, "max_tokens": tokens, "ignore_eos": True})

    with ThreadPoolExecutor(3) as pool:
        seed = 1
        while time.monotonic() < end:
            list(pool.map(conversation, range(seed, seed + 3)))
            seed += 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the engines are under load")
    seconds = parser.parse_args().seconds
    browser = shutil.which("chromium")
    if browser is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name, PatientServerGroup(Path(name) / "logs") as group:
        model = build_model(Path(name) / "model", ModelSpec(layers=4))
        prefill, first, second = (
            group.engine(role, model, kv_bytes=False) for role in ("prefill", "decode-1", "decode-2")
        )
        group.wait_ready()
        router = group.router(prefill, first, arguments=("--decode", second.url))
        page = Page(browser, str(Path(name) / "profile"), f"{router.url}/")
        try:
            with ThreadPoolExecutor(1) as pool:
                load = pool.submit(work, router, seconds)
                time.sleep(max(seconds - 5, 0))
                TARGET.write_bytes(page.picture())
                load.result()
        finally:
            page.close()
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
