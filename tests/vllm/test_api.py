"""Behaviour of vLLM that `kvpass.vllm.engine` relies on; vLLM's backends are not public. If one of these tests fails on
a new release, adapt that file; nothing else depends on vLLM."""

import inspect
from dataclasses import fields, replace
from importlib.metadata import entry_points

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec

from kvpass.vllm import engine, serving_config


def names(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_this_release_is_one_that_is_tested():
    serving_config.check_version(vllm.__version__)


def test_the_plugin_is_found():
    assert "kvpass" in {point.name for point in entry_points(group="vllm.general_plugins")}


def test_backends_are_taken_by_name_and_looked_up_as_attributes_of_a_module():
    """`register_backends`: a path is split at its last dot, and the last part is an attribute."""
    engine.register_backends()
    for name in engine._TAKEN:
        assert AttentionBackendEnum[name].get_path() == f"kvpass.vllm.engine.{name}"
        assert AttentionBackendEnum[name].value.startswith("vllm.")


def test_a_configuration_has_a_field_for_plugins():
    assert {"additional_config", "speculative_config", "kv_transfer_config"} <= {one.name for one in fields(VllmConfig)}


def test_layers_make_their_attention_of_these_arguments():
    assert names(AttentionImpl.__init__)[: len(engine._ARGUMENTS)] == list(engine._ARGUMENTS)
    assert names(AttentionImpl.forward)[:9] == names(engine.PackedAttention.forward)[:9]


def test_a_backend_says_how_large_a_block_is():
    """`customize_spec`: bytes per token and head, whatever the dtype."""
    assert "customize_spec" in vars(AttentionBackend)
    spec = FullAttentionSpec(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.float32)
    packed = replace(spec, dtype=torch.uint8, state_content_bytes=48)
    assert packed.page_size_bytes == 128 * 3 * 48


def test_blocks_of_a_sliding_window_are_kept_for_the_tokens_before_a_step():
    """`Served.window`: that many of the last tokens, minus the next one."""
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32, sliding_window=64)
    manager = SlidingWindowManager.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = spec.sliding_window, spec.extra_retained_tokens
    assert manager.get_num_skipped_tokens(100) == 100 - 63


def test_metadata_of_a_step_has_what_a_batch_takes():
    needed = {"query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens"}
    assert needed <= {one.name for one in fields(CommonAttentionMetadata)}
    assert names(AttentionMetadataBuilder.__init__) == ["kv_cache_spec", "layer_names", "vllm_config", "device"]
    assert names(AttentionMetadataBuilder.build) == ["common_prefix_len", "common_attn_metadata", "fast_build"]


def test_heads_of_a_block_are_contiguous_in_this_layout():
    assert KVCacheLayout.LBHNC in engine.WindowBackend.supported_kv_cache_layouts()
