"""benchmarks/papers: every row can be planned at equal settings, and orders are judged by paired errors."""

import json
import sys
from pathlib import Path

import pytest
import torch

from kvpass.schemes import LayerGeometry, geometries, get
from kvpass.schemes.geometry import Held

FOLDER = Path(__file__).parent.parent / "benchmarks" / "papers"


@pytest.fixture(scope="module")
def run():
    sys.path.insert(0, str(FOLDER))
    try:
        import run
    finally:
        sys.path.remove(str(FOLDER))
    return run


def layers() -> list[LayerGeometry]:
    held = Held(torch.zeros(1, 3, 1, 64), torch.zeros(1, 3, 1, 64))
    return list(geometries([held] * 30).values())


def test_every_row_has_a_scheme_that_packs_smollm2(run):
    for name, table in run.TABLES.items():
        assert len({row.name for row in table.rows}) == len(table.rows) > 3, name
        assert sum(row.figure is not None for row in table.rows) >= 3, name
        for row in map(run.resolved, table.rows):
            if not row.scheme.needs_calibration:
                assert all(row.scheme.plan_of(layer) for layer in layers()), row.name


def test_orders_are_compared_pair_by_pair_and_only_where_rows_are_told_apart(run):
    def row(scale):  # 10 blocks of 16 tokens that vary in the same way
        divergences = [scale * (1 + 0.1 * (i // 16 % 3)) for i in range(160)]
        return dict(divergences=divergences, agreements=[1.0] * 160, surprisals=[1.0] * 160, bits=2.0)

    names = ["best", "second", "third", "unknown"]
    figures = [4.0, 3.0, 2.0, None]
    row_of = type(run.TABLES["squat"].rows[0])
    rows = [row_of(name, "kivi", figure) for name, figure in zip(names, figures, strict=True)]
    table = run.Table("a paper", "a table", "%", rows)
    measured = {"best": row(0.1), "second": row(0.5), "third": row(0.3), "unknown": row(0.2)}
    assert run.order(table, measured) == (
        ["best before second", "best before third"], ["second before third"], []
    )  # fmt: skip
    measured["third"] = measured["second"]
    assert run.order(table, measured)[1:] == ([], ["second before third"])


def test_written_results_belong_to_rows_of_their_table(run):
    for file in run.RESULTS.glob("papers-*.json"):
        written = json.loads(file.read_text(encoding="utf-8"))
        table = run.TABLES[written["table"]]
        rows = {row.name: row for row in map(run.resolved, table.rows)}
        assert any(run.measured(row, written["rows"]) for row in rows.values())
        assert (written["prompt"], written["scored"]) == (table.prompt, table.scored)


def test_a_row_is_measured_again_if_its_scheme_has_changed_but_not_if_a_field_was_added(run):
    new = get("aqua", backbone=get("higgs", across_heads=True), sinks=2)
    old = str(get("aqua", sinks=2)).replace("across_heads=False, ", "")
    assert run.describes(str(new), new) and run.describes(old, get("aqua", sinks=2))
    assert not run.describes(old, new) and not run.describes(str(new), get(new, sinks=3))
    assert not run.describes(str(get("kivi")), get("rtn")) and not run.describes(str(get("kivi")), get("kivi", bits=4))


def test_the_page_shows_the_written_results(run):
    page = run.PAGE.read_text(encoding="utf-8")
    for name, table in run.TABLES.items():
        files = [run.results_of(name, model, run.RESULTS) for model in run.MODELS]
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        assert not results or run.markdown(table, results) in page, name
