"""What a LoRA adapter is, beyond its name: P and D may hold different adapters under one name, or one in two folders.

vLLM reads all of an adapter before the first request that uses it. This reads 64 blocks of it, once for each version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

logger = logging.getLogger("vllm.kvferry.adapter")

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them."""
SCALING = ("r", "lora_alpha", "use_rslora")
"""Of the adapter's configuration, what its weights do not tell. Other entries may differ by host, as paths do."""
BLOCKS, BLOCK_BYTES = 64, 4096
"""Of the weights, the blocks that count; the first ones have the header of safetensors."""
MAX_ADAPTERS = 1024

_Version = tuple[int, int, int]
_known: dict[str, tuple[_Version | None, str]] = {}


def lora_content(path: str) -> str:
    """A digest of the adapter in a folder, alike for copies of it; empty where no such files are to be read here."""
    known, version = _known.get(path), None
    try:
        file = next((found for name in WEIGHTS if (found := Path(path, name).expanduser()).is_file()), None)
        if file is not None:
            stat = file.stat()
            version = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if known is not None and known[0] == version:
            return known[1]
        content = "" if file is None else _digest(file)
    except (OSError, RuntimeError, ValueError, AttributeError) as error:  # RuntimeError: of ``expanduser``
        logger.debug("kvferry: the LoRA adapter in %s: %r", path, error)
        content = ""
    if not content and (known is None or known[1]):
        logger.info(
            "kvferry: the LoRA adapter %s cannot be compared: its name must mean the same on both engines", path
        )
    if len(_known) >= MAX_ADAPTERS:
        _known.clear()
    _known[path] = version, content
    return content


def _digest(file: Path) -> str:
    config: dict[str, object] = json.loads((file.parent / "adapter_config.json").read_text())
    digest = hashlib.blake2b(json.dumps([config.get(name) for name in SCALING]).encode(), digest_size=16)
    with file.open("rb") as weights:
        size = os.fstat(weights.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - BLOCK_BYTES)
        for number in range(BLOCKS):
            weights.seek(last * number // (BLOCKS - 1))
            digest.update(weights.read(BLOCK_BYTES))
    return digest.hexdigest()
