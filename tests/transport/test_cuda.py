"""CUDA's driver against a stand-in that is compiled with CUDA's own header, and who may map P's memory by it."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
import torch

from kvferry.kernels.launch import CompiledKernel, StreamBuffers
from kvferry.transport import cuda
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane, IpcChannel, IpcMemory, IpcOffer
from kvferry.transport.planes.pull import MAX_FILE_BYTES, MemoryFileAddress
from tests.support.apart import need_namespaces
from tests.support.fork_server import fork_server
from tests.support.inside import forget_driver

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
CONTEXT = "c000000000000028"
"""Of GPU 0, whose handle is 40."""
EVENT, STREAM, OWN_STREAM = "e000000000000001", 0x7FFF12345678ABCD, "5000000000000001"
ADDRESS = 0x7F1234567890
HANDLE = bytes(3 * i % 256 for i in range(64))
OUT_OF_MEMORY, NO_DEVICE = 2, 100


class Fake:
    """The stand-in, and what it has recorded."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def _int(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, f"fake_{name}")

    def set(self, name: str, value: int) -> None:
        self._int(name).value = value

    def fail(self, call: str, status: int = OUT_OF_MEMORY) -> None:
        (ctypes.c_char * 64).in_dll(self.library, "fake_failing").value = call.encode()
        self.set("status", status)

    def without_handles(self) -> None:
        ctypes.c_bool.in_dll(self.library, "fake_has_handles").value = False

    def reset(self) -> None:
        self.fail("", 0)
        self.set("pending", 0)
        self.set("num_arguments", 0)
        ctypes.c_bool.in_dll(self.library, "fake_has_handles").value = True
        self.calls()

    def calls(self) -> list[str]:
        """The calls since the last look: name, ``held`` or ``released``, arguments."""
        log = (ctypes.c_char * (1 << 16)).in_dll(self.library, "fake_log")
        found = log.value.decode().splitlines()
        log.value = b""
        return found


def compiled(folder: Path, source: str, name: str) -> Path:
    """A shared library from C, against the header of CUDA that comes with Triton."""
    triton = pytest.importorskip("triton")
    header = Path(triton.__file__).parent / "backends/nvidia/include"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not (header / "cuda.h").exists():
        pytest.skip("needs a C compiler and cuda.h")
    constants = {name.lstrip("_"): value for name, value in vars(cuda).items() if name.isupper() and type(value) is int}
    defined = [f"-D{name}={value}" for name, value in constants.items()]
    (folder / f"{name}.c").write_text(source)
    library = folder / f"{name}.so"
    options = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wmissing-prototypes", f"-I{header}", *defined]
    subprocess.run([compiler, *options, f"{folder / name}.c", "-o", library, "-ldl"], check=True, timeout=800)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("fake_libcuda.c").read_text()
    return compiled(tmp_path_factory.mktemp("libcuda"), source, "libcuda")


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(cuda, "LIBRARY", str(library))
    forget_driver()
    fake = Fake(library)
    fake.reset()
    cuda.load()
    assert fake.calls() == ["cuInit released 0"]
    yield fake
    fake.reset()
    forget_driver()


def launch() -> None:
    buffers = StreamBuffers(GPU, STREAM)
    about = SimpleNamespace(shared=4096, num_warps=8, num_ctas=1, global_scratch_size=0, profile_scratch_size=0)
    kernel = CompiledKernel(SimpleNamespace(metadata=about, function=0x7EEE00000001), num_scalars=3)
    assert kernel.is_plain
    buffers.launch(kernel, 77, ADDRESS, (5, -1, 1 << 62))


