"""The pass on captured graphs: one decode graph, nothing lost, nothing cloned, and the same cache contents as in eager
mode."""

import copy
import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from transformers import AttentionInterface, DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.compile import backend
from kvpass.compile.backend import Backend
from kvpass.compile.calls import APPEND_LAYERS, ATTEND, argument
from kvpass.compile.masks import structure
from kvpass.schemes import LayerGeometry

from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

GEOMETRY = LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()


def runtime(model):
    return model._kvpass


@torch.no_grad()
def run(model, ids, cache=None, chunk=1):
    """Feed ``ids`` in chunks; returns the logits of the last token of each, and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = [
        model(input_ids=ids[:, i : i + chunk], past_key_values=cache).logits[:, -1]
        for i in range(0, ids.shape[1], chunk)
    ]
    return torch.stack(logits), cache


def prefilled(model, length=70, batch=1):
    return run(model, tokens(batch, length), chunk=length)[1]


def states(cache):
    return [state for layer in cache.layers for state in layer.states()]


class Recorder(Backend):
    """A backend that stores the graph it captured and the rewritten one."""

    def __call__(self, gm, example_inputs):
        self.captured = gm
        self.rewritten = super().__call__(gm, example_inputs)
        return self.rewritten


@pytest.mark.compiles
@pytest.mark.slow_cases("squat-eager")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", ["kivi", "squat"])
def test_the_rewritten_graph_leaves_the_contents_eager_leaves_bit_for_bit(attention, scheme):
    model = kvpass.apply(llama(attention), scheme=scheme, lowering="eager")
    cache = prefilled(model)
    other = copy.deepcopy(cache)
    ids = tokens(1, 45, seed=3)
    expected, cache = run(model, ids, cache)
    recorder = Recorder(interpret=True, lowering="reference")
    runtime(model).decode_step = torch.compile(runtime(model).original, backend=recorder, fullgraph=True)
    runtime(model).eager = False
    logits, other = run(model, ids, other)
    assert len(recorder.graphs) == 1 and recorder.graphs[0].fused == 2 and recorder.graphs[0].decoded == 0
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(states(other), states(cache), strict=True):
        used = mine.spec.retention.pages(115)
        for name in ("scale", "zero_point"):
            torch.testing.assert_close(
                getattr(mine, name)[:, :, :used], getattr(theirs, name)[:, :, :used], atol=2e-3, rtol=2e-3
            )
        before = mine.spec.retention.pages(70)  # pages that this run did not write are unchanged, bit for bit
        assert torch.equal(mine.codes[:, :, :before], theirs.codes[:, :, :before])
    first = states(other)[0], states(cache)[0]  # layer 0 sees the same inputs in both: equal bit for bit throughout
    for (name, mine), (_, theirs) in zip(first[0].tensors(), first[1].tensors(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.compiles
def test_compiled_logits_equal_eager_logits_over_the_same_packed_state():
    model = kvpass.apply(llama(), scheme="kivi")
    cache = prefilled(model)
    same = copy.deepcopy(cache)
    for step in range(40):
        token = tokens(1, 1, seed=step)
        runtime(model).eager = True
        expected, same = run(model, token, same)
        runtime(model).eager = False
        logits, cache = run(model, token, cache)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        for mine, theirs in zip(states(cache), states(same), strict=True):
            window = mine.window(71 + step), theirs.window(71 + step)
            torch.testing.assert_close(*window, atol=1e-5, rtol=1e-5)
        same = copy.deepcopy(cache)


@pytest.mark.compiles
def test_two_hundred_steps_are_one_graph_and_recompile_nothing():
    model = kvpass.apply(llama(), scheme="kivi")
    _, cache = run(model, tokens(1, 200), prefilled(model, 50))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert len(kvpass.explain(model).graphs) == 1
    assert {layer.tokens for layer in cache.layers} == {250}


def test_a_new_cache_and_another_prompt_length_reuse_the_graph():
    model = kvpass.apply(llama(), scheme="squat")
    for length in (33, 70, 130):
        run(model, tokens(1, 20), prefilled(model, length))
    compiled = [graph for graph in kvpass.explain(model).graphs if graph.compiled]
    assert len(compiled) == 1 == len(kvpass.explain(model).graphs)


@pytest.mark.slow
def test_a_padded_call_after_an_unpadded_one_is_masked():
    """Whether to drop a mask is decided in every call."""
    model, eager = kvpass.apply(llama()), kvpass.apply(llama(), lowering="eager")
    for mask in (torch.ones(2, 41), torch.cat([torch.zeros(2, 9), torch.ones(2, 32)], 1), torch.ones(2, 41)):
        mask, outputs = mask.long(), []
        for m in (model, eager):
            cache = DynamicCache(config=m.config)
            with torch.no_grad():
                m(input_ids=tokens(2, 40), attention_mask=mask[:, :40], past_key_values=cache)
                step = m(input_ids=tokens(2, 1, seed=9), attention_mask=mask, past_key_values=cache)
            outputs.append(step.logits)
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)


def test_a_crop_across_a_flush_is_lossless_and_generation_goes_on():
    model = kvpass.apply(llama(), scheme="kivi")
    cache = prefilled(model, 60)
    reference = copy.deepcopy(cache)
    run(model, tokens(1, 8, seed=1), cache)  # flushes at 64
    cache.crop(-8)
    ids = tokens(1, 12, seed=2)
    logits, _ = run(model, ids, cache)
    expected, _ = run(model, ids, reference)
    assert torch.equal(logits, expected)


def test_verification_of_several_tokens_over_a_compiled_cache():
    model = kvpass.apply(llama(), scheme="kivi")
    cache = prefilled(model, 60)
    run(model, tokens(1, 3), cache)
    logits, cache = run(model, tokens(1, 6, seed=4), cache, chunk=6)
    assert torch.isfinite(logits).all() and cache.get_seq_length() == 69
    run(model, tokens(1, 3), cache)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.compiles
def test_the_generated_code_holds_no_buffer_of_codes_and_no_host_sync():
    """An opaque op with a view as input, or a write right after a read, would make Inductor clone whole pools."""
    model = kvpass.apply(llama(), scheme="kivi")
    cache = prefilled(model)
    _, codes = run_and_get_code(lambda: run(model, tokens(1, 2), cache))
    (outer,) = [code for code in codes if "kvpass.attend" in code]
    assert outer.count("torch.ops.kvpass.attend.default(") == 2
    assert outer.count("torch.ops.kvpass.append_layers_.default(") == 2 and "kvpass.append_.default(" not in outer
    assert not re.search(r"empty_strided\w*\(\([^)]*\), \([^)]*\), torch\.uint8", outer)
    assert "_local_scalar_dense" not in outer and ".item()" not in outer
    assert outer.index("kvpass.append_layers_.default(") > outer.rindex("kvpass.attend.default(")


def captured_graph(model, recorder):
    """The decode graph of ``model``, captured by ``recorder``."""
    runtime(model).decode_step = torch.compile(runtime(model).original, backend=recorder, fullgraph=True)
    run(model, tokens(1, 2), prefilled(model))
    return recorder.captured


@pytest.mark.slow
def test_a_structural_mask_is_dropped_and_a_padding_mask_is_not():
    """Eager attention adds a mask even if it hides nothing. The pass detects this by evaluating the mask."""
    model = kvpass.apply(llama("eager"), scheme="kivi")
    recorder = Recorder(interpret=True)
    captured_graph(model, recorder)
    attends = [n for n in recorder.rewritten._run.__self__.graph.nodes if n.target is ATTEND]
    assert [argument(n, "mask") for n in attends] == [None, None]
    padded = torch.ones(1, 72, dtype=torch.long)
    padded[:, :5] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(1, 71), attention_mask=padded[:, :71], past_key_values=cache)
        model(input_ids=tokens(1, 1), attention_mask=padded, past_key_values=cache)
    attends = [n for n in recorder.rewritten._run.__self__.graph.nodes if n.target is ATTEND]
    assert all(argument(n, "mask") is not None for n in attends)


def test_a_mask_of_lengths_and_a_constant_is_structure():
    """transformers 5.17 builds masks this way. A constant that hides something is read, not guessed."""
    for hidden, verdict in ((0.0, "full"), (float("-inf"), None)):
        graph = torch.fx.Graph()
        seen = graph.call_function(torch.ops.aten.ones.default, ([2, 4],), {"dtype": torch.bool})
        constant = graph.get_attr("constant")
        mask = graph.call_function(torch.ops.aten.where.ScalarOther, (seen, constant, -1e38))
        graph.output(mask)
        holder = torch.nn.Module()
        holder.constant = torch.tensor(hidden)
        seen.meta["val"], constant.meta["val"] = torch.ones(2, 4, dtype=torch.bool), holder.constant
        mask.meta["val"] = torch.zeros(2, 4)
        module = torch.fx.GraphModule(holder, graph)
        assert structure(next(n for n in module.graph.nodes if n.name == mask.name), 2) == verdict


def test_state_updates_survive_dead_code_elimination():
    """In-place methods look pure to FX before functionalization; an append lost there gives plausible logits."""
    model = kvpass.apply(llama(), scheme="kivi")
    recorder = Recorder(interpret=True)
    captured_graph(model, recorder)
    graph = recorder.rewritten._run.__self__.graph
    appends = [node for node in graph.nodes if node.target is APPEND_LAYERS]
    assert [len(argument(node, "x")) for node in appends] == [2, 2]  # keys and values of two layers
    assert not any(node.target in (ATTEND,) for node in list(graph.nodes)[list(graph.nodes).index(appends[0]) :])
    graph.eliminate_dead_code()
    assert [node for node in graph.nodes if node.target is APPEND_LAYERS] == appends


def test_attention_weights_read_elsewhere_are_refused_with_a_reason_and_stay_correct():
    model, eager = (
        kvpass.apply(llama("eager"), scheme="kivi"),
        kvpass.apply(llama("eager"), lowering="eager", scheme="kivi"),
    )
    outputs = []
    for m in (model, eager):
        cache = prefilled(m)
        with torch.no_grad():
            outputs.append(m(input_ids=tokens(1, 1), past_key_values=cache, output_attentions=True))
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=1e-4, rtol=0)
    graph = kvpass.explain(model).graphs[-1]
    assert graph.fused == 0 and graph.decoded == 4
    assert any("output_attentions" in reason for reason in graph.refused)
    assert "not fused" in str(kvpass.explain(model))


def test_the_report_says_which_layer_is_not_fused_and_why():
    model = llama("eager")
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def looks_at_its_weights(*args, **kwargs):
        out, weights = plain(*args, **kwargs)
        return out + 0 * weights.sum(), weights

    attention.forward = looks_at_its_weights
    kvpass.apply(model, "kivi")
    run(model, tokens(1, 3), prefilled(model))
    report = kvpass.explain(model)
    assert report.fused == 1
    assert [bool(report.why_not_fused(layer)) for layer in report.layers] == [False, True]
    rows = str(report).splitlines()
    first, second = (next(i for i, row in enumerate(rows) if row.startswith(f"    {index}  ")) for index in (0, 1))
    assert "packed, fused" in rows[first] and "packed, not fused" in rows[second]
    assert "weights are also used outside" in rows[second + 1]


def test_strict_raises_with_the_reason_and_loses_nothing():
    model = kvpass.apply(llama("eager"), scheme="kivi", strict=True)
    cache = prefilled(model)
    with pytest.raises(kvpass.NotFusedError, match="output_attentions"), torch.no_grad():
        model(input_ids=tokens(1, 1), past_key_values=cache, output_attentions=True)
    assert cache.get_seq_length() == 70
    run(model, tokens(1, 3), cache)
    assert cache.get_seq_length() == 73


def test_attention_that_is_not_recognised_is_reported_with_what_to_do():
    def by_hand(module, q, k, v, mask, scaling=None, **kwargs):
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        weights = (torch.einsum("bhsd,bhtd->bhst", q, k) * scaling + (0 if mask is None else mask)).exp()
        return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2), None

    AttentionInterface.register("by_hand", by_hand)
    model = kvpass.apply(llama("by_hand"), scheme="kivi", strict=True)
    with pytest.raises(
        kvpass.NotFusedError, match=r"something other than SDPA or a softmax .* attn_implementation='sdpa'"
    ):
        run(model, tokens(1, 1), prefilled(model))


@pytest.mark.compiles
def test_an_applied_model_inside_a_compiled_function_keeps_its_own_graph():
    model = kvpass.apply(llama(), scheme="kivi")
    ids = tokens(1, 6, seed=1)
    expected, _ = run(model, ids, prefilled(model))
    graphs = len(kvpass.explain(model).graphs)

    @torch.compile(backend="eager")
    def double(token, cache):
        return model(input_ids=token, past_key_values=cache).logits[:, -1] * 2

    cache = prefilled(model)
    with torch.no_grad():
        logits = torch.stack([double(ids[:, i : i + 1], cache) for i in range(6)])
    torch.testing.assert_close(logits, 2 * expected, atol=1e-4, rtol=0)
    assert len(kvpass.explain(model).graphs) == graphs and cache.get_seq_length() == 76


@pytest.mark.compiles
@pytest.mark.parametrize("options", [{}, {"lowering": "reference"}])
def test_the_backend_fuses_a_function_that_uses_the_ops_itself(options):
    plan = kvpass.schemes.get("kivi").plan(GEOMETRY)
    k, v, q = torch.randn(1, 2, 90, 32), torch.randn(1, 2, 90, 32), torch.randn(1, 4, 1, 32)
    key, value = KVState.allocate(plan.key, 1, 2, 32, k.dtype, "cpu", 128), None
    value = KVState.allocate(plan.value, 1, 2, 32, v.dtype, "cpu", 128)
    key.append(k, 0), value.append(v, 0)

    def step(q, k_new, v_new, length, key, value, key_text, value_text):
        full_k = torch.cat([torch.ops.kvpass.dequantize(key, length, key_text), k_new], 2)
        full_v = torch.cat([torch.ops.kvpass.dequantize(value, length, value_text), v_new], 2)
        torch.ops.kvpass.append_(key, length, k_new, None, None, key_text)
        torch.ops.kvpass.append_(value, length, v_new, None, None, value_text)
        return torch.nn.functional.scaled_dot_product_attention(q, full_k, full_v, enable_gqa=True)

    def arguments(key, value):
        return q, k[:, :, :1], v[:, :, :1], key.length_tensor(90), key.pack, value.pack, key.text, value.text

    expected_states = copy.deepcopy((key, value))
    expected = step(*arguments(*expected_states))
    out, codes = run_and_get_code(torch.compile(step, backend=Backend(**options)), *arguments(key, value))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert any("kvpass.attend" in code for code in codes)
    for mine, theirs in zip((key, value), expected_states, strict=True):
        assert torch.equal(mine.dequantize(91), theirs.dequantize(91))


@pytest.mark.compiles
def test_ops_whose_sizes_grow_with_the_cache_stay_out_of_cuda_graphs():
    of_a_length = {"append_", "append_layers_", "append_rotary_", "dequantize", "rotate", "attend"}
    overloads = {op: getattr(torch.ops.kvpass, op).default for op in (*of_a_length, "quantize")}
    tagged = {op for op, overload in overloads.items() if torch.Tag.cudagraph_unsafe in overload.tags}
    assert tagged == of_a_length


@pytest.mark.slow
@pytest.mark.compiles
def test_a_mode_reaches_inductor_and_changes_nothing_on_the_cpu(monkeypatch, reference_in_this_test):
    seen, logits = [], []

    def noted(*args):
        seen.append(inductor_config.triton.cudagraphs)
        return compile_fx(*args)

    monkeypatch.setattr(backend, "compile_fx", noted)
    for mode in (None, "reduce-overhead"):  # for a scheme whose steps cannot be replayed as a whole
        model = kvpass.apply(llama(layers=1), scheme="kivi+h2o", mode=mode)
        logits.append(run(model, tokens(1, 3), prefilled(model, 40))[0])
    assert seen == [False, True] and torch.equal(*logits)
    with pytest.raises(KVPassError, match="max-autotune"):
        kvpass.apply(llama(), scheme="kivi", mode="max-autotune")


@pytest.mark.nightly
@pytest.mark.compiles
def test_models_of_other_shapes_in_the_same_process_do_not_make_a_graph_dynamic():
    """Dynamo remembers per function which ints and floats varied; an attention scale must stay a constant."""
    for head_dim, kv_heads in ((32, 2), (64, 1)):
        model = kvpass.apply(llama(head_dim=head_dim, kv_heads=kv_heads), scheme="kivi-pre")
        run(model, tokens(1, 3), prefilled(model, 40))
        assert kvpass.explain(model).fused == 2
