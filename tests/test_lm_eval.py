"""lm-evaluation-harness accepts a model that kvpass is applied to, and generates through its packed cache."""

import json
import string

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import kvpass

from tiny import llama

pytest.importorskip("lm_eval")


@pytest.fixture
def tokenizer():
    letters = {letter: i for i, letter in enumerate(["<pad>", "<eos>", *string.printable])}
    whole = Tokenizer(tokenizer_models.WordLevel(letters, unk_token="<pad>"))
    whole.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", model_max_length=512)


@pytest.fixture
def task(tmp_path):
    """Two questions of a task that generates. A task that only ranks answers would never read a cache."""
    from lm_eval.api.task import ConfigurableTask

    path = tmp_path / "test.jsonl"
    rows = [{"question": f"{start} " * 30, "answer": "x"} for start in ("abc", "one two")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConfigurableTask(
        config={
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        }
    )


def test_the_harness_generates_through_the_packed_cache(tokenizer, task):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    torch._dynamo.reset()
    model = llama()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)

    def answers():
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
        results = evaluator.simple_evaluate(harness, tasks=[task], log_samples=True, bootstrap_iters=0)
        assert results["results"]["tiny"]["exact_match,none"] == 0  # a random model answers nothing correctly
        return [sample["filtered_resps"] for sample in results["samples"]["tiny"]]

    full, found = answers(), {}
    for scheme in ("identity", "kivi-1"):
        kvpass.apply(model, scheme, lowering="eager")
        found[scheme], report = answers(), kvpass.explain(model)
        kvpass.remove(model)
        assert report.packed == 2 and report.tokens > 120 and report.nbytes > 0
    assert found["identity"] == full != found["kivi-1"]
