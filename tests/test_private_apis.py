"""Behaviour that kvpass relies on beyond torch's public API. If one of these tests fails on a new torch, adapt the file
that it names; nothing else depends on that behaviour."""

import copy
import gc
import inspect
import threading
import warnings

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_inductor_cache
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache, GenerationMixin, cache_utils

import kvpass
from kvpass import accelerate_hooks
from kvpass.cache.state import KVState
from kvpass.compile import appends, capture, find, normalise, recorded_calls, vmaps
from kvpass.compile.backend import Backend
from kvpass.compile.calls import APPEND
from kvpass.lowering import partial_attention, session
from kvpass.lowering.cpp.build import build
from kvpass.lowering.inductor import aot
from kvpass.lowering.inductor.aot import Input, Program, compile_ahead
from kvpass.models import recording
from kvpass.models.arguments import CACHE, CACHE_NAMES, cache_argument
from kvpass.runtime.steps import model_changes
from kvpass.runtime.transformers import TransformersRuntime
from kvpass.schemes import KIVIConfig

from common import ROUNDS_IN_INDUCTOR, coded
from tiny import llama, tokens


def captured(fn, *inputs):
    """The Dynamo graph of ``fn``; placeholders have example values, as a backend sees them."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(copy.deepcopy(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def test_export_keeps_attention_whole_and_names_what_is_written():
    """`kvpass.compile.normalise`: aot_export_module(pre_dispatch=True)."""

    def step(q, k, state):
        state.add_(k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, state)

    normal = normalise.normalise(captured(step, *(torch.randn(1, 2, 4, 8) for _ in range(3))))
    targets = {node.target for node in normal.graph.nodes}
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert torch.ops.aten.add.Tensor in targets and torch.ops.aten.add_.Tensor not in targets
    assert len(normal.mutated) == 1
    (value,) = normal.mutated.values()
    assert value.target is torch.ops.aten.add.Tensor
    assert len(normal.outputs) == 1


def test_export_turns_mutable_custom_ops_into_auto_functionalized_v2():
    """`kvpass.compile.appends` reads the arguments this higher-order op was called with."""
    spec = coded(2, "channel", 32, 32)
    state, x = KVState.allocate(spec, 1, 2, 32, torch.float32, "cpu", 64), torch.randn(1, 2, 1, 32)

    def step(*state_and_others):
        *pack, length, x = state_and_others
        torch.ops.kvpass.append_(pack, length, x, None, None, state.text)
        return x + 1

    tensors = *state.pack, state.length_tensor(5), x
    normal = normalise.normalise(captured(step, *tensors))
    (append,) = appends.appends(normal.graph)
    placeholders = [node for node in normal.graph.nodes if node.op == "placeholder"]
    assert list(append.arguments) == [argument.name for argument in APPEND._schema.arguments]
    assert append.written == append.state and len(append.state) == 4 and set(append.state) <= set(placeholders)
    assert [node.meta["val"].shape for node in append.state] == [tensor.shape for tensor in state.pack]
    assert append.importance is None and append.spec == state.text
    assert find.find(normal.graph, {}) == ([], [])


def test_a_kernel_compiled_ahead_serves_every_size_of_its_dynamic_dims():
    """`kvpass.lowering.inductor.aot`: Inductor's compile_fx on a graph traced with fake tensors."""
    inputs = [Input("x", torch.empty(7), [0]), Input("y", torch.empty(7, 4), [0])]
    kernel = compile_ahead(Program(lambda x, y: ((x[:, None] * y).sum(-1),), inputs))
    for size in (2, 7, 50):
        x, y = torch.randn(size), torch.randn(size, 4)
        torch.testing.assert_close(kernel(x, y)[0], (x[:, None] * y).sum(-1))


def test_one_tensor_as_example_of_two_inputs_is_still_two_inputs():
    example = torch.empty(4)
    inputs = [Input("x", example), Input("nothing", None), Input("y", example)]
    kernel = compile_ahead(Program(lambda x, nothing, y: (x - y,), inputs))
    x, y = torch.randn(4), torch.randn(4)
    assert torch.equal(kernel(x, None, y)[0], x - y)


