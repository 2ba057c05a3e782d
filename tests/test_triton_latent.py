"""The Triton kernel over a packed latent against the reference: on a GPU if there is one, otherwise in Triton's
interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass.errors import KVPassError
from kvpass.lowering.table import DispatchKey, select
from kvpass.schemes import KIVIConfig

from common import WIDTHS, coded, randn, seeds, state_of, without_inductor
from test_triton import DEVICE, TOLERANCE, few, on_device, random_mask
from zoo import ZOO

pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else None)
OPS = torch.ops.kvpass
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32  # float32 latents do not fit a GPU's registers


def latent_call(
    specs, n, queries=1, heads=5, ranks=(64, 16), batch=1, mask=None, causal=False, softcap=0.0, dtype=DTYPE
):
    """Arguments of `kvpass::attend` over a latent of ``n`` tokens and its rotary part, of ``ranks`` channels."""
    past = [randn(i, batch, 1, n, dim, dtype=dtype) for i, dim in enumerate(ranks)]
    states = [state_of(spec, x, room=n + 70) for spec, x in zip(specs, past, strict=True)]
    packs = [[tensor.to(DEVICE) for tensor in state.pack] for state in states]
    new = [randn(5 + i, batch, 1, queries, dim, dtype=dtype) for i, dim in enumerate(ranks)]
    q, texts = randn(7, batch, heads, queries, sum(ranks), dtype=dtype), [str(spec) for spec in specs]
    return on_device([q, *packs, states[0].length_tensor(n), *new, mask, causal, 0.2, softcap, *texts])


def assert_as_the_reference(arguments, **others):
    others |= dict(latent=True, with_lse=True)
    got, expected = (OPS.attend(*arguments, name, **others) for name in ("triton", "reference"))
    tolerance = TOLERANCE[arguments[0].dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


KIVI = coded(4, "channel", 32, 32), coded(4, "token", 16, 32, residual=32)
CASES = {
    "one token": dict(specs=KIVI, n=200),
    "no pages": dict(specs=KIVI, n=20),
    "nothing stored": dict(specs=KIVI, n=0, queries=3, causal=True),
    "sinks, another batch, per token": dict(
        specs=[coded(bits, "token", 16, 32, sinks=3) for bits in (2, 8)], n=170, batch=2, heads=2
    ),
    "a draft, more rows than a tile": dict(specs=KIVI, n=150, queries=4, heads=7, causal=True),
    "odd ranks": dict(specs=[coded(2, "channel", 16, 16), coded(3, "token", 8, 16)], n=90, ranks=(48, 24)),
    "a prompt": dict(specs=KIVI, n=100, queries=20, heads=2, causal=True),
    "float16": dict(specs=KIVI, n=170, dtype=torch.float16),
    "bfloat16": dict(specs=KIVI, n=170, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_over_a_latent_equals_the_reference(case):
    assert_as_the_reference(latent_call(**CASES[case]))


@pytest.mark.slow
@few
@given(
    bits=st.sampled_from(WIDTHS), of_rotary=st.sampled_from(WIDTHS), n=st.integers(0, 200), queries=st.integers(1, 5),
    heads=st.integers(1, 9), kind=st.sampled_from(("none", "bool", "float")), later=st.sampled_from((0, 32, 39)),
    softcap=st.sampled_from((0.0, 3.0)), sinks=st.booleans(), seed=seeds,
)  # fmt: skip
def test_any_call_equals_the_reference(bits, of_rotary, n, queries, heads, kind, later, softcap, sinks, seed):
    specs = coded(bits, "channel", 32, 32), coded(of_rotary, "token", 16, 32, residual=later, rollback=7)
    mask = random_mask(kind, seed, 1, 1, queries, n + queries)
    logits = randn(1, heads).to(DEVICE) if sinks else None
    call = latent_call(specs, n, queries, heads, mask=mask, causal=mask is None, softcap=softcap)
    assert_as_the_reference(call, sinks=logits)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([coded(4, "token", 16, 32, rotation=0)] * 2, "it does not support rotation"),
        ([coded(4, "token", 16, 32, residual=residual) for residual in (32, 0)], "must not leave the residual window"),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(specs, says):
    with pytest.raises(KVPassError, match=says):
        OPS.attend(*latent_call(specs, 100), "triton-latent", latent=True)


def test_it_is_chosen_by_name_only():
    key = DispatchKey("attend", "cuda", tuple(map(str, KIVI)), 1, 576, torch.bfloat16, ("latent attention",))
    assert select(key).name == "inductor-dense"
    assert select(key, "triton").name == "triton-latent"


@pytest.mark.skipif(DEVICE == "cuda", reason="float32 latents do not fit a GPU's registers")
@pytest.mark.slow
def test_a_model_runs_by_it():
    model = ZOO["DeepSeek-V3"].model("sdpa")
    ids, logits = torch.randint(2, 100, (2, 60), generator=torch.Generator().manual_seed(0)), []
    with without_inductor():
        for lowering in ("triton", "reference"):
            kvpass.apply(model, KIVIConfig(bits=4, residual=32), lowering=lowering)
            out = model.generate(
                ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            logits.append(torch.stack(out.logits))
            report = kvpass.explain(model)
            assert report.fused == 2 and ("triton-latent" in str(report.graphs[0])) == (lowering == "triton")
            kvpass.remove(model)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
