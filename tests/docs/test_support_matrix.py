"""The tables of docs/compatibility.md: no mark without a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import support_matrix
from tests.support.families import ALL, FAMILIES

TEST = "@pytest.mark.{}('name', {})\ndef test_it(name): ...\n"


def test_every_test_that_is_named_exists() -> None:
    assert [
        name for tests in support_matrix.FEATURES.values() for name in tests if not support_matrix.exists(name)
    ] == []
    assert all(support_matrix.exists(llama) for _, llama in support_matrix.COLUMNS.values())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (TEST.format("parametrize", "ALL"), ALL.keys()),
        (TEST.format("parametrize", "FAMILIES"), FAMILIES.keys()),
        ("def test_it(): ...\n", set()),
        (TEST.format("skip", "ALL"), set()),
    ],
    ids=["all", "fewer", "no parameters", "skipped"],
)
def test_a_family_has_its_mark_by_the_parameters_of_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, names: set[str]
) -> None:
    monkeypatch.setattr(support_matrix, "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(text)
    assert support_matrix.parameters("test_one.py::test_it") == names
    assert support_matrix.exists("test_one.py::") and support_matrix.exists("test_one.py::test_it")
    assert not support_matrix.exists("test_one.py::test_none") and not support_matrix.exists("test_none.py::")


def test_a_row_goes_with_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(support_matrix.FEATURES, "LoRA adapters", ["tests/vllm/test_handover_steps.py::test_none"])
    assert "LoRA" not in support_matrix.feature_table() and "preemption" in support_matrix.feature_table()
