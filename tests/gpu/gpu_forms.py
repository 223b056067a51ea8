"""Which engines hand over to which in the GPU tests, and on which GPUs of a machine they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FLASH, TRITON = "FLASH_ATTN", "TRITON_ATTN"
PLANES = ("cuda_ipc", "ucx")


@dataclass(frozen=True)
class Form:
    """One engine. ``beside``: a D on the first GPU, as every P's first rank is. ``heads``: KV heads of its model.
    ``policy``: of failed loads."""

    role: Literal["P", "D"]
    tensor: int = 1
    pipeline: int = 1
    attention: str = FLASH
    plane: str = "auto"
    block: int = 16
    layout: str = "NHD"
    beside: bool = False
    heads: int = 8
    policy: str = "recompute"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        place = "-beside" if self.beside else ""
        how = f"{self.attention.partition('_')[0].lower()}-{self.block}{self.layout}-{self.plane}"
        return f"{self.role}-tp{self.tensor}pp{self.pipeline}-{how}-{self.heads}heads-{self.policy}{place}"

    @property
    def blocks(self) -> int:
        """Of the block pool: few, so that little traffic scatters all of them."""
        return 16384 // self.block

    def gpus(self, there: int) -> tuple[int, ...]:
        """The GPU of each rank, of ``there``: P's from the first upwards, D's from the last downwards.

        With GPUs for all ranks nothing is shared; with fewer, ranks that hand over to each other still are on two GPUs
        where that can be. Raises ValueError where one engine has more ranks than there are GPUs.
        """
        if self.ranks > there:
            raise ValueError(f"{self.name} has {self.ranks} ranks, one to a GPU, and there are {there}")
        if self.role == "P" or self.beside:
            return tuple(range(self.ranks))
        return tuple(range(there - 1, there - 1 - self.ranks, -1))


@dataclass(frozen=True)
class Case:
    """One pair of engines."""

    name: str
    p: Form
    d: Form

    @property
    def needs(self) -> int:
        """GPUs."""
        return max(self.p.ranks, self.d.ranks, 1 if self.d.beside else 2)


def cases() -> Iterator[Case]:
    """Both planes for every form. Most D's differ from P in block size, attention backend or layout as well."""
    flash, triton = Form("P"), Form("P", attention=TRITON)
    alone = {"cuda_ipc": Form("D", plane="cuda_ipc"), "ucx": Form("D", plane="ucx", attention=TRITON, block=64)}
    for plane, d in alone.items():
        yield Case(f"tp1-tp1-flash-{plane}", flash, d)
        yield Case(f"tp1-tp1-triton-{plane}", triton, d)
    yield Case("tp1-tp1-in-step", flash, Form("D", plane="cuda_ipc", attention=TRITON, block=32, policy="fail"))
    yield Case("tp2-tp2-in-step", Form("P", tensor=2), Form("D", tensor=2, plane="cuda_ipc", block=32, policy="fail"))
    for plane, attention in zip(PLANES, (TRITON, FLASH), strict=True):
        beside = Form("D", plane=plane, attention=attention, block=32, beside=True)
        yield Case(f"same-gpu-{plane}", flash, beside)
    for plane, attention in zip(PLANES, (FLASH, TRITON), strict=True):
        two = Form("D", tensor=2, plane=plane, attention=attention, block=64, layout="HND")
        yield Case(f"tp2-tp2-{plane}", Form("P", tensor=2), two)
        yield Case(f"tp1-tp2-{plane}", flash, two)
        yield Case(f"tp2-tp1-{plane}", Form("P", tensor=2), alone[plane])
        yield Case(f"pp2-tp2-{plane}", Form("P", pipeline=2), two)
        three = Form("D", tensor=2, plane=plane, attention=attention, heads=6)
        yield Case(f"tp3-tp2-{plane}", Form("P", tensor=3, heads=6), three)
