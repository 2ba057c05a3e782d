"""Random configs give either an error of kvpass's own or a correct result.

Calling a config class directly may also raise Python's TypeError for the names of arguments, which is not tried here.
`--fuzz-examples` sets the number of inputs.
"""

import dataclasses
import json
import typing

import pytest
import torch
from hypothesis import strategies as st

from kvpass import KVPassError, schemes
from kvpass.codec import CODECS, Adaptive, Allocation, CodecSpec, Quantizer, Shares, Subspace, Transform, parse
from kvpass.codec.salient import Salient
from kvpass.fields import made
from kvpass.layout.retention import HeavyHitter, LogSparse, Recent, Retention, Sinks, StreamingLLM
from kvpass.schemes import LayerGeometry, LayerPlan, SchemeConfig

from common import DTYPES, queries_for, randn, state_of
from fuzzing import junk, mostly, nested, plain
from tiny import llama, step_by_step, tokens

pytestmark = pytest.mark.usefixtures("reference_lowering")

CLASSES = sorted({type(schemes.get(name)) for name in schemes.available()}, key=lambda cls: cls.name)
RUN_BYTES = 1 << 20  # larger states are only planned

_sizes = st.sampled_from((8, 16, 32, 64) * 4 + (1, 2, 4, 5, 48, 96, 1024, 2**24))
_by_name = {
    "bits": st.sampled_from((1, 2, 3, 4, 8, 2, 4, 16, 32)),
    "sinks": st.integers(0, 8),
    "rollback": st.integers(0, 16),
    "own_codes": st.sampled_from((1.0, 1.0, 0.0, 0.5)),
    "budget": st.none() | st.sampled_from((0, 32, 64, 256)),
    **dict.fromkeys(("page_size", "window"), st.sampled_from((16, 32, 64))),
    **dict.fromkeys(("group_size", "rank", "block_size"), st.sampled_from((4, 8, 16, 32))),
    **dict.fromkeys(("key_bits", "value_bits"), st.integers(0, 6)),
    "scale_bits": st.sampled_from((16, 16, 8, 4)),
    "share": st.sampled_from((0.0, 0.0, 0.1, 1.0)),
    "grid": st.sampled_from(("d2n16", "d2n64", "d2n256", "d4n64", "")),
    "predictor": st.sampled_from(("linear", "linear-4", "low-rank", "mlp", "")),
    "widths": st.sampled_from(((2, 3, 4), [2, 4, 8], (1, 2), (4,), (2, 2), (3, 8), ())),
    "weights": st.sampled_from(((0.5, 0.5), [0.25, 0.75], (2.0, -1.0))),
    "energy": st.none() | st.sampled_from((1.0, 20.0)),
    "rows": st.integers(1, 9),
    "query_energy": st.sampled_from((1.0, (1.0, 2.0), [3.0, 4.0], ())),
    "retention": st.sampled_from((Recent(64), LogSparse(32), HeavyHitter(64, recent=32), StreamingLLM(4, recent=96)))
    | st.deferred(lambda: fields_of(Retention)),
    "quantizer": st.deferred(lambda: fields_of(Quantizer)),
    "transform": st.deferred(lambda: fields_of(Transform)),
    "subspace": st.none()
    | st.builds(Subspace, st.integers(1, 70), st.sampled_from((0.0, 0.5, 1e6)), st.booleans(), _sizes),
    "adaptive": st.none() | st.just(Adaptive((2, 3, 4), "key", 0.1, 0.01, 5)),
    "codec": st.sampled_from(
        (
            *(
                None,
                "nuq",
                Allocation(14, 8, 8, False),
                Allocation(14, 4, 8, True, 20, 8),
                Shares(8),
                Salient(0.5, "keys"),
            ),
            *(one() for one in CODECS.values() if not dataclasses.fields(one)),
        )
    ),
    **dict.fromkeys(("pairs", "singles", "rich_pairs", "rich_singles"), st.integers(0, 17)),
    **dict.fromkeys(
        ("key_fields", "value_fields", "rich_key_fields", "rich_value_fields"),
        st.tuples(st.integers(0, 50), st.integers(0, 17)),
    ),
    **dict.fromkeys(("backbone", "first_layer"), st.sampled_from(("higgs", "kivi", "rtn-2", {"scheme": "quarot"}))),
}


