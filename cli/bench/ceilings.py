"""What this machine reaches without KVFerry, beside which a plane's rate is read."""

from __future__ import annotations

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from kvferry.cli.rank_pair.pair import device_of

MAX_BYTES = 256 << 20
_PIECE = 1 << 20


class Ceiling(msgspec.Struct, frozen=True):
    """``gb_per_second``: the median."""

    what: str
    nbytes: int
    gb_per_second: float


def ceilings(device: torch.device, nbytes: int, rounds: int) -> list[Ceiling]:
    """A copy of ``nbytes`` that lie together, from P's device to D's; in host memory also TCP over loopback."""
    nbytes = min(nbytes, MAX_BYTES)
    copies = [copy_seconds(device, nbytes) for _ in range(rounds)]
    found = [Ceiling("one contiguous copy", nbytes, _rate(nbytes, copies))]
    if device.type == "cpu":
        found.append(Ceiling("TCP over loopback", nbytes, _rate(nbytes, [tcp_seconds(nbytes) for _ in range(rounds)])))
    return found


def _rate(nbytes: int, seconds: list[float]) -> float:
    return nbytes / statistics.median(seconds) / 1e9


def copy_seconds(device: torch.device, nbytes: int) -> float:
    """A copy from one tensor to another, the pages of both touched before."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device_of(device, side)) for side in "pd")
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(target.device)
    begun = time.perf_counter()
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - begun


def tcp_seconds(nbytes: int) -> float:
    """One connection over loopback, its ends in two threads, which hold no lock while they send and receive."""
    piece, into = memoryview(bytes(_PIECE)), memoryview(bytearray(_PIECE))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()

        def send() -> None:
            for start in range(0, nbytes, _PIECE):
                sender.sendall(piece[: min(_PIECE, nbytes - start)])

        with ThreadPoolExecutor(1) as pool, receiver:
            begun, left = time.perf_counter(), nbytes
            sent = pool.submit(send)
            while left:
                left -= receiver.recv_into(into[: min(_PIECE, left)])
            sent.result()
            return time.perf_counter() - begun
