"""Tracing of the pass: what is written for each graph, what is kept, and that nothing happens unless requested."""

import shutil

import pytest
import torch
from decoders import NanoDecoder
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.compile import backend, trace

from tiny import llama, tokens

STAGES = ["captured", "normalised", "found", "rewritten", "lowered"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder that ``KVPASS_TRACE`` names; it does not exist yet."""
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path / "a" / "trace"))
    return tmp_path / "a" / "trace"


def captured(attention="sdpa", **options):
    """A model whose every forward is captured, without compilation."""
    return kvpass.apply(llama(attention), "kivi-pre", lowering="eager", **options)


@torch.no_grad()
def feed(model, *lengths, **options):
    cache = DynamicCache(config=model.config)
    for length in lengths:
        model(input_ids=tokens(1, length), past_key_values=cache, **options)


def read(folder, name):
    return (folder / name).read_text()


def changed(diff):
    """The lines that a diff adds and removes."""
    lines = diff.splitlines()[2:]
    return [line[1:] for line in lines if line[0] == "+"], [line[1:] for line in lines if line[0] == "-"]


def test_every_stage_of_every_graph_is_written(folder):
    feed(captured(), 40, 1)
    prompt, step = sorted(folder.iterdir())
    assert (prompt.name, step.name) == ("graph-000", "graph-001")
    texts = [f"{i}-{name}.txt" for i, name in enumerate(STAGES, 1)]
    diffs = [name.replace("txt", "diff") for name in texts[1:]]
    assert sorted(file.name for file in step.iterdir()) == sorted([*texts, *diffs, "summary.txt"])
    dynamo, normal, found, rewritten, lowered = (read(step, name) for name in texts)
    assert "modeling_llama.py" in dynamo and '"Sym(s' in dynamo and "torch.nn.functional.linear" not in normal
    for text in (normal, found):
        assert text.count("aten.scaled_dot_product_attention.default(") == 2 == text.count("kvpass.append_.default") / 2
    assert found.count("# AttentionSite(output=scaled_dot_product_attention") == 2 and "rotation=rotate" in found
    assert rewritten.count("kvpass.attend.default(") == 2 and "kvpass.dequantize" not in rewritten
    assert "'auto'" not in lowered and lowered.count("'reference'") == 4  # two reads, keys and values of all layers
    assert not any("AOT" in text or "= None\n" in text for text in (dynamo, normal, found, rewritten, lowered))


def test_diffs_show_what_a_stage_did_and_no_more(folder):
    feed(captured(), 40)
    (graph,) = folder.iterdir()
    new, old = changed(read(graph, "3-found.diff"))
    assert not old and len(new) == 2 and all(line.strip().startswith("# AttentionSite(") for line in new)
    new, old = changed(read(graph, "4-rewritten.diff"))
    assert sum("kvpass.attend." in line for line in new) == 2 == sum("kvpass.rotate." in line for line in old)
    new, old = changed(read(graph, "5-lowered.diff"))
    assert len(new) == len(old) == 4 and all("kvpass.attend." in line or "kvpass.append_" in line for line in new)


def test_the_summary_counts_nodes_and_says_what_each_stage_took(folder):
    feed(captured(), 40)
    (graph,) = folder.iterdir()
    first, second, *rows = read(graph, "summary.txt").splitlines()
    assert "(interpreted): 2 attentions fused, 0 reads dequantized, 2 keys rotated" in first and "4 caches" in second
    times = [row.split() for row in rows[2:7]]
    assert [row[0] for row in times] == STAGES and len(times[0]) == 2  # Dynamo's time is unknown
    assert all(float(ms.replace(",", "")) > 0 for _, _, ms in times[1:])
    counts = {row.split()[0]: row.split()[1:] for row in rows[8:]}
    assert counts["kvpass.attend.default"] == ["2", "2"] and counts["kvpass.dequantize.default"] == ["4", "4"]
    assert counts["kvpass.append_.default"] == ["(functionalized)", "4", "4"]
    assert len(counts["placeholder"]) == 5 and len(set(counts["placeholder"])) == 1


@pytest.mark.slow
def test_graphs_that_the_pass_gives_up_are_written_as_far_as_possible(folder):
    with pytest.raises(kvpass.NotFusedError, match="weights are returned"):
        feed(captured("eager", strict=True), 40, output_attentions=True)
    graph = max(folder.iterdir())  # the earlier one is from the trial in `apply`
    assert {file.name[:1] for file in graph.iterdir()} == set("1234s")
    assert read(graph, "3-found.txt").count("# refused: ") == 2
    summary = read(graph, "summary.txt")
    assert "not fused (2x): " in summary and "given up: NotFusedError: strict=True" in summary


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path / "file" / "trace"))
    model = llama()
    with pytest.raises(KVPassError, match=r"KVPASS_TRACE: cannot write to .*file/trace \(Not a directory\)"):
        kvpass.apply(model, "kivi")
    assert "forward" not in vars(model) and not hasattr(model, "_kvpass")


def test_a_deleted_folder_is_a_one_line_error_and_the_call_can_be_repeated(folder):
    model = captured()
    shutil.rmtree(folder)
    with pytest.raises(KVPassError, match=r"KVPASS_TRACE.*\(No such file"):
        feed(model, 40)
    folder.mkdir()
    feed(model, 40)
    assert [graph.name for graph in folder.iterdir()] == ["graph-000"]


@pytest.mark.slow
def test_explain_keeps_the_stages_of_graphs_to_come():
    model = captured()
    feed(model, 40)
    report = kvpass.explain(model, graphs=True)
    assert str(report).count("captured before you asked for them") == 1
    feed(model, 40, 1)
    prompt, step = report.graphs
    assert not prompt.stages and [stage.name for stage in step.stages] == STAGES
    captured_by_dynamo, *others = step.stages
    assert not captured_by_dynamo.diff and not captured_by_dynamo.seconds
    assert all(stage.text and stage.diff and stage.seconds > 0 for stage in others)
    assert step.stages[-1].ops["kvpass.attend.default"] == 2 and "kvpass.attend.default(" in step.stages[-1].text
    assert f"  stages: captured {sum(captured_by_dynamo.ops.values())} nodes, normalised " in str(report)


def test_the_last_stage_is_the_graph_for_inductor(monkeypatch, reference_in_this_test):
    monkeypatch.setattr(backend, "compile_fx", lambda module, inputs: module.forward)
    model = kvpass.apply(llama(), "kivi")
    kvpass.explain(model, graphs=True)
    feed(model, 40, 1)
    (graph,) = kvpass.explain(model).graphs
    assert [stage.name for stage in graph.stages] == [*STAGES, "compiled"]
    assert graph.stages[-1].seconds > 0 and not graph.stages[-1].text


def test_without_tracing_no_graph_is_formatted(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a text nobody asked for")

    monkeypatch.delenv(trace.VARIABLE, raising=False)
    monkeypatch.setattr(trace, "_text", refuse)
    model = captured()
    feed(model, 40)
    (graph,) = kvpass.explain(model).graphs
    assert not graph.stages and "stages" not in str(kvpass.explain(model))


def test_simulations_are_traced_too(folder, reference_in_this_test):
    ids = tokens(2, 90)
    model = kvpass.apply(NanoDecoder().eval(), "kivi", example_inputs=(ids[:, :8],))
    report = kvpass.explain(model, graphs=True)
    model(ids)
    (graph,) = folder.iterdir()
    names = sorted(file.name for file in graph.glob("*.txt"))
    assert names[3:] == ["4-rewritten.txt", "summary.txt"]
    assert read(graph, "4-rewritten.txt").count("kvpass.simulate.default(") == 2
    assert report.graphs[0].stages[3].text == read(graph, "4-rewritten.txt") and "stages: captured " in str(report)