@pytest.mark.skipif(not ROUNDS_IN_INDUCTOR, reason="`kvpass.lowering.inductor.pages` does not encode before torch 2.13")
def test_compiled_kernels_round_to_16_bits_where_the_program_does():
    """Inductor drops casts to 16 bits and back unless told not to. Values would then be quantized with other scales
    than the stored ones."""
    kernel = compile_ahead(Program(lambda x: (x.half().float() + 1,), [Input("x", torch.empty(64))]))
    x = torch.randn(64) / 3
    assert torch.equal(kernel(x)[0], x.half().float() + 1)


def test_guards_on_sizes_can_be_evaluated_without_the_graph():
    """`kvpass.compile.recorded_calls`: a ShapeEnv can express its guards as text that refers only to sizes, and
    evaluate it."""

    def step(x):
        return x + 1 if x.shape[0] > 10 else x - 1

    placeholders = []

    def backend(gm, example_inputs):
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        placeholders.append(values)
        return recorded_calls.Noted(gm.forward, values)

    step = torch.compile(step, backend=backend, dynamic=True)
    with recorded_calls.noted() as calls:
        step(torch.zeros(12))
    ((call, _),) = calls
    place = next(i for i, value in enumerate(placeholders[0]) if isinstance(value, torch.Tensor))
    (got,) = call.again({place: torch.ones(30)})
    assert torch.equal(got, torch.full((30,), 2.0))
    assert call.again({place: torch.ones(7)}) is None


@pytest.mark.slow
def test_compiled_code_is_never_reused_for_another_scheme():
    """`kvpass.compile.backend`: compile_fx caches the rewritten graph, in which the specs are constants."""
    hits = []
    with fresh_inductor_cache():
        for config in (KIVIConfig(), KIVIConfig(), KIVIConfig(bits=4), KIVIConfig(residual=64)):
            torch._dynamo.reset()
            counters.clear()
            model = kvpass.apply(llama(), config, lowering="reference")
            model.generate(tokens(1, 70), max_new_tokens=3, do_sample=False)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0, 0]


def test_compiled_code_runs_while_another_thread_traces():
    """`kvpass.lowering.session`: Dynamo's lock, and the flag without which compiled functions refuse to run
    meanwhile."""
    step = torch.compile(lambda x: x + 1, backend="eager")
    step(torch.zeros(2))
    results, flags = [], []

    def traced(x):
        for function in (lambda: step(torch.zeros(2)), compile_lock.acquire, torch.compiler.is_dynamo_compiling):
            arguments = (False,) if function == compile_lock.acquire else ()
            other = threading.Thread(target=lambda f=function, a=arguments: results.append(f(*a)))
            other.start()
            other.join()
        flags.append(torch.compiler.is_compiling())
        return x + 1

    with session.compiling():
        make_fx(traced)(torch.zeros(2))
    assert torch.equal(results[0], torch.ones(2))
    assert results[1:] == [False, False] and flags == [True]
    assert not torch.compiler.is_compiling()
    assert torch.compile(lambda x: x + torch.compiler.is_dynamo_compiling(), backend="eager")(torch.zeros(1)) == 1


