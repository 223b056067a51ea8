"""Which fault strikes where: drawn by a seed, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.fault_proxy import Kind

WHOLE_STREAM = (Kind.TRUNCATE, Kind.DELAY, Kind.STALL)
"""Faults after which the bytes that did arrive are P's: all that a network does to a TCP stream."""
DAMAGE = (Kind.DROP, Kind.DUPLICATE, Kind.REORDER, Kind.CORRUPT)
"""Faults that only somebody between P and D can do to a stream, or broken memory."""
PROCESS = ("kill P", "kill D", "stop P", "stop D", "restart P")
"""What happens to a process at a byte of a stream."""
HANDSHAKE_BYTES, TO_P_BYTES, TO_D_BYTES, DATA_BYTES = 800, 150, 60, 1_000_000
"""Before which byte of a stream a fault strikes: a handshake has more; so have the control messages of a hand-over
without a handshake, in each direction, and the KV of one prompt."""


@dataclass(frozen=True)
class Case:
    """One fault, and the hand-over that it strikes.

    ``fresh``: D connects anew for this hand-over, so that the handshake can be struck too. ``control``: the fault is on
    the control port, else on the data port. ``process``: what happens to a process at that byte, one of ``PROCESS``.
    ``streamed``: P computes the prompt while D reads it.
    """

    seed: int
    fresh: bool
    control: bool
    upwards: bool
    kind: Kind
    at: int
    nbytes: int
    flip: int
    abruptly: bool
    process: str = ""
    streamed: bool = False

    def __str__(self) -> str:
        what = self.process or self.kind.value
        where = f"{'control' if self.control else 'data'} to {'P' if self.upwards else 'D'}"
        text = f"seed {self.seed}: {what} at byte {self.at} of {where}, {'fresh' if self.fresh else 'used'} connection"
        return f"{text}, while P computes" if self.streamed else text


def draw(seed: int, *, data: bool = True) -> Case:
    """The case of a seed. ``data``: the fault may be on the data port."""
    rng = random.Random(seed)
    control, fresh = rng.random() < 0.6 or not data, rng.random() < 0.5
    upwards = rng.random() < 0.5 if control else False  # D sends next to nothing to a data port
    process = rng.choice(PROCESS) if rng.random() < 0.3 else ""
    kind = Kind.CALL if process else rng.choice(WHOLE_STREAM + DAMAGE)
    if control:
        at = rng.randrange(HANDSHAKE_BYTES if fresh else TO_P_BYTES if upwards else TO_D_BYTES)
    else:
        at = rng.randrange(DATA_BYTES)
    return Case(
        seed, fresh, control, upwards, kind, at, nbytes=rng.choice((1, 7, 64, 500)), flip=1 << rng.randrange(8),
        abruptly=rng.random() < 0.5, process=process, streamed=rng.random() < 0.4,
    )  # fmt: skip


def covering(first: int = 0) -> list[Case]:
    """The first cases from the seed ``first`` on of which each has a fault that none before it had: all kinds of damage
    to the control stream and to the data stream, and all that happens to processes, also while P computes."""
    wanted = {(kind, control, "") for kind in WHOLE_STREAM + DAMAGE for control in (True, False)}
    wanted |= {(Kind.CALL, True, process) for process in PROCESS} | {(Kind.CALL, False, "kill P")}
    streamed = {(Kind.CALL, False, "kill P"), (Kind.TRUNCATE, False, ""), (Kind.STALL, True, "")}
    streamed |= {(Kind.CALL, True, process) for process in PROCESS}
    found: list[Case] = []
    while wanted or streamed:
        case = draw(first)
        first += 1
        key, keys = (case.kind, case.control, case.process), streamed if case.streamed else wanted
        if key in keys:
            keys.remove(key)
            found.append(case)
    return found


def is_promised(case: Case, settings: Mapping[str, Any]) -> bool:
    """Whether a load that is reported as done must have P's bytes. Where nothing protects a stream, and somebody
    changes it, that is not so: see SECURITY.md. ``settings``: of both engines."""
    if case.process or case.kind in WHOLE_STREAM or case.control:
        return True
    return settings["plane"] == "zmq" or bool(settings.get("encrypt"))