RETAINED = ["cuDeviceGet held 0", "cuDevicePrimaryCtxRetain released 40"]
PUSHED, POPPED = f"cuCtxPushCurrent_v2 held {CONTEXT}", "cuCtxPopCurrent_v2 held"
STEPS: dict[str, tuple[Callable[[], object], object, list[str]]] = {
    "bind_context": (lambda: cuda.bind_context(GPU), None, [*RETAINED, f"cuCtxSetCurrent held {CONTEXT}"]),
    "upload": (
        lambda: cuda.upload(ADDRESS, ADDRESS + 1, 1 << 40, STREAM), None,
        ["cuMemcpyHtoDAsync_v2 held 7f1234567890 7f1234567891 10000000000 7fff12345678abcd"],
    ),
    "launch": (
        launch, None,
        [f"cuLaunchKernel held 7eee00000001 77,1,1 256,1,1 4096 7fff12345678abcd 0: {ADDRESS} 5 -1 {1 << 62} 0 0"],
    ),
    "address_range": (
        lambda: cuda.address_range(0xFEDCBA9876543210), (0xFEDCBA9876500000, 1 << 41),
        ["cuMemGetAddressRange_v2 released fedcba9876543210"],
    ),
    "ipc_handle": (
        lambda: cuda.ipc_handle(ADDRESS), HANDLE,
        ["cuPointerGetAttribute released 10 7f1234567890", "cuIpcGetMemHandle released 7f1234567890"],
    ),
    "open_handle": (
        lambda: cuda.open_handle(HANDLE), 0xABCDEF0123456789,
        [f"cuIpcOpenMemHandle_v2 released {HANDLE.hex()} 1"],
    ),
    "close_handle": (
        lambda: cuda.close_handle(0xABCDEF0123456789), None,
        ["cuIpcCloseMemHandle released abcdef0123456789"],
    ),
    "read_bytes": (
        lambda: cuda.read_bytes(ADDRESS, 5, GPU), bytes(range(5)),
        [
            *RETAINED, PUSHED, "cuStreamCreate released 1",
            f"cuMemcpyDtoHAsync_v2 released 7f1234567890 5 {OWN_STREAM}",
            f"cuStreamSynchronize released {OWN_STREAM}", f"cuStreamDestroy_v2 released {OWN_STREAM}", POPPED,
        ],
    ),
    "register_host": (
        lambda: cuda.register_host(ADDRESS, 1 << 40, GPU, read_only=False), None,
        [*RETAINED, PUSHED, "cuMemHostRegister_v2 released 7f1234567890 10000000000 3", POPPED],
    ),
    "register_host_read_only": (
        lambda: cuda.register_host(ADDRESS, 1 << 40, GPU, read_only=True), None,
        [*RETAINED, PUSHED, "cuMemHostRegister_v2 released 7f1234567890 10000000000 11", POPPED],
    ),
    "unregister_host": (
        lambda: cuda.unregister_host(ADDRESS, GPU), None,
        [*RETAINED, PUSHED, "cuMemHostUnregister released 7f1234567890", POPPED],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_arguments_and_results_pass_whole(fake: Fake, name: str) -> None:
    """Also above 32 bits, and structs by value. Calls that may wait release the GIL."""
    if name == "launch":
        fake.set("num_arguments", 6)
    act, result, calls = STEPS[name]
    assert act() == result
    assert fake.calls() == calls


def test_an_event_from_its_creation_to_its_end(fake: Fake) -> None:
    event = cuda.Event()
    event.record(STREAM)
    event.make_stream_wait(STREAM + 1)
    fake.set("pending", 1)
    assert (event.query(), event.query()) == (False, True)
    assert event.synchronize()
    del event
    assert fake.calls() == [
        "cuEventCreate held 2",
        f"cuEventRecord held {EVENT} 7fff12345678abcd",
        f"cuStreamWaitEvent held 7fff12345678abce {EVENT} 0",
        f"cuEventQuery held {EVENT}",
        f"cuEventQuery held {EVENT}",
        f"cuEventSynchronize released {EVENT}",
        f"cuEventDestroy_v2 held {EVENT}",
    ]


def test_a_wait_with_a_limit_asks_without_the_gil_until_it_is_over(fake: Fake) -> None:
    event = cuda.Event()
    fake.calls()
    fake.set("pending", 3)
    assert event.synchronize(60.0)
    assert fake.calls() == [f"cuEventQuery released {EVENT}"] * 4
    fake.set("pending", 1 << 30)
    assert not event.synchronize(0.0)
    assert fake.calls() == [f"cuEventQuery released {EVENT}"]


def test_memory_is_freed_in_its_context_whichever_is_current(fake: Fake) -> None:
    memory = cuda.Allocation(1 << 40, GPU)
    assert memory.__cuda_array_interface__["data"] == (0xFEDCBA9876543210, False)
    del memory
    assert fake.calls() == [
        "cuMemAlloc_v2 released 10000000000", *RETAINED, PUSHED, "cuMemFree_v2 released fedcba9876543210", POPPED,
    ]  # fmt: skip


FAILING = [
    ("cuEventCreate", cuda.Event),
    ("cuEventQuery", lambda: cuda.Event().query()),
    ("cuLaunchKernel", launch),
    ("cuCtxPushCurrent_v2", STEPS["read_bytes"][0]),
    ("cuCtxPopCurrent_v2", STEPS["read_bytes"][0]),
    ("cuIpcOpenMemHandle_v2", STEPS["open_handle"][0]),
    ("cuStreamCreate", STEPS["read_bytes"][0]),
    ("cuMemcpyDtoHAsync_v2", STEPS["read_bytes"][0]),
    ("cuStreamSynchronize", STEPS["read_bytes"][0]),
]
"""One check serves all calls but those of ``cuda.UNCHECKED``; here with what each kind of call must leave in order."""


@pytest.mark.parametrize(("call", "act"), FAILING, ids=[call for call, _ in FAILING])
def test_a_failure_has_the_name_of_the_call_and_cuda_s_of_the_error(
    fake: Fake, call: str, act: Callable[[], object]
) -> None:
    fake.fail(call)
    with pytest.raises(TransportError, match=f"{call.removesuffix('_v2')}: CUDA_ERROR_OUT_OF_MEMORY$"):
        act()
    pushed = [line.split()[0] for line in fake.calls()]
    if call != "cuCtxPushCurrent_v2":
        assert pushed.count("cuCtxPushCurrent_v2") == pushed.count("cuCtxPopCurrent_v2"), "a context stays behind"
    assert pushed.count("cuStreamDestroy_v2") == (call != "cuStreamCreate") * pushed.count("cuStreamCreate")


def test_what_an_error_names(fake: Fake) -> None:
    fake.fail("cuEventQuery", 12345)
    with pytest.raises(TransportError, match="cuEventQuery: CUDA error 12345"):
        cuda.Event().query()
    fake.fail("cuMemHostRegister_v2")
    with pytest.raises(TransportError, match="4096 bytes of staging memory cannot be page-locked: cuMemHostRegister"):
        cuda.register_host(ADDRESS, 4096, GPU, read_only=False)


@pytest.mark.parametrize("call", ["cuMemHostUnregister", "cuCtxPushCurrent_v2"])
def test_memory_that_stays_registered_is_logged(fake: Fake, caplog: pytest.LogCaptureFixture, call: str) -> None:
    fake.fail(call)
    with caplog.at_level(logging.WARNING, "vllm.kvferry.cuda"):
        cuda.unregister_host(ADDRESS, GPU)
    assert "stays page-locked" in caplog.text and "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_a_mapping_that_went_with_its_context_is_closed_without_error(fake: Fake) -> None:
    fake.fail("cuIpcCloseMemHandle")
    cuda.close_handle(ADDRESS)
    assert fake.calls() == ["cuIpcCloseMemHandle released 7f1234567890"]


def test_virtual_memory_has_no_handle(fake: Fake) -> None:
    fake.without_handles()
    with pytest.raises(PlaneUnavailableError, match="virtual memory of CUDA"):
        cuda.ipc_handle(ADDRESS)


def test_peer_access_is_asked_of_the_gpu_with_that_uuid_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def can_access(device: torch.device, peer: int) -> bool:
        asked.append(peer)
        return peer == 1

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU {device.index}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    for seen_or_ours in ("GPU 0", "GPU 1", "of a GPU that this process does not see"):
        cuda.check_peer_access(GPU, seen_or_ours)
    with pytest.raises(TransportError, match="GPU 0 has no peer access to GPU 2"):
        cuda.check_peer_access(GPU, "GPU 2")
    assert asked == [1, 2]


def test_a_host_without_the_driver_has_no_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-missing.so.1")
    forget_driver()
    for act in (cuda.load, cuda.Event, STEPS["bind_context"][0]):
        with pytest.raises(PlaneUnavailableError, match=r"libcuda-missing\.so\.1: .*driver is not installed"):
            act()


def test_a_driver_without_a_function_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = compiled(tmp_path, "int cuInit(unsigned int);\nint cuInit(unsigned int flags) { return 0; }\n", "old")
    monkeypatch.setattr(cuda, "LIBRARY", str(old))
    forget_driver()
    with pytest.raises(PlaneUnavailableError, match=r"undefined symbol: cu.*too old"):
        cuda.load()


def test_a_driver_without_a_gpu_has_no_plane(fake: Fake) -> None:
    forget_driver()
    fake.fail("cuInit", NO_DEVICE)
    with pytest.raises(PlaneUnavailableError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        cuda.load()
    fake.fail("", 0)
    cuda.load()


def test_nothing_is_loaded_before_the_first_call() -> None:
    """More than PyTorch and Triton load themselves."""
    script = """
        import sys
        import torch, triton

        def loaded():
            return "libcuda.so" in open("/proc/self/maps").read(), "cuda.bindings" in sys.modules

        before = loaded()
        import kvferry.connector.pages.copies, kvferry.kernels.launch
        import kvferry.transport.registry, kvferry.transport.planes.ucx, kvferry.transport.planes.cuda_ipc
        from kvferry.transport import cuda
        print(loaded() == before, cuda._driver.cache_info().currsize)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "0"]), done.stderr


def test_the_guard_changes_another_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        now.append(device.index)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    with cuda.device_guard(GPU):
        assert now == [0]
        with cuda.device_guard(OTHER):
            assert now == [0, 1]
    assert now == [0]


def test_the_current_stream_is_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a release of PyTorch without the short way."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    assert cuda.current_stream(OTHER) == 71
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=80 + device.index))
    assert cuda.current_stream(OTHER) == 81


IPC_GPU = torch.device("cuda", 0)
SIZE = 1 << 20


def context(ranges: tuple[tuple[int, int], ...], synchronize: Callable[[], None] = lambda: None) -> PlaneContext:
    return PlaneContext("127.0.0.1", SIZE, SIZE, memory=PlaneMemory(IPC_GPU, ranges, synchronize))


class Driver:
    """One GPU's allocations, by the address at which P has them; mapped they lie ``SHIFT`` further on."""

    SHIFT = 1 << 40

    def __init__(self) -> None:
        self.secret = b""
        self.mapped: list[int] = []
        self.broken = ""
        self.size = SIZE

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("check_peer_access", "address_range", "ipc_handle", "open_handle", "read_bytes"):
            monkeypatch.setattr(cuda, name, getattr(self, name))
        monkeypatch.setattr(cuda, "bind_context", lambda device: None)
        monkeypatch.setattr(cuda, "device_uuid", lambda device: "GPU-0")
        monkeypatch.setattr(cuda, "allocate", lambda nbytes, device: torch.zeros(64, dtype=torch.uint8))
        monkeypatch.setattr(cuda, "close_handle", self.mapped.remove)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))

    def check_peer_access(self, device: torch.device, uuid: str) -> None:
        if self.broken == "no peer access":
            raise TransportError("GPU 0 has no peer access to GPU 1")

    def address_range(self, address: int) -> tuple[int, int]:
        return address // SIZE * SIZE, self.size

    def ipc_handle(self, base: int) -> bytes:
        if self.broken == "virtual":
            raise PlaneUnavailableError("the KV cache lies in virtual memory of CUDA")
        return base.to_bytes(8, "little").ljust(64, b"\0")

    def open_handle(self, handle: bytes) -> int:
        if self.broken == "gone":
            raise TransportError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")
        self.mapped.append(int.from_bytes(handle[:8], "little") + self.SHIFT)
        return self.mapped[-1]

    def read_bytes(self, address: int, nbytes: int, device: torch.device) -> bytes:
        return bytes(nbytes) if self.broken == "other bytes" else self.secret


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    driver.install(monkeypatch)
    return driver


Make = Callable[..., CudaIpcPlane]


@pytest.fixture
def plane(driver: Driver) -> Iterator[Make]:
    made: list[CudaIpcPlane] = []

    def make(ranges: tuple[tuple[int, int], ...] = ((3 * SIZE + 5, 100), (7 * SIZE, 10)), synchronize=lambda: None):
        made.append(CudaIpcPlane(context(ranges, synchronize)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def memory_of(pid: int, reply: bytes) -> IpcMemory:
    """What a P has published."""
    fd = msgspec.msgpack.decode(reply, type=MemoryFileAddress).fd
    return msgspec.msgpack.decode(Path(f"/proc/{pid}/fd/{fd}").read_bytes(), type=IpcMemory)


class P(NamedTuple):
    """Another process: its offer, and its reply to any D."""

    offer: IpcOffer
    reply: bytes

    @property
    def memory(self) -> IpcMemory:
        return memory_of(self.offer.pid, self.reply)

    def join(self, plane: CudaIpcPlane) -> IpcChannel:
        channel, payload = plane.connect(encoded(self.offer), "127.0.0.1")
        assert payload == b""
        plane.finish(channel, self.reply)
        return channel


@pytest.fixture
def p(driver: Driver, tmp_path: Path) -> Iterator[P]:
    """The offer of another process, which holds two allocations."""
    script = """
import sys, pytest, torch
from tests.transport.test_cuda import SIZE, Driver, context
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane
patch = pytest.MonkeyPatch()
Driver().install(patch)
plane = CudaIpcPlane(context(((3 * SIZE + 5, 100), (7 * SIZE, 10))))
print(plane.offer().hex(), plane.accept(b"")[1].hex(), flush=True)
sys.stdin.read()
"""
    with fork_server().start("-c", script, text=True) as process:
        offer, reply = map(bytes.fromhex, process.stdout.readline().split())
        p = P(msgspec.msgpack.decode(offer, type=IpcOffer), reply)
        driver.secret = p.memory.secret
        yield p


def encoded(offer: IpcOffer, **change: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, **change))


def until(condition: Callable[[], bool], plane: CudaIpcPlane) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        plane.progress()
        time.sleep(1e-3)


def joined(p: P, d: CudaIpcPlane) -> IpcChannel:
    channel = p.join(d)
    until(lambda: channel.ready, d)
    return channel


def test_p_s_memory_is_mapped_once_and_found_at_our_addresses(driver: Driver, plane: Make, p: P) -> None:
    d = plane()
    channel = joined(p, d)
    assert len(driver.mapped) == 3, "two allocations and the probe"
    assert channel.translate(3 * SIZE + 5, 100) == 3 * SIZE + 5 + Driver.SHIFT
    assert channel.translate(7 * SIZE, 10) == 7 * SIZE + Driver.SHIFT
    for address, nbytes in ((7 * SIZE, 11), (5 * SIZE, 1), (3 * SIZE, 10), (3 * SIZE + 6, 100)):
        with pytest.raises(TransportError, match="in no KV cache that the prefill engine has published"):
            channel.translate(address, nbytes)
    channel.close()
    channel.close()
    until(lambda: not driver.mapped, d)


def test_it_is_unmapped_once_the_copies_have_ended(driver: Driver, plane: Make, p: P) -> None:
    ended = threading.Event()
    waited: list[bool] = []
    d = plane(synchronize=lambda: waited.append(ended.wait(60)))
    channel = joined(p, d)
    channel.close()
    time.sleep(0.2)
    assert not waited, "nothing waits for it"
    assert driver.mapped
    ended.set()
    until(lambda: not driver.mapped, d)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"host_id": "another"}, "another host or in another network namespace"),
        ({"host_id": ""}, "another host"),
        ({"pid": os.getpid()}, "this very process"),
        ({"pid": os.getpid(), "pids": 1}, "CUDA compares numbers"),
        ({"pid": 1 << 29}, "cannot be found"),
        ({"why": "no handles"}, "cannot be mapped: no handles"),
    ],
)
def test_whom_it_does_not_concern_is_refused(
    driver: Driver, plane: Make, p: P, change: dict[str, object], why: str
) -> None:
    with pytest.raises(PlaneUnavailableError, match=why):
        plane().connect(encoded(p.offer, **change), "127.0.0.1")
    assert not driver.mapped


