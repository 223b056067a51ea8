"""Which weights an engine of vLLM has: read from the files that vLLM loads, and followed where they change under way.

vLLM gives a connector no call where weights change. All that is in the form of a checkpoint passes ``load_weights`` of
the model: a reload from files, and what a trainer sends. Some of vLLM's ways of transfer write the parameters
themselves; such updates are counted, so that engines with as many of them agree.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from huggingface_hub import snapshot_download

from kvferry.connector.geometry.model_identity import weights_fact
from kvferry.connector.vllm import hooks
from kvferry.connector.worker.weights import WeightsDigest, checkpoint_digest, counts, sampled

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvferry.adapter")

READ_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
"""The load formats for which vLLM reads a checkpoint in the format safetensors, if there is one."""
CHANGES = ("update_weights", "reload_weights", "reset_weights")
"""The methods of vLLM's worker that change weights."""
_PART = re.compile(r".*-\d+-of-(\d+)\.safetensors")
_CACHED = re.compile(r".*/models--([^/]+)/snapshots/([^/]+)/?")


class EngineWeights:
    """``fact``: as ``weights_fact`` has it, of now. ``tag``: ``model_tag`` of the settings, in its place if set."""

    def __init__(self, vllm_config: VllmConfig, tag: str | None = None) -> None:
        self._config, self.tag = vllm_config, tag
        self._digest = WeightsDigest()
        self._seen = self._uncounted = 0  # tensors that passed ``load_weights``, and updates of which none did
        try:
            self._digest = self._digest if tag else checkpoint_digest(weights_files(vllm_config))
        except Exception as error:  # of huggingface_hub and of files
            text = (
                "kvferry: the weights of %s cannot be read (%s): their name is compared in place of a digest, and must "
                "mean the same on P and D"
            )
            why = str(error).strip().partition("\n")[0] or repr(error)
            logger.warning(text, weights_name(vllm_config), why[:300])

    @property
    def fact(self) -> str:
        return weights_fact(str(self._digest), weights_name(self._config))

    def follow(self, runner: Any, connector: object, changed: Callable[[], None]) -> None:
        """Have ``changed`` called after each change of the weights of this runner's model, and ``fact`` follow it."""
        worker = hooks.find_worker(runner)

        def loads(load: Callable[..., Any]) -> Callable[..., Any]:
            def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    return load(self._watched(weights), *args, **kwargs)
                finally:
                    changed()

            return load_weights

        def changes(change: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen = self._seen
                try:
                    return change(*args, **kwargs)
                finally:
                    if seen == self._seen and not getattr(worker, "_weight_update_is_draft", False):
                        self._uncounted += 1
                        self._digest.put("", self._uncounted, b"")
                        changed()

            return call

        if hasattr(runner, "get_model"):
            hooks.wrap(runner.get_model(), "load_weights", connector, loads)
        for name in CHANGES:
            if hasattr(worker, name):
                hooks.wrap(worker, name, connector, changes)

    def _watched(self, weights: Any) -> Any:
        """The same weights, which are noted as the model takes them; a list stays one."""
        return list(self._noted(weights)) if isinstance(weights, list) else self._noted(weights)

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:  # else vLLM only plans a load
                self._seen += 1
                if counts(name):
                    self._digest.put(name, tensor.nbytes, _sample(tensor))
            yield name, tensor


def _sample(tensor: torch.Tensor) -> bytes:
    """As of the file in which the tensor would lie. Where that cannot be had, what no other engine has."""
    at, count = sampled(tensor.nbytes)
    try:
        content = tensor.detach().reshape(-1).view(torch.uint8)
        return content[at : at + count].cpu().numpy().tobytes()
    except Exception as error:
        logger.warning("kvferry: weights that were loaded cannot be compared: %r", error)
        return secrets.token_bytes(16)


def weights_name(vllm_config: VllmConfig) -> str:
    """The name of the weights and their revision: of a folder in the cache of Hugging Face those of its repository."""
    model = vllm_config.model_config
    name, revision = model.model_weights or model.model, model.revision
    if cached := _CACHED.fullmatch(str(name)):
        name, revision = cached[1].replace("--", "/"), cached[2]
    else:
        revision = getattr(model.hf_config, "_commit_hash", None) or revision
    return f"{name}, revision {revision or 'unset'}"


def weights_files(vllm_config: VllmConfig) -> list[Path]:
    """The files that vLLM loads, by its rules: ``consolidated`` ones first, of others those that the index names.

    Raises:
        Exception: there are none, or not in this format; one line.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in READ_FROM_FILES:
        raise ValueError(f"load_format {load.load_format}")
    if model.model_weights:
        raise ValueError(f"they come from {model.model_weights}")
    folder = Path(model.model)
    if not folder.is_dir():
        cached = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
        folder = Path(cached)
    every = sorted(folder.glob("*.safetensors"))
    found = [file for file in every if file.name.startswith("consolidated")]
    if not found or load.load_format not in ("auto", "mistral"):
        found = [file for file in every if file not in found]
        parts = [_PART.fullmatch(file.name) for file in found]
        index = folder / "model.safetensors.index.json"
        if len(found) > 1 and not all(part and int(part[1]) == len(found) for part in parts) and index.is_file():
            named = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
            found = [file for file in found if file.name in named]
    if not found:
        raise ValueError(f"no file *.safetensors in {folder}")
    return found
