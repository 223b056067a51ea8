"""Limits, GPUs, RDMA and cma, each with its fault planted in files of a machine, or in a process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvferry.cli.doctor import host, planes, rdma
from kvferry.cli.doctor.findings import Level, Machine
from kvferry.cli.doctor.host import GpuFacts
from kvferry.cli.doctor.rdma import UcxBuild
from kvferry.connector.config import Settings
from kvferry.transport.channels import CPU
from tests.doctor.planted import NOBODY, as_nobody, is_bad, machine, only

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {soft}                 {hard}                 files
Max locked memory         {locked}              {locked}              bytes
"""


def with_limits(tmp_path, soft="1024", hard="524288", locked="unlimited", **files):
    return machine(tmp_path, {"proc/self/limits": LIMITS.format(soft=soft, hard=hard, locked=locked), **files})


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_hard_limit_of_few_files(tmp_path):
    assert host.open_files(with_limits(tmp_path)).value == "1024, an engine can raise it to 65536"
    assert host.open_files(with_limits(tmp_path, "unlimited", "unlimited")).level is Level.OK
    is_bad(host.open_files(with_limits(tmp_path, "256", "1024")), Level.WARNING, "1024", "4096", "ulimit")
    assert host.open_files(machine(tmp_path / "empty")).level is Level.NOTE


def test_this_machine_has_limits():
    assert host.limit(Machine(), "Max open files") is not None
    assert {finding.what for finding in host.limit_findings(Machine())} == {
        "open files", "host memory", "clock", "timers", "/dev/shm",
    }  # fmt: skip


def test_little_memory(tmp_path):
    assert host.memory(machine(tmp_path, {"proc/meminfo": "MemAvailable:   9000000 kB\n"})).level is Level.OK
    is_bad(host.memory(machine(tmp_path, {"proc/meminfo": "MemAvailable: 100000 kB\n"})), Level.WARNING, "97 MiB")
    assert host.memory(machine(tmp_path, {"proc/meminfo": ""})).level is Level.NOTE


def test_a_small_dev_shm():
    is_bad(host.shared_memory(64 << 20), Level.WARNING, "64 MiB", "--shm-size")
    is_bad(host.shared_memory(None, "No such file"), Level.WARNING, "No such file")
    assert host.shared_memory(8 << 30).level is Level.OK


def test_a_slow_clock_and_late_timers(tmp_path):
    name = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    is_bad(host.clock_source(machine(tmp_path, {name: "hpet\n"})), Level.WARNING, "hpet")
    assert host.clock_source(machine(tmp_path, {name: "tsc\n"})).level is Level.OK
    is_bad(host.lateness(0.5), Level.WARNING, "500.0 ms")
    assert host.lateness(0.001).level is Level.OK


# --- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "built_for", "words"),
    [
        ({"dev/nvidia0": ""}, None, ["built without CUDA"]),
        ({"proc/driver/nvidia/version": "NVRM version: 595\n"}, "13.0", ["--gpus all"]),
        ({"dev/nvidia0": "", "dev/nvidia1": ""}, "13.0", ["nvidia0, nvidia1", "nvidia-smi"]),
    ],
)
def test_gpus_that_cannot_be_used(files, built_for, words, tmp_path):
    is_bad(host.no_gpu(machine(tmp_path, files), built_for), Level.WARNING, *words)


def test_a_machine_without_gpus(tmp_path):
    for built_for in (None, "13.0"):
        assert host.no_gpu(machine(tmp_path, {"dev/nvidiactl": ""}), built_for).level is Level.NOTE