def test_a_p_of_another_process_namespace_lends_its_files(driver: Driver, plane: Make) -> None:
    """The second file is as the board, which P lends when D has attached."""
    need_namespaces()
    script = """
from tests.support.apart import leave
leave()
import os, sys, pytest
from tests.transport.test_cuda import SIZE, Driver, context, memory_of
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane
patch = pytest.MonkeyPatch()
Driver().install(patch)
plane = CudaIpcPlane(context(((3 * SIZE + 5, 100), (7 * SIZE, 10))))
print(plane.offer().hex(), flush=True)
channel, reply = plane.accept(bytes.fromhex(sys.stdin.readline()))
file = os.memfd_create("board")
os.write(file, b"content")
channel.lend(file)
print(reply.hex(), memory_of(os.getpid(), reply).secret.hex(), file, flush=True)
sys.stdin.read()
"""
    with closing(plane()) as d, fork_server().start("-c", script, text=True) as process:
        channel, payload = d.connect(bytes.fromhex(process.stdout.readline()), "127.0.0.1")
        process.stdin.write(payload.hex() + "\n")
        process.stdin.flush()
        reply, secret, file = process.stdout.readline().split()
        driver.secret = bytes.fromhex(secret)
        assert not d.progress() or channel.error is None
        d.finish(channel, bytes.fromhex(reply))
        until(lambda: channel.ready, d)
        assert channel.translate(7 * SIZE, 10) == 7 * SIZE + Driver.SHIFT
        ours = channel.process.open_file(int(file))
        assert os.pread(ours, 100, 0) == b"content" and not channel.process.ended
        os.close(ours)
        process.stdin.close()
        until(lambda: channel.error is not None, d)
        assert "died" in str(channel.error) and channel.process.ended


