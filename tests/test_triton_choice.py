"""Which models run the Triton kernels, and which calls the kernels refuse."""

from dataclasses import replace

import pytest
import torch

import kvpass
from kvpass import KVPassError
from kvpass.codec import Subspace
from kvpass.layout.pool import bucket
from kvpass.lowering.table import DispatchKey, select
from kvpass.schemes import KIVIConfig, LayerGeometry, get

from common import ROUNDS_IN_INDUCTOR, changed_table, coded, only_reference
from tiny import called, llama, step_by_step, tokens
from zoo import ZOO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else None)  # as in `test_triton`

from kvpass.lowering.triton import configs  # noqa: E402

KIVI = coded(2, "channel", 32, 32), coded(2, "token", 32, 32, residual=32)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_decodes_with_the_kernels_as_it_does_eagerly():
    ids = tokens(2, 75).to(DEVICE)
    expected, *_ = step_by_step(llama(layers=1).to(DEVICE), "kivi", ids, 70, lowering="eager")
    got, _, report = step_by_step(llama(layers=1).to(DEVICE), "kivi", ids, 70, lowering="triton")
    assert "append_layers_: triton, attend: triton" in str(report)
    assert torch.allclose(got, expected, atol=1e-4)


def taken_by_auto(table):
    """Let "auto" choose Triton kernels in the interpreter, too, as on a GPU."""
    for rows in table.values():
        if "triton" in rows:
            rows["triton"] = replace(rows["triton"], by_name_only=False)
            rows.pop("cpp", None)  # on a CPU, it comes first


@pytest.mark.slow
def test_drafts_are_verified_by_the_kernels_whatever_their_length(caplog):
    calls = [(70, 0), (1, 0), (4, 1), (6, 2), (3, 1), (9, 0)]
    eager, packed = (kvpass.apply(llama(layers=1).to(DEVICE), "kivi", lowering=name) for name in ("eager", "auto"))
    with changed_table(taken_by_auto), caplog.at_level("INFO", logger="kvpass.lowering"):
        got, _ = called(packed, calls)
    for a, b in zip(got, called(eager, calls)[0], strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    for queries in ("1 query", "6 queries", "3 queries", "9 queries"):
        assert f"attend on {DEVICE}, {queries}: triton" in caplog.text
    assert [graph.lowerings["attend"] for graph in kvpass.explain(packed).graphs] == ["triton"] * 2


REFUSED = {
    "log-sparse": coded(2, "channel", 16, 16, residual=32, keep="log"),
    "pre-rope, rotated": coded(2, "token", 16, 16, pre_rope=True, rotation=0),
    "raw": coded(32, "token", 16, 16),
    "grid": coded(6, "token", 16, 16, grid="d4n64"),
    "predictor": coded(2, "token", 16, 16, predictor="linear"),
    "page of 24": coded(2, "channel", 8, 24),
    "values first": coded(2, "channel", 16, 16, residual=16),
}


def dispatch(op, *specs, device=DEVICE, queries=1, head_dim=64):
    return DispatchKey(op, device, tuple(map(str, specs)), queries, head_dim)


@pytest.mark.parametrize("spec", REFUSED.values(), ids=REFUSED)
def test_attend_refuses_unsupported_calls_with_the_reason(spec):
    value = coded(2, "token", 16, spec.page_size if spec.page_size != 24 else 16)
    with pytest.raises(KVPassError, match="lowering='triton' cannot run kvpass::attend"):
        select(dispatch("attend", spec, value), "triton")
    assert select(dispatch("attend", spec, value)).name != "triton"


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(head_dim=512), "head_dim must be from 16 to 256"),
        (dict(device="xpu"), "CUDA"),
    ],
    ids=str,
)
def test_attend_refuses_unsupported_specs(changed, reason):
    with pytest.raises(KVPassError, match=reason):
        select(dispatch("attend", *KIVI, **changed), "triton")


