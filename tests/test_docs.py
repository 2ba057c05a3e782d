"""The documentation is correct: examples run, generated pages and tables are up to date, and links work."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import kvpass
import kvpass.eval
import kvpass.models

from common import script
from shrink import architectures
from tiny import llama, tokens

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_a_scheme_runs(registry, reference_in_this_test, capsys):
    torch._dynamo.reset()
    given = dict(model=llama(), ids=tokens(1, 150))
    exec("\n".join(code_blocks("docs/add-a-scheme.md")), given)
    first, last = (given["MineConfig"]().plan(given["LayerGeometry"](i, 2, 2, 32, torch.float32, None)) for i in (0, 1))
    assert (first.key.bits, last.key.bits, first.key.retention.sinks) == (2, 8, 4)
    out = capsys.readouterr().out
    assert "kvpass mine(" in out and "2 of 2 cache layers packed" in out
    assert [row.scheme for row in given["rows"]] == ["kivi", "mine", "mine-4"] and given["rows"][0].kl > 0


def test_the_support_matrix_is_up_to_date():
    """In a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "docs" / "make_support.py", "--check"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def readme(monkeypatch):
    """benchmarks/readme.py, which writes the tables of measured figures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return script("benchmarks/readme.py")


def test_tables_of_figures_match_the_stored_results(readme):
    """After a change of docs/results.json, docs/lengths.json or benchmarks/results/steps-cpu.json:
    ``python benchmarks/readme.py``."""
    results = readme.all_lengths()
    assert {name for texts in results.values() for rows in texts.values() for name in rows} <= set(readme.SCHEMES)
    for page, text in readme.pages(results, readme.stored(readme.STEPS)).items():
        assert page.read_text(encoding="utf-8") == text, page


def test_the_picture_names_every_measured_scheme_and_is_small_enough_to_keep(readme):
    """After a change of docs/results.json: ``python benchmarks/readme.py``."""
    picture = readme.PICTURE.read_text(encoding="utf-8")
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    for name in {name for rows in results.values() for name, row in rows.items() if row["kl"] >= 1e-6}:
        assert picture.count(f">{name}</text>") == len(results), name
    assert picture == readme.compact(picture) and len(picture.splitlines()) < 1000


def test_the_picture_of_lengths_names_its_schemes_and_is_small_enough_to_keep(readme):
    """After a change of docs/lengths.json: ``python benchmarks/readme.py``."""
    picture = readme.LENGTHS_PICTURE.read_text(encoding="utf-8")
    for name in (*readme.BY_LENGTH, *readme.all_lengths()[readme.PROMPT]):
        assert picture.count(f">{name}</text>") == 1, name
    assert picture == readme.compact(picture) and len(picture.splitlines()) < 1000


def test_decode_times_in_the_readme_come_from_the_benchmark(readme, tmp_path):
    written = {"arguments": {"scheme": "kivi-4"}, "seconds": {"4096": {"default": 0.1, "kivi-4": 0.09, "hqq": 0.2}}}
    (tmp_path / "step.json").write_text(json.dumps(written), encoding="utf-8")
    steps = readme.merged({"kivi": {"4096": 1.25}}, [tmp_path / "step.json"])
    assert steps == {"kivi": {"4096": 1.25}, "kivi-4": {"4096": pytest.approx(0.9)}}
    rows = readme.short_table(readme.all_lengths(), steps).splitlines()
    found = {row.split(" | ")[0].strip("| `"): row.split(" | ")[-1].strip("| ") for row in rows[2:]}
    assert found["kivi"] == "25 % longer" and found["kivi-4"] == "10 % shorter" and found["higgs"] == "not measured"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_figures_about_architectures_match_the_stored_results():
    """After a change of docs/field.json, or of its presentation: ``python docs/make_architectures.py``."""
    make = script("docs/make_architectures.py")
    results = json.loads(make.RESULTS.read_text(encoding="utf-8"))
    assert make.page(results) == make.PAGE.read_text(encoding="utf-8")
    for quoting in make.QUOTING:
        text = quoting.read_text(encoding="utf-8")
        assert text == make.with_block(text, results), quoting


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "architectures.md"], ids=lambda page: page.name
)
def test_no_count_of_architectures_is_written_by_hand(page):
    begin, end = (re.escape(mark) for mark in (script("docs/make_architectures.py").BEGIN, "<!-- end -->"))
    by_hand = re.sub(f"{begin}.*?{end}", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    counted = r"\d+\s+(transformers\s+)?(configurations|architectures)|\d+\s+(of\s+them|are)\s+packed"
    assert not re.search(counted, by_hand)


def test_every_architecture_of_these_transformers_was_tried():
    """After an update of transformers: ``make test-field``."""
    results = json.loads(script("docs/make_architectures.py").RESULTS.read_text(encoding="utf-8"))
    if results["transformers"] != transformers.__version__:
        pytest.skip(f"tried with transformers {results['transformers']}")
    assert {finding["name"] for finding in results["findings"]} == set(map(str, architectures()))


def test_every_use_links_to_an_existing_test():
    """Each row of docs/uses.md names a test, and a case of it if it has several."""
    rows = [row for row in (ROOT / "docs" / "uses.md").read_text(encoding="utf-8").splitlines() if row[:2] == "| "]
    rows = [row for row in rows if not row.startswith(("| use |", "| --- |"))]
    assert len(rows) > 50
    for row in rows:
        found = re.fullmatch(r"\| .+ \| \[(test_\w+)\]\(\.\./tests/(test_\w+\.py)\)(?: \((.+)\))? \|", row)
        assert found, row
        name, path, case = found.groups()
        module = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, row
        strings = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
        assert case is None or case in strings, row


def environment_variables(*folders: str) -> set[str]:
    """Names of environment variables in modules that read the environment."""
    names = set()
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if re.search(r"environ|getenv", text):
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            names |= {each for each in strings if isinstance(each, str) and re.fullmatch(r"[A-Z][A-Z0-9_]{5,}", each)}
    return names - {"LICENSE"}  # the name of a file


def test_every_environment_variable_is_on_its_page():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = environment_variables("kvpass", "lowering")
    assert {"KVPASS_CACHE", "KVPASS_COMPILE_PROCESSES", "KVPASS_SCHEME", "KVPASS_TRACE"} <= read
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"\w+", row)}
    assert read <= told
    own = {name for name in told if name.startswith("KVPASS_")}
    assert own <= environment_variables("kvpass", "lowering", "tests"), "no longer read anywhere"


def test_the_reference_has_every_public_name():
    """docs/reference lists what mkdocstrings shows: only existing names, and all public ones."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)]
    assert len(names) == len(set(names))
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name
    for module in (kvpass, kvpass.schemes, kvpass.eval, kvpass.models):
        public = {f"{module.__name__}.{name}" for name in module.__all__} - {"kvpass.ops", "kvpass.schemes"}
        assert public <= set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_pages_exist(page):
    """Except in docs/decisions.md, which names what was removed."""
    if page.name == "decisions.md":
        pytest.skip("names removed files")
    named = re.findall(
        r"\b(?:kvpass|lowering|tests|benchmarks|docs|examples)/[\w/]+\.(?:py|md|h|cpp)\b",
        page.read_text(encoding="utf-8"),
    )
    assert not [name for name in named if not (ROOT / name).exists()]
