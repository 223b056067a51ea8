"""Prompts of LoRA adapters: D loads what P has computed with the same adapter, whatever folder either has it in."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest

from kvferry.connector.vllm.lora_content import (
    BLOCK_BYTES,
    BLOCKS,
    MAX_ADAPTERS,
    REPLACED,
    known_adapters,
    lora_content,
)
from tests.vllm.labelled import prompt
from tests.vllm.stepped import EngineGroup, Lines, loaded, settle

pytestmark = pytest.mark.vllm
IDS = prompt(100)


def adapter(folder: Path, *, weights: bytes = b"header weights", rank: int = 8, base: str = "here") -> str:
    folder.mkdir(exist_ok=True)
    config = {"r": rank, "lora_alpha": 16, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_what_an_adapter_is_does_not_depend_on_its_folder(tmp_path: Path) -> None:
    content = lora_content(adapter(tmp_path / "a"))
    assert content and content == lora_content(adapter(tmp_path / "b", base="there"))
    assert content != lora_content(adapter(tmp_path / "c", weights=b"header Weights"))
    assert content != lora_content(adapter(tmp_path / "d", rank=16))


def test_any_end_of_large_weights_counts(tmp_path: Path) -> None:
    plain = bytearray(3 * BLOCKS * BLOCK_BYTES)
    changed = [bytearray(plain) for _ in range(3)]
    changed[1][-1] = changed[2][0] = 1
    changed.append(plain + b"\0")
    folders = [adapter(tmp_path / str(n), weights=bytes(weights)) for n, weights in enumerate(changed)]
    assert len(set(map(lora_content, folders))) == len(folders)


def test_an_adapter_that_is_replaced_in_its_folder_is_another(tmp_path: Path) -> None:
    """As ``load_inplace`` has it. Otherwise vLLM keeps what it has, under one number."""
    folder = adapter(tmp_path / "a")
    first = lora_content(folder)
    assert lora_content(folder, 1) == first
    adapter(tmp_path / "a", weights=b"header Weights")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    second = lora_content(folder)
    assert lora_content(folder, 2) == second not in (first, "", REPLACED) and lora_content(folder, 1) == REPLACED
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert lora_content(folder, 2) == second, "vLLM cannot load another"


def test_how_many_adapters_are_known_is_bounded(tmp_path: Path) -> None:
    """Those that are used stay."""
    folder = adapter(tmp_path / "a")
    lora_content(folder, 1)
    second = lora_content(adapter(tmp_path / "a", weights=b"header, other weights"))
    for number in range(2, MAX_ADAPTERS + 10):
        assert lora_content(folder, number) == second and lora_content(folder, 1) == REPLACED
    assert len(known_adapters) == MAX_ADAPTERS


@pytest.mark.parametrize("broken", ["no folder", "no weights", "no config", "no object", "no mount"])
def test_an_adapter_that_cannot_be_read_goes_by_its_name(
    tmp_path: Path, lines: Lines, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "org/name-of-a-repository" if broken == "no folder" else adapter(tmp_path / "a")
    if broken == "no weights":
        (tmp_path / "a" / "adapter_model.safetensors").unlink()
    elif broken == "no config":
        (tmp_path / "a" / "adapter_config.json").unlink()
    elif broken == "no object":
        (tmp_path / "a" / "adapter_config.json").write_text("[]")
    elif broken == "no mount":
        monkeypatch.setattr(Path, "is_file", Mock(side_effect=OSError(errno.ENOTCONN, "not connected")))
    assert lora_content(folder) == lora_content(folder) == ""
    assert broken == "no folder" or len(lines(folder, "its name must mean the same on both engines")) == 1


@pytest.mark.parametrize("at_d", ["copy", "other", "unknown"])
def test_d_loads_what_p_computed_with_the_same_adapter(
    group: EngineGroup, tmp_path: Path, lines: Lines, at_d: str
) -> None:
    p, d = group.pair(extra={"plane": "cma"})
    params = p.prefill(IDS, lora=LoRARequest("helper", 1, adapter(tmp_path / "p")))
    folder = {"copy": adapter(tmp_path / "d"), "other": adapter(tmp_path / "o", rank=16), "unknown": "org/name"}[at_d]
    request_id = d.add(IDS, params, max_tokens=4, lora=LoRARequest("helper", 1, folder))
    loaded(p, d, request_id, 0 if at_d == "other" else None)
    assert bool(lines(request_id, "with another LoRA adapter of this name")) == (at_d == "other")
    settle(p, d)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_that_was_replaced_in_p_s_folder_is_not_the_one_that_p_has(
    group: EngineGroup, tmp_path: Path, in_place: bool
) -> None:
    """P has loaded it for its first request, whatever that was. D has the new one."""
    p, d = group.pair(extra={"plane": "cma"})
    of_p = LoRARequest("helper", 31, adapter(tmp_path / "p"), load_inplace=in_place)
    p.finish(p.add(prompt(20, 9), lora=of_p))
    adapter(tmp_path / "p", weights=b"header, other weights")
    of_d = LoRARequest("helper", 32, adapter(tmp_path / "d", weights=b"header, other weights"))
    request_id = d.add(IDS, p.prefill(IDS, lora=of_p), max_tokens=4, lora=of_d)
    loaded(p, d, request_id, None if in_place else 0)
    settle(p, d)