def test_peer_access_and_memory_without_handles():
    good = GpuFacts(["A", "B"], [[True, True], [True, True]], ["", ""])
    assert all(finding.level is Level.OK for finding in host.judge_gpus(good, {}))
    bad = GpuFacts(["A", "B"], [[True, False], [True, True]], ["", "it has no IPC handle"])
    found = host.judge_gpus(bad, {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments: True"})
    is_bad(only(found, "peer access"), Level.WARNING, "GPU 0 does not read the memory of GPU 1")
    is_bad(only(found, "IPC memory of GPU 1"), Level.WARNING, "no IPC handle")
    is_bad(only(found, "PYTORCH_CUDA_ALLOC_CONF"), Level.WARNING, "expandable_segments")


# --- RDMA -----------------------------------------------------------------------------------------------------------

PORT = "sys/class/infiniband/mlx5_0/ports/1"
DEVICE = {f"{PORT}/state": "4: ACTIVE\n", f"{PORT}/link_layer": "InfiniBand\n", "dev/infiniband/uverbs0": ""}
WITH_IB, WITHOUT_IB = (
    UcxBuild("1.21.0", "/usr/lib/libucp.so", True),
    UcxBuild("1.21.0", "/venv/site-packages/libucx/libucp.so", False),
)
SYSTEM = {rdma.SYSTEM_UCX: "true"}


def verdict(
    root: Path, build: UcxBuild | None, environ: dict[str, str] | None = None, files=DEVICE, locked="unlimited"
):
    text = LIMITS.format(soft=1024, hard=1024, locked=locked)
    found = rdma.judge(machine(root, {**files, "proc/self/limits": text}, environ), build)
    return only(found, "RDMA over ucx")


def test_rdma_that_can_be_used(tmp_path):
    assert verdict(tmp_path, WITH_IB, SYSTEM).level is Level.OK


def test_the_four_reasons_against_rdma_are_told_apart(tmp_path):
    no_device = verdict(tmp_path / "1", WITH_IB, SYSTEM, files={})
    assert no_device.level is Level.NOTE and "no device" in no_device.value
    assert "no InfiniBand built in" in verdict(tmp_path / "2", WITHOUT_IB, SYSTEM, files={}).value
    built = verdict(tmp_path / "3", WITHOUT_IB, SYSTEM)
    is_bad(built, Level.WARNING, "no InfiniBand built in", "PyPI wheel", rdma.SYSTEM_UCX)
    for chosen in ({"UCX_TLS": "tcp,cuda"}, {"UCX_TLS": "^ib"}, {"UCX_NET_DEVICES": "eth0"}):
        (name,) = chosen
        is_bad(verdict(tmp_path / "4", WITH_IB, SYSTEM | chosen), Level.WARNING, "another lane is chosen", name)
    is_bad(verdict(tmp_path / "4", WITH_IB), Level.WARNING, "another lane is chosen", rdma.SYSTEM_UCX)
    for fine in ({"UCX_TLS": "rc,cuda"}, {"UCX_TLS": "all"}, {"UCX_TLS": "^tcp"}, {"UCX_NET_DEVICES": "mlx5_0:1"}):
        assert verdict(tmp_path / "5", WITH_IB, SYSTEM | fine).level is Level.OK


def test_rdma_by_nixl(tmp_path):
    """Beside it nothing has to be done for ucx."""
    files = {**DEVICE, "proc/self/limits": LIMITS.format(soft=1024, hard=1024, locked="unlimited")}
    found = rdma.judge(machine(tmp_path, files), WITHOUT_IB, "nixl_cu13 1.5.1")
    assert only(found, "RDMA over nixl").level is Level.OK and "1.5.1: mlx5_0" in only(found, "RDMA over nixl").value
    assert only(found, "RDMA over ucx").level is Level.NOTE
    found = rdma.judge(machine(tmp_path, files, {"UCX_TLS": "tcp"}), WITHOUT_IB, "nixl_cu13 1.5.1")
    is_bad(only(found, "RDMA over nixl"), Level.WARNING, "another lane is chosen", "UCX_TLS=tcp")
    is_bad(only(rdma.judge(machine(tmp_path, files), WITH_IB), "RDMA over nixl"), Level.WARNING, "kvferry[rdma]")
    down = machine(tmp_path / "down", {**files, f"{PORT}/state": "1: DOWN\n"})
    is_bad(only(rdma.judge(down, WITHOUT_IB, "nixl_cu13 1.5.1"), "RDMA over nixl"), Level.WARNING, "no RDMA port")
    assert not [x for x in rdma.judge(machine(tmp_path / "bare", {}), WITH_IB, "nixl_cu13 1.5.1") if "nixl" in x.what]


def test_device_files_without_permission(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # nobody may look into the folders above
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    machine(tmp_path, DEVICE)
    (tmp_path / "dev/infiniband/uverbs0").chmod(0)
    with as_nobody():
        finding = rdma.judge(Machine(SYSTEM, tmp_path), WITH_IB)[-1]
    is_bad(finding, Level.WARNING, "no permission", "uverbs0: EACCES", "--device /dev/infiniband")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    is_bad(rdma.judge(Machine(SYSTEM, tmp_path), WITH_IB)[-1], Level.WARNING, "no permission", "no uverbs file")


def test_a_port_that_is_down_no_ucx_and_little_locked_memory(tmp_path):
    found = rdma.judge(machine(tmp_path, {**DEVICE, f"{PORT}/state": "1: DOWN\n"}), WITH_IB)
    is_bad(only(found, "mlx5_0"), Level.WARNING, "DOWN", "ACTIVE")
    is_bad(verdict(tmp_path / "1", None), Level.WARNING, "no UCX", "kvferry[ucx]")
    is_bad(verdict(tmp_path / "2", WITH_IB, SYSTEM, locked="65536"), Level.WARNING, "64 KiB", "unlimited")


def test_the_transports_of_a_ucx_are_those_of_its_folder(tmp_path):
    assert not rdma.has_infiniband(tmp_path)
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_cma.so.0").touch()
    assert not rdma.has_infiniband(tmp_path)
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert rdma.has_infiniband(tmp_path)


# --- planes ---------------------------------------------------------------------------------------------------------


def test_the_planes_of_this_machine(tmp_path):
    found, usable = planes.findings(machine(tmp_path), Settings())
    assert {"shm", "tcp", "zmq"} <= {plane.name for plane in usable}
    assert not planes.lacking_planes(usable)
    is_bad(planes.lacking_planes([])[0], Level.FAULT, "none for")
    assert not [finding for finding in found if finding.what.startswith("cuda_ipc, host")]


def test_a_plane_that_cannot_be_had(tmp_path):
    found, usable = planes.findings(machine(tmp_path), Settings(side_channel_host="192.0.2.1", plane="tcp"))
    is_bad(only(found, "tcp, host memory"), Level.FAULT, "192.0.2.1", "plane=tcp")
    assert "tcp" not in {plane.name for plane in usable}
    found, _ = planes.findings(machine(tmp_path), Settings(side_channel_host="192.0.2.1"))
    assert only(found, "tcp, host memory").level is Level.NOTE


def test_memory_of_another_process_may_be_read():
    assert planes.read_between_processes() in (0, errno.EPERM)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_memory_of_another_user_may_not_be_read(monkeypatch):
    monkeypatch.setattr(planes, "READER", f"import os; os.setuid({NOBODY}){planes.READER}")
    number = planes.read_between_processes()
    assert number == errno.EPERM
    is_bad(planes.cma_permission(number, "0"), Level.WARNING, "EPERM", "SYS_PTRACE")


def test_ptrace_scope_is_named(tmp_path):
    scope = machine(tmp_path, {planes.PTRACE_SCOPE: "1\n"}).text(planes.PTRACE_SCOPE)
    is_bad(planes.cma_permission(errno.EPERM, scope), Level.WARNING, "ptrace_scope is 1", "sysctl")
    is_bad(planes.cma_permission(errno.ENOSYS, ""), Level.WARNING, "ENOSYS")
    assert planes.cma_permission(0, "1").level is Level.OK


def test_a_plane_without_permission_is_not_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(planes, "read_between_processes", lambda: errno.EPERM)
    found, usable = planes.findings(machine(tmp_path), Settings())
    assert only(found, "cma, host memory").level is Level.WARNING
    assert planes.PlaneOnDevice("cma", CPU) not in usable
