"""A mask is dropped if and only if it is proven, at every length, to be equivalent to no mask or to causality."""

import re

import pytest
import torch
from decoders import HEAD_DIM, VOCABULARY, WIDTH
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import DynamicCache

import kvpass
from kvpass.compile.linear import Linear, impossible
from kvpass.compile.masks import beside_padding, structure
from kvpass.models.arguments import CACHE
from kvpass.runtime.padding import Padding, PaddingMasks, known
from kvpass.schemes import IdentityConfig

from tiny import llama, tokens

LEAST, NEVER = torch.finfo(torch.float32).min, -torch.inf


def square(past: int, total: int, value: float = 1.0) -> Tensor:
    return torch.full((total - past, total), value)


CAUSAL = {  # masks of queries i and keys j, given the number of past tokens and of all tokens
    "compared": lambda i, j, past, total: j <= i,
    "compared the other way": lambda i, j, past, total: i >= j,
    "negated": lambda i, j, past, total: ~(j > i),
    "a difference": lambda i, j, past, total: (i - j) >= 0,
    "scaled": lambda i, j, past, total: 3 * j < 3 * i + 2,
    "with what is always so": lambda i, j, past, total: (j <= i) & (j > -1) & (i >= past) & (j < total),
    "a window without an end": lambda i, j, past, total: (j <= i) & (i - j < total),
    "below a diagonal": lambda i, j, past, total: square(past, total).bool().tril(past),
    "above a diagonal": lambda i, j, past, total: square(past, total, NEVER).triu(past + 1),
    "filled": lambda i, j, past, total: torch.zeros(total - past, total).masked_fill(j > i, NEVER),
    "chosen": lambda i, j, past, total: torch.where(j <= i, 0.0, LEAST),
    "multiplied": lambda i, j, past, total: (1.0 - (j <= i).float()) * LEAST,
    "a logarithm": lambda i, j, past, total: (j <= i).float().log(),
    "joined": lambda i, j, past, total: torch.hstack(
        [torch.zeros(total - past, past), square(past, total, NEVER)[:, past:].triu(1)]
    ),
    "turned": lambda i, j, past, total: (j.transpose(0, 1) <= i.t()).permute(1, 0),
    "heads and batch": lambda i, j, past, total: (j <= i)[None, None].expand(2, 4, -1, -1),
    "twice over": lambda i, j, past, total: torch.where(j <= i, 0.0, LEAST) + torch.zeros(total).masked_fill(
        j > i, LEAST
    ),
}  # fmt: skip
FULL = {
    "nothing": lambda i, j, past, total: torch.zeros(total - past, total),
    "always so": lambda i, j, past, total: (j >= 0) & (i - j < total),
    "either": lambda i, j, past, total: (j <= i) | (j > i),
    "one row": lambda i, j, past, total: torch.ones(1, total, dtype=torch.bool),
}
ONE_ROW = {**CAUSAL, "a prefix seen by all": lambda i, j, past, total: (j <= i) | (j < 10)}  # full for one query


def window(width):
    return lambda i, j, past, total: (j <= i) & (j > i - width)


