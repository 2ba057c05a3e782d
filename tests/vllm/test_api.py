"""Behaviour of vLLM that `kvpass.vllm` relies on; vLLM's backends and offloading are not public. If one of these tests
fails on a new release, adapt `engine` (blocks) or `connector` (the prefix store); nothing else depends on vLLM."""

import inspect
from dataclasses import fields, replace
from importlib.metadata import entry_points

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec
from vllm.v1.kv_offload.base import TransferResult, get_offload_group_idx, make_offload_key
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

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
    needed = {"query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens", "max_query_len"}
    assert needed <= {one.name for one in fields(CommonAttentionMetadata)}
    assert names(AttentionMetadataBuilder.__init__) == ["kv_cache_spec", "layer_names", "vllm_config", "device"]
    assert names(AttentionMetadataBuilder.build) == ["common_prefix_len", "common_attn_metadata", "fast_build"]


def test_heads_of_a_block_are_contiguous_in_this_layout():
    assert KVCacheLayout.LBHNC in engine.WindowBackend.supported_kv_cache_layouts()


def test_layers_may_share_a_cache_that_is_chosen_once_all_exist():
    """`_share_blocks` sets an attribute of layers while their specs are collected; a layer that has it gets no blocks
    of its own, but those of the layer it names, and their metadata."""
    assert "kv_sharing_target_layer_name" in inspect.getsource(Attention.__init__)
    collect = inspect.getsource(GPUModelRunner.get_kv_cache_spec)
    assert collect.index("kv_sharing_target_layer_name") < collect.index("customize_attention_spec(")
    groups = inspect.getsource(add_kv_sharing_layers_to_kv_cache_groups)
    assert "tgt_kv_cache_group.layer_names.append(layer_name)" in groups
    spec = FullAttentionSpec(block_size=64, num_kv_heads=3, head_size=64, dtype=torch.uint8, state_content_bytes=99)
    assert replace(spec, num_head_slots=1).page_size_bytes == 64 * 99


# ---------------------------------------------------------------- the prefix store


def test_the_connector_is_found_by_its_module():
    """`KVPassConnector` is looked up as an attribute of `kvpass.vllm`."""
    named = KVTransferConfig(
        kv_connector="KVPassConnector", kv_connector_module_path="kvpass.vllm", kv_role="kv_both",
        kv_connector_extra_config={"scheme": "kivi-4"},
    )  # fmt: skip
    found = KVConnectorFactory.get_connector_class(named)
    assert issubclass(found, OffloadingConnector) and KVConnectorFactory.supports_hma_config(named)


def test_a_connector_consists_of_what_its_constructor_makes():
    """`KVPassConnector.__init__` takes the place of this one, except for the spec."""
    source = inspect.getsource(OffloadingConnector.__init__)
    made = {
        line.split("=")[0].strip().split(":")[0] for line in source.splitlines() if line.strip().startswith("self.")
    }
    assert made == {"self._canonical_layout", "self.connector_scheduler", "self.connector_worker"}
    assert names(offloading.OffloadingConnectorScheduler.__init__) == ["spec", "vllm_config", "kv_cache_config"]
    assert names(OffloadingConnectorWorker.__init__) == ["spec", "vllm_config", "kv_cache_config"]


def test_a_failed_load_is_recomputed_by_a_policy_that_is_read_after_the_connector_is_made():
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("create_connector(") < source.index("kv_load_failure_policy")
    assert "failed_recving" in {one.name for one in fields(KVConnectorTransferResults)}
    assert "request.num_computed_tokens = 0" in inspect.getsource(Scheduler._handle_failed_recving)


def test_jobs_and_requests_of_the_connector_are_where_they_were():
    assert "_load_jobs" in inspect.getsource(OffloadingConnectorWorker.__init__)
    assert "_req_status" in inspect.getsource(offloading.OffloadingConnectorScheduler.__init__)
    assert "next_stored_chunk_idx" in {one.name for one in fields(offloading.RequestGroupState)}
    assert {"job_id", "success", "transfer_size", "transfer_time"} == {one.name for one in fields(TransferResult)}


def test_the_group_of_a_chunk_is_at_the_end_of_its_key():
    key = make_offload_key(b"h" * 32, 3)
    assert get_offload_group_idx(key) == int.from_bytes(key[-4:], "big") == 3
