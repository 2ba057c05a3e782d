"""Fixtures for tests with vLLM. `make test-vllm` creates an environment with vLLM; without vLLM the tests are not
collected."""

import json
from importlib.util import find_spec

import pytest

from engines import HERE, additional, started

if find_spec("vllm") is None or find_spec("vllm.v1") is None:  # this folder's name is that of the package
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def serve():
    """``serve(model, phases, scheme, **engine)`` returns the output of `job.py`. interpreted: whether Triton's kernels
    run in its interpreter."""

    def run(model, phases, scheme=None, inspect=False, interpreted=False, **engine):
        if scheme is not None:
            engine |= additional(scheme)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if inspect else {}
        environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
        job = dict(model=str(model), phases=phases, inspect=inspect, engine=engine)
        done = started(job, **environment)
        for line in done.stdout.splitlines():
            if line.startswith("RESULT"):
                return json.loads(line.removeprefix("RESULT"))
        raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A decoder with random weights whose heads two ranks can share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=512, head_dim=64)
    heads = dict(num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The folder of a real model, downloaded once."""
    from kvpass.models import packaged_folder

    return packaged_folder()


@pytest.fixture(scope="session")
def texts(smollm2):
    """Three prompts for SmolLM2, as token ids: a short one, and two of hundreds of tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = (HERE.parent.parent / "docs" / "codecs.md").read_text()
    return [tokenizer(one)["input_ids"] for one in (text[:1200], text[2000:4800], "The capital of France is")]
