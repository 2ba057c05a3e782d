"""Models shared by processes (``DistributedConfig``): two processes on a CPU, started by torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "parallel.py"


def found(*command) -> list[dict]:
    """The output of each process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=500)
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return [json.loads(line) for line in lines]


def test_two_processes_generate_the_same_as_one(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=512, head_dim=32)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (alone,) = found(str(SCRIPT), str(tmp_path))
    both = found("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT), str(tmp_path))
    assert len(both) == 2
    for one in both:
        assert one["fingerprint"] == alone["fingerprint"]
        assert one["tokens"] == alone["tokens"]
        assert one["bytes"] * 2 == alone["bytes"]
        for key, instead in {
            "compiled": "lowering='eager'",
            "captured": "'kivi'",
            "calibrated": "in one process",
        }.items():
            assert "sharded across 2 processes" in one[key] and instead in one[key], (key, one[key])
