"""Changes of a model between two steps: hooks that are added, removed or changed, adapters, attributes and configs.

Steps that were compiled before, or are called again without guards, give the results of the untouched model.
"""

from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from transformers import DynamicCache

import kvpass
from kvpass import NotFusedError
from kvpass.compile.backend import Backend
from kvpass.runtime.steps.model_changes import Hooks, Watch

from tiny import llama, tokens

LOSSLESS = dict(scheme="identity", residual=16)
MODES = {"eager": dict(lowering="eager"), "default": {}, "reduce-overhead": dict(mode="reduce-overhead")}


@pytest.fixture(autouse=True)
def reference(reference_in_this_test, monkeypatch):
    """Other tests cover the contents of a step, and Inductor's version of its graph."""
    monkeypatch.setattr(Backend, "_compiled", lambda self, module, inputs: (module.recompile(), module.forward)[1])


@torch.no_grad()
def decoded(model, changes, prompt=20):
    """Logits after a prompt and after a step that follows each of ``changes`` to the model; None means no change."""
    cache, ids = DynamicCache(config=model.config), tokens(1, prompt + len(changes))
    logits = [model(input_ids=ids[:, :prompt], past_key_values=cache).logits[:, -1]]
    for step, change in enumerate(changes, prompt):
        if change is not None:
            change(model)
        logits.append(model(input_ids=ids[:, step : step + 1], past_key_values=cache).logits[:, -1])
    return torch.cat(logits)


class Steering:
    """Hooks to add or remove: one adds to a layer's output, one doubles a layer's input, and one applies to every
    module."""

    def __init__(self):
        self.state, self.seen, self.handles = {"strength": 1.0}, [], []
        self.vector = torch.linspace(-3, 3, 64)

    def add(self, model):
        def steer(module, inputs, output):
            self.seen.append(tuple(output.shape))
            return output + self.state["strength"] * self.vector

        self.handles.append(model.model.layers[1].register_forward_hook(steer))

    def stronger(self, model):
        self.state["strength"] = 4.0

    def before(self, model):
        def double(module, args, kwargs):
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}

        layer = model.model.layers[0]
        self.handles.append(layer.self_attn.register_forward_pre_hook(double, with_kwargs=True))

    def everywhere(self, model):
        halved = type(model.model.layers[0].mlp)
        self.handles.append(
            register_module_forward_hook(lambda module, _, out: out / 2 if type(module) is halved else None)
        )

    def remove(self, model):
        self.handles.pop().remove()

    @property
    def changes(self):
        ends = [None, None, self.remove, None]
        return [None, None, None, self.add, None, self.stronger, *ends, self.before, *ends, self.everywhere, *ends]


@pytest.mark.parametrize("mode", MODES)
def test_hooks_may_be_added_changed_and_removed_while_decoding(mode):
    expected, hooks = Steering(), Steering()
    want = decoded(llama(), expected.changes)
    model = kvpass.apply(llama(), LOSSLESS, **MODES[mode])
    torch.testing.assert_close(decoded(model, hooks.changes), want, atol=1e-5, rtol=1e-5)
    assert hooks.seen == expected.seen and len(hooks.seen) == 5
    report = kvpass.explain(model)
    if mode != "eager":
        assert report.fused == 2 and report.hooked_steps == 11
        assert "11 steps were not compiled, because of hooks on every module" in str(report)
    assert report.recalled == (mode == "reduce-overhead")


@pytest.mark.slow
def test_hooks_may_be_added_and_removed_with_a_fully_captured_forward():
    """Keys are stored before RoPE, and all are exact here. Prompts are captured too, and so are steps with hooks."""
    strength = {"by": 1.0}

    def add(model):
        hook = model.model.layers[0].register_forward_hook(lambda module, _, output: output * strength["by"] + 1)
        model.remove = hook.remove

    def stronger(model):
        strength["by"] = 4.0

    def remove(model):
        model.remove()
        strength["by"] = 1.0

    changes, hooked_from_the_start = [None, add, stronger, remove], [None]
    expected = llama(layers=1)
    want = [decoded(expected, changes), (add(expected), decoded(expected, hooked_from_the_start))[1]]
    model = kvpass.apply(llama(layers=1), dict(scheme="kivi", rope="pre", group_size=8, residual=64))
    got = [decoded(model, changes), (add(model), decoded(model, hooked_from_the_start))[1]]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert kvpass.explain(model).hooked_steps == 3


def test_hooks_of_the_model_itself_run_around_its_compiled_forward():
    model, seen = kvpass.apply(llama(layers=1), LOSSLESS), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    decoded(model, [None] * 3)
    assert len(seen) == 4 and not kvpass.explain(model).hooked_steps


def pruned(model):
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)


