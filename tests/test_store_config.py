"""What a user of vLLM sets for the prefix store, and how it finds tokens in an engine's blocks. None of this needs
vLLM."""

import os
from types import SimpleNamespace

import pytest
import torch

from kvpass import KVPassError
from kvpass.schemes import KIVIConfig
from kvpass.vllm.engine_blocks import EngineBlocks
from kvpass.vllm.store_config import StoreConfig, weights_of


def test_options_are_read():
    found = StoreConfig.of({"scheme": {"scheme": "kivi", "bits": 4, "sinks": 4}, "cpu_bytes": 1 << 40})
    assert found.scheme == KIVIConfig(bits=4, sinks=4) and found.cpu_bytes == 1 << 40 and found.path is None
    assert not found.offload_prompt_only  # the next turn of a chat begins with what was generated
    assert StoreConfig.of({"scheme": "kivi-4", "path": "folder"}).cpu_bytes == 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "needs a scheme"),
        ({"scheme": 4, "cpu_bytes": 1}, "needs a scheme"),
        ({"scheme": "no such scheme", "cpu_bytes": 1}, "Unknown scheme"),
        ({"scheme": "kivi"}, "set cpu_bytes, path or both"),
        ({"scheme": "kivi", "cpu_bytes": -1}, "must not be negative"),
        ({"scheme": "kivi", "cpu_bytes": "much"}, "cpu_bytes must be an integer"),
        ({"scheme": "kivi", "cpu_bytes": 1, "disk_bytes": 5}, "set path, too"),
        ({"scheme": "kivi", "cpu_bytes_to_use": 1}, "has no .*cpu_bytes_to_use.*it takes scheme, cpu_bytes"),
        ({"scheme": "kivi", "cpu_bytes": 1, "blocks_per_chunk": 0}, "at least 1"),
        ({"scheme": "kivi", "cpu_bytes": 1, "recompute": -1}, "must not be negative"),
        ({"scheme": "kivi", "cpu_bytes": 1, "bits": 2.0}, "bits is for calibrations"),
        ({"scheme": ".", "cpu_bytes": 1}, "holds no calibration"),
    ],
)
def test_anything_else_is_refused(extra, says):
    with pytest.raises(KVPassError, match=says):
        StoreConfig.of(extra)


def test_chunks_are_whole_pages_of_all_groups():
    config = StoreConfig.of({"scheme": "kivi", "cpu_bytes": 1})
    assert config.chunk_of([128], [32, 32]) == 1
    assert config.chunk_of([16], [32]) == 8
    assert config.chunk_of([16, 48], [32]) == 8
    assert config.chunk_of([96], [64]) == 2
    assert config.chunk_of([64], [128]) == 2
    two = StoreConfig.of({"scheme": "kivi", "cpu_bytes": 1, "blocks_per_chunk": 2})
    assert two.chunk_of([16], [32]) == 2
    with pytest.raises(KVPassError, match="multiple of 4"):
        two.chunk_of([16], [64])


def test_weights_are_told_apart(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "readme.txt").write_text("text")
    before = weights_of(str(tmp_path))
    assert [name for name, *_ in before] == ["config.json", "model.safetensors"]
    assert weights_of(str(tmp_path)) == before and weights_of(str(file)) == before[1:]
    file.write_bytes(b"Weights")
    os.utime(file, (1, 1))
    assert weights_of(str(tmp_path)) != before
    file.rename(tmp_path / "5f2e.bin")
    file.symlink_to(tmp_path / "5f2e.bin")  # as in Hugging Face's cache
    assert ["model.safetensors", "5f2e.bin"] in weights_of(str(tmp_path))
    with pytest.raises(KVPassError, match="leave path out"):
        weights_of("no-such/model")


# ---------------------------------------------------------------- blocks

HEADS, DIM, SIZE, BLOCKS = 2, 8, 4, 6


class Backend:
    """Writes keys and values as attention backends do: ``place`` says where, in a block ``[H, SIZE, 2 * DIM]``."""

    def __init__(self, place, size=SIZE):
        self.place, self.size = place, size

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        assert keys.shape == values.shape == (len(slots), HEADS, DIM)
        for slot, k, v in zip(slots.tolist(), keys, values, strict=True):
            self.place(cache[slot // self.size], slot % self.size, k, v)


def side_by_side(block, token, k, v):
    block[:, token, :DIM], block[:, token, DIM:] = k, v


def channels_first(block, token, k, v):
    """Keys by channel, then values by token, within the memory of a head: as on CPUs."""
    count = block[0].numel() // 2
    both = block.view(HEADS, 2, count)
    both[:, 0].view(HEADS, DIM, -1)[:, :, token] = k
    both[:, 1].view(HEADS, -1, DIM)[:, token] = v


def rounded(block, token, k, v):
    side_by_side(block, token, k.round(), v.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [side_by_side, channels_first])
@pytest.mark.parametrize("parts", [1, 2])
def test_tokens_are_found_wherever_a_backend_puts_them(dtype, place, parts):
    layer = SimpleNamespace(impl=Backend(place, SIZE // parts))
    cache = torch.randn(BLOCKS * parts, HEADS, SIZE // parts, 2 * DIM).to(dtype)
    before, blocks = cache.clone(), torch.tensor([4, 1, 3])
    one = EngineBlocks(layer, cache, HEADS, DIM, SIZE, BLOCKS)
    assert torch.equal(cache, before)  # it tries on a block of its own
    keys, values = (torch.randn(HEADS, 3 * SIZE, DIM).to(dtype) for _ in range(2))
    one.write(blocks, keys, values)
    assert all(torch.equal(a, b) for a, b in zip(one.read(blocks), (keys, values), strict=True))
    again = torch.tensor([3, 4])
    some = torch.cat([keys[:, 2 * SIZE :], keys[:, :SIZE]], 1)
    assert torch.equal(one.read(again)[0], some)
    others = torch.tensor([0, 2, 5])
    rows = (others.unsqueeze(1) * parts + torch.arange(parts)).flatten()
    assert torch.equal(cache[rows], before[rows])


def test_blocks_that_are_apart_are_read(dtype=torch.bfloat16):
    """Layers whose blocks lie beside each other, and blocks with padding."""
    memory = torch.randn(BLOCKS, 2, HEADS, SIZE, 2 * DIM + 3).to(dtype)
    cache, layer = memory[:, 1, ..., : 2 * DIM], SimpleNamespace(impl=Backend(side_by_side))
    one = EngineBlocks(layer, cache, HEADS, DIM, SIZE, BLOCKS)
    keys, values = one.read(torch.tensor([5]))
    assert torch.equal(keys, cache[5, ..., :DIM]) and torch.equal(values, cache[5, ..., DIM:])


def test_blocks_that_change_what_they_store_are_refused():
    cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)
    for impl in (Backend(rounded), Backend(lambda block, token, k, v: None), object()):
        with pytest.raises(KVPassError, match="another attention backend"):
            EngineBlocks(SimpleNamespace(impl=impl), cache, HEADS, DIM, SIZE, BLOCKS)
