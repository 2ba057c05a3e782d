"""The lowering table: which implementation is chosen, which are passed over, and what is reported about it."""

from dataclasses import dataclass

import pytest
import torch

from kvpass import KVPassError
from kvpass.codec import Allocation, CodecSpec, Quantizer
from kvpass.codec.layer_pages import LayerPages
from kvpass.layout.retention import Recent
from kvpass.lowering import table
from kvpass.lowering.table import DispatchKey, Implementation, implements, select
from kvpass.schemes import LayerGeometry, available, get

from common import coded, implementations


@pytest.fixture
def toy_op():
    """A separate op in the table, with one implementation that serves everything and one that is selective."""

    @implements("toy", "plain")
    def plain():
        return "plain"

    @implements("toy", "choosy", refuses=lambda dispatch: None if dispatch.device == "cuda" else "it needs a GPU.")
    def choosy():
        return "choosy"

    yield DispatchKey("toy", "cpu"), DispatchKey("toy", "cuda")
    del table._TABLE["toy"]
    select.cache_clear()


def test_auto_takes_the_latest_that_does_not_refuse(toy_op):
    cpu, cuda = toy_op
    assert select(cpu).name == "plain" and select(cuda).name == "choosy"
    assert isinstance(select(cpu), Implementation) and select(cpu).run() == "plain"


def test_an_implementation_name_selects_that_one(toy_op):
    assert select(toy_op[1], "plain").name == "plain"


def test_a_lowering_name_selects_any_of_its_implementations(toy_op):
    cpu, cuda = toy_op
    refuses = lambda dispatch: None if dispatch.device == "cpu" else "it runs on CPUs."  # noqa: E731
    implements("toy", "choosy-cpu", refuses=refuses, lowering="choosy")(lambda: "choosy-cpu")
    assert select(cpu, "choosy").name == "choosy-cpu" and select(cuda, "choosy").name == "choosy"
    assert select(cpu).name == "choosy-cpu" and select(cuda).name == "choosy"
    with pytest.raises(KVPassError, match=r"use one of \['choosy', 'plain'\]"):
        select(cpu, "cutlass")
    with pytest.raises(KVPassError, match="'choosy-cpu' cannot run kvpass::toy here: it runs on CPUs"):
        select(cuda, "choosy-cpu")


def test_an_unknown_name_lists_the_known_ones(toy_op):
    with pytest.raises(KVPassError, match=r"'cutlass' for kvpass::toy.*\['choosy', 'plain'\].*auto"):
        select(toy_op[0], "cutlass")


def test_a_named_implementation_that_refuses_says_why(toy_op):
    with pytest.raises(KVPassError, match=r"'choosy' cannot run kvpass::toy here: it needs a GPU.*'auto'"):
        select(toy_op[0], "choosy")


def test_no_implementation_at_all_gives_every_reason(toy_op):
    del table._TABLE["toy"]["plain"]
    with pytest.raises(KVPassError, match="not choosy: it needs a GPU"):
        select(toy_op[0])


def test_a_new_registration_is_seen_at_once(toy_op):
    assert select(toy_op[0]).name == "plain"
    implements("toy", "newer")(lambda: "newer")
    assert select(toy_op[0]).run() == "newer"


def test_the_choice_and_what_was_passed_over_are_logged(toy_op, caplog):
    with caplog.at_level("INFO", logger="kvpass.lowering"):
        select(toy_op[0])
    assert "kvpass::toy on cpu: plain" in caplog.text and "not choosy: it needs a GPU" in caplog.text


@dataclass(frozen=True)
class LaterQuantizer(Quantizer):
    """A quantizer with a field that no lowering knows."""

    smoothing: float = 0.0


@dataclass(frozen=True)
class LaterSpec(CodecSpec):
    """A spec with such a quantizer."""

    smoothing: float = 0.0


QUANTIZER = Quantizer(2, "token", 16)
LATER = {
    "of a part": CodecSpec(LaterQuantizer(2, "token", 16, smoothing=0.5), Recent(16)),
    "of the whole": LaterSpec(QUANTIZER, Recent(16), smoothing=0.5),
}


@pytest.mark.parametrize("field", LATER)
@pytest.mark.parametrize("lowering", ["inductor", "triton"])
@pytest.mark.parametrize("op", ["quantize", "append_", "append_layers_", "dequantize", "attend"])
def test_unlisted_features_are_served_by_the_reference_alone(op, lowering, field, monkeypatch, caplog):
    device = "cuda" if lowering == "triton" else "cpu"
    today, later = (
        DispatchKey(op, device, (str(spec),) * (2 if op.startswith("attend") else 1), queries=1, head_dim=64)
        for spec in (CodecSpec(QUANTIZER, Recent(16)), LATER[field])
    )
    if lowering in implementations(op):
        assert select(today, lowering).name == lowering
    monkeypatch.setattr(table, "parse", lambda text: LATER[field])
    if lowering in implementations(op):
        with pytest.raises(KVPassError, match="it does not support smoothing"):
            select(later, lowering)
    with caplog.at_level("INFO", logger="kvpass.lowering"):
        assert select(later).name == "reference"
    assert f"not {lowering}: it does not support smoothing" in caplog.text or lowering not in implementations(op)


def test_every_field_of_a_spec_is_a_size_or_a_feature():
    """Fields that only affect how values are quantized, such as eta, are not features for ops that read them."""
    plain = coded(2, "channel", 16, 16)
    assert plain.features == {"bits=2", "per=channel"}
    spec = coded(2, "channel", 16, 16, residual=32, keep="log", eta=0.1, pre_rope=True, rotation=3, center=True)
    assert spec.features == plain.features | {"keep=log", "eta", "pre_rope", "rotation", "center"}
    assert spec.stored_as.features == spec.features - {"eta"}


def test_every_op_has_a_reference_that_serves_every_call():
    for op in ("quantize", "append_", "append_layers_", "dequantize", "attend"):
        assert "eager" in implementations(op) and "reference" in table.names()
        for queries in (0, 1, 5):
            assert select(DispatchKey(op, "cpu", queries=queries), "reference").name == "reference"


@pytest.mark.parametrize("name", available())
def test_kernels_of_a_codec_serve_no_other_codec(name):
    """Their features alone do not say so: those of a spec may be fewer."""
    plan = get(name).plan_of(LayerGeometry(1, 4, 2, 64, torch.float32, torch.device("cpu")))
    for spec in (plan.key, plan.value):
        own = isinstance(spec.codec, (Allocation, LayerPages))
        for op in ("quantize", "append_", "append_layers_", "dequantize"):
            assert (select(DispatchKey(op, "cpu", (str(spec),), head_dim=64)).name == "cpp") == own