def test_what_cannot_be_lent_leaves_no_socket_behind(driver: Driver, plane: Make) -> None:
    """P's poll loop sees no end of a D that only reads nothing any more."""
    p, d = plane(), plane()
    offer = encoded(msgspec.msgpack.decode(p.offer(), type=IpcOffer), pids=1, pid=1)
    before = len(os.listdir("/proc/self/fd"))
    channel, payload = d.connect(offer, "127.0.0.1")
    assert isinstance(channel, IpcChannel)
    with socket.socket(fileno=os.dup(channel.process.fd)) as theirs:
        theirs.shutdown(socket.SHUT_RD)
        with pytest.raises(TransportError, match="gone"):
            p.accept(payload)
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_peer_access_is_told_before_anything_is_mapped(driver: Driver, plane: Make, p: P) -> None:
    driver.broken = "no peer access"
    with pytest.raises(PlaneUnavailableError, match="no peer access"):
        p.join(plane())


@pytest.mark.parametrize(
    ("broken", "why"),
    [("gone", "INVALID_VALUE"), ("other bytes", "not the bytes that the prefill engine wrote"), ("small", "smaller")],
)
def test_a_mapping_that_fails_is_the_channel_s_error(driver: Driver, plane: Make, p: P, broken: str, why: str) -> None:
    d = plane()
    driver.broken = broken
    if broken == "small":
        driver.size = SIZE // 2
    channel = p.join(d)
    until(lambda: channel.error is not None, d)
    assert why in str(channel.error) and "cannot be mapped" in str(channel.error) and not channel.ready
    channel.close()
    until(lambda: not driver.mapped, d)


def test_memory_without_handles_can_only_read_from_others(driver: Driver, plane: Make, p: P) -> None:
    driver.broken = "virtual"
    d = plane()
    assert "virtual memory" in d.cannot_serve
    assert msgspec.msgpack.decode(d.offer(), type=IpcOffer).why == d.cannot_serve
    joined(p, d)


def test_a_layer_in_several_allocations_is_not_offered(plane: Make) -> None:
    assert "several allocations" in plane(((SIZE - 10, 20),)).cannot_serve


def test_the_handles_are_not_in_the_offer(driver: Driver, plane: Make) -> None:
    made = plane()
    handle = driver.ipc_handle(3 * SIZE)
    assert handle not in made.offer()
    memory = memory_of(os.getpid(), made.accept(b"")[1])
    assert handle in [allocation.handle for allocation in memory.allocations]
    assert MAX_FILE_BYTES > 512 * 90 and len(memory.allocations) == 2