def test_hooks_that_compute_weights_are_compiled():
    changes = [None, pruned, None, None]
    model = kvpass.apply(llama(layers=1), LOSSLESS)
    torch.testing.assert_close(decoded(model, changes), decoded(llama(layers=1), changes), atol=1e-5, rtol=1e-5)
    assert not kvpass.explain(model).hooked_steps


def test_strict_does_not_decode_because_of_a_hook():
    model, hooks = kvpass.apply(llama(layers=1), LOSSLESS, strict=True), Steering()
    model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(NotFusedError, match=r"hooks on model\.norm"):
        decoded(model, [None])
    assert not hooks.seen


def test_hooks_are_found_on_modules_that_came_later_and_in_dicts_that_were_replaced():
    model = llama()
    hooks = Hooks(model)
    assert hooks() == ()
    model.model.norm.extra = nn.Identity()
    model.model.norm.extra.register_forward_hook(lambda *_: None)
    assert hooks() == ("model.norm.extra",)
    model.model.norm.extra._forward_hooks = {}
    assert hooks() == ()
    model.model.norm.extra._forward_hooks = {0: lambda *_: None}
    assert hooks() == ("model.norm.extra",)
    del model.model.norm.extra
    assert hooks() == ()


class Reading(nn.Module):
    """A norm that reads every kind of attribute that a module may have."""

    def __init__(self, inner, config):
        super().__init__()
        self.inner, self.config, self.scale, self.on = inner, config, 2.0, None
        self.by_name, self.in_order, self.options = {"one": 2.0}, [[2.0]], SimpleNamespace(scale=2.0)

    def forward(self, x):
        scale = self.config.some_scale * self.scale * self.by_name["one"] * self.in_order[0][0] * self.options.scale
        return self.inner(x) * scale if self.on is None else x * scale


def reading(layers=2):
    model = llama(layers=layers)
    model.config.some_scale = 0.5
    model.model.norm = Reading(model.model.norm, model.config)
    return model


def other_scaling(model):
    model.model.layers[0].self_attn.scaling = 1.0


def other_field(model):
    model.config.some_scale = 2.0


def other_flag(model):
    model.model.norm.on = True


def other_value(model):
    model.model.norm.by_name["one"] = 3.0


def other_element(model):
    model.model.norm.in_order[0][0] = 3.0


def other_option(model):
    model.model.norm.options.scale = 3.0


def other_forward(model):
    norm = model.model.norm
    norm.forward = MethodType(lambda self, x: self.inner(x) / 2, norm)


ATTRIBUTES = [other_scaling, other_field, other_flag, other_value, other_element, other_option, other_forward]


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_changes_of_a_model_are_noticed(change):
    model = reading()
    watch = Watch(model)
    assert watch.changed() and not watch.changed()
    model.model.norm.scale = float("2")  # another object with the same value
    assert not watch.changed()
    change(model)
    assert watch.changed() and not watch.changed()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_attributes_and_fields_of_a_config_change_while_decoding(mode):
    changes = [None, None, None, other_scaling, None, other_field, None]
    model = kvpass.apply(reading(layers=1), LOSSLESS, **MODES[mode])
    torch.testing.assert_close(decoded(model, changes), decoded(reading(layers=1), changes), atol=1e-5, rtol=1e-5)
    graphs = kvpass.explain(model).graphs
    assert len(graphs) == 3 and all(graph.fused == 1 and not graph.decoded for graph in graphs)


def with_adapters(model):
    """Two adapters in ``model`` itself, both with an effect."""
    peft = pytest.importorskip("peft")
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model, name)
    return model.eval()


def of_each_adapter(change):
    def changed(model):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                change(module)

    return changed


ADAPTERS = {
    "switched": of_each_adapter(lambda module: module.set_adapter("two")),
    "scaled": of_each_adapter(lambda module: module.scaling.update(two=3.0)),
    "disabled": of_each_adapter(lambda module: module.enable_adapters(False)),
    "enabled": of_each_adapter(lambda module: module.enable_adapters(True)),
    "merged": of_each_adapter(lambda module: module.merge()),
}


def test_changes_of_adapters_are_noticed():
    model = with_adapters(llama())
    watch = Watch(model)
    assert watch.changed() and not watch.changed()
    for change in ADAPTERS.values():
        change(model)
        assert watch.changed() and not watch.changed()


@pytest.mark.slow_cases("reduce-overhead")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_adapters_are_switched_disabled_and_merged_while_decoding(mode):
    changes = [None, None, *(each for name in ("switched", "disabled", "merged") for each in (ADAPTERS[name], None))]
    expected = decoded(with_adapters(llama(layers=1)), changes)
    model = kvpass.apply(with_adapters(llama(layers=1)), LOSSLESS, **MODES[mode])
    torch.testing.assert_close(decoded(model, changes), expected, atol=1e-5, rtol=1e-5)
    assert kvpass.explain(model).fused == 1
