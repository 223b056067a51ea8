"""A P and a D in processes of their own, and hand-overs between them: what faults, outages and fuzzing have in common.

Where nothing goes on by itself the ranks' clocks are moved, so that nobody waits for a deadline."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from tests.handover.prefilling import PrefillingEngine
from tests.support.engines import free_port
from tests.support.inside import thread_of
from tests.support.ranks import Rank, Timed, grant, left_in_tables, let_time_pass, load_plan
from tests.support.remote import Remote
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
        return dict(self.rank.counts("num_retries"))

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


TOKENS, STEP, THEIRS, OURS = 100, 40, [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
HANDSHAKE, TRANSFER, LEASE = 10.0, 10.0, 20.0
TIMES: dict[str, Any] = {
    "handshake_timeout_seconds": HANDSHAKE, "transfer_timeout_seconds": TRANSFER, "lease_seconds": LEASE,
    "ask_hold_seconds": 5.0,
}  # fmt: skip
"""Settings of both processes, by which the checks go."""
DEADLINE = HANDSHAKE + 2 * TRANSFER + 5.0
"""Seconds of D's clock from the last byte that passed until a load must be reported."""
QUIET_SECONDS = 0.15
"""After so much time without a byte between P and D nothing goes on by itself: the clocks are moved by one second."""
PATIENCE = 600.0
"""Seconds of real time after which a case has failed; no case comes near, on a slow host either."""


class Broken(AssertionError):
    """An invariant does not hold. The message names the case."""


class RankPair:
    """Hand-overs from ``p`` to ``d``, each of a prompt that none had before.

    Args:
        settings: of both, with the plane.
        own: more options of P's rank and of D's, by "p" and "d"; their ``settings`` go beside those of both.
        form: options of both ranks.
    """

    def __init__(self, settings: dict[str, Any], own: dict[str, dict[str, Any]] | None = None, **form: Any) -> None:
        self.port = free_port()  # of P, also after a restart
        self.settings, self._own, self._form = settings, own or {}, form
        self._number = 0
        self.case = str(settings["plane"])
        self.p, self.d = self.start("p"), self.start("d")

    def start(self, role: str) -> RemoteRank:
        own = dict(self._own.get(role, {}))
        settings = self.settings | {"side_channel_port": self.port if role == "p" else 0} | own.pop("settings", {})
        return RemoteRank(engine_id=f"engine-{role}", settings=settings, **self._form, **own)

    def restart(self, role: str) -> None:
        """End a process, in whatever state it is, and start another one in its place."""
        getattr(self, role).close()
        setattr(self, role, self.start(role))

    def peer(self) -> PeerEngine:
        return remote_peer([self.p])

    @property
    def passed(self) -> int:
        """Bytes that passed between them so far, where somebody counts them."""
        return 0

    def close(self) -> None:
        """End both processes."""
        for rank in (self.p, self.d):
            rank.close()

    # --- hand-overs -----------------------------------------------------------------------------------------------

    def begin(self, streamed: bool = False) -> str:
        """Start a hand-over; its name. ``streamed``: P computes the prompt while D reads it."""
        self._number += 1
        name = f"req-{self._number}"
        self.d.wipe()
        self.p.fill(THEIRS, TOKENS, salt=-self._number if streamed else self._number)
        if streamed:  # over what other requests have left there
            token = self.p.compute(name, THEIRS, TOKENS, self._number, STEP)
        else:
            token = self.p.grant(name, THEIRS, TOKENS)
        self.d.load(name, token, self.peer(), OURS, TOKENS, STEP * streamed)
        return name

    def holds(self) -> bool:
        """Whether D has P's bytes of the last hand-over."""
        return bool(self.d.holds(OURS, TOKENS, self._number))

    def reuse(self) -> None:
        """P computes another prompt in the same pages."""
        self.p.fill(THEIRS, TOKENS, salt=-self._number)

    def reported(self, name: str) -> bool:
        """Whether D reports the load as done. D reports it once (``Rank.poll``) and within its deadline."""
        passed, waited = self.passed, 0.0
        while name not in self.d.received():
            if self.quiet(lambda: name in self.d.received()):
                waited = 0.0 if self.passed != passed else waited + 1.0
                passed = self.passed
                self.expect(waited <= DEADLINE, f"D reports a load within {DEADLINE:g} s of the last byte")
                self.d.let_time_pass(1.0)
        return bool(self.d.received()[name])

    def ended(self, name: str) -> bool:
        """The same, and a load that is done has P's bytes."""
        done = self.reported(name)
        self.expect(not done or self.holds(), "a load that was reported as done has P's bytes")
        return done

    def freed(self, name: str) -> None:
        """P has its pages back: by the release, or when its clock is one second past the lease."""
        if self.quiet(lambda: name in self.p.sent()):
            self.p.let_time_pass(LEASE + 1.0)
        self.until(lambda: name in self.p.sent(), f"P has its pages back {LEASE + 1:g} s after the load ended")

    def works(self, streamed: bool = False) -> None:
        """A hand-over succeeds, and nothing is left in a table of either side."""
        for _ in range(20):
            name = self.begin(streamed)
            done = self.ended(name)
            self.freed(name)
            if done:
                return self.settle()
            self.d.let_time_pass(2.0)  # a failed link answers for a second
            time.sleep(0.3)
        raise Broken(f"{self.case}: no clean hand-over succeeds afterwards")

    def settle(self) -> None:
        """Both live, and their tables are empty, at the latest when the clocks are some time-outs later."""
        for rank in (self.p, self.d):
            self.expect(not rank.process.ended.is_set(), "both processes live")

            def left(rank: RemoteRank = rank) -> list[str]:
                return [f"{count} {name}" for name, count in rank.tables().items() if count and name != "links"]

            self.until(lambda left=left: not left(), f"no table keeps anything: {left()}", rank)  # type: ignore[misc]

    # --- waiting --------------------------------------------------------------------------------------------------

    def quiet(self, condition: Callable[[], bool] = lambda: False) -> bool:
        """Whether no byte passes for a moment, in which the condition does not hold."""
        passed, end = self.passed, time.monotonic() + QUIET_SECONDS
        while not condition():
            if time.monotonic() > end:
                return self.passed == passed
            time.sleep(0.005)
        return False

    def until(self, condition: Callable[[], bool], text: str, moved: RemoteRank | None = None) -> None:
        """Wait for a condition; the clock of ``moved`` goes on wherever nothing happens by itself."""
        end = time.monotonic() + PATIENCE
        while not condition():
            self.expect(time.monotonic() < end, text)
            time.sleep(0.01)
            if moved is not None and self.quiet(condition):
                moved.let_time_pass(1.0)

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(f"{self.case}: {text}")


def run_parser(description: str, *, seconds: float | None = None, count: int | None = None) -> argparse.ArgumentParser:
    """Of a program that goes on by seeds. ``args.seed`` is one in any case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="repeats a run")
    parser.add_argument("--count", type=int, default=count)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser
