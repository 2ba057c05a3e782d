"""Generated tasks after RULER: what they hide, what they ask for, and how answers are scored."""

import json
import re
from collections import Counter

import pytest
import torch

from kvpass import cli, models
from kvpass.errors import KVPassError
from kvpass.eval import synthetic, texts
from kvpass.eval.quality import packed
from kvpass.eval.retrieval import Reading, ask
from kvpass.eval.synthetic import TASKS, Answer, document, run_ruler

from tiny import Letters, llama

pytestmark = pytest.mark.usefixtures("nothing_compiled")

LENGTH = 2000


@pytest.fixture(scope="module")
def filler():
    return texts.tokens(Letters(), "prose", LENGTH)


def made(task, filler, seed=0, length=LENGTH):
    one = document(Letters(), filler, task, length, seed)
    asked = [(Letters().decode(each.tokens[0]), each.wanted) for each in one.questions]
    return Letters().decode(one.text[0]), asked


@pytest.mark.parametrize("task", TASKS)
def test_a_text_has_about_the_length_asked_for_and_differs_by_seed(task, filler):
    text, asked = made(task, filler)
    assert LENGTH - 40 < len(text) <= LENGTH + 40
    assert made(task, filler)[0] == text != made(task, filler, seed=1)[0]
    for _, wanted in asked:
        assert set(wanted) <= set(re.findall(r"\w+", text)) and len(set(wanted)) == len(wanted)


@pytest.mark.parametrize("task, keys, values", [("single", 1, 1), ("multikey", 4, 1), ("multivalue", 1, 4)])
def test_needles_are_whole_and_each_key_is_asked_for(task, keys, values, filler):
    text, asked = made(f"niah-{task}", filler)
    found = re.findall(r"One of the special magic numbers for (\w+) is: (\d{7})\.", text)
    wanted = {re.search(r"magic numbers for (\w+) mentioned", question)[1]: wanted for question, wanted in asked}
    assert len(asked) == len(wanted) == keys and len(found) == keys * values
    for key, numbers in wanted.items():
        assert sorted(n for k, n in found if k == key) == sorted(numbers)


def test_every_variable_of_the_chain_has_the_value_asked_for(filler):
    text, [(question, wanted)] = made("variables", filler)
    values = dict(re.findall(r"VAR (\w+) = (\d+)\.", text))
    for name, other in re.findall(r"VAR (\w+) = VAR (\w+)\.", text):
        values[name] = values[other]  # in the order of the text, each after what it refers to
    assert len(values) == 5 and set(values) == set(wanted)
    assert set(values.values()) == {re.search(r"the value (\d+)", question)[1]}


def test_the_common_words_are_the_most_common(filler):
    text, [(_, wanted)] = made("common-words", filler, length=6000)
    counts = Counter(re.findall(r"^\d+\. (\w+)$", text, re.MULTILINE))
    most = [word for word, _ in counts.most_common(10)]
    assert set(most) == set(wanted) and counts[most[-1]] > 5 * counts.most_common(11)[-1][1]


def test_an_answer_is_scored_by_whole_words():
    assert Answer("t", 1, ("12", "345"), "they are 12, 3456 and 45").score == 0.5
    assert Answer("t", 1, ("12",), "112").score == 0


def test_lengths_and_tasks_that_do_not_work_are_refused(filler):
    for task, length, why in (
        ("nonsense", 500, "Unknown task"),
        ("niah-single", 5000, "longer filler"),
        ("niah-single", 40, "another length"),
        ("common-words", 300, "greater length"),
    ):
        with pytest.raises(KVPassError, match=why):
            document(Letters(), filler, task, length)


def sharp():
    """A model whose answers depend on what it has read."""
    model = llama()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def test_the_question_reads_the_text_as_it_is_stored(filler):
    """All schemes get the same questions, and one that ruins the cache answers otherwise than full precision."""
    torch._dynamo.reset()
    found = run_ruler(
        sharp(), Letters(), filler, {"full": None, "same": "identity", "coarse": "kivi-1"}, ["niah-single"], [600],
        repeats=2, progress=False,
    )  # fmt: skip
    full, same, coarse = ([row.answer for row in rows] for rows in found.values())
    assert full == same != coarse
    assert [row.wanted for row in found["full"]] == [row.wanted for row in found["coarse"]]
    assert all(row.kl == pytest.approx(0, abs=1e-5) for row in found["full"] + found["same"])
    assert all(row.kl > 1e-3 for row in found["coarse"])


@pytest.mark.parametrize("scheme", [None, "kivi"])
def test_each_question_follows_the_text_alone(scheme, filler):
    model, one = sharp(), document(Letters(), filler, "niah-multikey", 900)
    questions = [question.tokens for question in one.questions]
    with packed(model, scheme, **({} if scheme is None else {"lowering": "eager"})):
        together = ask(model, Letters(), one.text, questions, one.most)
        alone = [ask(model, Letters(), one.text, [question], one.most)[0] for question in questions]
    assert together == alone and len(set(alone)) > 1


def test_an_answer_is_predicted_as_in_one_forward(filler):
    """The probabilities that KL is computed from, against those of a forward without a cache."""
    model, one = sharp(), document(Letters(), filler, "niah-single", 600)
    reading, question = Reading(model, one.text), one.questions[0].tokens
    answer = reading.answer(question, one.most, Letters())
    with torch.no_grad():
        ids = torch.cat([one.text, question, answer], 1)
        logits = model(input_ids=ids, use_cache=False).logits[0, -answer.shape[1] - 1 : -1]
    assert torch.equal(logits.argmax(-1), answer[0])
    torch.testing.assert_close(reading.log_probabilities(question, answer), logits.double().log_softmax(-1))


def test_the_command_says_where_full_precision_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "load", lambda name, say: (llama(), Letters()))
    monkeypatch.setattr(synthetic, "TASKS", {"niah-single": TASKS["niah-single"]})
    out = tmp_path / "out.json"
    sizes = ["--lengths", "500", "--repeats", "1", "--schemes", "identity", "--tasks", "niah-single"]
    assert cli.main(["ruler", *sizes, "--json", str(out)]) == 0
    assert "Full precision itself fails at niah-single" in capsys.readouterr().out
    assert {row["score"] for rows in json.loads(out.read_text()).values() for row in rows} == {0.0}
