"""A rank in a process of its own: what a test can kill, stop and restart."""

from __future__ import annotations

import ctypes
import mmap
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from tests.handover.prefilling import PrefillingEngine
from tests.support.inside import thread_of
from tests.support.ranks import Rank, grant, left_in_tables, let_time_pass, load_plan
from tests.support.remote import Remote
from tests.support.timed import Timed
from tests.support.turns import Usage

STEP_SECONDS = 5e-3
"""Before each step of a prompt that a rank computes."""


class RemoteRank(Remote):
    """The tests' end of a ``HostedRank``, whose methods it has."""

    def __init__(self, **rank: Any) -> None:
        super().__init__(f"{__name__}:HostedRank", **rank)
        self.answer()
        self.address: RankAddress
        self.address, self.lease_seconds = self.call("where")

    def wake(self) -> None:
        """The pages are accessible and registered again; the bytes are others, and so is ``address``."""
        self.call("restore")
        self.address, _ = self.call("where")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def remote_peer(ranks: Sequence[RemoteRank], engine_id: str = "engine-p") -> PeerEngine:
    """These processes as the one P engine that D is told of."""
    return PeerEngine(engine_id, len(ranks), 1, ranks[0].lease_seconds, tuple(rank.address for rank in ranks))


class HostedRank:
    """In its process. ``rank``: options of ``Rank``; ``namespace``: a network namespace of ``ip netns``."""

    def __init__(self, namespace: str = "", settings: dict[str, Any] | None = None, **rank: Any) -> None:
        if namespace:
            enter(namespace)
        self._usage: Usage | None = None
        self.rank = Rank(settings=Timed(**settings or {}), **rank)
        self.fill, self.close = self.rank.fill, self.rank.close
        self._ahead = 0.0

    def where(self) -> tuple[RankAddress, float]:
        return self.rank.address, self.rank.settings.lease_seconds

    def grant(self, request_id: str, block_ids: Sequence[int], tokens: int, token: bytes | None = None) -> bytes:
        """Lease a prompt; the token, which other ranks of an engine get from the first."""
        return grant([self.rank], request_id, block_ids, tokens, token)

    def compute(self, request_id: str, block_ids: Sequence[int], tokens: int, salt: int, step: int) -> Iterator[bytes]:
        """Compute a prompt, which may be read meanwhile, in steps of ``step`` tokens, and lease it at the end. The
        token is given when the first step is about to begin."""
        engine = PrefillingEngine([self.rank], block_ids, tokens, request_id, salt)
        engine.begin(step_tokens=step)
        yield engine.token
        for start in range(0, tokens, step):
            time.sleep(STEP_SECONDS)
            engine.step(start, min(start + step, tokens))
        engine.grant()

    def sent(self) -> set[str]:
        """Requests whose lease has ended."""
        self.rank.poll()
        return self.rank.sent

    def load(
        self, request_id: str, token: bytes, engine: PeerEngine, block_ids: Sequence[int], tokens: int, step: int = 0
    ) -> None:
        """Start a hand-over into this rank. ``step``: tokens of a step of a P that still computes the prompt."""
        plan = load_plan(request_id, token, engine, block_ids, 0, tokens)
        load = msgspec.structs.replace(plan.loads[0], step_tokens=step)
        self.rank.worker.post(msgspec.structs.replace(plan, loads=(load,)))

    def received(self) -> dict[str, bool]:
        """Hand-overs that were reported, and whether they succeeded."""
        self.rank.poll()
        return {name: name not in self.rank.failed for name in self.rank.received}

    def retried(self) -> dict[str, int]:
        """Attempts of hand-overs that failed and were followed by another since the last call, by the reason."""
        return dict(self.rank.figures()["retried"])

    def usage(self) -> dict[str, Any]:
        """What this process holds, and what its turns and its log were like since the last call."""
        self._usage = self._usage or Usage(self.rank)
        return self._usage.take()

    def sleep(self) -> None:
        """Unregister the caches and make their pages inaccessible: whatever touches one ends the process."""
        self.rank.worker.unregister()
        protect(self.rank.caches.values(), accessible=False)

    def restore(self) -> None:
        protect(self.rank.caches.values(), accessible=True)
        self.wipe(-9)
        self.rank.worker.restore()

    def let_time_pass(self, seconds: float) -> None:
        """For the transfer thread it is ``seconds`` later from now on, with those of earlier calls."""
        self._ahead += seconds
        let_time_pass(self.rank, self._ahead)

    def stand_still(self, seconds: float) -> None:
        """The transfer thread does nothing for so long, from its next turn on."""
        hold_up(thread_of(self.rank), seconds)

    def tables(self) -> dict[str, int]:
        """What the transfer thread still has in its tables, by the name of the table: 0 where nothing is left."""
        return left_in_tables(self.rank)

    def wipe(self, element: int = -1) -> None:
        """Overwrite all caches with bytes that no prompt has."""
        for cache in self.rank.caches.values():
            cache.fill_(element)

    def is_wiped(self) -> bool:
        """Whether nothing has written to the caches since ``wipe``."""
        return all(bool((cache == -1).all()) for cache in self.rank.caches.values())

    def holds(self, block_ids: Sequence[int], tokens: int, salt: int = 0) -> bool:
        """Whether these blocks have exactly the bytes of the prompt that ``fill`` writes with this ``salt``."""
        return torch.equal(self.rank.read(block_ids, tokens), self.rank.wanted(tokens) + salt)

    def cpu_seconds(self) -> float:
        return time.process_time()


def protect(caches: Iterable[torch.Tensor], *, accessible: bool) -> None:
    """Change whether anybody may touch the pages that lie in these tensors as a whole, or in a part of one."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for cache in caches:
        storage = cache.untyped_storage()
        first = -(-storage.data_ptr() // page) * page
        nbytes = (storage.data_ptr() + storage.nbytes()) // page * page - first
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
    turn = thread.turn

    def late_turn(now: float) -> bool:
        thread.turn = turn
        time.sleep(seconds)
        return bool(turn(now))

    thread.turn = late_turn
    thread.wake()
