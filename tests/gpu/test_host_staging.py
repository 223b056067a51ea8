"""Host staging of caches on a GPU: its kernels pack straight into the slots of a plane, and unpack from them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport import cuda
from kvferry.transport.errors import TransportError
from tests.transport.plane_pair import PLANES, SLOT, Pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, HEADS, TOKENS, CONTENT = 2, 4, 32, 240
NBYTES = LAYERS * HEADS * TOKENS * CONTENT
assert NBYTES < SLOT, "an encrypted message is longer than its content"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(params=PLANES)
def pair(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Pair]:
    pair = Pair(request.param, 8, device)
    yield pair
    pair.close()


class Cache:
    """[L, B, N, H, C] uint8 on the GPU, of which a hand-over takes blocks in scattered order."""

    def __init__(self, device: torch.device, block_size: int, block_ids: list[int]) -> None:
        self.device = device
        self.memory = torch.zeros((LAYERS, 16, block_size, HEADS, CONTENT), dtype=torch.uint8, device=device)
        layer, block, token, head, _ = self.memory.stride()
        self.ids = torch.tensor(block_ids, device=device)
        self.pages = Pages(
            bases=self.memory.data_ptr() + layer * np.arange(LAYERS, dtype=np.int64),
            block_ids=np.array(block_ids, dtype=np.int64),
            block_size=block_size, block_stride=block, head_stride=head, token_stride=token,
        )  # fmt: skip

    def fill(self, seed: int) -> torch.Tensor:
        """New bytes everywhere; those of the hand-over."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        self.memory.random_(0, 256, generator=generator)
        return self.taken()

    def taken(self) -> torch.Tensor:
        """[L, T, H, C] by plain indexing."""
        return self.memory[:, self.ids].reshape(LAYERS, TOKENS, HEADS, CONTENT).clone()

    def copy(self, address: int, *, pack: bool) -> None:
        """To or from wire bytes at ``address``, seen to its end."""
        wire = wire_pages(address, LAYERS, HEADS, TOKENS, CONTENT)
        dst, src = (wire, self.pages) if pack else (self.pages, wire)
        copy_pages(dst, src, num_heads=HEADS, num_tokens=TOKENS, content_bytes=CONTENT, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()


def test_a_kernel_packs_into_slots_and_unpacks_from_them(pair: Pair, device: torch.device) -> None:
    ours, theirs = Cache(device, 8, [3, 9, 1, 14]), Cache(device, 16, [5, 2])
    sender, receiver = pair.join()
    for tag in range(24):  # every slot more than once
        wanted = theirs.fill(tag)
        receiver.expect(tag, NBYTES)
        slot = pair.acquired(sender)
        theirs.copy(slot.address, pack=True)
        sender.send(slot, NBYTES, tag)
        message = pair.arrived(receiver)
        ours.copy(message.address, pack=False)
        message.release()
        assert torch.equal(ours.taken(), wanted)
    assert pair.p.staging_bytes >= SLOT


def test_a_kernel_finishes_after_the_channel_was_closed(pair: Pair, device: torch.device) -> None:
    ours, theirs = Cache(device, 8, [3, 9, 1, 14]), Cache(device, 16, [5, 2])
    sender, receiver = pair.join()
    wanted = theirs.fill(1)
    receiver.expect(1, NBYTES)
    slot = pair.acquired(sender)
    theirs.copy(slot.address, pack=True)
    sender.send(slot, NBYTES, 1)
    message = pair.arrived(receiver)
    late = pair.acquired(sender)
    pair.close()
    theirs.copy(late.address, pack=True)
    sender.give_back(late)
    ours.copy(message.address, pack=False)
    message.release()
    assert torch.equal(ours.taken(), wanted)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_refusal_is_ours_alone_and_ends_there(device: torch.device, read_only: bool) -> None:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    cuda.register_host(address, len(memory), device, read_only=False)
    with pytest.raises(TransportError, match="cannot be page-locked"):
        cuda.register_host(address, len(memory), device, read_only=read_only)  # it is already
    assert torch.arange(100, device=device).sum().item() == 4950, "nobody else hears of it"
    cuda.unregister_host(address, device)
    cuda.unregister_host(address, device)  # refused, and logged
    assert torch.arange(100, device=device).sum().item() == 4950
