"""The result of `kvpass.calibrate`. It is stored as safetensors and JSON, so loading it runs no code."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from .. import schemes
from ..errors import KVPassError
from ..fields import shown
from ..layout.retention import Retention
from . import CalibratedWaterfillConfig, LayerGeometry, SchemeConfig
from .fingerprint import check_settings, fingerprint, settings
from .hub import PREFIX, downloaded, uploaded
from .valid import check_calibration

_FORMAT = 2
_TENSORS, _FACTS = "predictors.safetensors", "calibration.json"
_FILES = _TENSORS, _FACTS
_ROLES = ("key", "value")


def describe(model: nn.Module, layers: Mapping[int, LayerGeometry | str]) -> dict[str, Any]:
    """What identifies ``model``: its class, the heads of its packed layers, its `settings`, and a `fingerprint` of its
    weights."""
    packed = {i: layer for i, layer in layers.items() if isinstance(layer, LayerGeometry)}
    return {
        "class": type(model).__name__,
        "layers": {str(i): layer.sizes for i, layer in packed.items()},
        "settings": settings(model),
        "weights": fingerprint(model),
    }


@dataclass(frozen=True)
class Calibration:
    """A scheme with tensors fitted to one model. Pass it to `kvpass.apply` in place of a scheme.

    scheme: the config, with every measured field filled in.
    predictors: layer -> the tensors of its keys and of its values. They are the weights of predictors
        (`kvpass.codec.predictor`), or datatypes and the ranges of keys (`kvpass.codec.datatype`), or the tensors that
        distribute bits (`kvpass.codec.shares`).
    model: what identifies the model (`describe`).
    explained: layer -> fractions of the variance of its keys and of its values that predictors explain, on held-out
        sequences; empty without predictors.
    facts: other measurements, by name.

    Raises `KVPassError` if the fields do not belong together.
    """

    scheme: SchemeConfig
    predictors: dict[int, tuple[list[Tensor], list[Tensor]]]
    model: dict[str, Any]
    explained: dict[int, tuple[float, float]]
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        check_calibration(self.scheme, self.predictors, self.model, self.explained, self.facts)

    def retaining(self, policy: Retention) -> Calibration:
        """The same calibration with another retention policy. Raises `KVPassError` if the combination is impossible."""
        return replace(self, scheme=schemes.compose(self.scheme, policy))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors. A model holds them once, however many caches it has."""
        return sum(tensor.nbytes for both in self.predictors.values() for one in both for tensor in one)

    @property
    def bits_saved(self) -> float:
        """Bits per value that the backbone alone would need in addition for the same error, over all layers.

        If a share e of the variance is predicted, a backbone whose error scales with its input errs 1 - e times as
        much, and each bit divides its error by four.
        """
        shares = [share for both in self.explained.values() for share in both]
        return sum(-0.5 * math.log2(max(1 - share, 1e-9)) for share in shares) / (2 * len(self.model["layers"]))

    @property
    def pays_off_at(self) -> int:
        """Tokens, over all sequences in the model's caches, above which the predictors take less memory than they
        save."""
        values = sum(2 * heads * head_dim for heads, head_dim in self.model["layers"].values())
        return math.ceil(8 * self.nbytes / (values * self.bits_saved)) if self.bits_saved > 0 else -1

    def check(self, model: nn.Module, layers: Mapping[int, LayerGeometry | str]) -> None:
        """Raise `KVPassError` unless this calibration was made for ``model``, whose cache layers are ``layers``."""
        found = describe(model, layers)
        for what, name in (
            ("model", "class"),
            ("layers and heads", "layers"),
            ("", "settings"),
            ("weights", "weights"),
        ):
            if name == "settings":
                check_settings(self.model[name], found[name], "This calibration was made with")
            elif found[name] != self.model[name]:
                raise KVPassError(
                    f"This calibration was made for another model ({what}: {self.model[name]}, not {found[name]}). "
                    f"Calibrate this model: kvpass.calibrate(model, ids, {self.scheme.name!r})."
                )

    def save(self, folder: str | Path) -> Path:
        """Write to ``folder``, creating it if needed; returns it. Replaces the files of an earlier calibration."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{layer}.{role}.{i}": tensor.cpu().contiguous()
            for layer, both in self.predictors.items()
            for role, one in zip(_ROLES, both, strict=True)
            for i, tensor in enumerate(one)
        }
        data = save(tensors)
        facts = {
            "format": _FORMAT,
            "scheme": self.scheme.to_dict(),
            "model": self.model,
            "explained": {str(layer): list(shares) for layer, shares in self.explained.items()},
            "facts": self.facts,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        for name, content in ((_TENSORS, data), (_FACTS, json.dumps(facts, indent=2).encode())):
            partial = folder / f".{name}.partial"
            partial.write_bytes(content)
            partial.replace(folder / name)
        return folder

    def push(self, name: str, private: bool = False) -> str:
        """Upload to the Hugging Face hub; returns the address of the commit.

        name: ``hub:owner/name[/folder][@revision]``, which `kvpass.load` accepts. The repository is created if needed,
            ``private`` or not.

        Raises `KVPassError` if the name is malformed or the upload fails.
        """
        with TemporaryDirectory() as folder:
            return uploaded(self.save(folder), name, _FILES, private)

    def __str__(self) -> str:
        scheme = self.scheme.to_dict()
        if isinstance(self.scheme, CalibratedWaterfillConfig):
            what = "metrics" if self.scheme.form == "hybrid" else "bases, means and widths"
            return f"{what} of {len(self.predictors)} layers, {self.nbytes:,} bytes, shared by all caches of the model"
        if not self.predictors:
            return f"query energies of {len(scheme['query_energy'])} layers"
        if not self.explained:
            return f"datatypes and ranges of {len(self.predictors)} layers, {self.nbytes:,} bytes"
        pays = f"pay off from {self.pays_off_at:,} tokens on" if self.bits_saved > 0 else "do not pay off"
        return (
            f"{scheme['predictor']} predictors of {self.nbytes:,} bytes, shared by all caches of the model: they save "
            f"{self.bits_saved:.2f} bits per value and {pays}"
        )


def load_calibration(folder: str | Path) -> Calibration:
    """The calibration that `Calibration.save` wrote to ``folder``, or that `Calibration.push` uploaded to
    ``hub:owner/name[/folder][@revision]``. Raises `KVPassError` if files are missing, truncated, modified,
    inconsistent, or of another version, or cannot be downloaded."""
    folder = downloaded(folder, _FILES) if isinstance(folder, str) and folder.startswith(PREFIX) else Path(folder)
    try:
        facts, data = json.loads((folder / _FACTS).read_text(encoding="utf-8")), (folder / _TENSORS).read_bytes()
    except OSError as error:
        raise KVPassError(f"{folder} holds no calibration: {error.strerror}, {Path(error.filename).name}.") from error
    except (ValueError, RecursionError) as error:
        raise KVPassError(f"{folder / _FACTS} is not valid JSON: {error}. Calibrate again.") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise KVPassError(
            f"{folder / _FACTS} has format {shown(found)}, but this kvpass reads format {_FORMAT}: calibrate again. "
            "Format 1 did not record the model's adapters and settings."
        )
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise KVPassError(
            f"{folder / _TENSORS} does not match {_FACTS}: it is truncated or was modified. Calibrate again."
        )
    try:
        explained = {int(layer): tuple(shares) for layer, shares in facts["explained"].items()}
        predictors = _unflatten(load(data))
        return Calibration(schemes.get(facts["scheme"]), predictors, facts["model"], explained, facts["facts"])
    except KVPassError as error:
        raise KVPassError(f"{folder} holds an inconsistent calibration: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise KVPassError(f"{folder} holds no readable calibration: {error!r}. Calibrate again.") from error


def _unflatten(tensors: dict[str, Tensor]) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
    """The tensors of each layer, from the flat names that `Calibration.save` writes. Raises `KVPassError` for
    unexpected ones."""

    def taken(layer: int, role: str) -> list[Tensor]:
        names = (f"{layer}.{role}.{i}" for i in itertools.count())
        return [tensors.pop(name) for name in itertools.takewhile(tensors.__contains__, names)]

    layers = sorted({int(name.partition(".")[0]) for name in tensors})
    predictors = {layer: (taken(layer, "key"), taken(layer, "value")) for layer in layers}
    if tensors:
        raise KVPassError(f"{shown(sorted(tensors))} are not the tensors of a layer.")
    return predictors
