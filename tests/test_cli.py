"""The command line: what it prints and writes, and its one-line errors."""

import csv
import functools
import json
import subprocess
import sys

import pytest
import torch

from kvpass import api, cli, models
from kvpass.errors import KVPassError
from kvpass.eval import texts
from kvpass.eval.budget import recommend
from kvpass.eval.plot import Point, check_plot, front, pareto
from kvpass.eval.retrieval import Retrieval, passkey, retrieve
from kvpass.eval.speed import measure, sharing_weights

from tiny import Letters, llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """Every command finds a tiny model with a tokenizer of letters."""
    torch._dynamo.reset()
    monkeypatch.setattr(models, "load", lambda name, say: (llama(), Letters()))


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = cli.main(args)
    return (code, *capsys.readouterr())


def test_commands_print_only_their_own_output():
    done = subprocess.run([sys.executable, "-m", "kvpass", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: kvpass") and not done.stderr


def test_eval_prints_a_table_and_writes_json_csv_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "svg")}
    written = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["svg"])]
    sizes = ["--context", "200", "--score", "48", "--lengths", "8192"]
    code, out, err = run(capsys, "eval", "--schemes", "kivi-1,kivi", "--text", "prose", *sizes, *written)
    assert code == 0 and "152 prompt tokens, 48 scored" in err
    assert "at 8k" in out and "perplexity" in out and "kivi against kivi-1" in out and "tokens/s" not in out
    (rows,) = json.loads(files["json"].read_text())["texts"].values()
    lines = list(csv.DictReader(files["csv"].open()))
    assert [row["scheme"] for row in rows] == [line["scheme"] for line in lines] == ["full precision", "kivi-1", "kivi"]
    assert f"{rows[1]['kl']:.4f}" in out and rows[1]["kl"] > rows[2]["kl"] > rows[0]["kl"]
    picture = files["svg"].read_text()
    assert ">kivi-1</text>" in picture and ">full precision</text>" not in picture


def test_waterfill_is_calibrated_on_other_texts_than_are_measured(capsys, tmp_path):
    """The resulting file is a valid scheme for every other command."""
    out = str(tmp_path / "shared")
    sizes = ["--tokens", "420", "--length", "210"]
    code, printed, err = run(capsys, "calibrate", "--scheme", "waterfill", "--out", out, *sizes)
    assert code == 0 and "8 sequences of 210 tokens of modules, manual, readme, stories" in err
    assert "shared by all caches of the model" in printed and "kvpass.load" in printed
    measured = ["--text", "prose", "--context", "240", "--score", "32"]
    code, printed, _ = run(capsys, "eval", "--schemes", out, *measured)
    assert code == 0 and out in printed


@pytest.mark.parametrize("name", texts.to_calibrate())
def test_texts_to_calibrate_on_are_long_enough(name):
    assert name not in texts.available() and len(texts.read(name)) > 12_000


