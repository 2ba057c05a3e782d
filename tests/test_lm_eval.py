"""lm-evaluation-harness accepts a model that kvpass is applied to, generates through its packed cache, and ranks
answers by likelihoods that read it."""

import json
import string

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import kvpass
from kvpass import cli, models
from kvpass.errors import KVPassError

from tiny import llama

pytest.importorskip("lm_eval")


@pytest.fixture
def model():
    torch._dynamo.reset()
    made = llama()
    with torch.no_grad():
        for parameter in made.model.layers.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return made


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


def test_the_harness_generates_through_the_packed_cache(model, tokenizer, task):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

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


@pytest.fixture
def questions(tmp_path):
    """Six questions in the columns of PIQA, in a file that replaces its data set."""
    goals = [f"{word} " * 25 for word in ("abc", "one two", "x", "lorem ipsum", "42", "why not")]
    rows = [{"goal": goal, "sol1": "a short answer", "sol2": "another", "label": i % 2} for i, goal in enumerate(goals)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_likelihoods_differ_by_scheme_and_full_precision_is_the_harness_own_figure(model, tokenizer, questions):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from kvpass.eval import harness

    schemes = {name: None if name == "full" else kvpass.schemes.get(name) for name in ("full", "identity", "kivi-1")}
    scores = harness.run_tasks(model, tokenizer, ["piqa"], schemes, data=questions)
    full, same, coarse = scores
    plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    own = evaluator.simple_evaluate(plain, tasks=harness._tasks(["piqa"], questions), bootstrap_iters=0)
    expected = harness._score("piqa", own)
    assert full.metrics == same.metrics == expected.metrics and len(full.totals) == 6
    assert torch.allclose(torch.tensor(full.totals), torch.tensor(expected.totals), atol=1e-2)
    assert full.changed(same) == 0 and full.shift(same)[0] < 1e-2 < coarse.shift(full)[0]
    assert coarse.gain(full, "acc")[0] == pytest.approx(coarse.metrics["acc"] - full.metrics["acc"])
    assert not kvpass.runtime.applied.is_applied(model)


def test_rolling_likelihoods_are_scored_token_by_token_or_refused(model, tokenizer):
    from lm_eval.api.instance import Instance

    from kvpass.eval.harness import PackedLM

    text = [Instance("loglikelihood_rolling", {}, ("abc " * 30,), 0)]
    full = PackedLM(model, tokenizer=tokenizer, batch_size=1, token_by_token=True).loglikelihood_rolling(text)
    packed = PackedLM(model, "kivi-1", tokenizer=tokenizer, batch_size=1)
    with pytest.raises(KVPassError, match="token_by_token=True"):
        packed.loglikelihood_rolling(text)
    packed.token_by_token = True
    assert abs(packed.loglikelihood_rolling(text)[0] - full[0]) > 1e-2


def test_the_command_compares_schemes_question_by_question(model, tokenizer, questions, monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda name, say: (model, tokenizer))
    out = questions / "out.json"
    wanted = ["tasks", "--tasks", "piqa", "--schemes", "kivi-1", "--limit", "4", "--shots", "1"]
    assert cli.main([*wanted, "--data", str(questions), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "piqa, 4 questions" in printed and "answers changed" in printed and "kivi-1" in printed
    assert [len(score["totals"]) for score in json.loads(out.read_text())] == [4, 4]
    assert cli.main(["tasks", "--tasks", "no-such-task"]) == 2 and "no task" in capsys.readouterr().err
    assert cli.main(["tasks", "--tasks", "hellaswag", "--data", str(questions)]) == 2