def test_a_limit_that_fullgraph_reaches_is_an_error_of_its_own_before_anything_runs():
    """`kvpass.runtime.forms` then compiles the function again."""
    ran = []
    step = torch.compile(lambda x, n: x + n, backend=lambda gm, _: lambda *i: ran.append(1) or gm(*i), fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        step(torch.zeros(2), "a" == "a")
        with pytest.raises(FailOnRecompileLimitHit):
            step(torch.zeros(2, 2), False)
    assert ran == [1]


def test_calls_that_end_and_start_do_not_fail_one_that_runs():
    """torch counts compiled frames of all threads in one variable, see `kvpass.lowering.session.uncounted`. Otherwise,
    with eight threads, about one step in ten thousand failed with "found no compiled frames" and left its cache
    inconsistent."""
    if session._count_frames is None:
        pytest.skip("this torch does not count frames")

    def meanwhile(gm, _):
        return lambda *inputs: [session._count_frames(-1), session._count_frames(0), gm(*inputs)][-1]

    step = torch.compile(lambda x: x + 1, backend=meanwhile, fullgraph=True)
    with pytest.raises(RuntimeError, match="no compiled frames"):
        step(torch.zeros(2))
    for _ in range(2):
        with session.uncounted():
            assert torch.equal(step(torch.zeros(2)), torch.ones(2))
        assert session._count_frames(-1) == -1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_is_not_compiled_is_called_as_it_is(fullgraph):
    """`kvpass.lowering.session.uncompiled`, and `uncounted`, which disables the check that something was compiled."""

    @torch.compiler.disable
    def inside(x):
        with session.uncounted():
            return x + torch.compiler.is_dynamo_compiling()

    def fn(x):
        return inside(x)

    def backend(gm, _):
        raise AssertionError("something was compiled")

    session.uncompiled(fn)
    assert torch.compile(fn, backend=backend, fullgraph=fullgraph)(torch.zeros(1)) == 0


def test_a_float_that_changes_is_a_constant_of_another_graph():
    """`kvpass.lowering.session.specialized`: otherwise a changed float becomes a tensor that is read with ``item``."""
    graphs, module = [], torch.nn.ReLU()
    step = torch.compile(lambda x: module(x) * module.scale, backend=lambda gm, _: graphs.append(gm) or gm)
    with session.specialized():
        for module.scale in (2.0, 3.0):
            assert step(torch.ones(1)) == module.scale
    assert [len(gm.graph.find_nodes(op="placeholder")) for gm in graphs] == [1, 1]
    assert not torch._dynamo.config.specialize_float


def test_modules_keep_hooks_in_dicts_of_these_names():
    """`kvpass.runtime.steps.model_changes`, which also recognizes hooks by the Python modules they come from."""
    module = torch.nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    assert all(len(vars(module)[name]) == 1 for name in model_changes._HOOKS) and not any(model_changes._GLOBAL_HOOKS)
    handles = [
        getattr(torch.nn.modules.module, f"register_module_forward_{name}")(print) for name in ("hook", "pre_hook")
    ]
    assert all(map(len, model_changes._GLOBAL_HOOKS))
    for handle in handles:
        handle.remove()
    assert not any(model_changes._GLOBAL_HOOKS)
    model = llama()
    recording.put_up_hooks(model, dict(output_hidden_states=True))
    (hook,) = model.model.layers[0]._forward_hooks.values()
    assert hook.__module__ == recording.RECORDS


def test_transformers_records_hidden_states_by_hooks_that_can_be_installed_ahead():
    """`kvpass.models.recording` recognizes models whose forward records outputs."""
    model = llama()
    assert list(recording._recorders(model)) == [model.model]
    recording.put_up_hooks(model, {})
    assert not model.model.layers[0]._forward_hooks
    for _ in range(2):
        recording.put_up_hooks(model, dict(output_hidden_states=True))
        assert len(model.model.layers[0]._forward_hooks) == 1
    assert len(model(tokens(1, 5), output_hidden_states=True).hidden_states) == 3


@pytest.mark.slow
def test_remove_lets_go_of_every_graph():
    """`kvpass.lowering.session.forget`: Dynamo stores graphs on code objects, and backends in a table."""

    def alive() -> dict[type, int]:
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]
        return {kind: kinds.count(kind) for kind in (Backend, TransformersRuntime)}

    model, counts = llama(), []
    for _ in range(3):
        kvpass.apply(model, KIVIConfig(residual=16, group_size=16, rope="pre"), lowering="eager")
        model.generate(tokens(1, 20), max_new_tokens=3)
        assert kvpass.explain(model).graphs
        kvpass.remove(model)
        counts.append(alive())
    assert counts[0] == counts[1] == counts[2]


