"""The binding to CUDA's driver on a GPU, beside PyTorch, which uses the same contexts and streams."""

from __future__ import annotations

import threading

import pytest
import torch

from kvferry.transport import cuda
from kvferry.transport.errors import TransportError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG = 1_000_000_000
"""Cycles; half a second on any GPU."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def test_the_uuid_is_pytorch_s(device: torch.device) -> None:
    assert cuda.device_uuid(device) == str(torch.cuda.get_device_properties(device).uuid)
    cuda.check_peer_access(device, cuda.device_uuid(device))


def test_a_thread_without_a_context_gets_pytorch_s(device: torch.device) -> None:
    torch.zeros(1, device=device)
    found: list[object] = []

    def run() -> None:
        cuda.bind_context(device)
        event = cuda.Event()
        event.record(cuda.current_stream(device))
        found.extend((event.synchronize(10.0), event.query(), torch.cuda.current_device()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == [True, True, 0]


def test_memory_is_allocated_read_and_freed(device: torch.device) -> None:
    """A read does not wait for what others do on the GPU."""
    memory = cuda.allocate(4 << 20, device)
    assert cuda.address_range(memory.data_ptr() + 5) == (memory.data_ptr(), 4 << 20)
    memory.copy_(torch.arange(4 << 20, dtype=torch.int64).to(torch.uint8))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(LONG)
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    assert cuda.read_bytes(memory.data_ptr() + 250, 10, device) == bytes((250 + n) % 256 for n in range(10))
    assert not event.query()
    assert not event.synchronize(1e-3)
    assert event.synchronize() and event.query()
    address = memory.data_ptr()
    del memory
    with pytest.raises(TransportError, match="cuMemGetAddressRange: CUDA_ERROR"):
        cuda.address_range(address)


def test_a_handle_of_this_process_cannot_be_opened_here(device: torch.device) -> None:
    memory = cuda.allocate(4 << 20, device)
    handle = cuda.ipc_handle(memory.data_ptr())
    assert len(handle) == cuda.HANDLE_BYTES and any(handle)
    with pytest.raises(TransportError, match="cuIpcOpenMemHandle: CUDA_ERROR"):
        cuda.open_handle(handle)


def test_the_current_stream_is_pytorch_s(device: torch.device) -> None:
    assert cuda.current_stream(device) == torch.cuda.current_stream(device).cuda_stream
    other = torch.cuda.Stream(device)
    with torch.cuda.stream(other):
        assert cuda.current_stream(device) == other.cuda_stream


def test_an_upload_is_in_the_order_of_its_stream(device: torch.device) -> None:
    source = torch.arange(100, dtype=torch.int64, pin_memory=True)
    there = torch.zeros(100, dtype=torch.int64, device=device)
    stream, behind = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 10)
    cuda.upload(there.data_ptr(), source.data_ptr(), 800, stream.cuda_stream)
    event = cuda.Event()
    event.record(stream.cuda_stream)
    event.make_stream_wait(behind.cuda_stream)
    assert not event.query()
    with torch.cuda.stream(behind):
        found = there.clone()
    behind.synchronize()
    assert event.query() and found.tolist() == list(range(100))
