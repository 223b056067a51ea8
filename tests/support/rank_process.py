"""A rank in a process of its own, driven by JSON lines on stdin: what a test can kill, stop and restart."""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import msgspec

from kvferry.connector.wire.step_plan import LeaseGrant, PeerEngine, RankAddress, StepPlan, pack_ids
from tests.support.fork_server import fork_server


class RemoteRank:
    """The parent's end. Every call waits for its answer, at most ``timeout`` seconds."""

    def __init__(self, timeout: float = 600.0, **rank: Any) -> None:
        self._timeout = timeout
        self._ahead = 0.0
        self.process = fork_server().start(str(Path(__file__).resolve()), json.dumps(rank), text=True)
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._greet(self._answer())

    def _greet(self, hello: dict[str, Any]) -> None:
        self.address = RankAddress(
            hello["pp_rank"],
            hello["tp_rank"],
            hello["host"],
            hello["port"],
            base64.b64decode(hello["incarnation"]),
            hello["key"],
        )
        self.lease_seconds = float(hello["lease_seconds"])

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._timeout)
        except Empty:
            raise TimeoutError(f"the rank's process said nothing for {self._timeout:g} s") from None
        if not line:
            raise ChildProcessError("the rank's process has ended")
        return dict(json.loads(line))

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def fill(self, block_ids: Sequence[int], tokens: int, salt: int = 0) -> None:
        """Write the prompt into these blocks; prompts of another ``salt`` have other bytes everywhere."""
        self.call("fill", block_ids=list(block_ids), tokens=tokens, salt=salt)

    def grant(self, request_id: str, block_ids: Sequence[int], tokens: int) -> bytes:
        """Lease a prompt; the token."""
        token = secrets.token_bytes(16)
        encoded = base64.b64encode(token).decode()
        self.call("grant", request_id=request_id, block_ids=list(block_ids), tokens=tokens, token=encoded)
        return token

    def compute(self, request_id: str, block_ids: Sequence[int], tokens: int, salt: int, step: int) -> bytes:
        """Begin to compute a prompt, which may be read meanwhile, in steps of ``step`` tokens, and lease it at the end.
        Returns the token when the first step is about to begin."""
        token = secrets.token_bytes(16)
        encoded = base64.b64encode(token).decode()
        self.call(
            "compute", request_id=request_id, block_ids=list(block_ids), tokens=tokens, token=encoded, salt=salt,
            step=step,
        )  # fmt: skip
        return token

    def sent(self) -> set[str]:
        """Requests whose lease has ended."""
        return set(self.call("sent")["sent"])

    def load(
        self, request_id: str, token: bytes, engine: PeerEngine, block_ids: Sequence[int], tokens: int, step: int = 0
    ) -> None:
        """Start a hand-over into this rank. ``step``: tokens of a step of a P that still computes the prompt."""
        self.call(
            "load",
            request_id=request_id,
            token=base64.b64encode(token).decode(),
            engine=base64.b64encode(msgspec.msgpack.encode(engine)).decode(),
            block_ids=list(block_ids),
            tokens=tokens,
            step=step,
        )

    def received(self) -> dict[str, bool]:
        """Hand-overs that were reported, and whether they succeeded."""
        return dict(self.call("received")["received"])

    def retried(self) -> dict[str, int]:
        """Attempts of hand-overs that failed and were followed by another since the last call, by the reason."""
        return dict(self.call("retried")["retried"])

    def sleep(self) -> None:
        """Unregister the caches and make their pages inaccessible: whatever touches one ends the process."""
        self.call("sleep")

    def wake(self) -> None:
        """Make the pages accessible and register them again; the bytes are others, and so is ``address``."""
        self._greet(self.call("wake"))

    def let_time_pass(self, seconds: float) -> None:
        """For the transfer thread it is ``seconds`` later from now on, with those of earlier calls."""
        self._ahead += seconds
        self.call("later", seconds=self._ahead)

    def stand_still(self, seconds: float) -> None:
        """The transfer thread does nothing for so long, from its next turn on."""
        self.call("stand still", seconds=seconds)

    def tables(self) -> dict[str, int]:
        """What the transfer thread still has in its tables, by the name of the table: 0 where nothing is left."""
        return dict(self.call("tables"))

    def wipe(self) -> None:
        """Overwrite all caches with bytes that no prompt has."""
        self.call("wipe")

    def is_wiped(self) -> bool:
        """Whether nothing has written to the caches since ``wipe``."""
        return bool(self.call("is_wiped")["wiped"])

    def holds(self, block_ids: Sequence[int], tokens: int, salt: int = 0) -> bool:
        """Whether these blocks have exactly the bytes of the prompt that ``fill`` writes with this ``salt``."""
        return bool(self.call("holds", block_ids=list(block_ids), tokens=tokens, salt=salt)["holds"])

    def cpu_seconds(self) -> float:
        return float(self.call("cpu")["seconds"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended. Until then its memory may still be read."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.process.close()


def remote_peer(ranks: Sequence[RemoteRank], engine_id: str = "engine-p") -> PeerEngine:
    """These processes as the one P engine that D is told of."""
    return PeerEngine(engine_id, len(ranks), 1, ranks[0].lease_seconds, tuple(rank.address for rank in ranks))


PAGE = mmap.PAGESIZE
STEP_SECONDS = 5e-3
"""Before each step of a prompt that a rank computes."""


def protect(caches: Iterable[Any], *, accessible: bool) -> None:
    """Change whether anybody may touch the pages that lie in these tensors as a whole, or in a part of one."""
    libc = ctypes.CDLL(None, use_errno=True)
    for cache in caches:
        storage = cache.untyped_storage()
        first = -(-storage.data_ptr() // PAGE) * PAGE
        nbytes = (storage.data_ptr() + storage.nbytes()) // PAGE * PAGE - first
        protection = mmap.PROT_READ | mmap.PROT_WRITE if accessible else 0
        if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), protection):
            raise OSError(ctypes.get_errno(), "mprotect")


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, into a network namespace of ``ip netns``, and /sys too, where UCX
    looks for devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, slave, recursive, lazily = 0x20000, 1 << 19, 1 << 14, 2  # sched.h, mount.h
    with open(f"/run/netns/{namespace}") as file:
        failed = libc.setns(file.fileno(), 0) or libc.unshare(new_mounts)
    failed = failed or libc.mount(b"none", b"/", None, slave | recursive, None) or libc.umount2(b"/sys", lazily)
    if failed or libc.mount(b"kvferry", b"/sys", b"sysfs", 0, None):
        raise OSError(ctypes.get_errno(), f"network namespace {namespace}")


def hold_up(thread: Any, seconds: float) -> None:
    """The next turn of a transfer thread begins with a sleep."""
    turn = thread._turn

    def late_turn(now: float) -> bool:
        thread._turn = turn
        time.sleep(seconds)
        return bool(turn(now))

    thread._turn = late_turn
    thread.wake()


def main() -> None:

    import torch

    from kvferry.connector.config import Settings
    from tests.handover.prefilling import PrefillingEngine
    from tests.support.ranks import Rank, left_in_tables, let_time_pass, load_plan

    torch.set_num_threads(1)
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # its default is stdout, which has the answers
    arguments = json.loads(sys.argv[1])
    arguments["settings"] = Settings(**arguments.get("settings", {}))
    if namespace := arguments.pop("namespace", ""):
        enter(namespace)
    rank = Rank(**arguments)

    def answer(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    def greet() -> None:
        address = rank.address
        answer(
            pp_rank=address.pp_rank, tp_rank=address.tp_rank, host=address.host, port=address.port,
            incarnation=base64.b64encode(address.incarnation).decode(), key=address.key,
            lease_seconds=rank.settings.lease_seconds,
        )  # fmt: skip

    greet()
    for line in sys.stdin:
        order = json.loads(line)
        match order["command"]:
            case "fill":
                rank.fill(order["block_ids"], order["tokens"], order["salt"])
                answer()
            case "wipe":
                for cache in rank.caches.values():
                    cache.fill_(-1)
                answer()
            case "is_wiped":
                answer(wiped=all(bool((cache == -1).all()) for cache in rank.caches.values()))
            case "holds":
                found, wanted = rank.read(order["block_ids"], order["tokens"]), rank.wanted(order["tokens"])
                answer(holds=torch.equal(found, wanted + order["salt"]))
            case "later":
                let_time_pass(rank, order["seconds"])
                answer()
            case "stand still":
                hold_up(rank.worker._transfer_thread, order["seconds"])
                answer()
            case "tables":
                answer(**left_in_tables(rank))
            case "grant":
                lease = LeaseGrant(
                    order["request_id"],
                    base64.b64decode(order["token"]),
                    order["tokens"],
                    (pack_ids(order["block_ids"]),),
                )
                rank.worker.post(StepPlan(leases=(lease,)))
                answer()
            case "compute":
                engine = PrefillingEngine(
                    [rank], order["block_ids"], order["tokens"], order["request_id"], order["salt"]
                )
                engine.token = base64.b64decode(order["token"])
                engine.begin(step_tokens=order["step"])
                answer()
                for start in range(0, order["tokens"], order["step"]):
                    time.sleep(STEP_SECONDS)
                    engine.step(start, min(start + order["step"], order["tokens"]))
                engine.grant()
            case "sent":
                rank.poll()
                answer(sent=sorted(rank.sent))
            case "load":
                plan = load_plan(
                    order["request_id"],
                    base64.b64decode(order["token"]),
                    msgspec.msgpack.decode(base64.b64decode(order["engine"]), type=PeerEngine),
                    order["block_ids"],
                    0,
                    order["tokens"],
                )
                load = msgspec.structs.replace(plan.loads[0], step_tokens=order["step"])
                rank.worker.post(msgspec.structs.replace(plan, loads=(load,)))
                answer()
            case "received":
                rank.poll()
                answer(received={name: name not in rank.failed for name in rank.received})
            case "retried":
                assert rank.worker.rank_context is not None
                answer(retried=rank.figures()["retried"])
            case "sleep":
                rank.worker.unregister()
                protect(rank.caches.values(), accessible=False)
                answer()
            case "wake":
                protect(rank.caches.values(), accessible=True)
                for cache in rank.caches.values():
                    cache.fill_(-9)
                rank.worker.restore()
                greet()
            case "cpu":
                answer(seconds=time.process_time())
    rank.close()


if __name__ == "__main__":
    main()
