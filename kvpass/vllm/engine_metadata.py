"""What vLLM passes to packed layers in a step, and the configurations that they cannot be combined with."""

from dataclasses import dataclass

from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from ..errors import KVPassError
from ..paged.batch import Batch, BlockTable
from .serving_config import KEY, VARIABLE


@dataclass
class WindowMetadata:
    """The block table of the exact tokens: ``[R, n]``, as vLLM has it, and tokens per block."""

    blocks: Tensor
    size: int


class WindowBuilder(AttentionMetadataBuilder[WindowMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # that of the pages decides

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False):
        return WindowMetadata(common_attn_metadata.block_table_tensor, self.kv_cache_spec.block_size)


@dataclass
class PackedMetadata:
    """The requests of a step, in vLLM's own tensors, which a captured graph reads again in later steps. A layer adds
    their windows when it runs, so what is computed from them is captured, too.

    start, total: ``[R + 1]`` and ``[R]``. blocks: ``[R, n]``. slots, lead, most: as in `Batch`.
    """

    start: Tensor
    total: Tensor
    blocks: Tensor
    slots: int
    lead: int
    most: int
    batch: Batch | None = None

    def with_window(self, window: WindowMetadata) -> Batch:
        """The complete batch; the layers of a group share what is computed for it."""
        if self.batch is None:
            start, total = self.start.long(), self.total.long()
            past = total - (start[1:] - start[:-1])
            tables = BlockTable(self.blocks.long(), self.slots), BlockTable(window.blocks.long(), window.size)
            self.batch = Batch(start, past, total, *tables, self.lead, self.most)
        return self.batch


def check(config: VllmConfig) -> None:
    """Raise `KVPassError` for configurations that cannot be combined with packed pages."""
    parallel, cache = config.parallel_config, config.cache_config
    asks = {
        f"kv_cache_dtype={cache.cache_dtype!r}: pages have a dtype of their own": cache.cache_dtype != "auto",
        "speculative decoding": config.speculative_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "encoder-decoders": config.model_config.is_encoder_decoder,
        "MLA": config.model_config.use_mla,
        "disable_hybrid_kv_cache_manager": bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
    if found := [name for name, there in asks.items() if there]:
        raise KVPassError(
            f"kvpass does not support {'; '.join(found)}. Remove that option, or serve without {KEY} in "
            f"additional_config and {VARIABLE}."
        )
