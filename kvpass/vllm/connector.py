"""`KVPassConnector`: vLLM's `OffloadingConnector` over a prefix store.

vLLM keeps what is hard to get right: which blocks of a request belong to which chunk, when they may be written to,
requests that wait for a load, preemption, aborts, hybrid models and metrics. The store's own are its index
(`store_manager`) and what its workers do with blocks (`store_worker`).
"""

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import OffloadingSpec

from ..errors import KVPassError
from ..prefix_store import ChunkCodec, ChunkFiles, EntropyChunkCodec, LayerShape
from ..prefix_store.chunks import plans_of
from .calibrated_scheme import CalibratedScheme
from .engine_blocks import EngineBlocks
from .serving_config import check_version
from .store_config import StoreConfig, folder_of, weights_of
from .store_manager import GroupSizes, StoreManager
from .store_worker import Group, StoreWorker

logger = init_logger("vllm.kvpass.store")

_DTYPES = torch.float32, torch.bfloat16, torch.float16


@dataclass
class StoreWorkerMetadata(OffloadingWorkerMetadata):
    """What a worker tells the scheduler after a step.

    lost: chunks that it could not store or load.
    grown: by how many bytes chunks in memory are larger than was reserved for them.
    """

    lost: set[bytes] = field(default_factory=set)
    grown: Counter[bytes] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StoreWorkerMetadata":
        both = super().aggregate(other)
        lost, grown = self.lost | getattr(other, "lost", set()), Counter(self.grown)
        grown.update(getattr(other, "grown", {}))
        return StoreWorkerMetadata(both.completed_jobs, both.transfer_stats, lost, grown)


class StoreSpec(OffloadingSpec):
    """Makes the manager of a store. Workers are made when caches are known, by the connector."""

    def __init__(self, config, store: StoreConfig, manager: StoreManager) -> None:
        super().__init__(config)
        self.offload_prompt_only, self.manager = store.offload_prompt_only, manager

    def get_manager(self) -> StoreManager:
        return self.manager

    def get_worker(self, kv_caches):
        raise NotImplementedError("KVPassConnector.register_kv_caches makes it, from caches with shapes and dtypes")


