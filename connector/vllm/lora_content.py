"""What a LoRA adapter is, beyond its name: P and D may hold different adapters under one name, or one in two folders.

vLLM reads all of an adapter before the first request that uses it. This reads 64 blocks of it, once for each version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger("vllm.kvferry.adapter")

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them."""
SCALING = ("r", "lora_alpha", "use_rslora")
"""Of the adapter's configuration, what its weights do not tell. Other entries may differ by host, as paths do."""
BLOCKS, BLOCK_BYTES = 64, 4096
"""Of the weights, the blocks that count; the first ones have the header of safetensors."""
MAX_ADAPTERS = 1024
"""That are known, the ones that were used last. vLLM has fewer in memory, and loads others anew."""
REPLACED = secrets.token_hex(16)
"""In place of the content of an adapter that was replaced in its folder: vLLM may have this one or the one before."""

_Version = tuple[int, int, int]
known_adapters: dict[tuple[int, str], tuple[_Version | None, str, str]] = {}
"""By vLLM's number of the adapter, and its folder: its version and content now, and its content at the first call."""


def lora_content(path: str, number: int = 0) -> str:
    """A digest of the adapter in a folder, alike for copies of it; empty where no such files are to be read here;
    ``REPLACED``, which no other engine has, where another lay there at the first call for this ``number`` of vLLM's. 0:
    vLLM reads it anew for each step, as ``load_inplace`` has it."""
    known = known_adapters.pop((number, path), None)  # the one that was used last comes last
    version, content = None, ""
    try:
        file = next((found for name in WEIGHTS if (found := Path(path, name).expanduser()).is_file()), None)
        if file is not None:
            stat = file.stat()
            version = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if known is not None and known[0] == version:
            content = known[1]
        elif file is not None:
            content = _digest(file)
    except (OSError, RuntimeError, ValueError, AttributeError) as error:  # RuntimeError: of ``expanduser``
        logger.debug("kvferry: the LoRA adapter in %s: %r", path, error)
    if not content and (known is None or known[1]):
        text = "kvferry: the LoRA adapter %s cannot be compared: its name must mean the same on both engines"
        logger.info(text, path)
    first = known[2] or content if known and number else content
    known_adapters[number, path] = version, content, first
    if len(known_adapters) > MAX_ADAPTERS:
        del known_adapters[next(iter(known_adapters))]
    return first if content in ("", first) else REPLACED


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
