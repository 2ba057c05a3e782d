"""The documentation is what it says: examples run, generated pages and tables are up to date, links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from kvpass.schemes import base

from tiny import llama, tokens

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


def script(path: str):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def registry(monkeypatch):
    """Schemes registered meanwhile are forgotten."""
    monkeypatch.setattr(base, "_SCHEMES", dict(base._SCHEMES))
    monkeypatch.setattr(base, "_PRESETS", dict(base._PRESETS))


def test_the_example_of_a_scheme_runs(registry, reference_in_this_test, capsys):
    torch._dynamo.reset()
    given = dict(model=llama(), ids=tokens(1, 150))
    exec("\n".join(code_blocks("docs/add-a-scheme.md")), given)
    first, last = (given["MineConfig"]().plan(given["LayerGeometry"](i, 2, 2, 32, torch.float32, None)) for i in (0, 1))
    assert (first.key.bits, last.key.bits, first.key.retention.sinks) == (2, 8, 4)
    out = capsys.readouterr().out
    assert "kvpass mine(" in out and "2 of 2 cache layers packed" in out
    assert [row.scheme for row in given["rows"]] == ["kivi", "mine", "mine-4"] and given["rows"][0].kl > 0


def test_the_api_page_is_made_from_these_docstrings():
    assert script("docs/make_api.py").page() == (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), (
        "python docs/make_api.py"
    )


@pytest.fixture
def readme(monkeypatch):
    """benchmarks/readme.py, which writes the tables of measured figures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return script("benchmarks/readme.py")


def test_tables_of_measured_figures_are_those_of_the_results(readme):
    """After a change of docs/results.json or benchmarks/results/steps-cpu.json: ``python benchmarks/readme.py``."""
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    steps = json.loads(readme.STEPS.read_text(encoding="utf-8"))
    assert {name for rows in results.values() for name in rows} <= set(readme.SCHEMES)
    for page, block in ((readme.PAGE, readme.table(results)), (readme.README, readme.short_table(results, steps))):
        text = page.read_text(encoding="utf-8")
        assert text == readme.with_block(text, block), page


def test_decode_times_enter_the_readme_from_what_the_benchmark_wrote(readme, tmp_path):
    written = {"arguments": {"scheme": "kivi-4"}, "seconds": {"4096": {"default": 0.1, "kivi-4": 0.09, "hqq": 0.2}}}
    (tmp_path / "step.json").write_text(json.dumps(written), encoding="utf-8")
    steps = readme.merged({"kivi": {"4096": 1.25}}, [tmp_path / "step.json"])
    assert steps == {"kivi": {"4096": 1.25}, "kivi-4": {"4096": pytest.approx(0.9)}}
    rows = readme.short_table(json.loads(readme.RESULTS.read_text(encoding="utf-8")), steps).splitlines()
    found = {row.split(" | ")[0].strip("| `"): row.split(" | ")[-1].strip("| ") for row in rows[2:]}
    assert found["kivi"] == "25 % longer" and found["kivi-4"] == "10 % shorter" and found["higgs"] == "not measured"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
