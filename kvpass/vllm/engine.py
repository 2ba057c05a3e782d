"""The attention backend of packed blocks. It and `engine_metadata` are all that packed blocks use of vLLM;
tests/vllm/test_api.py reports what has changed there.

A layer's pages are in blocks of its own full-attention group, whose bytes `kvpass.paged.block_layout` describes. Its
exact tokens belong to a companion layer with a sliding window, whose blocks vLLM frees as the window moves on. vLLM
allocates both, shares them between requests with a common prefix, frees them and counts them, as for any model with two
kinds of layers.

With a calibration, pages of layers differ in size, and vLLM has blocks of one size. So all layers have one companion,
and use the blocks of the first one, by vLLM's own sharing of caches between layers; `kvpass.paged.model_layout`
describes their bytes.
"""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    SlidingWindowSpec,
)

from ..errors import KVPassError
from ..lowering.page_codecs import codecs_for
from ..paged import paged_attention
from ..schemes import SchemeConfig
from .calibrated_scheme import CalibratedScheme
from .engine_metadata import PackedMetadata, WindowBuilder, check
from .serving_config import Options, Served, ServedCalibration, SlidingBlock, check_version, options_asked
from .store_config import folder_of

logger = init_logger("vllm.kvpass")  # vLLM configures its own loggers alone

_TAKEN = "CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"
"""Backends that platforms choose for decoder layers."""
_TESTED = "CPU_ATTN"
_WINDOW = "kvpass.window"


def register_backends() -> None:
    """Replace the backends that platforms choose. The class of each is decided when a layer asks for it
    (`__getattr__`), because only then there is a configuration."""
    for name in _TAKEN:
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


def __getattr__(name: str) -> type[AttentionBackend]:
    if name not in _TAKEN:
        raise AttributeError(name)
    own = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    options = _options_of(get_current_vllm_config())
    if options is not None and name != _TESTED:
        if not options.untested_platform:
            raise KVPassError(
                f"kvpass was tested on vLLM's CPU platform alone, and this process chose {name}. To try it all the "
                'same, set {"kvpass": {..., "untested_platform": true}} and compare answers with those of vLLM alone.'
            )
        logger.warning_once("kvpass was never run in place of %s: compare answers with those of vLLM alone.", name)
    return _backend(own, options)


def _options_of(config: VllmConfig) -> Options | None:
    options = options_asked(config.additional_config)
    if options is not None:
        check_version(vllm.__version__)
    return options


@cache
def _backend(own: type[AttentionBackend], options: Options | None) -> type[AttentionBackend]:
    """The backend for a process whose engines ask for ``options``, in place of vLLM's ``own``. vLLM caches it for the
    process."""

    def same_options() -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and _options_of(config) != options:
            raise KVPassError(
                f"Another engine in this process uses {options}, but this one asks for {_options_of(config)}: vLLM "
                "keeps the first. Use one process for each."
            )

    class Untouched(own):  # type: ignore[misc, valid-type]
        @staticmethod
        def get_impl_cls():
            same_options()
            return own.get_impl_cls()

    if options is None:
        return Untouched
    PackedAttention.own = own

    class Packed(own):  # type: ignore[misc, valid-type]
        """Full attention over pages; all other layers keep vLLM's own backend."""

        supported_kv_cache_dtypes: ClassVar[list] = ["auto"]
        forward_includes_kv_cache_update = True

        @staticmethod
        def get_impl_cls():
            same_options()
            return PackedAttention

        @staticmethod
        def get_builder_cls():
            return PackedBuilder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            return [MultipleOf(1)]  # blocks are not split; `Served.layout` checks their size

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            if not isinstance(spec, FullAttentionSpec) or spec.state_content_bytes is not None:
                return spec
            served, size = _sized(PackedAttention.config, spec.num_kv_heads, spec.head_size)
            if isinstance(served, ServedCalibration):
                _share_blocks(PackedAttention.config)
                content = served.bytes_per_token(size)
                spec = replace(spec, num_head_slots=1)
            else:
                content = served.layout(size).bytes_per_token
            return replace(spec, block_size=size, dtype=torch.uint8, state_content_bytes=content)

    return Packed


class WindowBackend(AttentionBackend):
    """The backend of the exact tokens. No layer runs it; the backend of the pages reads and writes them."""

    @staticmethod
    def get_name() -> str:
        return PackedAttention.own.get_name()

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError

    @staticmethod
    def get_builder_cls():
        return WindowBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)


