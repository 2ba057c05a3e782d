"""Engines with a prefix store: what comes back from it is what was computed."""

import random

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kvpass.prefix_store import ChunkFiles
from kvpass.vllm.store_manager import GroupSizes, StoreManager

from engines import additional, started, stored

CHUNK = 128  # tokens, of vLLM's block size on CPUs


def prompt(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(512) for _ in range(count)]


A, B, C = prompt(1, 1000), prompt(2, 700), prompt(3, 700)


def asks(*prompts, **more) -> dict:
    return {"prompts": list(prompts), "tokens": 24, "reset": True, **more}


def cached(phase) -> list[int]:
    return [one["cached"] for one in phase["requests"].values()]


def assert_same(found, expected, tolerance):
    for number, one in expected["requests"].items():
        other = found["requests"][number]
        assert other["tokens"] == one["tokens"]
        assert (torch.tensor(other["logprobs"]) - torch.tensor(one["logprobs"])).abs().max() <= tolerance


def test_prefixes_come_back_from_memory_and_disk(serve, tiny, tmp_path):
    """Exact by identity: from memory, beyond its limit from disk, in another process, after damage, for several
    requests at once, and after some of them were aborted. Another scheme and dtype see none of it. A hit is all whole
    chunks, but for the last 64 tokens, which are computed again."""
    chunk = 3 * 4 * 64 * 2 * CHUNK * 4
    extra = dict(cpu_bytes=8 * chunk, path=str(tmp_path))
    phases = [asks(A), asks(A), asks(B), asks(C), asks(A), asks(A, A[:600] + B[:300], B)]
    phases += [asks(A, C, abort={0: 1, 1: 3}), asks(A, C)]
    found = serve(tiny, phases, **stored("identity", **extra))["phases"]
    assert cached(found[0]) == [0] and cached(found[1]) == [832], [cached(one) for one in found]
    assert cached(found[4]) == [832]  # B and C filled the memory
    assert cached(found[5])[0] == 832 and cached(found[5])[1] >= 448 and cached(found[5])[2] == 576
    assert cached(found[7]) == [832, 576]
    for phase in (1, 4):
        assert_same(found[phase], found[0], 1e-5)
    again = serve(tiny, [asks(A), asks(B), asks(A), asks(C, damage=str(tmp_path)), asks(C)],
                  **stored("identity", **extra))["phases"]  # fmt: skip
    assert [cached(one) for one in again] == [[832], [576], [832], [0], [576]]
    for phase, expected in zip(again, (found[0], found[2], found[0], found[3], found[3]), strict=True):
        assert_same(phase, expected, 1e-5)
    other = serve(tiny, [asks(A), asks(A)], **stored("kivi-8", recompute=0, **extra))["phases"]
    assert [cached(one) for one in other] == [[0], [896]]
    assert_same(other[0], found[0], 1e-4)
    first = [one["requests"]["0"] for one in other]
    assert first[0]["tokens"][0] == first[1]["tokens"][0]  # so that the numbers are those of one token
    assert 0 < abs(first[0]["logprobs"][0] - first[1]["logprobs"][0]) < 0.2


def test_ranks_keep_their_own_heads(serve, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    extra = dict(cpu_bytes=1 << 22, path=str(tmp_path))  # less than A takes
    found = serve(tiny, [asks(A), asks(A)], tensor_parallel_size=2, **stored("identity", **extra))["phases"]
    assert [cached(one) for one in found] == [[0], [832]]
    assert_same(found[1], found[0], 1e-4)
    assert {path.suffixes[0] for path in tmp_path.rglob("*.safetensors")} == {".0", ".1"}


def test_layers_with_a_sliding_window_are_kept(serve, tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=512, head_dim=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=200, initializer_range=0.2)
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path / "model")
    extra = dict(cpu_bytes=1 << 20, path=str(tmp_path / "store"))
    damaged = asks(A, damage=str(tmp_path / "store"))
    found = serve(tmp_path / "model", [asks(A), asks(A), damaged], **stored("identity", **extra))["phases"]
    assert cached(found[0]) == [0] and cached(found[1])[0] >= 768, [cached(one) for one in found]
    for phase in found[1:]:
        assert_same(phase, found[0], 1e-4)