def values_of(name: str, hint):
    """Values of a field, most of them plausible."""
    plausible = _by_name.get(name, _sizes)
    if typing.get_origin(hint) is typing.Literal:
        plausible = st.sampled_from(typing.get_args(hint))
    elif hint is bool:
        plausible = st.booleans()
    elif hint is float or hint == float | None:
        plausible = st.one_of(st.floats(0, 1), st.sampled_from((0, 1, 100.0)))
    return mostly(plausible)


def fields_of(cls, most: int = 3):
    """Values of some fields of a dataclass."""
    hints = typing.get_type_hints(cls)
    values = {field.name: values_of(field.name, hints[field.name]) for field in dataclasses.fields(cls)}
    required = {field.name for field in dataclasses.fields(cls) if field.default is field.default_factory}
    some = st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: values[name] for name in {*required, *names}}))


geometries = st.builds(
    LayerGeometry,
    st.integers(0, 3), st.just(4), st.integers(1, 3), st.sampled_from((32, 64, 32, 64, 16, 128, 1, 2, 3, 20, 48)),
    st.sampled_from((*DTYPES, *DTYPES, torch.float64)), st.just(torch.device("cpu")), st.sampled_from((None, 0)),
)  # fmt: skip


# ---------------------------------------------------------------- a config that is taken works


def check_round_trip(config: SchemeConfig) -> None:
    data = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    again = schemes.get(data)
    assert again == config and type(again) is type(config) and hash(again) == hash(config) and str(again) == str(config)


def check_storage(spec: CodecSpec, layer: LayerGeometry) -> str:
    """Store tokens by the reference, and check what they dequantize to."""
    assert parse(str(spec)) == spec
    tokens = spec.retention.sinks + spec.retention.residual + 2 * spec.page_size + 3
    quantizer = spec.quantizer
    if spec.needs_importance or spec.transform.predictor or quantizer.follows_keys or spec.calibrated:
        return "planned"  # only a cache can store these: `test_a_model_takes_any_config`
    if (
        layer.num_key_value_heads * layer.head_dim * (tokens + spec.retention.rollback) * layer.dtype.itemsize
        > RUN_BYTES
    ):
        return "planned"
    x = randn(0, 1, layer.num_key_value_heads, tokens, layer.head_dim, dtype=layer.dtype)
    q = queries_for(spec, 1, 1, layer.num_key_value_heads, dim=layer.head_dim)
    state = state_of(spec, x, [tokens - 2, 1, 1], None if q is None else q.to(layer.dtype))
    got, behind = state.dequantize(tokens), min(tokens, spec.retention.sinks) + spec.retention.packed(tokens)
    assert got.shape == x.shape and got.dtype == x.dtype and torch.isfinite(got).all()
    if spec.quantizer.raw:
        # a mean is subtracted and added again
        rounded = 2 * torch.finfo(x.dtype).eps if spec.transform.center else 0
        torch.testing.assert_close(got, x, rtol=rounded, atol=rounded)
    if spec.retention.keep == "recent":
        assert torch.equal(got[:, :, : spec.retention.sinks], x[:, :, : spec.retention.sinks])
        assert torch.equal(got[:, :, behind:], x[:, :, behind:])
    if (
        spec.quantizer.subspace is None and spec.own_codes == 1
    ):  # no compensation between channels, no shared quantized values
        assert (got - x).double().norm() <= 2 * x.double().norm()
    return "decoded"


def check_plan(config: SchemeConfig, layer: LayerGeometry) -> str:
    try:
        plan = config.plan(layer)
    except KVPassError as error:
        assert str(error)
        return "refused for the layer"
    assert isinstance(plan, LayerPlan) and str(plan)
    return min(check_storage(spec, layer) for spec in (plan.key, plan.value))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
def test_configs_raise_kvpass_errors_or_store_tokens(cls, fuzz):
    changed = fields_of(cls)

    def attempt(drawn):
        way, fields, layer = drawn
        if way == "dict":
            config = schemes.get({"scheme": cls.name, **fields})
        elif way == "overrides":
            config = schemes.get(cls.name, **fields)
        elif way == "constructor":
            config = cls(**fields)
        else:
            config = schemes.get({**json.loads(json.dumps(cls().to_dict())), **fields})
        check_round_trip(config)
        return check_plan(config, layer)

    ways = st.sampled_from(("dict", "overrides", "constructor", "changed to_dict"))
    fuzz(f"{cls.name} configs", st.tuples(ways, changed, geometries), attempt)