class Window(nn.Module, AttentionLayerBase):
    """The exact tokens of a layer, or of all layers, as a layer of the model of their own."""

    def __init__(self, name: str, served: Served | ServedCalibration, config: VllmConfig) -> None:
        super().__init__()
        self.name, self.served, self.kv_cache = name, served, torch.tensor([])
        config.compilation_config.static_forward_context[name] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Called once memory is allocated, before the first request: compiles the kernels of all layers."""
        self.kv_cache = kv_cache
        if self.name == f"{_WINDOW}.0":
            self.layer.impl.warm()

    @property
    def layer(self) -> Any:
        """The layer that these exact tokens belong to."""
        context = get_current_vllm_config().compilation_config.static_forward_context
        return next(one for one in context.values() if getattr(getattr(one, "impl", None), "window", None) is self)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SlidingWindowSpec:
        served, size = _sized(vllm_config, self.served.heads, self.served.head_dim)
        layers = len(served.layers) if isinstance(served, ServedCalibration) else 1
        return SlidingWindowSpec(
            block_size=served.window_block(size, _beside(vllm_config)),
            num_kv_heads=layers * served.heads,
            head_size=served.head_dim,
            dtype=served.dtype,
            sliding_window=served.window,
        )


class PackedBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Builds metadata for packed layers; for a group of other layers it returns vLLM's own builder."""

    def __new__(cls, kv_cache_spec, layer_names, vllm_config, device):
        if getattr(kv_cache_spec, "state_content_bytes", None) is None:
            return PackedAttention.own.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)
        return super().__new__(cls)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        if getattr(kv_cache_spec, "state_content_bytes", None) is None:
            return PackedAttention.own.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
        options = _options_of(vllm_config)
        served = PackedAttention.served.get((kv_cache_spec.num_kv_heads, kv_cache_spec.head_size))
        if options is None or not isinstance(served, Served):
            return AttentionCGSupport.NEVER
        layout, device = served.layout(kv_cache_spec.block_size), current_platform.device_type
        captured = paged_attention.never_waits(
            layout.key, layout.value, served.head_dim, served.dtype, device, options.lowering
        )
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if captured else AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        served = PackedAttention.served[kv_cache_spec.num_kv_heads, kv_cache_spec.head_size]
        self.layout = served.layout(kv_cache_spec.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False):
        common, layout = common_attn_metadata, self.layout
        return PackedMetadata(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, layout.slots, layout.lead,
            common.max_query_len,
        )  # fmt: skip


