"""Files with a valid checksum and invalid contents: an error of kvpass's own before the model is touched, or a valid
result."""

import hashlib
import json

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load, save

import kvpass
from kvpass import KVPassError, schemes
from kvpass.calibration import regression
from kvpass.calibration.regression import Moments, fit
from kvpass.models.probe import probe
from kvpass.schemes.calibrated import Calibration, describe

from common import randn
from fuzzing import damaged
from tiny import llama, step_by_step, tokens

pytestmark = pytest.mark.usefixtures("reference_lowering", "short_fits")
TENSORS, FACTS = "predictors.safetensors", "calibration.json"
AQUA = dict(scheme="aqua", residual=32, rope="post", first_layer="higgs", rank=8)
SCHEMES = {
    "linear": dict(AQUA, predictor="linear"),
    "linear-4": dict(AQUA, predictor="linear-4"),
    "low-rank-4, keys": dict(AQUA, predictor="low-rank-4", predicted="keys"),
    "mlp, lossless": dict(AQUA, predictor="mlp", backbone="identity"),
    "qaq": dict(scheme="qaq", query_energy=[1.0, 2.0, 3.0]),
}


def calibrated(model, fields) -> Calibration:
    """A calibration of ``model`` fitted to noise."""
    scheme, layers = schemes.get(fields), probe(model)
    if scheme.name == "qaq":
        return Calibration(scheme, {}, describe(model, layers), {}, {"tokens": 9})

    def fitted(role: str, inputs: int) -> list[torch.Tensor]:
        def rows():
            return iter([(randn(1, 40, inputs), randn(2, 40, 64))])

        how = dict(ridge=1.0, rank=scheme.rank, dtype=torch.float16)
        return fit(scheme.predictor, rows, Moments.of(rows), **how) if scheme.predicted in ("both", role) else []

    predictors = {index: (fitted("keys", 64), fitted("values", 128)) for index in list(layers)[1:]}
    explained = {index: (0.5, 0.25) for index in predictors}
    return Calibration(scheme, predictors, describe(model, layers), explained, {"error": {"0": [0.5, 1.0]}})


@pytest.fixture
def short_fits(monkeypatch):
    monkeypatch.setattr(regression, "_MLP_STEPS", 1)


@pytest.fixture(scope="module")
def model():
    return llama(layers=3)


def rewrite(folder, facts: dict, tensors: bytes) -> None:
    """Write files with matching checksums, whatever their contents."""
    (folder / TENSORS).write_bytes(tensors)
    if isinstance(facts, dict) and "sha256" in facts:
        facts = {**facts, "sha256": hashlib.sha256(tensors).hexdigest()}
    (folder / FACTS).write_text(json.dumps(facts))


def check_use(model, folder) -> str:
    """Load a calibration and decode with it. If it is refused, the model is untouched."""
    try:
        calibration = kvpass.load(folder)
        assert str(calibration) and calibration.nbytes >= 0
        logits, _, report = step_by_step(model, calibration, tokens(1, 75), 72, lowering="eager")
        assert torch.isfinite(logits).all() and str(report)
        return "decoded"
    finally:
        assert not vars(model).keys() & {"forward", "_kvpass"}


def saved(model, fields, folder) -> tuple[dict, bytes]:
    """The metadata and tensors that `Calibration.save` writes."""
    calibrated(model, fields).save(folder)
    return json.loads((folder / FACTS).read_text()), (folder / TENSORS).read_bytes()


def share(name: str) -> float:
    """A fraction of the number of examples: QAQ captures its prompt, which takes about a second."""
    return 0.1 if name == "qaq" else 1.0


@pytest.mark.parametrize("predictor", ["linear", "linear-4", "low-rank", "low-rank-4", "mlp"])
@pytest.mark.parametrize("predicted", ["both", "keys", "values"])
def test_valid_fitted_tensors_are_accepted(model, tmp_path, predictor, predicted):
    calibrated(model, dict(AQUA, predictor=predictor, predicted=predicted)).save(tmp_path)
    assert check_use(model, tmp_path) == "decoded"


@pytest.mark.parametrize("name", SCHEMES)
def test_calibration_metadata_raises_kvpass_errors_or_works(model, tmp_path, fuzz, name):
    facts, data = saved(model, SCHEMES[name], tmp_path)

    def attempt(changed):
        rewrite(tmp_path, changed, data)
        return check_use(model, tmp_path)

    fuzz(f"calibration.json, {name}", damaged(facts), attempt, share(name))


_changes = {
    "int64": lambda x: x.long(),
    "float32": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "uint8": lambda x: x.to(torch.uint8),
    "bool": lambda x: x.bool(),
    "one value": lambda x: x.flatten()[:1],
    "a scalar": lambda x: x.flatten()[0],
    "empty": lambda x: x[:0],
    "longer": lambda x: torch.cat([x, x]),
    "transposed": lambda x: x.mT.contiguous() if x.ndim == 2 else x[None],
    "nan": lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x,
    "one infinity": lambda x: (
        x.index_put((torch.tensor([0]),), torch.tensor(torch.inf).to(x)) if x.is_floating_point() else x
    ),
    "largest": lambda x: torch.full_like(x, 65504) if x.is_floating_point() else torch.full_like(x, 255),
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_calibration_tensors_raise_kvpass_errors_or_work(model, tmp_path, fuzz, name):
    facts, data = saved(model, SCHEMES[name], tmp_path)
    original = load(data)
    names = st.sampled_from([*original, "1.key.0", "1.key.9", "7.key.0", "01.key.0", "1.middle.0", "x", "1.key", ""])
    hows = st.sampled_from([*_changes, "dropped", "renamed"])

    def attempt(changes):
        tensors = dict(original)
        for which, other, how in changes:
            tensor = tensors.get(which, torch.ones(2, 2, dtype=torch.float16))
            if how == "dropped":
                tensors.pop(which, None)
            elif how == "renamed":
                tensors[other] = tensors.pop(which, tensor)
            else:
                tensors[which] = _changes[how](tensor).contiguous()
        rewrite(tmp_path, facts, save(tensors))
        return check_use(model, tmp_path)

    fuzz(f"{TENSORS}, {name}", st.lists(st.tuples(names, names, hows), min_size=1, max_size=3), attempt, share(name))


@pytest.mark.parametrize("key", [None, "a"])
@pytest.mark.parametrize("place", ["facts", "scheme", "model", "explained", "format"])
@pytest.mark.parametrize("depth", [9, 900, 100_000])
def test_deeply_nested_calibrations_are_refused(model, tmp_path, key, place, depth):
    facts, _ = saved(model, SCHEMES["linear"], tmp_path)
    opening, closing = ("[", "]") if key is None else (f'{{"{key}":', "}")
    text = json.dumps({**facts, place: "here"}).replace('"here"', opening * depth + "0" + closing * depth)
    (tmp_path / FACTS).write_text(text)
    with pytest.raises(KVPassError):
        kvpass.load(tmp_path)