def test_packed_blocks_and_the_store_are_alternatives(tiny):
    engine = additional("kivi") | stored("kivi-4", cpu_bytes=1 << 24)
    done = started(dict(model=str(tiny), phases=[], inspect=False, engine=engine))
    assert done.returncode and "does not support KV connectors" in done.stdout + done.stderr


# ---------------------------------------------------------------- the scheduler's side alone


def context(name: str, keys: list[bytes]) -> ReqContext:
    found = ReqContext(name)
    for number, key in enumerate(keys):
        found.set_offload_key_position(key, (number + 1) * CHUNK)
    return found


@pytest.fixture
def keys():
    return [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]


def test_the_manager_keeps_to_its_limit(keys):
    manager, some = StoreManager(40, None, {0: GroupSizes(CHUNK, 20, 10)}, 1), context("a", keys)
    stored = manager.prepare_store(keys, some)
    assert stored.keys_to_store == keys[:3] and not stored.evicted_keys  # the first takes more
    assert stored.store_spec.numbers == [0, 1, 2]
    assert manager.lookup(keys[0], some) == LookupResult.HIT_PENDING
    manager.complete_store(keys[:3], some)
    assert [manager.lookup(key, some) for key in keys[2:4]] == [LookupResult.HIT, LookupResult.MISS]
    manager.touch(keys[:3], some)
    assert manager.prepare_store(keys[3:5], some).evicted_keys == keys[2:0:-1]


def test_chunks_larger_than_expected_push_others_out_in_all_workers(keys):
    manager, some = StoreManager(40, None, {0: GroupSizes(CHUNK, 20, 10)}, 1), context("a", keys)
    manager.prepare_store(keys[:3], some)
    manager.complete_store(keys[:3], some)
    manager.grow({keys[2]: 5})
    assert manager.lookup(keys[0], some) == LookupResult.MISS and manager.index.nbytes == 25
    assert list(manager.prepare_load(keys[1:3], some).dropped) == [keys[0]]


def test_chunks_being_loaded_are_not_dropped(keys):
    manager, some = StoreManager(40, None, {0: GroupSizes(CHUNK, 20, 10)}, 1), context("a", keys)
    manager.prepare_store(keys[:3], some)
    manager.complete_store(keys[:3], some)
    manager.prepare_load(keys[:3], some)
    assert manager.prepare_store(keys[3:], some).keys_to_store == []
    manager.complete_load(keys[:3], some)
    assert manager.prepare_store(keys[3:], some).evicted_keys


def test_a_chunk_that_a_worker_has_lost_is_forgotten_by_all(keys):
    manager, some = StoreManager(40, None, {0: GroupSizes(CHUNK, 20, 10)}, 2), context("a", keys)
    manager.prepare_store(keys[:2], some)
    manager.complete_store(keys[:2], some)
    manager.forget([keys[1]])
    assert manager.lookup(keys[1], some) == LookupResult.MISS
    assert list(manager.prepare_load(keys[:1], some).dropped) == [keys[1]]  # other ranks may still have it


def test_requests_with_adapters_and_engines_that_were_reset_use_no_files(keys, tmp_path):
    files = ChunkFiles(tmp_path, {})
    manager, some = StoreManager(0, files, {0: GroupSizes(CHUNK, 20, 10)}, 1), context("a", keys)
    job = manager.prepare_store(keys[:2], some).store_spec
    assert job.keys == keys[:2] and job.on_disk and not job.in_memory
    for key in keys[:2]:
        files.write(key, {"x": torch.zeros(2)})
    manager.complete_store(keys[:2], some)
    assert manager.lookup(keys[0], some) == LookupResult.HIT
    manager.private.add("a")
    assert manager.lookup(keys[0], some) == LookupResult.MISS
    assert manager.prepare_store(keys[2:], some).keys_to_store == []
    manager.on_request_finished(some)
    manager.reset_cache()
    assert manager.lookup(keys[0], some) == LookupResult.MISS