OTHERS = {  # and the index where they first differ from causality
    "window": (window(96), 96),
    "window of a constant": (lambda i, j, past, total: window(torch.tensor(96))(i, j, past, total), 96),
    "window of a table": (lambda i, j, past, total: window(torch.arange(90, 97)[-1])(i, j, past, total), 96),
    "window, additive": (lambda i, j, past, total: torch.where(window(96)(i, j, past, total), 0.0, LEAST), 96),
    "window, by diagonals": (lambda i, j, past, total: square(past, total).bool().tril(past).triu(past - 95), 96),
    "window and sinks": (lambda i, j, past, total: (j <= i) & ((j < 4) | (i - j < 96)), 100),
    "long window": (window(4096), 4096),
    "very long window": (window(131072), 131072),
    "chunks": (lambda i, j, past, total: (j <= i) & (i // 64 == j // 64), 64),
    "blocks": (lambda i, j, past, total: (j <= i) & ((i - j) // 32 < 3), 96),
    "every 70th hidden": (lambda i, j, past, total: (j <= i) & ((i - j) % 70 < 69), 69),
    "a prefix hidden later": (lambda i, j, past, total: (j <= i) & ((j >= 4) | (i < 80)), 80),
    "a bias that vanishes": (lambda i, j, past, total: torch.where(j <= i, -0.1 * F.relu(i - j - 80.0), NEVER), 81),
    "a bias in steps": (lambda i, j, past, total: torch.where(j <= i, -0.5 * (i - j >= 70), NEVER), 70),
    "squares": (lambda i, j, past, total: (j <= i) & ((i - j) * (i - j) < 81 * 81), 81),
    "an overflow": (lambda i, j, past, total: (j <= i) & ((i - j) * 2**57 >= 0), 64),
    "short integers": (lambda i, j, past, total: (j <= i) & ((i - j).to(torch.int8) >= 0), 128),
    "moved": (lambda i, j, past, total: (j <= i) & (j.roll(100, 1) >= 0) & (j.flip(1) + i < past + 100), 90),
}  # fmt: skip
SEVERAL_ROWS = {**OTHERS, "a prefix seen by all": (ONE_ROW["a prefix seen by all"], 1)}


MASKS = {**ONE_ROW, **{name: mask for name, (mask, _) in OTHERS.items()}}


def concrete(mask, past: int, queries: int) -> Tensor:
    """The rows of ``mask`` for the last ``queries`` tokens."""
    total = past + queries
    return mask(torch.arange(past, total)[:, None], torch.arange(total)[None], past, total)


def verdict(mask, queries: int) -> str | None:
    """What the pass concludes about ``mask`` in a graph for any length, and for any number of queries if it is not
    1."""

    def symbolic(new, all_tokens):
        return concrete(mask, all_tokens.shape[0] - new.shape[0], new.shape[0])

    module = make_fx(symbolic, tracing_mode="symbolic", pre_dispatch=True)(torch.ones(queries), torch.ones(23))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.target = torch.ops.aten.detach.default  # as in a functional graph
    rows = next(iter(module.graph.nodes)).meta["val"].shape[0]
    return structure(module.graph.output_node().args[0], rows)


def hides_as(mask, kind: str, past: int, queries: int) -> bool:
    """Whether ``mask`` shows each query exactly the keys of ``kind``, by comparing elements."""
    got, total = concrete(mask, past, queries), past + queries
    if got.dtype != torch.bool:
        if not ((got == 0) | (got <= LEAST / 2)).all():
            return False
        got = got == 0
    everything = torch.ones(queries, total, dtype=torch.bool)
    return bool((got == (everything if kind == "full" else everything.tril(past))).all())


@pytest.mark.parametrize("name", CAUSAL)
def test_causality_is_recognised_however_it_is_written(name):
    assert verdict(CAUSAL[name], 5) == "causal"


@pytest.mark.parametrize("name", [*FULL, *ONE_ROW])
def test_a_mask_that_hides_nothing_is_recognised(name):
    assert verdict({**FULL, **ONE_ROW}[name], 1) == "full"
    if name in FULL:
        assert verdict(FULL[name], 5) == "full"


@pytest.mark.parametrize("name", SEVERAL_ROWS)
def test_masks_that_hide_something_at_any_length_stay(name):
    mask, first = SEVERAL_ROWS[name]
    assert verdict(mask, 5) is None
    assert name not in OTHERS or verdict(mask, 1) is None
    assert not all(hides_as(mask, "causal", past, n) for past in (0, first + 60) for n in (1, 3))


class Masked(nn.Module):
    """One layer, with a cache passed in and out and a custom mask."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.mask = mask
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, idx: Tensor, past: tuple[Tensor, Tensor] | None = None):
        x = self.embedding(idx)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        before = 0 if past is None else past[0].shape[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = concrete(self.mask, before, idx.shape[1])
        y = F.scaled_dot_product_attention(4 * q, k, v, attn_mask=mask)
        return self.head(x + y.transpose(1, 2).flatten(2)), (k, v)


@torch.no_grad()
def logits_of(model, ids: Tensor, prompt: int) -> Tensor:
    """Logits after the prompt, after each further token, and after five tokens at once at the end."""
    rows, past = [], None
    parts = [ids[:, :prompt], *ids[:, prompt:-5].split(1, 1), ids[:, -5:]]
    for part in parts:
        logits, past = model(part, past)
        rows.append(logits[:, -1])
    return torch.stack(rows, 1)


END_TO_END = {
    "window": 96, "window of a constant": 96, "window, additive": 96, "long window": 4096, "chunks": 64,
    "every 70th hidden": 69, "a bias that vanishes": 81, "a prefix seen by all": 60, "chosen": 60,
}  # fmt: skip


@pytest.mark.parametrize(("name", "first"), END_TO_END.items())
def test_a_decoder_with_a_mask_of_its_own_is_right_beyond_where_the_mask_changes(name, first):
    torch._dynamo.reset()
    model, prompt = Masked(MASKS[name]).eval(), 20 if first < 1000 else first - 4
    ids = tokens(1, first + 30)
    expected = logits_of(model, ids, prompt)
    kvpass.apply(model, IdentityConfig(residual=16), example_inputs=(ids[:, :8],), strict=True)
    runtime = model._kvpass
    runtime._choose = lambda first, _: (
        runtime.captured if first.tokens else runtime.original
    )  # the pass, without Inductor
    torch.testing.assert_close(logits_of(model, ids, prompt), expected, atol=1e-5, rtol=1e-5)
    graphs = kvpass.explain(model).graphs
    assert len(graphs) == 2
    assert all(graph.fused == 1 for graph in graphs)


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@torch.no_grad()
def test_a_padding_mask_of_the_new_tokens_only_means_what_it_means_to_the_model(lowering):
    """transformers applies it to the first tokens and hides the others."""
    torch._dynamo.reset()
    model, ids, outputs = llama(layers=1), tokens(2, 31), []
    for packed in (False, True):
        if packed:
            kvpass.apply(model, IdentityConfig(residual=16), lowering=lowering)
            model._kvpass.decode_step = model._kvpass.captured
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :20], attention_mask=torch.ones(2, 20, dtype=torch.long), past_key_values=cache)
        for start, stop, width in ((20, 21, 21), (21, 22, 1), (22, 27, 5), (27, 28, 28), (28, 29, 1), (29, 30, 29)):
            mask = torch.ones(2, width, dtype=torch.long)
            outputs.append(model(input_ids=ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits)
    for got, expected in zip(outputs[6:], outputs[:6], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- random masks

breakpoints = st.one_of(st.integers(-3, 60), st.sampled_from((96, 127, 128, 300, 1000)))


def combined(shorter):
    """Masks composed of ``shorter`` masks; each is a function and the constants in it."""
    two = st.tuples(shorter, shorter)
    return st.one_of(
        two.map(lambda p: (lambda i, j: p[0][0](i, j) & p[1][0](i, j), p[0][1] + p[1][1])),
        two.map(lambda p: (lambda i, j: p[0][0](i, j) | p[1][0](i, j), p[0][1] + p[1][1])),
        two.map(lambda p: (lambda i, j: torch.where(i >= j, p[0][0](i, j), p[1][0](i, j)), p[0][1] + p[1][1])),
        shorter.map(lambda p: (lambda i, j: ~p[0](i, j), p[1])),
    )


simple = st.one_of(
    st.just((lambda i, j: j <= i, [])),
    breakpoints.map(lambda c: (lambda i, j: i - j < c, [c])),
    breakpoints.map(lambda c: (lambda i, j: j >= c, [c])),
    breakpoints.map(lambda c: (lambda i, j: i != c, [c])),
    breakpoints.map(lambda c: (lambda i, j: 2 * i - j > c, [c])),
    breakpoints.map(lambda c: (lambda i, j: (i - j) // 7 <= c, [7 * c])),
    breakpoints.map(lambda c: (lambda i, j: j + 3 > i - torch.tensor(c), [c])),
)
random_masks = st.recursive(simple, combined, max_leaves=5)


@settings(max_examples=60)
@given(random_masks, st.booleans(), st.booleans(), st.sampled_from((1, 4)))
def test_conclusions_about_masks_hold_at_many_lengths(drawn, causal, additive, queries):
    inner, constants = drawn

    def mask(i, j, past, total):
        seen = inner(i, j) & (j <= i) if causal else inner(i, j)
        return torch.where(seen, 0.0, NEVER) if additive else seen

    kind = verdict(mask, queries)
    around = {abs(c) + d for c in constants for d in (-2, -1, 0, 1)} | {2 * abs(c) + 5 for c in constants}
    for past in {0, 1, 30, *around} if kind else ():
        for rows in (1,) if queries == 1 else (2, 7):
            assert hides_as(mask, kind, max(0, past), rows)


always = st.one_of(
    breakpoints.map(lambda c: lambda i, j, total: i - j < total + abs(c)),
    breakpoints.map(lambda c: lambda i, j, total: j >= -abs(c)),
    breakpoints.map(lambda c: lambda i, j, total: (i < c) | (i > c - 1)),
    breakpoints.map(lambda c: lambda i, j, total: (j == c) | (j != torch.tensor(c))),
)


@pytest.mark.slow
@given(always, always, st.sampled_from(range(4)))
def test_causality_is_recognised_next_to_trivially_true_terms(true, also_true, how):
    def mask(i, j, past, total):
        a, b, seen = true(i, j, total), also_true(i, j, total), j <= i
        return (a & seen & b, (seen & a) | ~b, torch.where(a, seen, b), torch.where(~a | ~seen, LEAST, 0.0))[how]

    assert verdict(mask, 5) == "causal"
    assert verdict(mask, 1) == "full"


# ---------------------------------------------------------------- inequalities


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.integers(-9, 9)), min_size=1, max_size=6))
def test_inequalities_called_impossible_have_no_solution(rows):
    inequalities = [Linear.of({"x": a, "y": b}, c) for a, b, c in rows]
    solved = any(all(a * x + b * y + c >= 0 for a, b, c in rows) for x in range(-40, 41) for y in range(-40, 41))
    assert not (impossible(inequalities) and solved)


def test_contradicting_inequalities_are_detected():
    x, y = Linear.of({"x": 1}), Linear.of({"y": 1})
    assert impossible([x - y - 1, y - x])
    assert impossible([x * 2 - y * 2 - 1, y * 2 - x * 2 + 1])  # between two integers
    assert not impossible([x - y, y - x])


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """Pretend that reading a mask waits for a device. Counts how often masks are read."""
    reads, read = [], PaddingMasks.read

    def counted(mask):
        reads.append(mask)
        return read(mask)

    monkeypatch.setattr(PaddingMasks, "waits", staticmethod(lambda mask: True))
    monkeypatch.setattr(PaddingMasks, "read", staticmethod(counted))
    return reads


def handed_a_mask(model, monkeypatch) -> list[bool]:
    """Whether each later call is run with a mask."""
    masked, leave_out = [], model._kvpass._leave_out

    def watched(kwargs, *args):
        leave_out(kwargs, *args)
        masked.append("attention_mask" in kwargs)

    monkeypatch.setattr(model._kvpass, "_leave_out", watched)
    return masked


def test_a_mask_of_ones_that_generate_extends_is_read_once_on_an_accelerator(on_an_accelerator, monkeypatch):
    """Step by step, like generate: some versions of transformers drop such a mask before their first step."""
    model, ids, cache = kvpass.apply(llama(), scheme="kivi", lowering="eager"), tokens(2, 40), DynamicCache()
    masked = handed_a_mask(model, monkeypatch)
    given = dict(attention_mask=torch.ones(2, 34, dtype=torch.long))
    for start, stop in ((0, 34), *((i, i + 1) for i in range(34, 40))):
        out = model(input_ids=ids[:, start:stop], past_key_values=cache, **given)
        given = model._update_model_kwargs_for_generation(out, given)
        del given[CACHE]
    assert len(on_an_accelerator) == 1 and masked == [False] * 7


def test_generate_reads_no_mask_at_a_step_on_an_accelerator(on_an_accelerator, monkeypatch):
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    masked = handed_a_mask(model, monkeypatch)
    model.generate(tokens(2, 40), attention_mask=torch.ones(2, 40, dtype=torch.long), max_new_tokens=6, do_sample=False)
    assert len(on_an_accelerator) <= 1 and masked == [False] * 6


def test_a_mask_that_hides_something_stays_on_an_accelerator(on_an_accelerator, monkeypatch):
    model, ids = kvpass.apply(llama(), scheme="kivi", lowering="eager"), tokens(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    masked = handed_a_mask(model, monkeypatch)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), expected)
    assert masked == [True] * 6


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padding_is_a_start_of_each_row_on_an_accelerator(attention, on_an_accelerator, monkeypatch):
    """The graphs have no mask, and give the results of a masked model."""
    ids, mask = tokens(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[0, :9], mask[2, :33] = 0, 0
    found, graphs, options = [], [], dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    for waits in (True, False):
        monkeypatch.setattr(PaddingMasks, "waits", staticmethod(lambda mask, waits=waits: waits))
        scheme = dict(scheme="kivi", group_size=8, residual=8)
        model = kvpass.apply(llama(layers=1, attention=attention), scheme)
        model._kvpass.decode_step = model._kvpass.captured  # the pass, without Inductor
        model._kvpass.keep_stages()
        found.append(model.generate(ids, **options, output_logits=True, return_dict_in_generate=True))
        graphs.append([graph.stages[-1].text for graph in kvpass.explain(model).graphs])
    torch.testing.assert_close(found[0].logits, found[1].logits, atol=1e-5, rtol=1e-5)
    assert len(on_an_accelerator) == 1
    (without,), (masked,) = graphs
    assert re.search(r"starts = (?!None)", without) and not re.search(r"mask = (?!None)", without)
    assert re.search(r"mask = (?!None)", masked) and not re.search(r"starts = (?!None)", masked)


LEFT = {
    "looked up": lambda there, row, i, j: (j <= i) & there[row, j].bool(),
    "spread": lambda there, row, i, j: (j <= i) & (there[:, None] != 0),
    "additive": lambda there, row, i, j: torch.where((j <= i) & there[:, None].bool(), 0.0, NEVER),
}
MORE = {
    "of the key before": lambda there, row, i, j: (j <= i) & there.roll(1, 1)[:, None].bool(),
    "of another row": lambda there, row, i, j: (j <= i) & there.flip(0)[:, None].bool(),
    "of the first row": lambda there, row, i, j: (j <= i) & there[:1, None].bool(),
    "of the query": lambda there, row, i, j: (j <= i) & there[:, None].bool() & there[row, i].bool(),
    "hides where it is 1": lambda there, row, i, j: (j <= i) & (there[:, None] == 0),
    "hides some": lambda there, row, i, j: (j <= i) & (there[:, None].bool() | (j > 7)),
    "a window": lambda there, row, i, j: (j <= i) & (j > i - 9) & there[:, None].bool(),
    "a bias": lambda there, row, i, j: torch.where(j <= i, (1.0 - there[:, None]) * -3.0, NEVER),
}


@pytest.mark.parametrize("name", [*LEFT, *MORE])
def test_other_masks_are_not_mistaken_for_left_padding(name):
    def symbolic(there, new):
        (batch, total), queries = there.shape, new.shape[0]
        row, j = torch.arange(batch)[:, None, None], torch.arange(total)[None, None]
        return {**LEFT, **MORE}[name](there, row, torch.arange(total - queries, total)[None, :, None], j)[:, None]

    example = torch.ones(3, 23, dtype=torch.long), torch.ones(5)
    module = make_fx(symbolic, tracing_mode="symbolic", pre_dispatch=True)(*example)
    rows = list(module.graph.find_nodes(op="placeholder"))[1].meta["val"].shape[0]
    assert beside_padding(module.graph.output_node().args[0], rows) == ("causal" if name in LEFT else None)


@pytest.mark.parametrize("how", ["another", "written to", "a view written to", "not by generate"])
def test_an_unknown_mask_of_a_step_is_read_before_it_is_dropped(how, on_an_accelerator, monkeypatch):
    model, ids, cache = kvpass.apply(llama(), scheme="kivi", lowering="eager"), tokens(1, 21), DynamicCache()
    mask = torch.ones(1, 20, dtype=torch.long)
    out = model(input_ids=ids[:, :20], attention_mask=mask, past_key_values=cache)
    assert known(mask) == Padding()
    masked = handed_a_mask(model, monkeypatch)
    following = torch.cat([mask, mask.new_ones(1, 1)], 1)
    if how != "not by generate":
        following = model._update_model_kwargs_for_generation(out, dict(attention_mask=mask))["attention_mask"]
        assert known(following) == Padding()
    if how == "another":
        following = following.clone()
    if how != "not by generate":
        (following[:, :5] if how == "a view written to" else following)[:, 3] = 0
    logits = model(input_ids=ids[:, 20:], attention_mask=following, past_key_values=cache).logits
    assert masked == [True] and len(on_an_accelerator) == 1
    again, cache = kvpass.apply(llama(), scheme="kivi", lowering="eager"), DynamicCache()
    monkeypatch.setattr(PaddingMasks, "waits", staticmethod(lambda mask: False))
    again(input_ids=ids[:, :20], past_key_values=cache)
    assert torch.equal(logits, again(input_ids=ids[:, 20:], attention_mask=following, past_key_values=cache).logits)


def test_models_that_extend_masks_themselves_are_left_alone():
    class Own(type(llama())):
        def _update_model_kwargs_for_generation(self, *args, **kwargs):
            return super()._update_model_kwargs_for_generation(*args, **kwargs)

    model = kvpass.apply(Own(llama().config).eval(), scheme="kivi", lowering="eager")
    assert "_update_model_kwargs_for_generation" not in vars(model)
    kvpass.remove(model)


def test_remove_restores_how_masks_are_extended():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    assert "_update_model_kwargs_for_generation" in vars(model)
    kvpass.remove(model)
    assert "_update_model_kwargs_for_generation" not in vars(model)
