"""Generated tasks after RULER: what they hide, what they ask for, and how answers are scored."""

import json
import re
from collections import Counter

import pytest
import torch

from kvpass import cli, models
from kvpass.errors import KVPassError
from kvpass.eval import synthetic, texts
from kvpass.eval.synthetic import TASKS, Answer, question, run_ruler

from tiny import Letters, llama

pytestmark = pytest.mark.usefixtures("nothing_compiled")

LENGTH = 2000


@pytest.fixture(scope="module")
def filler():
    return texts.tokens(Letters(), "prose", LENGTH)


def made(task, filler, seed=0, length=LENGTH):
    one = question(Letters(), filler, task, length, seed)
    return one, Letters().decode(one.text[0]), Letters().decode(one.question[0])


@pytest.mark.parametrize("task", TASKS)
def test_a_text_has_about_the_length_asked_for_and_differs_by_seed(task, filler):
    one, text, _ = made(task, filler)
    assert LENGTH - 40 < one.text.shape[1] <= LENGTH + 40
    assert made(task, filler)[1] == text != made(task, filler, seed=1)[1]
    assert set(one.wanted) <= set(re.findall(r"\w+", text)) and len(set(one.wanted)) == len(one.wanted)


@pytest.mark.parametrize("task, needles, wanted", [("single", 1, 1), ("multikey", 4, 1), ("multivalue", 4, 4)])
def test_needles_are_whole_and_the_question_asks_for_those_of_one_key(task, needles, wanted, filler):
    one, text, asked = made(f"niah-{task}", filler)
    found = re.findall(r"One of the special magic numbers for (\w+) is: (\d{7})\.", text)
    key = re.search(r"magic numbers for (\w+) mentioned", asked)[1]
    assert len(found) == needles and sorted(n for k, n in found if k == key) == sorted(one.wanted)
    assert len(one.wanted) == wanted


def test_every_variable_of_the_chain_has_the_value_asked_for(filler):
    one, text, asked = made("variables", filler)
    values = dict(re.findall(r"VAR (\w+) = (\d+)\.", text))
    for name, other in re.findall(r"VAR (\w+) = VAR (\w+)\.", text):
        values[name] = values[other]  # in the order of the text, each after what it refers to
    assert len(values) == 5 and set(values) == set(one.wanted)
    assert set(values.values()) == {re.search(r"the value (\d+)", asked)[1]}


def test_the_common_words_are_the_most_common(filler):
    one, text, _ = made("common-words", filler, length=6000)
    counts = Counter(re.findall(r"^\d+\. (\w+)$", text, re.MULTILINE))
    most = [word for word, _ in counts.most_common(10)]
    assert set(most) == set(one.wanted) and counts[most[-1]] > 5 * counts.most_common(11)[-1][1]


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
            question(Letters(), filler, task, length)


def test_the_question_reads_the_text_as_it_is_stored(filler):
    """All schemes get the same questions, and one that ruins the cache answers otherwise than full precision."""
    torch._dynamo.reset()
    model = llama()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    found = run_ruler(
        model, Letters(), filler, {"full": None, "same": "identity", "coarse": "kivi-1"}, ["niah-single"], [600],
        repeats=2, progress=False,
    )  # fmt: skip
    full, same, coarse = ([row.answer for row in rows] for rows in found.values())
    assert full == same != coarse
    assert [row.wanted for row in found["full"]] == [row.wanted for row in found["coarse"]]


def test_the_command_says_where_full_precision_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "load", lambda name, say: (llama(), Letters()))
    monkeypatch.setattr(synthetic, "TASKS", {"niah-single": TASKS["niah-single"]})
    out = tmp_path / "out.json"
    sizes = ["--lengths", "500", "--repeats", "1", "--schemes", "identity", "--tasks", "niah-single"]
    assert cli.main(["ruler", *sizes, "--json", str(out)]) == 0
    assert "Full precision itself fails at niah-single" in capsys.readouterr().out
    assert {row["score"] for rows in json.loads(out.read_text()).values() for row in rows} == {0.0}
