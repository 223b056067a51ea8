"""An oracle of ``sum64``, word by word in Python's numbers, by the text of ``kernels/checksum.py`` alone; and scattered
pages that are packed and unpacked with checksums, on a device."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.kernels.checksum import WireCheck, checksum
from kvferry.kernels.paged_copy import Pages
from kvferry.kernels.paged_copy_triton import DevicePages, check_wire

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def key(number: int) -> int:
    value = number + 1
    value = (value ^ value >> 16) * 0x7FEB352D & MASK32
    value = (value ^ value >> 15) * 0x846CA68B & MASK32
    return value ^ value >> 16


def mixed(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK64
    return value ^ value >> 33


def sum64(message: bytes, tag: int) -> int:
    words = [int.from_bytes(message[at : at + 4], "little") for at in range(0, len(message), 4)]
    total = sum(word * key(number) for number, word in enumerate(words)) & MASK64
    return mixed(total ^ mixed(tag ^ mixed(len(message))))


NO_FAULT = True, 0, 0, 0, 1, 1, 1
"""Of ``found_on``."""
SIZES = [(1, 1, 1, 1), (1, 1, 1, 13), (2, 3, 5, 6), (2, 2, 7, 20), (2, 1, 40, 512), (2, 1, 33, 24), (1, 2, 130, 2)]
"""Layers, heads, tokens and content bytes of messages: rows of every alignment, one tile and several."""

TAG = 12345 << 32 | 7
BLOCK = 8


def found_on(
    device: torch.device, layers: int, heads: int, tokens: int, content: int, sms: int | None
) -> tuple[object, ...]:
    """Whether the kernel's checksum is the host's and, for short messages, the oracle's; and verdicts, which are 0 for
    a message that fits: of the unpack, of the look without a copy, the bytes that came back wrong; then of a message
    with a wrong first byte, a wrong last byte, and a wrong byte of the checksum."""
    rng = np.random.default_rng(content)
    blocks = -(-tokens // BLOCK)
    ids = rng.permutation(blocks + 2)[:blocks].astype(np.int64)
    pages = torch.from_numpy(rng.integers(0, 256, (layers, blocks + 2, heads * BLOCK * content), dtype=np.uint8))
    pages = pages.to(device)
    bases = pages.data_ptr() + np.arange(layers, dtype=np.int64) * pages.stride(0)
    sides = Pages(bases, ids, BLOCK, heads * BLOCK * content, BLOCK * content, content)
    there = DevicePages(sides, num_heads=heads, num_tokens=tokens, content_bytes=content, device=device)
    nbytes = layers * heads * tokens * content
    wire = torch.zeros(nbytes + 32, dtype=torch.uint8, device=device)
    address = wire.data_ptr() + -wire.data_ptr() % 16
    first = address - wire.data_ptr()
    verdict = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def copy(check: WireCheck, *, to_wire: bool) -> int:
        verdict.fill_(-1)
        there.copy(
            address, to_wire=to_wire, check=check, layer=0, num_layers=layers, token=0, num_tokens=tokens, sms=sms
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        return int(verdict[0])

    expects = WireCheck("sum64", TAG, verdict.data_ptr())
    before = pages.clone()
    copy(WireCheck("sum64", TAG), to_wire=True)
    on_host = wire.cpu()[first:].numpy()
    theirs = int.from_bytes(on_host[nbytes : nbytes + 8].tobytes(), "little")
    right = theirs == checksum("sum64", on_host.ctypes.data, nbytes, TAG)
    if nbytes < 10_000:
        right = right and theirs == sum64(on_host[:nbytes].tobytes(), TAG)
    blank = torch.ones_like(pages).copy_(before)
    blank[:, torch.from_numpy(ids).to(device)] = 0
    pages.copy_(blank)
    verdicts = [copy(expects, to_wire=False)]
    check_wire(address, (layers, heads, tokens, content), device, sms, expects)
    if device.type == "cuda":
        torch.cuda.synchronize()
    verdicts.append(int(verdict[0]))
    copied = DevicePages(sides, num_heads=heads, num_tokens=tokens, content_bytes=content, device=device)
    again = torch.zeros_like(wire)
    place = again.data_ptr() + -again.data_ptr() % 16
    copied.copy(place, to_wire=True, layer=0, num_layers=layers, token=0, num_tokens=tokens, sms=sms)
    came_back = again[place - again.data_ptr() :][:nbytes]
    verdicts.append(int((came_back != wire[first:][:nbytes]).sum()))
    for at in (0, nbytes - 1, nbytes + 3):
        wire[first + at] ^= 0x10
        verdicts.append(copy(expects, to_wire=False))
        wire[first + at] ^= 0x10
    return right, *verdicts
