"""Host staging of caches on a GPU: its kernels can use the slots of a plane, and chunks go to and from page-locked
memory by way of a buffer of the GPU."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.token_sharding import TokenBlocks
from kvferry.connector.geometry.view import CacheView
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.copies import BOUNCE_BYTES, GpuCopies
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport import cuda
from kvferry.transport.channels import Copy
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


class Chunks:
    """[L, B, H, N, C] on the GPU, and as many slots of page-locked memory as chunks."""

    LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 64, 4, 16, 256

    def __init__(self, device: torch.device, copies: GpuCopies, num_slots: int) -> None:
        shape = self.LAYERS, self.BLOCKS, self.HEADS, self.TOKENS, self.CONTENT
        self.memory = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        layer, block, head, token, _ = self.memory.stride()
        view = CacheView(
            layers=tuple("abcd"), bases=tuple(self.memory.data_ptr() + layer * n for n in range(self.LAYERS)),
            num_blocks=self.BLOCKS, num_heads=self.HEADS, block_size=self.TOKENS, content_bytes=self.CONTENT,
            block_stride=block, head_stride=head, token_stride=token, blocks_per_page=1, dtype="uint8",
            device=str(device),
        )  # fmt: skip
        geometry = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(self.HEADS,), regions=())
        self.caches = RankCaches(geometry, (view,), copies)
        self.slots = torch.zeros(num_slots, self.memory.nbytes, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize(device)

    def box(self, ids: list[int]) -> PageBox:
        view = self.caches.views[0]
        table = TokenBlocks(np.array(ids, dtype=np.int64), view.block_size, view.block_stride, 0)
        return PageBox(0, 0, self.LAYERS, 0, self.HEADS, 0, len(ids) * self.TOKENS, table)

    def wanted(self, ids: list[int]) -> torch.Tensor:
        """The chunk in wire order, by plain indexing."""
        return self.memory[:, ids].transpose(1, 2).reshape(-1).cpu()


def ended(copy: Copy) -> None:
    deadline = time.monotonic() + 60
    while not copy.done and time.monotonic() < deadline:
        time.sleep(1e-4)
    assert copy.done and not copy.error


def test_chunks_of_all_sizes_come_through_buffers(device: torch.device) -> None:
    """What is packed is in its slot once its copy is done, and what is unpacked in the pages. All are under way
    together."""
    copies = GpuCopies(device, 8)
    numbers = np.random.default_rng(5)
    counts = [2, 16, 3, 40, 64, 5, 63, 1, 33, 64, 17, 50]
    p, d = (Chunks(device, copies, len(counts)) for _ in range(2))
    ids = [numbers.permutation(p.BLOCKS)[:count].tolist() for count in counts]
    sizes = [p.caches.nbytes(p.box(of)) for of in ids]
    assert min(sizes) < BOUNCE_BYTES < max(sizes)
    packs = [p.caches.pack(slot.data_ptr(), p.box(of)) for slot, of in zip(p.slots, ids, strict=True)]
    for copy, slot, of, size in zip(packs, p.slots, ids, sizes, strict=True):
        ended(copy)
        assert torch.equal(slot[:size], p.wanted(of)) and not slot[size:].any()
    for slot, back, of, size in zip(p.slots, d.slots, ids, sizes, strict=True):  # pages of these chunks overlap
        copy = d.caches.unpack(slot.data_ptr(), d.box(of))
        other = d.caches.pack(back.data_ptr(), d.box(of))
        ended(copy)
        ended(other)
        assert torch.equal(back[:size], slot[:size]) and torch.equal(d.wanted(of), slot[:size])
    copies.close()


def test_a_chunk_waits_for_the_engine(device: torch.device) -> None:
    """Its kernels do, in either direction: the pages may be in use."""
    copies = GpuCopies(device, 8)
    chunks = Chunks(device, copies, 2)
    ids = list(range(chunks.BLOCKS))
    packed, unpacked = chunks.slots
    for copy in (chunks.caches.pack(packed.data_ptr(), chunks.box(ids)) for _ in range(3)):
        ended(copy)  # what the first ones cost is over
    engine = torch.cuda.Stream(device)
    with torch.cuda.stream(engine):
        torch.cuda._sleep(500_000_000)
        chunks.memory.fill_(7)
        copies.wait_event(copies.record_event())
    into, out = chunks.box(ids[:32]), chunks.box(ids[32:])
    copy = chunks.caches.unpack(unpacked.data_ptr(), into)
    late = chunks.caches.pack(packed.data_ptr(), out)
    assert not copy.done and not late.done
    ended(copy)
    ended(late)
    assert (packed[: chunks.caches.nbytes(out)] == 7).all()
    assert not chunks.memory[:, :32].any() and (chunks.memory[:, 32:] == 7).all()
    copies.close()