@pytest.mark.slow
def test_a_model_takes_any_config_or_refuses_it_untouched(fuzz):
    """Logits equal the untouched model for lossless configs, and are finite otherwise. Nothing is compiled."""
    model, ids = llama(), tokens(1, 75)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, 69:]
    classes = [cls for cls in CLASSES if not cls.needs_calibration]

    def attempt(drawn):
        cls, fields = drawn
        config = cls(**fields)
        try:
            logits, _, _ = step_by_step(model, config, ids, 70, lowering="eager")
        finally:
            assert not vars(model).keys() & {"forward", "_kvpass"}
        assert logits.shape == expected.shape and torch.isfinite(logits).all()
        if cls.name == "identity" and config.retention is None:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        return "decoded"

    drawn = st.sampled_from(classes).flatmap(lambda cls: st.tuples(st.just(cls), fields_of(cls, most=2)))
    fuzz("configs in a model", drawn, attempt, share=0.2)


PARTS = {"quantizer": Quantizer, "retention": Retention, "transform": Transform}


@pytest.mark.parametrize(
    "cls", [CodecSpec, *PARTS.values(), Subspace, Adaptive, Allocation], ids=lambda cls: cls.__name__
)
def test_parts_of_plans_raise_kvpass_errors_or_store_tokens(cls, fuzz):
    def attempt(drawn):
        fields, layer = drawn
        for name, value in fields.items():
            if name in PARTS and isinstance(value, dict):
                fields[name] = made(PARTS[name], name, value)
        part = cls(**fields)
        assert hash(part) == hash(cls(**fields)) and str(part)
        if cls is Retention:
            check_round_trip(config := schemes.get("kivi", retention=part))
            return check_plan(config, layer)
        if cls is not CodecSpec:
            return "taken"
        part.check(layer.head_dim)
        return check_storage(part, layer)

    fuzz(cls.__name__, st.tuples(fields_of(cls), geometries), attempt)


def test_policies_raise_kvpass_errors_or_compose(fuzz):
    numbers = mostly(_sizes)
    policies = st.one_of(
        st.tuples(st.just(Recent), st.lists(numbers, min_size=1, max_size=2)),
        st.tuples(st.just(LogSparse), st.lists(numbers, min_size=1, max_size=1)),
        st.tuples(st.just(HeavyHitter), st.lists(numbers, min_size=2, max_size=4)),
        st.tuples(st.just(StreamingLLM), st.lists(numbers, min_size=2, max_size=4)),
    )

    def attempt(drawn):
        (make, arguments), sinks, name = drawn
        policy = make(*arguments)
        if sinks is not None:
            policy = Sinks(sinks) + policy
        check_round_trip(config := schemes.compose(schemes.get(name), policy))
        return check_plan(config, LayerGeometry(0, 4, 2, 32, torch.float32, torch.device("cpu")))

    names = st.sampled_from(("kivi", "higgs", "identity", "kivi-pre", "logquant", "qaq", "xquant", "aqua"))
    fuzz("policies", st.tuples(policies, st.none() | numbers, names), attempt)


def test_invalid_schemes_raise_kvpass_errors(fuzz):
    keys = st.sampled_from(("scheme", "version", "backbone", "retention", "bits")) | st.text(max_size=3) | st.none()
    names = st.sampled_from(("kivi", "aqua", "kivi+h2o", "+", "h2o+kivi", "kivi+h2o+h2o", ""))
    values = st.one_of(names, junk, st.integers(0, 5))
    dicts = st.recursive(
        st.dictionaries(keys, values, max_size=3), lambda inner: st.dictionaries(keys, values | inner, max_size=3)
    )

    def attempt(scheme):
        check_round_trip(schemes.get(scheme))
        return "taken"

    fuzz("what is passed as a scheme", st.one_of(dicts, names, plain, junk), attempt)


@pytest.mark.parametrize("key", ["scheme", "backbone", "first_layer", "retention", "widths", None])
def test_deeply_nested_schemes_are_refused(key):
    deep = {"scheme": "aqua", "backbone": nested(5000, key)}
    with pytest.raises(KVPassError):
        schemes.get(deep)
    endless = {"scheme": "aqua"}
    endless["backbone"] = endless["scheme" if key == "scheme" else "first_layer"] = endless
    with pytest.raises(KVPassError):
        schemes.get(endless)