class KVPassConnector(OffloadingConnector):
    """``--kv-transfer-config '{"kv_connector": "KVPassConnector", "kv_connector_module_path": "kvpass.vllm", "kv_role":
    "kv_both", "kv_connector_extra_config": {"scheme": "kivi-4", "cpu_bytes": 4000000000}}'``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        _check(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"  # a damaged file is no reason to fail a request
        self.store = StoreConfig.of(transfer.kv_connector_extra_config)
        groups = {index: one for index, one in enumerate(kv_cache_config.kv_cache_groups)
                  if one.kv_cache_spec.prefix_cacheable}  # fmt: skip
        self.per, ranks = self._blocks_per_chunk(groups), vllm_config.parallel_config.world_size
        if isinstance(self.store.scheme, CalibratedScheme):
            model = vllm_config.model_config
            self.store.scheme.check_model(model.hf_config, folder_of(model.model, model.revision))
        of_ranks = [
            {index: self._codec(group, "cpu", "reference", rank) for index, group in groups.items()}
            for rank in range(ranks if isinstance(self.store.scheme, CalibratedScheme) else 1)
        ]  # ranks differ only in calibrated bit widths
        self.codecs = of_ranks[0]
        config = build_offloading_config(vllm_config, kv_cache_config)
        config = replace(config, cache=replace(config.cache, blocks_per_chunk=self.per))
        self._canonical_layout = False
        sizes = {
            index: GroupSizes(codec.tokens, *(
                ranks // len(of_ranks) * sum(one[index].nbytes(first) for one in of_ranks) for first in (True, False)
            ))
            for index, codec in self.codecs.items()
        }  # fmt: skip
        largest = max(one.first for one in sizes.values())
        if 0 < self.store.cpu_bytes < largest:
            raise KVPassError(f"cpu_bytes={self.store.cpu_bytes} does not hold one chunk, which takes {largest} bytes.")
        files = self._files(vllm_config)
        self.connector_scheduler = self.connector_worker = None
        spec = StoreSpec(config, self.store, StoreManager(self.store.cpu_bytes, files, sizes, ranks))
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)
            self.files = files

    # ------------------------------------------------------------ configuration

    def _shapes(self, group: KVCacheGroupSpec) -> dict[int, LayerShape]:
        spec = group.kv_cache_spec
        shape = LayerShape(spec.num_kv_heads, spec.head_size, spec.dtype)
        return {extract_layer_index(name): shape for name in group.layer_names}

    def _blocks_per_chunk(self, groups: dict[int, KVCacheGroupSpec]) -> int:
        model, pages = self._vllm_config.model_config, []
        for group in groups.values():
            plans = plans_of(self.store.scheme, self._shapes(group), model.get_total_num_hidden_layers())
            pages += [spec.page_size for plan in plans.values() for spec in (plan.key, plan.value)]
        return self.store.chunk_of([group.kv_cache_spec.block_size for group in groups.values()], pages)

    def _codec(
        self, group: KVCacheGroupSpec, device: torch.device | str, lowering: str, rank: int
    ) -> ChunkCodec | EntropyChunkCodec:
        layers, scheme = self._vllm_config.model_config.get_total_num_hidden_layers(), self.store.scheme
        tokens, shapes = group.kv_cache_spec.block_size * self.per, self._shapes(group)
        if not isinstance(scheme, CalibratedScheme):
            return ChunkCodec(scheme, shapes, layers, tokens, device, lowering)
        ranks, dtype = self._vllm_config.parallel_config.tensor_parallel_size, group.kv_cache_spec.dtype
        calibrated = scheme.layers(ranks, rank, dtype, torch.device(device))
        scheme.check_layers(shapes, calibrated)
        return EntropyChunkCodec(shapes, calibrated, tokens, device, lowering)

    def _files(self, config: VllmConfig) -> ChunkFiles | None:
        if self.store.path is None:
            return None
        algorithm = config.cache_config.prefix_caching_hash_algo
        if not algorithm.startswith("sha256"):
            raise KVPassError(
                f"Hashes by {algorithm!r} differ between processes, so files would never be found again: set "
                "--prefix-caching-hash-algo sha256, or leave path out."
            )
        model, parallel = config.model_config, config.parallel_config
        belongs_to = {
            "model": [model.compute_hash(), str(model.hf_overrides), config.load_config.load_format],
            "weights": weights_of(model.model, model.revision),
            "scheme": self.store.scheme.to_dict(),
            "chunks": {str(index): [codec.tokens, str(codec.shapes(True))] for index, codec in self.codecs.items()},
            "ranks": parallel.tensor_parallel_size,
            "hashes": algorithm,
        }
        return ChunkFiles(self.store.path, belongs_to, parallel.rank, self.store.disk_bytes)

    # ------------------------------------------------------------ workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, context = self._kv_cache_config, self._vllm_config.compilation_config.static_forward_context
        groups = {}
        for index in self.codecs:
            group, layers = config.kv_cache_groups[index], []
            spec = group.kv_cache_spec
            for name in group.layer_names:
                sizes = spec.num_kv_heads, spec.head_size, spec.block_size, config.num_blocks
                layers.append(EngineBlocks(context[name], kv_caches[name], *sizes))
            codec = self._codec(group, layers[0].device, "auto", self._vllm_config.parallel_config.rank)
            start = time.perf_counter()
            codec.warm()
            groups[index] = Group(codec, layers, self.per)
            logger.info(
                "kvpass keeps prefixes by %s: %s bytes per chunk of %d tokens, %.2f times fewer than vLLM's %s "
                "(kernels in %.1f s); memory for %s bytes of all ranks, files in %s",
                self.store.scheme.name, f"{codec.nbytes(False):,}", codec.tokens,
                codec.full_nbytes / codec.nbytes(False), str(spec.dtype).removeprefix("torch."),
                time.perf_counter() - start, f"{self.store.cpu_bytes:,}", self.files and self.files.folder,
            )  # fmt: skip
        if current_platform.is_cuda_alike():
            logger.warning("kvpass's prefix store has been run on vLLM's CPU platform only: compare a few answers.")
        self._of_worker.worker = StoreWorker(groups, self.files)

    @property
    def _of_worker(self) -> OffloadingConnectorWorker:
        assert self.connector_worker is not None, "vLLM calls this in workers alone"
        return self.connector_worker

    @property
    def _worker(self) -> StoreWorker:
        worker = self._of_worker.worker
        assert isinstance(worker, StoreWorker), "vLLM registers caches before it runs a step"
        return worker

    def start_load_kv(self, forward_context, **kwargs) -> None:
        self._worker.idle = forward_context.attn_metadata is None
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        requests, worker = dict(self._of_worker._load_jobs), self._worker
        results = super().get_transfer_results(finished_req_ids)
        failed = {job for job in worker.failed if requests.get(job) in results.finished_recving}
        results.failed_recving |= {requests[job] for job in failed}
        worker.failed -= failed
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        found = super().build_connector_worker_meta()
        if found is None or self.connector_worker is None:
            return found
        lost, self._worker.lost = self._worker.lost, set()
        grown = Counter(self._worker.take_grown())
        return StoreWorkerMetadata(found.completed_jobs, found.transfer_stats, lost, grown)

    # ------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Leaves the last tokens of a hit to the engine: errors of the newest tokens matter most. A shorter hit needs
        earlier tokens of sliding windows; if they are not stored, the hit stays as it is."""
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not found or not self.store.recompute:
            return found, later
        wanted = max(0, found - self.store.recompute)
        if wanted and self.scheduler._sliding_window_groups:
            # vLLM leaves out one token more
            again, _ = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens, wanted + 1)
            wanted = wanted if again == wanted else found
        return wanted, wanted > 0

    @property
    def _manager(self) -> StoreManager:
        manager = self.scheduler.manager
        assert isinstance(manager, StoreManager)
        return manager

    def on_new_request(self, request) -> None:
        if request.lora_request is not None:  # its key has the adapter's name and path, not its weights
            self._manager.private.add(request.request_id)
        super().on_new_request(request)

    def update_connector_output(self, connector_output) -> None:
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        self._manager.forget(getattr(meta, "lost", ()))
        self._manager.grow(getattr(meta, "grown", {}))
        for name in connector_output.failed_recving or ():  # what it computes itself is to be stored
            if (status := self.scheduler._req_status.get(name)) is not None:
                for state in status.group_states:
                    state.next_stored_chunk_idx = 0


def _check(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `KVPassError` for engines whose blocks cannot be stored."""
    parallel, cache = config.parallel_config, config.cache_config
    asks = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "several machines per engine": parallel.nnodes_within_dp > 1,
        "speculative decoding": config.speculative_config is not None,
        "engines without --enable-prefix-caching": not cache.enable_prefix_caching,
        f"vLLM's platform {current_platform.device_type!r}": not (
            current_platform.is_cpu() or current_platform.is_cuda_alike()
        ),
    }
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable:
            continue
        plain = isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) and not isinstance(
            spec, (MLAAttentionSpec, SlidingWindowMLASpec)
        )
        asks[f"layers with {type(spec).__name__}"] = not plain
        if plain and isinstance(spec, AttentionSpec):
            asks[f"caches of {spec.dtype}: quantizing them again would lose more than it saves"] = (
                spec.dtype not in _DTYPES or spec.kv_quant_mode.is_per_token_head or cache.cache_dtype not in
                ("auto", "float16", "bfloat16", "float32")
            )  # fmt: skip
    if found := [name for name, there in asks.items() if there]:
        raise KVPassError(
            f"The prefix store does not support {'; '.join(found)}. Change that option, or serve without "
            "KVPassConnector."
        )
