"""A calibration in place of a scheme: found by its folder, and checked against the model that is served. This module
does not import vLLM."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..codec.affine import params_dtype
from ..codec.calibrated_layer import CalibratedLayer
from ..codec.entropy_coding import rescale
from ..codec.layer_pages import share_of
from ..codec.spec import CodecSpec
from ..codec.tensors import of_model
from ..errors import KVPassError
from ..fields import shown
from ..prefix_store.chunks import LayerShape
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, LayerPlan
from ..schemes.calibrated import Calibration, load_calibration
from ..schemes.fingerprint import check_settings, fingerprint_of, settings_of_config

CALIBRATE = (
    "Calibrate once, python -m kvpass calibrate --model MODEL --scheme waterfill-static --out FOLDER, and pass that "
    "folder as the scheme."
)
"""What to do where a scheme needs a calibration."""

_CPU = torch.device("cpu")
Tensors = tuple[list[Tensor], list[Tensor]]
"""A layer's tensors for keys, and for values, as a calibration lists them."""


@dataclass(frozen=True)
class CalibratedScheme:
    """A calibration by its folder.

    digest: of its contents, so that a folder that was calibrated again is another scheme.
    bits: bits per value of entropy-coded codes; None is what it was calibrated for.
    """

    folder: str
    digest: str
    bits: float | None = None

    @classmethod
    def of(cls, folder: str) -> "CalibratedScheme":
        """Raises `KVPassError` unless ``folder`` holds a calibration whose pages need nothing of a prompt."""
        place = Path(folder).expanduser()
        files = sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else []
        return _found(os.path.abspath(place), tuple((file.name, file.stat().st_mtime_ns) for file in files))

    @property
    def name(self) -> str:
        return f"waterfill-static of {self.folder}"

    @property
    def calibration(self) -> Calibration:
        return _loaded(self.folder, self.digest)

    @property
    def scheme(self) -> CalibratedWaterfillConfig:
        scheme = self.calibration.scheme
        assert isinstance(scheme, CalibratedWaterfillConfig), "`of` has checked it"
        return scheme

    def to_dict(self) -> dict[str, Any]:
        """What identifies it, as plain data."""
        return {"scheme": self.scheme.to_dict(), "calibration": self.digest, "bits": self.bits}

    def storing(self, bits: float | None) -> "CalibratedScheme":
        """The same with ``bits`` bits per value where codes are entropy coded. Raises `KVPassError` unless they are
        above 0 and at most 8."""
        if bits is not None and not (isinstance(bits, (int, float)) and 0 < bits <= 8):
            raise KVPassError(f"bits={shown(bits)} must be above 0 and at most 8: bits per value of a calibration.")
        return replace(self, bits=bits)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, of all ranks, and their channels. Raises `KVPassError` if it has no calibration."""
        sizes = self.calibration.model["layers"]
        if str(layer) not in sizes:
            raise KVPassError(f"The calibration {self.folder} has no layer {layer}. Calibrate this model. {CALIBRATE}")
        heads, head_dim = sizes[str(layer)]
        return heads, head_dim

    def plan_of(self, layer: LayerGeometry) -> LayerPlan:
        return self.scheme.plan_of(layer)

    def layers(
        self, ranks: int, rank: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> dict[int, CalibratedLayer]:
        """The tensors of every layer for the heads that process ``rank`` of ``ranks`` has, for tokens of ``dtype``."""
        found, predictors, finer = {}, self.calibration.predictors, self._finer()
        for index, both in predictors.items():
            heads, specs = heads_of_rank(self.heads_of(index)[0], ranks, rank), self._specs(index, dtype)
            keys, values = (  # shares are read on the host
                [x if x.dtype == torch.int32 else x.to(device) for x in one]
                for one in _tensors_of(specs, both, heads, dtype)
            )
            layer = found[index] = CalibratedLayer.of(specs, (keys, values))
            for side in (layer.key, layer.value):
                side["steps"] = side["steps"] * finer
        return found

    def _finer(self) -> float:
        """The factor of all steps for `bits`."""
        if self.bits is None:
            return 1.0
        steps = torch.cat([
            _by_name(spec, tensors)[1]["steps"].double().flatten()
            for index, both in self.calibration.predictors.items()
            for spec, tensors in zip(self._specs(index, torch.float32), both, strict=True)
        ])  # fmt: skip
        return float(rescale(steps, self.bits)[0] / steps[0])

    def _specs(self, index: int, dtype: torch.dtype) -> tuple[CodecSpec, CodecSpec]:
        """How the keys and the values of a layer are stored."""
        plan = self.plan_of(LayerGeometry(index, len(self.calibration.predictors), *self.heads_of(index), dtype, _CPU))
        return plan.key, plan.value

    def check_layers(self, shapes: Mapping[int, LayerShape], layers: Mapping[int, CalibratedLayer]) -> None:
        """Raise `KVPassError` unless ``layers`` have the heads of ``shapes``, the layers that a process has."""
        for index, shape in shapes.items():
            found = layers[index].key["widths"].shape if index in layers else (0, 0, 0, 0)
            if (found[1], found[3]) != (shape.heads, shape.head_dim):
                raise KVPassError(
                    f"{self.name} has {found[1]} heads of {found[3]} channels for layer {index}, but each process has "
                    f"{shape.heads} of {shape.head_dim}. {CALIBRATE}"
                )

    def check_model(self, config: PreTrainedConfig, weights: Path) -> None:
        """Raise `KVPassError` unless this calibration was made for the model with ``config`` and ``weights``, a folder
        of safetensors files."""
        model = self.calibration.model
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        if (name := type(skeleton).__name__) != model["class"]:
            raise KVPassError(f"{self.name} was calibrated on a {model['class']}, and this is a {name}. {CALIBRATE}")
        ours = settings_of_config(config)
        theirs = {name: value for name, value in model["settings"].items() if name in ours}
        check_settings(theirs, {name: ours[name] for name in theirs}, f"{self.name} was calibrated on")
        if fingerprint_of(_tensors_in(weights, skeleton)) != model["weights"]:
            raise KVPassError(f"{self.name} was calibrated on other weights than those of {weights}. {CALIBRATE}")


@cache
def _found(folder: str, files: tuple[tuple[str, int], ...]) -> CalibratedScheme:
    """The calibration in ``folder``, whose ``files`` are names and times: an engine asks once for each layer."""
    scheme = load_calibration(folder).scheme
    if not isinstance(scheme, CalibratedWaterfillConfig) or scheme.form != "static":
        form = " (hybrid: fitted to each prompt as well)" if isinstance(scheme, CalibratedWaterfillConfig) else ""
        raise KVPassError(
            f"{folder} holds a calibration of {scheme.name!r}{form}, and of calibrations only waterfill-static can be "
            f"used here. {CALIBRATE}"
        )
    contents = b"".join((Path(folder) / name).read_bytes() for name, _ in files)
    return CalibratedScheme(folder, sha256(contents).hexdigest())


@cache
def _loaded(folder: str, digest: str) -> Calibration:
    return load_calibration(folder)


def heads_of_rank(total: int, ranks: int, rank: int) -> slice:
    """Which of ``total`` KV heads process ``rank`` of ``ranks`` has. If there are more ranks than heads, several have
    the same one."""
    each, repeats = max(1, total // ranks), max(1, ranks // total)
    return slice(rank // repeats * each, (rank // repeats + 1) * each)


def _by_name(spec: CodecSpec, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The rotation angles of keys, if they have them, and the other tensors of a side by name."""
    angles = tensors[:1] if spec.transform.numbered else []
    return angles, dict(zip(of_model(spec), tensors[len(angles) :], strict=True))