WRONG = [
    (["eval", "--schemes", "nonsense"], "Unknown scheme 'nonsense'"),
    (["eval", "--schemes", "aqua"], "must be calibrated"),
    (["eval", "--schemes", ","], "--schemes is empty"),
    (["eval", "--text", "no-such-file"], "Cannot read the text 'no-such-file'"),
    (["eval", "--context", "100", "--score", "100"], "leaves no prompt"),
    (["eval", "--context", "100000", "--score", "10"], "exceed the model's context"),
    (["eval", "--plot", "out.pdf"], "ending in .png or .svg"),
    (["recommend", "--bits", "0.5", "--schemes", "kivi,kivi-4"], "the smallest, kivi, takes"),
    (["needle", "--lengths", "40"], "leaves"),
    (["calibrate", "--scheme", "kivi"], "needs no calibration"),
    (["calibrate", "--tokens", "10"], "are less than one sequence"),
    (["explain", "--scheme", "rtn+nonsense"], "Unknown policy"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_errors_are_one_line(args, message, capsys):
    code, _, err = run(capsys, *args)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("kvpass: ") and message in last and "Traceback" not in err


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "--score", "0"],
        ["eval", "--score", "many"],
        ["eval", "--lengths", ""],
        ["eval", "--json", "/no/such/folder/x.json"],
        ["recommend"],
        ["recommend", "--bits", "nan"],
        ["needle", "--depths", "2"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_the_parser_refuses_impossible_arguments(args, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]


def test_recommend_takes_the_best_that_fits_and_says_why(capsys):
    sizes = ["--context", "200", "--score", "48", "--text", "prose"]
    code, out, _ = run(capsys, "recommend", "--bits", "3.5", "--schemes", "kivi-1,kivi,kivi-8,rtn", *sizes)
    assert code == 0 and 'kvpass.apply(model, scheme="kivi")' in out
    assert "It beats kivi-1 by" in out and "kivi-8" not in out
    assert "rtn cannot be used on this model: group_size=64 does not divide head_dim=32" in out


@pytest.mark.slow
def test_recommend_finds_the_best_of_many_schemes_within_the_bits():
    model, ids, names = llama(head_dim=64), {"text": tokens(1, 480)}, ["kivi-1", "higgs-1.5"]
    found = recommend(model, ids, 400, 9, schemes=names, most=1, progress=False)
    assert found.bits["kivi-1"] > found.bits["higgs-1.5"]
    assert found.best.scheme == "higgs-1.5" and len(found.best.divergences) == 80
    assert set(found.dropped) == {"kivi-1"} and found.dropped["kivi-1"] > 0
    of_all = recommend(model, ids, 400, 9, schemes=names, progress=False)
    assert not of_all.dropped and [row.scheme for row in of_all.rows] == ["higgs-1.5", "kivi-1"]


def test_recommend_says_if_nothing_can_be_used():
    model, ids = llama(), {"text": tokens(1, 120)}
    with pytest.raises(KVPassError, match="No scheme works"):
        recommend(model, ids, 100, 9, schemes=["rtn"], progress=False)


def test_needle_prints_exact_matches_and_writes_answers(capsys, tmp_path):
    path = tmp_path / "answers.json"
    args = ["--schemes", "kivi", "--lengths", "300", "--depths", "0,1", "--repeats", "1", "--json", str(path)]
    code, out, _ = run(capsys, "needle", *args)
    assert code == 0 and "300 at 0" in out and "0/1" in out  # a random model retrieves nothing
    assert {name: len(rows) for name, rows in json.loads(path.read_text()).items()} == {"full precision": 2, "kivi": 2}


def test_the_passkey_is_at_its_depth_and_only_it_counts_as_right():
    filler = torch.tensor([Letters()("x" * 400)["input_ids"]])
    for depth in (0, 0.5, 1):
        hidden = passkey(Letters(), filler, 300, depth, seed=3)
        text = Letters().decode(hidden.text[0])
        before, after = text.split(f"The pass key is {hidden.key}")
        assert hidden.text.shape[1] == pytest.approx(300, abs=3)
        assert before.count("x") == pytest.approx(depth * text.count("x"), abs=1) and hidden.key in after
    assert Retrieval(300, 0, "12345", " 12345. 6").right
    assert not Retrieval(300, 0, "12345", "54321 12345").right and not Retrieval(300, 0, "12345", "none").right
    assert passkey(Letters(), filler, 300, 0, seed=4).key != hidden.key
    with pytest.raises(KVPassError, match="depth=2"):
        passkey(Letters(), filler, 300, 2)


def test_retrieval_reads_the_packed_text(monkeypatch):
    """The question attends to quantized values: a 1-bit cache answers differently from full precision."""
    model, filler = llama(heads=2, kv_heads=1, head_dim=64), tokens(1, 400)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    found = retrieve(
        model, Letters(), filler, {"full": None, "same": "identity", "coarse": "rtn-2"}, [300], [0.5], progress=False
    )
    full, same, coarse = (found[name][0].answer for name in found)
    assert full == same != coarse


def test_bench_times_variants_that_share_their_weights():
    model, ids = llama(), tokens(1, 41)
    other = sharing_weights(model)
    assert other.lm_head.weight is model.lm_head.weight and other.model is not model.model
    speeds = measure({"one": model, "other": other}, ids, 40, rounds=2)
    assert speeds["one"].nbytes == speeds["other"].nbytes > 0 and speeds["one"].seconds > 0


def test_explain_and_bench_print_what_they_saw(capsys, monkeypatch):
    monkeypatch.setattr("kvpass.api.apply", functools.partial(api.apply, lowering="eager"))
    code, out, _ = run(capsys, "explain", "--scheme", "kivi-4")
    assert code == 0 and "kvpass kivi(" in out and "bits=4" in out and "2 of 2 cache layers packed" in out
    assert "65 tokens" in out
    code, out, _ = run(capsys, "bench", "--schemes", "kivi", "--lengths", "300", "--rounds", "2")
    full, kivi = (line.split() for line in out.splitlines() if line.startswith(("full", "kivi")))
    assert code == 0 and full[-1] == "1.000x" and float(kivi[-1].rstrip("x")) < 0.7


def test_the_pareto_front_has_the_schemes_that_none_beats():
    points = [Point("a", 2, 1.0, 0.1), Point("b", 3, 2.0, 0.1), Point("c", 4, 0.5, 0.1), Point("d", 4, 0.6, 0.1)]
    assert [point.name for point in front(points)] == ["a", "c"]


def test_pictures_without_matplotlib_or_points_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvpass.eval.plot.find_spec", lambda name: None)
        with pytest.raises(KVPassError, match="pip install"):
            check_plot(tmp_path / "x.svg")
    pytest.importorskip("matplotlib")
    with pytest.raises(KVPassError, match="nothing to draw"):
        pareto({"text": [Point("full precision", 32, 0.0, 0.0)]}, tmp_path / "x.png", "")


def test_a_data_set_is_read_with_datasets_or_says_how(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(texts, "find_spec", lambda name: None)
        with pytest.raises(KVPassError, match="pip install datasets"):
            texts.read("hub:some/data")
    pytest.importorskip("datasets")
    (tmp_path / "test.jsonl").write_text('{"id": "1", "text": "one"}\n{"id": "2", "text": "two"}\n')
    assert texts.read(f"hub:{tmp_path}") == "one\n\ntwo"
    with pytest.raises(KVPassError, match="Cannot read the data set"):
        texts.read(f"hub:{tmp_path}/nothing")
