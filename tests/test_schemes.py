"""The registry of schemes and their configs: resolution, round trips, and errors that say what to write instead."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError, Recent, schemes
from kvpass.codec import Allocation, Shares
from kvpass.lowering.cpp import attend_codes
from kvpass.schemes import KIVIConfig, LayerGeometry, LayerPlan, SQuatConfig
from kvpass.vllm.serving_config import Served

from common import WIDTHS, recoded


def geometry(head_dim=64):
    return LayerGeometry(0, 2, 3, head_dim, torch.float32, torch.device("cpu"))


@st.composite
def configs(draw):
    group = draw(st.sampled_from((8, 16, 32, 64)))
    common = dict(
        bits=draw(st.sampled_from(WIDTHS)),
        group_size=group,
        residual=group * draw(st.integers(1, 4)),
        sinks=draw(st.integers(0, 8)),
    )
    if draw(st.booleans()):
        return KIVIConfig(**common)
    return SQuatConfig(
        **common,
        rank=draw(st.integers(1, 64)),
        strength=draw(st.floats(0, 100)),
        lam=draw(st.one_of(st.none(), st.floats(0, 1))),
        block_size=draw(st.sampled_from((None, 8, 32))),
    )


def test_the_shipped_names_are_available_and_plan_every_layer():
    assert {"kivi", "kivi-4", "squat"} <= set(schemes.available())
    assert schemes.available() == sorted(schemes.available())
    for name in schemes.available():
        plan = schemes.get(name).plan(geometry())
        quantizer = plan.key.quantizer
        coded = quantizer.grid or (
            "bits on average, per channel" if isinstance(quantizer.codec, Allocation) else str(quantizer.bits)
        )
        coded = "calibrated bit widths" if isinstance(quantizer.codec, Shares) else coded
        assert isinstance(plan, LayerPlan) and coded in str(plan)
        plan.key.check(64), plan.value.check(64)


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(KVPassError, match="'kivy'") as error:
        schemes.get("kivy")
    assert all(name in str(error.value) for name in schemes.available())


def test_presets_match_their_names():
    assert schemes.get("kivi") == KIVIConfig() and schemes.get("squat") == SQuatConfig()
    assert schemes.get("kivi-4") == KIVIConfig(bits=4)
    assert schemes.get("kivi-4", sinks=4) == KIVIConfig(bits=4, sinks=4)


def test_a_dict_names_its_scheme_and_overrides_fields():
    assert schemes.get({"scheme": "kivi", "bits": 4, "sinks": 4}) == KIVIConfig(bits=4, sinks=4)
    assert schemes.get({"scheme": "kivi-4", "sinks": 1}) == KIVIConfig(bits=4, sinks=1)
    assert schemes.get({"scheme": "kivi", "bits": 4}, bits=8).bits == 8
    assert schemes.get(KIVIConfig(bits=4), sinks=2) == KIVIConfig(bits=4, sinks=2)


def test_resolving_does_not_change_what_was_passed():
    given_dict = {"scheme": "squat", "version": 1, "rank": 3}
    schemes.get(given_dict, rank=4)
    assert given_dict == {"scheme": "squat", "version": 1, "rank": 3}


@given(configs())
def test_to_dict_survives_json_and_resolves_to_an_equal_config(config):
    data = json.loads(json.dumps(config.to_dict()))
    again = schemes.get(data)
    assert again == config and type(again) is type(config) and hash(again) == hash(config)
    assert data["scheme"] == config.name and data["version"] == config.version


@given(configs())
def test_configs_are_frozen_and_usable_as_keys(config):
    assert {config: 1}[dataclasses.replace(config)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 3


def test_configs_of_different_schemes_are_never_equal():
    assert SQuatConfig(lam=0.0) != KIVIConfig()
    assert len({str(KIVIConfig()), str(KIVIConfig(bits=4)), str(SQuatConfig())}) == 3


@pytest.mark.parametrize("data", [KIVIConfig().to_dict(), SQuatConfig().to_dict(), KIVIConfig().to_dict() | {"new": 1}])
def test_a_dict_of_another_version_is_refused_as_such(data):
    with pytest.raises(KVPassError, match=r"[Vv]ersion 99.*version 1"):
        schemes.get(data | {"version": 99})


@pytest.mark.parametrize(
    "scheme, overrides, says",
    [
        ("kivi", dict(bits=5), r"bits=5.*\[1, 2, 3, 4, 8\]"),
        ("kivi", dict(group_size=24), "residual=32 must be a multiple of group_size=24"),
        ("kivi", dict(residual=0), "residual=0 must be an integer of at least 1"),
        ("kivi", dict(residual=-32), "residual=-32 must be an integer of at least 1"),
        ("kivi", dict(residual=100), "residual=100 must be a multiple of group_size=32"),
        ("kivi", dict(group_size=0), "group_size=0"),
        ("kivi", dict(group_size=-32), "group_size=-32"),
        ("kivi", dict(group_size=1, residual=1), "page_size=1.*multiple of 4"),
        ("kivi", dict(sinks=-1), "sinks=-1"),
        ("kivi", dict(bit=4), r"no field \['bit'\].*bits.*group_size"),
        ("squat", dict(rank=0), "rank=0 must be an integer of at least 1"),
        ("squat", dict(rank=-3), "rank=-3"),
        ("squat", dict(strength=-1.0), "from 0 to .*not -1"),
        ("squat", dict(lam=-1e-3), "must be a finite number from 0"),
        ("squat", dict(lam=float("nan")), "finite.*nan"),
        ("squat", dict(strength=float("inf")), "finite.*inf"),
        ("squat", dict(block_size=0), "block_size=0"),
        ("squat", dict(block_size=-32), "block_size=-32"),
        ("squat", dict(bits=7), "bits=7"),
        ("kivi", dict(bits="4"), "bits"),
        ("kivi", dict(bits=2.0), "bits"),
        ("kivi", dict(group_size="32"), "group_size"),
        ("kivi", dict(sinks="4"), "sinks"),
        ("squat", dict(rank="5"), "rank"),
        ("squat", dict(strength="strong"), "strength"),
    ],
)
def test_impossible_configs_are_refused_at_construction_with_what_to_write(scheme, overrides, says):
    with pytest.raises(KVPassError, match=says):
        schemes.get(scheme, **overrides)
    if "bit" not in overrides:
        with pytest.raises(KVPassError, match=says):
            type(schemes.get(scheme))(**overrides)


@pytest.mark.parametrize(
    "scheme, says",
    [
        (None, "NoneType"),
        (7, "int"),
        (["kivi"], "list"),
        (KIVIConfig, "type"),
        ({"bits": 4}, '"scheme"'),
        ({}, '"scheme"'),
        ({"scheme": "nope"}, "Unknown scheme 'nope'.*kivi"),
        ({"scheme": "kivi", "colour": 1}, "colour"),
    ],
)
def test_what_is_not_a_scheme_is_refused(scheme, says):
    with pytest.raises(KVPassError, match=says):
        schemes.get(scheme)


@pytest.mark.parametrize("name", ["kivi", "squat"])
def test_a_plan_refuses_a_head_its_groups_do_not_divide(name):
    with pytest.raises(KVPassError, match=r"group_size=32 does not divide head_dim=48.*divisor of 48"):
        schemes.get(name).plan(geometry(48))


def test_a_plan_refuses_a_block_that_does_not_divide_the_head():
    with pytest.raises(KVPassError, match="block_size=48 does not divide head_dim=64"):
        schemes.get("squat", block_size=48).plan(geometry())


@given(configs())
def test_kivi_and_squat_differ_only_in_the_subspace_of_keys(config):
    plan = config.plan(geometry(128))
    assert plan.needs_queries == isinstance(config, SQuatConfig)
    assert recoded(plan.key, subspace=None, per="token", window=plan.value.retention.window) == plan.value
    assert plan.key.retention.residual == 0 and plan.value.retention.residual == plan.key.page_size == config.residual


def test_squats_weight_is_relative_unless_the_papers_lambda_is_given():
    relative = SQuatConfig(strength=0.5).plan(geometry()).key.quantizer.subspace
    paper = SQuatConfig(lam=1e-3).plan(geometry()).key.quantizer.subspace
    assert relative.relative and relative.weight == 0.5 and relative.block_size == 32
    assert not paper.relative and paper.weight == 1e-3


def test_a_scheme_without_a_plan_says_so():
    @dataclasses.dataclass(frozen=True)
    class Unfinished(schemes.SchemeConfig):
        name = "unfinished"

    with pytest.raises(TypeError, match="Unfinished must define plan"):
        Unfinished().plan(geometry())
    assert "unfinished" not in schemes.available()


def test_values_leave_their_window_as_many_at_a_time_as_asked():
    """KIVI's paper holds R values exactly; pages of R hold up to 2 R - 1."""
    plan = schemes.get("kivi-paper").plan(geometry())
    assert (plan.value.retention.residual, plan.value.retention.window) == (32, 36)
    assert plan.key == schemes.get("kivi").plan(geometry()).key
    with pytest.raises(KVPassError, match="leave out value_page"):
        schemes.get("kivi", retention=Recent(64), value_page=4)
    with pytest.raises(KVPassError, match="leave out value_page"):
        schemes.get("waterfill", value_page=4)
    with pytest.raises(KVPassError, match="whole bytes"):
        schemes.get("kivi", value_page=2)


def test_kernels_that_read_pages_of_one_size_do_not_serve_values_with_pages_of_their_own():
    """The C++ kernel read values of "kivi-paper" as if their pages had as many tokens as those of keys."""
    for name, served in (("kivi", True), ("kivi-paper", False)):
        plan = schemes.get(name).plan(geometry())
        assert attend_codes.serves(plan.key, plan.value, 64, torch.float32) is served
    with pytest.raises(KVPassError, match="as many of both"):
        Served(schemes.get("kivi-paper"), 2, 2, 64, torch.float32)


def test_a_group_of_values_is_at_most_a_head():
    plan = schemes.get("kivi-128").plan(geometry())
    assert plan.key.quantizer.group_size == 128 and plan.value.quantizer.group_size == geometry().value_head_dim