def _tensors_of(specs: tuple[CodecSpec, CodecSpec], both: Tensors, heads: slice, dtype: torch.dtype) -> Tensors:
    found: Tensors = ([], [])
    for spec, tensors, into in zip(specs, both, found, strict=True):
        angles, named = _by_name(spec, tensors)
        into += angles
        widths = named["widths"][:, heads].contiguous()
        for name, tensor in named.items():
            own = share_of(widths[0]) if name == "share" else tensor[:, heads].contiguous()
            into.append(own.to(params_dtype(dtype)) if own.is_floating_point() else own)
    return found


def _tensors_in(folder: Path, skeleton: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Name and tensor of each weight of ``skeleton``, from the safetensors files of ``folder``."""
    files = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
    weights = skeleton.state_dict(keep_vars=True)
    stored = {id(weight): name for name, weight in weights.items() if name in files}  # tied weights are stored once
    found = []
    for name, weight in weights.items():
        if (own := stored.get(id(weight))) is None:
            raise KVPassError(
                f"The weights in {folder} cannot be compared with those of the calibration: {shown(name)} is in none "
                "of its safetensors files. Serve the folder that was calibrated."
            )
        with safe_open(files[own], "pt") as file:
            found.append((name, file.get_tensor(own)))
    return found


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())