def test_prompts_take_the_kernels_by_name_only():
    prompt = dispatch("attend", *KIVI, queries=0, device="cuda")
    assert select(prompt, "triton").name == "triton-prompt"
    assert not select(prompt).name.startswith("triton")


def test_prompts_behind_pages_with_per_channel_bit_widths_are_read_in_tiles():
    layer = LayerGeometry(0, 1, 2, 64, torch.float32, torch.device("cpu"))
    plan = get("waterfill").plan(layer)
    prompt = dispatch("attend", plan.key, plan.value, queries=0, device="cuda")
    assert select(prompt, "triton").name == "triton-tiles"
    assert not select(prompt).name.startswith("triton")


@pytest.mark.slow
@torch.no_grad()
def test_the_kernels_attend_to_an_encoder():
    """Cross-attention: a call has no new keys."""
    ids, logits = tokens(2, 60).to(DEVICE), []
    for lowering in ("triton", "eager"):
        scheme = KIVIConfig(residual=16, group_size=16)
        model = kvpass.apply(ZOO["BART"].model("sdpa").to(DEVICE), scheme, lowering=lowering)
        out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
        logits.append(torch.stack(out.logits))
        report = kvpass.explain(model)
        assert (report.fused, "attend: triton" in str(report)) == ((4, True) if lowering == "triton" else (0, False))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", ["quantize", "append_", "append_layers_"])
@pytest.mark.parametrize(
    "spec",
    [
        *(REFUSED[name] for name in ("raw", "page of 24")),
        coded(2, "channel", 16, 16, fit="lsq"),
        coded(2, "channel", 16, 16, subspace=Subspace(3, 1.0, True, 16)),
        coded(2, "channel", 32, 256, subspace=Subspace(3, 1.0, True, 32)),
    ],
    ids=["raw", "page of 24", "lsq", "small blocks", "long pages"],
)
def test_quantize_refuses_unsupported_specs_with_the_reason(op, spec):
    with pytest.raises(KVPassError, match=f"lowering='triton' cannot run kvpass::{op}"):
        select(dispatch(op, spec), "triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled here")
def test_auto_never_takes_the_interpreter():
    assert select(dispatch("attend", *KIVI)).name == "inductor"
    assert select(dispatch("quantize", KIVI[0])).name == ("inductor" if ROUNDS_IN_INDUCTOR else "reference")
    with only_reference():
        assert select(dispatch("attend", *KIVI)).name == "reference"


@pytest.mark.parametrize("tiles", [1, 7, 64, 256, 1024])
@pytest.mark.parametrize("others", [1, 8, 136, 256, 5000])
def test_the_chosen_splits_are_no_slower_than_one_or_one_per_slot(tiles, others, at_once=396):
    def duration(of_split):
        return configs.cdiv(configs.cdiv(tiles, of_split) * others, at_once) * (of_split + configs._BEGINNING)

    chosen = configs.tiles_of_split(tiles, others, at_once)
    assert 1 <= chosen <= tiles
    filling = configs.cdiv(tiles, max(1, min(tiles, at_once // others)))
    assert duration(chosen) <= min(duration(filling), duration(tiles))


def test_a_batch_that_does_not_divide_the_device_keeps_most_of_it_busy():
    """17 samples of 8 KV heads, 32k tokens: one split each is 136 programs for 264 slots, 52 % of them."""
    of_split = configs.tiles_of_split(256, 136, 264)
    splits = configs.cdiv(256, of_split)
    assert 136 * 256 / (configs.cdiv(136 * splits, 264) * 264 * of_split) > 0.85


def test_a_grid_serves_a_run_of_lengths_and_no_more_than_an_eighth_too_many():
    for tiles in range(1, 3000):
        assert tiles <= bucket(tiles) <= tiles + tiles // 8
    assert len({bucket(tiles) for tiles in range(1024, 2048)}) <= 9
