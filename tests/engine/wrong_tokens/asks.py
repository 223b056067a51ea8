"""The requests of ``run.py``, drawn by a seed, a plain engine's answers, P, and where D's worker asks for faults."""

from __future__ import annotations

import base64
import json
import random
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import START_SECONDS
from tests.support.served import PatientServerGroup, eventually, kill
from tests.support.server import EngineError, Server

KINDS = (
    "lease ended during the copy",
    "P's pages reused during the copy",
    "lease ended before the load",
    "copy error",
    "connection cut during the copy",
    "given up by the engine",
    "client left",
)
KILLED = "P killed during the copy"
WRONG_BYTE = "wrong byte after the load"
VOCABULARY = range(2, 1000)
LENGTHS = ((2, 31, 1), (33, 130, 4), (131, 400, 4), (401, 700, 1))
"""Tokens of a prompt: from, to, how often."""
CLEAR = 1e-3
"""How much likelier, as a logarithm, the plain engine must find its token than the next one. Engines that compute a
prompt in another batch differ by rounding, about 1e-6: no such difference decides between two tokens then."""
BATCH = 48


@dataclass
class Ask:
    """One request to D. ``handed_over``: P computes its prompt first. ``fault``: what is planted in its hand-over.

    ``tokens`` and ``digest`` [L,T,2] are the plain engine's.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    handed_over: bool = True
    fault: str | None = None
    tokens: list[int] = field(default_factory=list)
    digest: npt.NDArray[np.float32] | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "model", "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip


class Draw:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._seed, self._number = seed, 0

    def words(self, count: int) -> list[int]:
        return [self.rng.choice(VOCABULARY) for _ in range(count)]

    def length(self) -> int:
        low, high, _ = self.rng.choices(LENGTHS, [weight for *_, weight in LENGTHS])[0]
        return self.rng.randint(low, high)

    def ask(self, prompt: list[int], max_tokens: int | None = None, *, handed_over: bool = True) -> Ask:
        self._number += 1
        name = f"wt{self._seed}-{self._number}"
        return Ask(name, prompt, max_tokens or self.rng.randint(4, 12), handed_over)

    def group(self, most: int) -> list[Ask]:
        """Requests that reach D together, of which ``most`` are handed over at most. Half of the groups are one
        request. The prompts of the others begin alike, some are the same, and some are not handed over."""
        if most == 1 or self.rng.random() < 0.5:
            return [self.ask(self.words(self.length()))]
        base = self.words(self.rng.randint(40, 300))
        asks = [self.ask(base + self.words(self.rng.choice((0, 1, 9, 40))))]
        for _ in range(self.rng.randint(1, min(3, most - 1))):
            asks.append(self.ask(base + self.words(self.rng.choice((0, 1, 20, 70)))))
            asks[-1].handed_over = self.rng.random() < 0.75
        return asks

    def groups(self, count: int) -> list[list[Ask]]:
        """With ``count`` hand-overs in all."""
        groups: list[list[Ask]] = []
        left = count
        while left:
            groups.append(self.group(left))
            left -= sum(ask.handed_over for ask in groups[-1])
        return groups

    def plant(self, groups: list[list[Ask]], share: float, kills: int, kinds: Sequence[str] = KINDS) -> None:
        """Plant faults in a ``share`` of the hand-overs, ``kills`` of which kill P. Others that reach D together with a
        fault's request begin alike, so the first of a group is as likely as all others of it."""
        handed = [ask for asks in groups for ask in asks if ask.handed_over]
        firsts = [asks[0] for asks in groups if len(asks) > 1]
        count = max(1, round(share * len(handed)))
        half = self.rng.sample(firsts, min(len(firsts), count // 2))
        chosen = half + self.rng.sample([ask for ask in handed if ask not in half], count - len(half))
        self.rng.shuffle(chosen)
        for number, ask in enumerate(chosen):
            ask.fault = KILLED if number < kills else kinds[number % len(kinds)]


def ask_plain(plain: Server, asks: Sequence[Ask], draw: Draw) -> int:
    """Have a plain engine answer all of them. A prompt whose answer is not clear gets another last token, and again;
    returns how many did."""
    left, redrawn = list(asks), 0
    while left:
        unclear = [ask for start in range(0, len(left), BATCH) for ask in _batch(plain, left[start : start + BATCH])]
        for ask in unclear:
            ask.prompt[-1] = draw.rng.choice(VOCABULARY)
        left, redrawn = unclear, redrawn + len(unclear)
    return redrawn


def _batch(plain: Server, asks: list[Ask]) -> list[Ask]:
    """Ask for several prompts at once. Returns the ones whose answers are not clear."""

    def answer(ask: Ask) -> bool:
        body = ask.body | {"logprobs": 2, "return_tokens_as_token_ids": True}
        choice = plain.post("/v1/completions", body, headers={"X-Request-Id": ask.name})["choices"][0]
        ask.tokens = choice["token_ids"]
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        return all(first - second > CLEAR for first, second in tops)

    with ThreadPoolExecutor(len(asks)) as pool:
        clear = list(pool.map(answer, asks))
    digests = plain.rpc("wt_take")[0]
    for ask in asks:
        ask.digest = digest_of(digests[ask.name], ask)
    return [ask for ask, is_clear in zip(asks, clear, strict=True) if not is_clear]


def digest_of(text: str, ask: Ask) -> npt.NDArray[np.float32]:
    """[L,T,2] from base64."""
    tokens = len(ask.prompt) + ask.max_tokens - 1
    return np.frombuffer(base64.b64decode(text), dtype=np.float32).reshape(-1, tokens, 2)


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