def test_inductor_code_can_be_called_without_the_wrapper_that_disables_dynamo():
    """`kvpass.lowering.session`: innermost_fn. `kvpass.lowering.inductor.aot`: cpp.vec_isa_ok, which avoids probing."""
    graph, example = make_fx(lambda x: (x + 1,))(torch.ones(4)), torch.arange(4.0)
    with torch.no_grad(), inductor_config.patch(aot.unprobed()):
        compiled = compile_fx(graph, [example])
    assert torch.equal(session.undisabled(compiled)(example)[0], example + 1)
    assert not hasattr(session.undisabled(compiled), "_torchdynamo_orig_callable")
    with inductor_config.patch({"cpp.vec_isa_ok": False}):
        assert not aot.unprobed()  # a user's setting stays


def test_generate_makes_a_masks_successor_by_ones_alone_and_hands_it_over_as_it_is():
    """`kvpass.runtime.padding` carries findings about a mask over to the mask that generate extends it to."""
    model, seen = llama(layers=1), []
    forward = model.forward

    def watched(*args, **kwargs):
        seen.append(kwargs["attention_mask"])
        return forward(*args, **kwargs)

    model.forward = watched
    made, method = [], model._update_model_kwargs_for_generation
    mask = torch.tensor([[0, 1, 1, 0, 1]])

    def update(outputs, model_kwargs, *args, **kwargs):
        before = model_kwargs["attention_mask"]
        after = method(outputs, model_kwargs, *args, **kwargs)["attention_mask"]
        assert torch.equal(after, torch.cat([before, before.new_ones(1, 1)], 1))
        made.append(after)
        return model_kwargs

    model._update_model_kwargs_for_generation = update
    model.generate(tokens(1, 5), attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert len(seen) == 4 and all(a is b for a, b in zip(seen, [mask, *made], strict=False))


def test_transformers_has_one_name_for_a_cache():
    """`kvpass.models.arguments`: from 5.24 on the name is "cache", for models, in ``generate`` and in outputs; the
    older name, "past_key_values", warns. Add a third name to `CACHE_NAMES`; `apply` accepts all of them."""
    model = llama(layers=1)
    assert cache_argument(model) == CACHE  # found in spite of decorators of the forward
    assert CACHE in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for made in (model, kvpass.apply(llama(layers=1), KIVIConfig(), lowering="eager")):
            cache = DynamicCache(config=made.config)
            assert made(tokens(1, 5), **{CACHE: cache})[CACHE] is cache
            out = made.generate(tokens(1, 9), **{CACHE: cache}, max_new_tokens=2, return_dict_in_generate=True)
            assert out[CACHE] is cache and cache.get_seq_length() == 10
            assert all(made(tokens(1, 5), use_cache=True).get(name) is not None for name in (CACHE, "logits"))
    assert set(CACHE_NAMES) >= {CACHE, "past_key_values"}


def test_cpp_kernels_take_tensors_and_numbers():
    """`kvpass.lowering.cpp.build`: CppPythonBindingsCodeCache."""
    add = """
    #include <cstdint>
    extern "C" void kernel(const float* x, float* out, int64_t count, int64_t more) {
        for (int64_t i = 0; i < count; i++) out[i] = x[i] + more;
    }
    """
    x, out = torch.arange(5.0), torch.zeros(7)
    build(add, ["const float*", "float*", "int64_t", "int64_t"])(x[1:], out, 4, 2)
    assert out.tolist() == [3, 4, 5, 6, 0, 0, 0]


def test_dynamo_counts_why_graphs_broke_and_says_what_keeps_it_from_compiling():
    """`kvpass.compile.capture` reads ``counters``, ``config.disable``, the stance, and attributes of the errors."""

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    breaks = capture.Breaks()
    with breaks.watching():
        torch.compile(broken, backend="eager")(torch.ones(2))
    assert any("graph_break" in reason for reason in breaks.reasons()) and not capture.switched_off()
    torch._dynamo.reset()
    with pytest.raises(capture.FAILURES) as raised:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    assert "test_private_apis.py" in str(capture.translated(raised.value))
    with torch.compiler.set_stance("force_eager"):
        assert "force_eager" in capture.switched_off()


def test_dynamo_passes_on_what_a_constant_function_raises():
    """`kvpass.cache.layer` refuses another dtype in such a function, so that kvpass's own error is raised in every
    graph."""

    @torch.compiler.assume_constant_result
    def refuse(dtype, device):
        raise kvpass.KVPassError(f"not {dtype} on {device}")

    def step(x):
        return x if x.dtype == torch.float64 else refuse(x.dtype, x.device)

    torch._dynamo.reset()
    with pytest.raises(capture.FAILURES) as raised:
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
    assert str(capture.translated(raised.value)) == "not torch.float32 on cpu"


def test_dynamo_writes_vmap_down_between_two_calls_that_begin_and_end_it():
    """`kvpass.compile.vmaps` searches for these calls; under other names, masks of token types would not be
    captured."""
    graph = captured(torch.vmap(lambda x: x * 2), torch.ones(3, 4)).graph
    targets = [node.target for node in graph.nodes]
    assert targets.count(vmaps._vmap_increment_nesting) == targets.count(vmaps._vmap_decrement_nesting) == 1
    assert targets.index(vmaps._vmap_increment_nesting) < targets.index(vmaps._vmap_decrement_nesting)


def test_layers_with_a_state_keep_it_as_stateful_layers_expect():
    """`kvpass.cache.stateful` combines `LinearAttentionLayer` with packed keys and values."""
    mixin, layer = cache_utils.LinearAttentionCacheLayerMixin, cache_utils.LinearAttentionLayer(number_of_states=2)
    assert type(layer).__mro__[1] is mixin and not issubclass(mixin, cache_utils.CacheLayerMixin)
    for name in ("conv_states", "recurrent_states", "has_previous_state", "is_recurrent_states_initialized"):
        assert list(getattr(layer, name)) == [0, 1], name
    assert layer.record_past is False


def test_a_sliding_layer_returns_one_token_less_than_its_window_from_the_past():
    """`kvpass.cache.sliding` returns the same number of tokens to the model's own attention."""
    layer = cache_utils.DynamicSlidingWindowLayer(sliding_window=8)
    for count in (20, 1):
        keys, _ = layer.update(*(torch.ones(1, 1, count, 4) for _ in range(2)))
    assert layer.keys.shape[2] == 7 and keys.shape[2] == 8 and layer.get_mask_sizes(3) == (10, 14)
    assert layer.record_past is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_on_cpus_returns_the_log_of_the_sum_of_exponentials(dtype):
    """`kvpass.lowering.partial_attention` calls it by itself, to combine parts."""
    q, k, v = (torch.randn(1, 2, tokens, 16).to(dtype) for tokens in (6, 40, 40))
    bias = torch.randn(1, 1, 6, 40).to(dtype)
    bias[:, :, 2] = -torch.inf
    out, lse = partial_attention._flash(q, k, v, 0.0, False, attn_mask=bias, scale=0.3)
    scores = q.float() @ k.float().mT * 0.3 + bias.float()
    seen = torch.arange(6) != 2
    assert lse.dtype == torch.float32 and lse.shape == (1, 2, 6)
    torch.testing.assert_close(lse[..., seen], scores.logsumexp(-1)[..., seen], atol=2e-2, rtol=2e-2)
    assert (out[:, :, 2] == 0).all() and lse[:, :, 2].isfinite().all(), "a query that sees nothing"
    _, causal = partial_attention._flash(q, k[:, :, :6], v[:, :, :6], 0.0, True, attn_mask=None, scale=0.3)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = (q.float() @ k[:, :, :6].float().mT * 0.3).masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(causal, expected, atol=2e-2, rtol=2e-2)


def test_functions_of_subclasses_of_tensors_can_be_run_without_the_subclass():
    """`kvpass.cache.deferred`: torch._C.DisableTorchFunctionSubclass."""

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {}), "by the subclass"

    x = torch.ones(2).as_subclass(Sub)
    total, how = x.sum()
    assert total == 2 and how == "by the subclass"


def test_hooks_of_accelerate_have_the_weights_that_they_load(tmp_path):
    """`kvpass.accelerate_hooks` reads them."""
    accelerate, model = pytest.importorskip("accelerate"), llama()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model = accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(weight.is_meta for weight in model.parameters()) and accelerate_hooks.device_of(model).type == "cpu"
    loaded = dict(accelerate_hooks.weights_of(model))
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
