"""vLLM's OffloadingConnector for engines whose KV cache is in host memory.

vLLM refuses them where it makes the copier (``CPUOffloadingSpec.get_worker``), which needs streams of a GPU. All else
of the connector is vLLM's: what is stored and found, when a copy may begin, and what waits for its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopier(OffloadingWorker):
    """Copies when it is asked for its results, at the end of a step, as a GPU may do; or when it is waited for."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self.held = False
        """As long as this is set, only copies that are waited for are made."""
        self._per_chunk = blocks_per_chunk
        self._groups = [[caches.tensors[ref.tensor_idx].tensor for ref in refs] for refs in caches.group_data_refs]
        form = chunks, blocks_per_chunk
        self._kept = [
            [torch.zeros(*form, pages.shape[1], dtype=pages.dtype) for pages in each] for each in self._groups
        ]
        self._jobs: dict[int, tuple[Any, Any, bool]] = {}
        self._done: list[TransferResult] = []

    @property
    def jobs(self) -> int:
        """Copies that were asked for and not made."""
        return len(self._jobs)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = src_spec, dst_spec, True
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = dst_spec, src_spec, False
        return True

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            self._copy(job_id)

    def get_finished(self) -> list[TransferResult]:
        if not self.held:
            self.wait(set(self._jobs))
        done, self._done = self._done, []
        return done

    def _copy(self, job_id: int) -> None:
        pages, chunks, stores = self._jobs.pop(job_id)
        began, size = time.perf_counter(), 0
        blocks, kept = iter(pages.block_ids.tolist()), iter(chunks.block_ids.tolist())
        for group, (count, first) in enumerate(zip(pages.group_sizes, pages.block_indices, strict=True)):
            self._copy_group(group, [next(blocks) for _ in range(count)], first, kept, stores)
            size += count * sum(pages.shape[1] * pages.element_size() for pages in self._groups[group])
        assert next(blocks, None) is None and next(kept, None) is None
        taken = time.perf_counter() - began
        self._done.append(TransferResult(job_id, success=True, transfer_size=size, transfer_time=taken))

    def _copy_group(self, group: int, blocks: Sequence[int], first: int, kept: Any, stores: bool) -> None:
        """``first``: the place of the first of these blocks in its request."""
        chunk = -1
        for number, block in enumerate(blocks, first):
            if number == first or number % self._per_chunk == 0:
                chunk = next(kept)
            for pages, place in zip(self._groups[group], self._kept[group], strict=True):
                inside = place[chunk, number % self._per_chunk]
                if stores:
                    inside.copy_(pages[block])
                else:
                    pages[block].copy_(inside)


class HostStoreSpec(CPUOffloadingSpec):
    """``spec_name`` and ``spec_module_path`` of OffloadingConnector take a store that is none of vLLM's."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostCopier:
        return HostCopier(kv_caches, self.blocks_per_chunk, self.num_chunks)