class PackedAttention(AttentionImpl):
    """Attention of one layer over pages and exact tokens."""

    own: ClassVar[Any]
    """The backend that the platform chose, for all other layers."""
    served: ClassVar[dict[tuple[int, int], Served | ServedCalibration]] = {}
    """The served scheme by heads and head_dim, for this process."""
    sizes: ClassVar[dict[tuple[int, int], int]] = {}
    """Its block size, once all layers of the model are known."""
    config: ClassVar[VllmConfig]
    """That of the engine made last in this process."""

    def __new__(cls, *args, **kwargs):
        kind = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if kind.get("sliding_window") is not None or kind.get("attn_type", "decoder") != AttentionType.DECODER:
            return cls.own.get_impl_cls()(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        asks = {
            "ALiBi": alibi_slopes,
            "layers that share a cache": kv_sharing_target_layer_name,
            **{name: value for name, value in others.items() if value is not None},
        }
        if found := [name for name, value in asks.items() if value]:
            raise KVPassError(f"kvpass does not support models with {', '.join(found)}: serve this one without kvpass.")
        config = get_current_vllm_config()
        check(config)
        PackedAttention.config = config
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.softcap = num_kv_heads or num_heads, logits_soft_cap or 0.0
        options = _options_of(config)
        assert options is not None, "this class is that of a process with a scheme"
        self.lowering, self.served_as = options.lowering, _served(config, options.scheme, self.num_kv_heads, head_size)
        windows = [one for one in config.compilation_config.static_forward_context.values() if isinstance(one, Window)]
        if isinstance(self.served_as, ServedCalibration) and windows:
            (self.window,) = windows
        else:
            self.window = Window(f"{_WINDOW}.{len(windows)}", self.served_as, config)
        self.layer: paged_attention.Layer | None = None
        self.cache: Tensor | None = None
        self.place = 0
        """Which one this is of the layers that share blocks (`_share_blocks`)."""

    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PackedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.zero_()
        if self.layer is None or self.cache is not self.window.kv_cache:
            self.layer, self.cache = self._bound(kv_cache), self.window.kv_cache
        batch = attn_metadata.with_window(get_forward_context().attn_metadata[self.window.name])
        paged_attention.store(batch, self.layer, key, value)
        paged_attention.attend(batch, self.layer, query, output)
        return output

    def _bound(self, kv_cache: Tensor) -> paged_attention.Layer:
        served, window = self.served_as, self.window.kv_cache
        calibrated = None
        if isinstance(served, ServedCalibration):
            calibrated = list(served.layers.values())[self.place]
            views = served.layout(kv_cache.shape[2]).views(kv_cache.flatten(1))[self.place]
            window = window[:, self.place * served.heads : (self.place + 1) * served.heads]
            specs = calibrated.key_spec, calibrated.value_spec
        else:
            layout = served.layout(kv_cache.shape[2])
            views, specs = layout.views(kv_cache), (layout.key, layout.value)
        key, value = (codecs_for(spec, kv_cache.device, self.head_size) for spec in specs)
        layer = paged_attention.Layer(views, window, *specs, (key, value), self.scale, self.softcap, calibrated)
        return paged_attention.with_kernel(layer, self.lowering)

    def warm(self) -> None:
        """Compile everything that runs over blocks, using two blocks with the strides of vLLM's real ones."""
        key = self.num_kv_heads, self.head_size
        served, size = PackedAttention.served[key], PackedAttention.sizes[key]
        window, nbytes = self.window.kv_cache, served.block_bytes(size)
        heads = 1 if isinstance(served, ServedCalibration) else self.num_kv_heads
        content = nbytes // (heads * size)
        strides = (window.stride(0) * window.element_size(), size * content, content, 1)
        like = torch.empty_strided((2, heads, size, content), strides, dtype=torch.uint8, device=window.device)
        paged_attention.warm(self._bound(like), self.num_heads)


_ARGUMENTS = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
    "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip


def _served(
    config: VllmConfig, scheme: SchemeConfig | CalibratedScheme, heads: int, head_dim: int
) -> Served | ServedCalibration:
    """The served scheme for the heads of a rank."""
    model, found = config.model_config, PackedAttention.served.get((heads, head_dim))
    if found is not None:
        return found
    if isinstance(scheme, CalibratedScheme):
        parallel = config.parallel_config
        scheme.check_model(model.hf_config, folder_of(model.model, model.revision))
        ranks = parallel.tensor_parallel_size
        found = ServedCalibration(scheme, heads, head_dim, model.dtype, ranks, parallel.rank % ranks)
    else:
        found = Served(scheme, model.get_total_num_hidden_layers(), heads, head_dim, model.dtype)
    PackedAttention.served[heads, head_dim] = found
    return found


def _share_blocks(config: VllmConfig) -> None:
    """Let all packed layers use the blocks of the first one. Called when all layers exist.

    Raises `KVPassError` unless these are the layers of the calibration, and the model has no others.
    """
    context = config.compilation_config.static_forward_context
    layers = {name: one for name, one in context.items() if isinstance(one, AttentionLayerBase)}
    packed = {name: one for name, one in layers.items() if isinstance(getattr(one, "impl", None), PackedAttention)}
    first, served = next(iter(packed)), next(iter(packed.values())).impl.served_as
    others = [name for name, one in layers.items() if name not in packed and not isinstance(one, Window)]
    places = {index: place for place, index in enumerate(served.layers)}
    if others or {extract_layer_index(name) for name in packed} != set(places):
        raise KVPassError(
            f"{served.scheme.name} covers layers {list(places)}, but this model has full attention in {list(packed)} "
            f"and other layers in {others}. Use kivi-sinks."
        )
    for name, layer in packed.items():
        layer.impl.place = places[extract_layer_index(name)]
        if name != first:
            layer.kv_sharing_target_layer_name = first


def _sized(config: VllmConfig, heads: int, head_dim: int) -> tuple[Served | ServedCalibration, int]:
    """The served scheme and its block size: the user's, or the one that wastes least. Called when all layers exist."""
    served, cache, key = PackedAttention.served[heads, head_dim], config.cache_config, (heads, head_dim)
    if key not in PackedAttention.sizes:
        beside, given = _beside(config), cache.user_specified_block_size
        size = cache.block_size if given else served.block_size(beside)
        served.layout(size)  # checks sizes before memory is allocated
        if beside is not None and not given and isinstance(served, Served):
            in_flight = config.scheduler_config.max_num_batched_tokens
            served.check_gain(size, beside, config.model_config.max_model_len, in_flight)
        PackedAttention.sizes[key] = size
        logger.info("kvpass packs keys and values in blocks of %d tokens: %s", size, served.plan)
    return served, PackedAttention.sizes[key]


def _beside(config: VllmConfig) -> SlidingBlock | None:
    """The largest block of the model's own sliding-window layers."""
    layers = config.compilation_config.static_forward_context.values()
    specs = [
        layer.get_kv_cache_spec(config)
        for layer in layers
        if isinstance(layer, AttentionLayerBase)
        and not isinstance(layer, Window)
        and not isinstance(getattr(layer, "impl", None), PackedAttention)
    ]
    found = [SlidingBlock(one.block_size, one.page_size_bytes) for one in specs if isinstance(one, SlidingWindowSpec)]
    return max(found, key=lambda block: block.nbytes, default=None)
