"""The binding to CUDA's driver against a stand-in that is compiled with CUDA's own header: the arguments of each call,
whether it holds the GIL, errors, and that nothing is loaded before the first call. No GPU is needed."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.kernels.launch import CompiledKernel, StreamBuffers
from kvferry.transport import cuda
from kvferry.transport.errors import PlaneUnavailableError, TransportError
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
