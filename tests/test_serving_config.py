"""The options that vLLM users may pass, and the errors for anything else. None of this needs vLLM."""

from dataclasses import replace

import pytest
import torch

from kvpass import KVPassError, schemes
from kvpass.codec import CODECS
from kvpass.codec.pages import Affine
from kvpass.schemes import KIVIConfig, LayerGeometry
from kvpass.vllm.serving_config import NEWEST, Options, Served, SlidingBlock, check_version, options_asked, refusal


def served(scheme, layers=30, head_dim=64, dtype=torch.float32, **fields):
    return Served(schemes.get(scheme, **fields), layers, 3, head_dim, dtype)


@pytest.mark.parametrize(
    ("additional", "variable", "expected"),
    [
        ({}, "", None),
        (None, " ", None),
        ({"other": 1}, "", None),
        ({"kvpass": "kivi"}, "", KIVIConfig()),
        ({"kvpass": {"scheme": "kivi", "bits": 4}}, "", KIVIConfig(bits=4)),
        ({}, "kivi-4", KIVIConfig(bits=4)),
        ({}, '{"scheme": "kivi", "sinks": 4}', KIVIConfig(sinks=4)),
        ({"kvpass": "kivi"}, "higgs", KIVIConfig()),
    ],
)
def test_a_scheme_is_requested_in_one_of_two_ways(additional, variable, expected):
    found = options_asked(additional, {"KVPASS_SCHEME": variable})
    assert found == (None if expected is None else Options(expected))


def test_options_beside_the_scheme_are_not_its_own():
    asked = {"scheme": "kivi", "bits": 4, "lowering": "cpp", "untested_platform": True}
    assert options_asked({"kvpass": asked}, {}) == Options(KIVIConfig(bits=4), "cpp", True)
    for wrong, says in (
        ({"lowering": "fast"}, "must be 'auto' or one of"),
        ({"untested_platform": 1}, "True or False"),
    ):
        with pytest.raises(KVPassError, match=says):
            options_asked({"kvpass": {"scheme": "kivi", **wrong}}, {})


@pytest.mark.parametrize("asked", ["no such scheme", 3, ["kivi"], {"bits": 2}, {"scheme": "kivi", "wits": 2}, "{kivi"])
def test_unknown_schemes_are_refused(asked):
    with pytest.raises(KVPassError):
        options_asked({"kvpass": asked}, {})


def test_a_folder_without_a_calibration_is_refused(tmp_path):
    with pytest.raises(KVPassError, match="holds no calibration"):
        options_asked({"kvpass": str(tmp_path)}, {})


SERVED = {
    "e8", "higgs", "higgs-1.5", "higgs-3", "higgs-4", "higgs-sinks", "identity", "kivi", "kivi-1",
    "kivi-3", "kivi-4", "kivi-8", "kivi-lsq", "kivi-s8", "kivi-sinks", "kvarn", "quarot", "rtn", "turboquant",
}  # fmt: skip


def followed(name, reason):
    """The scheme that a refusal advises, which must be served."""
    advice = reason.rpartition("Use ")[2]
    if advice == "rope='post'.":
        return served(name, rope="post")
    named = [word.strip("'.,") for word in advice.split() if word.strip("'.,") in schemes.available()]
    return named and all(served(one) for one in named)


def test_every_scheme_is_served_or_refused_with_what_to_use():
    found = {}
    for name in schemes.available():
        try:
            served(name)
        except KVPassError as error:
            found[name] = str(error)
    for name, reason in found.items():
        assert repr(name) in reason, "a refusal names what was asked for"
        assert followed(name, reason), reason
    assert set(schemes.available()) - set(found) >= SERVED, {name: found.get(name) for name in SERVED if name in found}
    for name in ("h2o", "logquant", "qaq", "squat", "kivi-pre", "xquant", "aqua", "waterfill", "kitty", "gear"):
        assert name in found


def test_codecs_that_do_not_decode_any_bytes_are_refused(monkeypatch):
    """A server reads blocks before anything is stored in them."""
    for name in schemes.available():
        scheme = schemes.get(name)
        if scheme.needs_calibration:
            continue
        plan = scheme.plan_of(LayerGeometry(0, 2, 3, 64, torch.float32, torch.device("cpu")))
        for spec in (plan.key, plan.value):
            assert refusal(spec) or spec.codec.dequantizes_any_bytes, name
    for name in ("gear", "kitty"):
        with pytest.raises(KVPassError, match=r"indices.*Use kivi-sinks"):
            served(name)
    monkeypatch.setitem(CODECS, "of my own", None)  # afterwards it is gone

    class Silent(Affine, name="of my own"):
        dequantizes_any_bytes = False

    spec = served("kivi").plan.key
    assert refusal(spec) is None
    assert "dequantizes_any_bytes" in refusal(replace(spec, quantizer=replace(spec.quantizer, codec=Silent())))


def test_layers_that_differ_are_refused():
    with pytest.raises(KVPassError, match="Leave out skip_layers"):
        served("kivi", layers=6, skip_layers=(1, 1))
    assert served("asymkv").plan and served("asymkv-lsq").plan  # all their layers are alike
    with pytest.raises(KVPassError, match="a list of 2 integers, not 1"):
        options_asked({"kvpass": {"scheme": "kivi", "skip_layers": 1}}, {})


def test_blocks_hold_whole_pages_and_windows_divide_them():
    for name in ("identity", "kivi", "kivi-sinks", "higgs-sinks", "kivi-8"):
        for dtype in (torch.float32, torch.bfloat16):
            one = served(name, dtype=dtype)
            for size in (64, 128, 256, 512):
                window = one.window_block(size)
                assert size % window == 0
                assert window * 2 * 64 * dtype.itemsize <= one.layout(size).bytes_per_token * size
    with pytest.raises(KVPassError, match="multiple of 32"):
        served("kivi").layout(48)


@pytest.mark.parametrize("name", ["kivi", "kivi-sinks", "higgs-sinks"])
def test_beside_sliding_windows_blocks_are_filled(name):
    """Gemma 3's heads in bfloat16, whose sliding-window layers have blocks of 128 tokens on CPUs: vLLM pads all blocks
    to theirs."""
    one, beside = Served(schemes.get(name), 26, 1, 256, torch.bfloat16), SlidingBlock(128, 128 * 2 * 256 * 2)
    size = one.block_size(beside)
    assert size % beside.tokens == 0 and size > one.block_size() // 2
    assert beside.nbytes // 2 < one.layout(size).bytes_per_token * size <= beside.nbytes
    assert one.window_block(size, beside) == beside.tokens  # so that a window takes no more blocks than theirs
    one.check_gain(size, beside, longest=8192, in_flight=2048)
    with pytest.raises(KVPassError, match="max-num-batched-tokens"):
        one.check_gain(size, beside, longest=2048, in_flight=2048)


def test_a_release_of_vllm_that_is_not_tested_is_refused():
    check_version(".".join(map(str, NEWEST)))
    check_version(f"{NEWEST[0]}.{NEWEST[1]}.3+cpu")
    for version in ("0.10.1", f"{NEWEST[0]}.{NEWEST[1] + 1}.0", "1.0"):
        with pytest.raises(KVPassError, match="tested"):
            check_version(version)
