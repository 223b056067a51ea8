"""Limits, GPUs, RDMA and cma, each with its fault planted in files of a machine, or in a process."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.cli.doctor import gpus, host, planes, rdma
from kvferry.cli.doctor.findings import Level, Machine
from kvferry.connector.config import Settings
from kvferry.transport.channels import CPU
from kvferry.transport.errors import PlaneUnavailableError
from tests.doctor.planted import NOBODY, as_nobody, is_bad, machine, only

NO_LIMIT = resource.RLIM_INFINITY


def limited(monkeypatch, soft=NO_LIMIT, hard=NO_LIMIT):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


# --- limits and GPUs ------------------------------------------------------------------------------------------------


def test_each_limit_that_is_too_low(monkeypatch):
    limited(monkeypatch, 1024, 524288)
    assert host.open_files().value == "1024, an engine can raise it to 65536"
    limited(monkeypatch)
    assert host.open_files().level is Level.OK
    limited(monkeypatch, 256, 1024)
    is_bad(host.open_files(), Level.WARNING, "1024", "4096", "ulimit")
    is_bad(host.shared_memory(64 << 20), Level.WARNING, "64 MiB", "--shm-size")
    is_bad(host.shared_memory(None, "No such file"), Level.WARNING, "No such file")
    assert host.shared_memory(8 << 30).level is Level.OK


@pytest.mark.parametrize(
    ("files", "built_for", "words"),
    [
        ({"dev/nvidia0": ""}, None, ["built without CUDA"]),
        ({"proc/driver/nvidia/version": "NVRM version: 595\n"}, "13.0", ["--gpus all"]),
        ({"dev/nvidia0": "", "dev/nvidia1": ""}, "13.0", ["nvidia0, nvidia1", "nvidia-smi"]),
        ({"dev/nvidiactl": ""}, None, None), ({"dev/nvidiactl": ""}, "13.0", None),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_used(files, built_for, words, tmp_path):
    found = gpus.no_gpu(machine(tmp_path, files), built_for)
    if words is None:
        assert found.level is Level.NOTE
    else:
        is_bad(found, Level.WARNING, *words)


def test_peer_access():
    (good,) = gpus.judge_peers([[True, True], [True, True]])
    assert good.level is Level.OK and not list(gpus.judge_peers([[True]]))
    (bad,) = gpus.judge_peers([[True, False], [True, True]])
    is_bad(bad, Level.WARNING, "GPU 0 does not read the memory of GPU 1")


PORT = "sys/class/infiniband/mlx5_0/ports/1"
DEVICE = {f"{PORT}/state": "4: ACTIVE\n", f"{PORT}/link_layer": "InfiniBand\n", "dev/infiniband/uverbs0": ""}


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    limited(monkeypatch)


def found_rdma(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, nixl: tuple[str, str] | None = ("nixl_cu13", "1.5.1")
):
    def release() -> tuple[str, str]:
        if nixl is None:
            raise PlaneUnavailableError("NIXL is not installed")
        return nixl

    monkeypatch.setattr(rdma, "nixl_release", release)
    return list(rdma.findings(machine))


def test_the_reasons_against_rdma_are_told_apart(tmp_path, monkeypatch):
    (none,) = found_rdma(machine(tmp_path / "1"), monkeypatch)
    assert none.level is Level.NOTE and "no device" in none.value
    there = machine(tmp_path / "2", DEVICE)
    device, fine = found_rdma(there, monkeypatch)
    assert device.level is fine.level is Level.OK and "1.5.1: mlx5_0" in fine.value
    is_bad(found_rdma(there, monkeypatch, None)[-1], Level.WARNING, "NIXL is not installed", "kvferry[rdma]")
    down = found_rdma(machine(tmp_path / "3", {**DEVICE, f"{PORT}/state": "1: DOWN\n"}), monkeypatch)
    is_bad(only(down, "mlx5_0"), Level.WARNING, "DOWN", "ACTIVE")
    limited(monkeypatch, 65536, 65536)
    is_bad(found_rdma(there, monkeypatch)[-1], Level.WARNING, "64 KiB", "unlimited")


def test_device_files_without_permission(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # nobody may look into the folders above
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    there = machine(tmp_path, DEVICE)
    (tmp_path / "dev/infiniband/uverbs0").chmod(0)
    with as_nobody():
        found = found_rdma(there, monkeypatch)
    is_bad(found[-1], Level.WARNING, "no permission", "uverbs0: EACCES", "--device /dev/infiniband")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    is_bad(found_rdma(there, monkeypatch)[-1], Level.WARNING, "no permission", "no uverbs file")


def found_planes(folder: Path, **settings: Any):
    usable: list[planes.PlaneOnDevice] = []
    return list(planes.findings(machine(folder), Settings(**settings), usable)), {plane.name for plane in usable}


def test_the_planes_of_this_machine(tmp_path):
    found, usable = found_planes(tmp_path)
    assert {"shm", "tcp", "zmq"} <= usable
    assert not [finding for finding in found if finding.what.startswith("cuda_ipc, host")]
    assert torch.cuda.is_available() or found_planes(tmp_path, plane="cuda_ipc")[0][-1].level is Level.FAULT
    is_bad(next(planes.lacking_planes([])), Level.FAULT, "none for")
    there = [planes.PlaneOnDevice("shm", device) for device in (CPU, torch.device("cuda"))]
    assert not list(planes.lacking_planes(there))


def test_a_plane_that_cannot_be_had(tmp_path):
    found, usable = found_planes(tmp_path, side_channel_host="192.0.2.1", plane="tcp")
    is_bad(only(found, "tcp, host memory"), Level.FAULT, "192.0.2.1", "plane=tcp")
    assert "tcp" not in usable
    found, _ = found_planes(tmp_path, side_channel_host="192.0.2.1")
    assert only(found, "tcp, host memory").level is Level.NOTE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_memory_of_another_user_may_not_be_read(monkeypatch):
    assert planes.read_between_processes() == 0
    monkeypatch.setattr(planes, "READER", f"import os; os.setuid({NOBODY}){planes.READER}")
    number = planes.read_between_processes()
    assert number == errno.EPERM
    is_bad(planes.cma_permission(number, "0"), Level.WARNING, "EPERM", "SYS_PTRACE")


def test_a_plane_without_permission_is_named_with_ptrace_scope_and_not_tested(tmp_path, monkeypatch):
    is_bad(planes.cma_permission(errno.ENOSYS, ""), Level.WARNING, "ENOSYS")
    machine(tmp_path, {planes.PTRACE_SCOPE: "1\n"})
    monkeypatch.setattr(planes, "read_between_processes", lambda: errno.EPERM)
    found, usable = found_planes(tmp_path)
    is_bad(only(found, "cma, host memory"), Level.WARNING, "ptrace_scope is 1", "sysctl")
    assert "cma" not in usable
