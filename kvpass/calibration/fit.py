"""`calibrate` measures on a model what a scheme needs. For AQUA-KV (arXiv 2501.19392) it is algorithm 1: layer by
layer, each fitted to the dequantized keys and values of the layer below."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .. import schemes
from ..accelerate_hooks import device_of, refuse_hooked
from ..codec import CodecSpec, dequantize_pages, quantize_pages
from ..codec.affine import params_dtype
from ..codec.center import fit_center
from ..codec.predictor import predict, with_below
from ..errors import KVPassError
from ..fields import check_integer
from ..layout.window import layout
from ..models.encoded import has_encoder
from ..models.parallel import refuse_sharded
from ..models.probe import calibrated_layers, probe
from ..progress import bar
from ..runtime.applied import is_applied
from ..schemes import (
    AquaKVConfig,
    CalibratedKVQuantConfig,
    CalibratedWaterfillConfig,
    LayerGeometry,
    LayerPlan,
    QAQConfig,
    SchemeConfig,
    WaterfillConfig,
    check_edges,
)
from ..schemes.calibrated import Calibration, describe
from .collect import Collected, digest
from .datatypes import fit_datatypes
from .default_texts import reading_for
from .energy import measure_energy
from .own_words import own_words
from .regression import Moments, fit
from .water_filling import find_turns, measure, passes, share_out

_HELD_OUT = 8  # one in this many sequences is held out
_TURNED = 16  # tokens from which the rotation of keys is found
_TRIAL_LAYERS, _TRIAL_SEQUENCES = 5, 4  # used to choose the scheme of the first layer
_CHAIN_TOLERANCE, _FIRST_TOLERANCE = 1.05, 0.02

Plans = dict[int, tuple[LayerPlan, LayerGeometry]]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    data: Tensor | Sequence[Tensor] | PreTrainedTokenizerBase | None = None,
    scheme: str | dict[str, Any] | SchemeConfig = "waterfill",
    *,
    work: str | Path | None = None,
    layers_at_once: int | None = None,
    progress: bool = True,
) -> Calibration:
    """Calibrate ``scheme`` on ``model``: choose bit widths ("waterfill-static", which "waterfill" stands for here, and
    "waterfill-hybrid"), fit predictors (AQUA-KV) or datatypes (KVQuant), or measure queries (QAQ). The model is not
    changed.

    The model runs over the data once. Predictors are then fitted layer by layer to sums over all tokens, so memory use
    does not depend on their number. Keys and values are stored on disk, ``4 * H_kv * D`` bytes per token and layer, of
    all layers or of ``2 * layers_at_once``.
    Datatypes also need the gradients of the loss, stored there too, and the keys or values of one layer at a time.
    Weights may be offloaded by accelerate (``device_map``), so the model may be larger than memory. AQUA-KV loads them
    once for every eight sequences of one length. "waterfill" and datatypes load them twice for each sequence, and keep
    the activations that gradients need in a temporary folder.

    data: token ids, ``[N, S]``, or a list of ``[S]`` or ``[1, S]``, of text like the model's later input; at least 2
        sequences. Every eighth one is held out to measure what predictors explain. Ten thousand tokens are enough for a
        small model. Given the model's tokenizer instead, it reads texts that come with kvpass and Python
        (`calibration.default_texts`); given nothing, 4,096 tokens that the model writes itself
        (`calibration.own_words`).
    scheme: one that takes calibration. AQUA-KV and "kvquant-calibrated" require it; QAQ can also use the queries of
        each prompt.
    work: a folder to resume an interrupted calibration from, and to reuse its keys and values for another scheme; they
        stay there, unless ``layers_at_once`` is given. Default: a temporary folder.
    layers_at_once: for AQUA-KV and datatypes: run the model over the data once for each group of this many layers. None
        is all layers.
    progress: show a progress bar if there is a terminal.

    Raises `KVPassError` for schemes that need no calibration, too little data, a model that is already packed, whose
    weights are sharded across processes, or whose keys and values differ in shape (MLA).
    """
    config = schemes.get(scheme)
    if isinstance(config, WaterfillConfig):
        config = config.to_calibrate()
    if not isinstance(config, (AquaKVConfig, CalibratedKVQuantConfig, CalibratedWaterfillConfig, QAQConfig)):
        raise KVPassError(f"{config.name!r} needs no calibration: kvpass.apply(model, scheme={config.name!r}).")
    if is_applied(model):
        raise KVPassError("kvpass is applied to this model: call kvpass.remove(model) first.")
    if layers_at_once is not None:
        check_integer("layers_at_once", layers_at_once, 1)
    refuse_sharded(model, "each process has only some of the heads", "calibrate in one process")
    if isinstance(config, QAQConfig):
        refuse_hooked(model, "queries are found in a graph of the whole forward", "use a scheme without calibration")
    elif config.rope == "pre":
        refuse_hooked(model, "keys before rotary embedding are found in a graph", "calibrate with rope='post'")
    layers = calibrated_layers(config, probe(model))
    if has_encoder(model):
        raise KVPassError(
            "Calibration does not support encoder-decoders: use a scheme that needs none, such as 'kivi'."
        )
    _refuse_unequal(layers)
    described, sequences = describe(model, layers), _sequences(data, config, model)
    if isinstance(config, QAQConfig):
        with bar("queries", len(sequences), "sequence", progress) as seen:
            config = measure_energy(model, sequences, config, seen)
        return Calibration(config, {}, described, {}, {"tokens": sum(ids.numel() for ids in sequences)})
    if isinstance(config, CalibratedWaterfillConfig):
        own = {i: layer for i, layer in layers.items() if isinstance(layer, LayerGeometry)}
        turns = find_turns(model, own, sequences[0][:, :_TURNED])
        with bar("texts", passes(len(sequences)), "text", progress) as seen:
            statistics = measure(model, sequences, own, turns, config, seen)
        config, shared = share_out(statistics, config)
        return Calibration(config, shared, described, {}, {"tokens": sum(ids.numel() for ids in sequences)})
    with ExitStack() as stack:
        if work is None:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpass-"))
        folder = Path(work) / digest(described, config.rope)
        folder.mkdir(parents=True, exist_ok=True)
        groups = _groups(layers, layers_at_once)
        collected = Collected(model, sequences, config.rope, folder, groups, progress)
        if len(groups) == 1:
            collected.collect()
        if isinstance(config, CalibratedKVQuantConfig):
            fitted = fit_datatypes(model, config, layers, sequences, collected, folder, progress)
            return Calibration(config, fitted, described, {}, {"tokens": sum(ids.numel() for ids in sequences)})
        choice, scores = _choose_first_layer(config, layers, collected)
        config = dataclasses.replace(config, first_layer=choice)
        folder = folder / digest(config.to_dict(), *sequences)
        folder.mkdir(exist_ok=True)
        chain = _Chain(config, layers, collected, folder)
        with bar("predictors", len(chain.plans), "layer", progress) as fitted:
            chain.run(fitted.update)
        shutil.rmtree(folder)
    facts = {"tokens": sum(ids.numel() for ids in sequences), "first_layer": scores, "error": chain.errors}
    return Calibration(config, chain.predictors, described, chain.explained, facts)


def _refuse_unequal(layers: dict[int, LayerGeometry | str]) -> None:
    """Raise `KVPassError` if keys and values of a layer differ in shape."""
    for layer in layers.values():
        if isinstance(layer, LayerGeometry) and (layer.latent or layer.heads[0] != layer.heads[1]):
            raise KVPassError(
                f"Calibration needs keys and values of equal shape, and layer {layer.index} keeps "
                f"{' and '.join(f'{heads.number} heads of {heads.dim} channels' for heads in layer.heads)}: use a "
                "scheme that needs no calibration, such as 'waterfill' or 'kivi'."
            )


def _sequences(
    data: Tensor | Sequence[Tensor] | PreTrainedTokenizerBase | None,
    config: AquaKVConfig | CalibratedKVQuantConfig | CalibratedWaterfillConfig | QAQConfig,
    model: nn.Module,
) -> list[Tensor]:
    device = device_of(model)
    if data is None:
        given: Any = own_words(model)
    else:
        given = getattr(data, "tokenizer", data)  # of a processor
        if isinstance(given, PreTrainedTokenizerBase):
            given = reading_for(config).sequences(given)
    if any(isinstance(ids, str) for ids in given):
        raise KVPassError("Calibration takes token ids, not text: tokenizer(text, return_tensors='pt').input_ids.")
    sequences = [torch.as_tensor(ids).view(1, -1).to(device) for ids in given]
    if any(ids.is_floating_point() for ids in sequences):
        raise KVPassError(
            "Calibration takes integer token ids, not floats: tokenizer(text, return_tensors='pt').input_ids."
        )
    shortest = config.sinks + 2 * config.key_retention().page_size
    if isinstance(config, CalibratedWaterfillConfig):  # only tokens that have left the window are measured
        shortest += config.key_retention().window
    if len(sequences) < 2 or any(ids.shape[1] < shortest for ids in sequences):
        raise KVPassError(
            f"Calibration needs at least 2 sequences of at least {shortest} tokens; got lengths "
            f"{[ids.shape[1] for ids in sequences]}."
        )
    return sequences


def _groups(layers: dict[int, LayerGeometry | str], size: int | None) -> list[tuple[int, ...]]:
    """The layers that take part, in groups of ``size``; None is one group."""
    own = [index for index, layer in layers.items() if isinstance(layer, LayerGeometry)]
    size = size or len(own)
    return [tuple(own[first : first + size]) for first in range(0, len(own), size)]


def _plans(config: AquaKVConfig, layers: dict[int, LayerGeometry | str]) -> Plans:
    plans = {i: (config.plan_of(layer), layer) for i, layer in layers.items() if isinstance(layer, LayerGeometry)}
    check_edges(plans)
    return plans


def _choose_first_layer(
    config: AquaKVConfig, layers: dict[int, LayerGeometry | str], collected: Collected
) -> tuple[SchemeConfig, dict[str, list[float]]]:
    """The cheapest scheme for the first layer that loses little itself and serves the layers above about as well as
    lossless storage. Judged by the error of the first layers on some of the sequences."""
    choices = config.first_layer_choices
    if len(choices) == 1:
        return choices[0], {}
    some = collected.first(_TRIAL_SEQUENCES)
    scores = {}
    for choice in choices:
        with tempfile.TemporaryDirectory(prefix="kvpass-") as folder:
            trial = _Chain(dataclasses.replace(config, first_layer=choice), layers, some, Path(folder), _TRIAL_LAYERS)
            trial.run()
        own, *others = (sum(pair) / 2 for pair in trial.errors.values())
        scores[str(choice)] = [own, sum(others) / max(1, len(others))]
    bound = _CHAIN_TOLERANCE * scores[str(choices[-1])][1]
    for choice in choices:
        first, above = scores[str(choice)]
        if first <= _FIRST_TOLERANCE and above <= bound:
            break
    return choice, scores


@dataclass(frozen=True)
class _Part:
    """The keys (role 0) or values (role 1) of one layer.

    below: the layers below that are kept, nearest first.
    layers_below: how many of them predictors read, if there are as many (`LayerPlan`).
    """

    layer: int
    below: tuple[int, ...]
    layers_below: int
    role: int
    spec: CodecSpec


class _Chain:
    """The layers of a model from the first up, each fitted to the dequantized output of the one below.

    explained, errors: layer -> one number each for its keys and values, on held-out sequences: the share of the
        variance that is predicted, and the squared dequantization error relative to the variance.
    """

    def __init__(
        self,
        config: AquaKVConfig,
        layers: dict[int, LayerGeometry | str],
        collected: Collected,
        folder: Path,
        depth: int | None = None,
    ):
        self.config, self.collected, self.folder = config, collected, folder
        self.plans = dict(list(_plans(config, layers).items())[:depth])
        self.predictors: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.explained: dict[int, tuple[float, float]] = {}
        self.errors: dict[int, tuple[float, float]] = {}
        count = len(collected)
        self.held_out = [i for i in range(count) if i % _HELD_OUT == min(_HELD_OUT, count) - 1]
        self.fitted_to = [i for i in range(count) if i not in self.held_out]

    def run(self, layer_done: Callable[[], object] = lambda: None) -> None:
        """Fit every layer. A layer whose predictors are in ``folder`` is only dequantized again."""
        below: tuple[int, ...] = ()
        for index, (plan, geometry) in self.plans.items():
            saved = self.folder / f"layer-{index}.safetensors"
            known = _unflatten(load_file(saved)) if saved.exists() else None
            tensors: list[list[Tensor]] = []
            shares: list[tuple[float, float]] = []  # share explained, error
            for role, spec in enumerate((plan.key, plan.value)):
                part = _Part(index, below, plan.layers_below, role, spec)
                moments = Moments.of(partial(self._pairs, part))
                tensors.append(known[role] if known else self._fit(part, moments, params_dtype(geometry.dtype)))
                shares.append(self._dequantize(part, tensors[role], moments.y / moments.count))
            key, value = shares
            if plan.looks_at_previous:
                self.predictors[index], self.explained[index] = (tensors[0], tensors[1]), (key[0], value[0])
                save_file(_flatten(tensors), saved)
            self.errors[index] = key[1], value[1]
            below = (index, *below)[: plan.layers_below]
            layer_done()

    def _tokens(self, sequence: int, layer: int, role: int, spec: CodecSpec) -> Tensor:
        """The tokens of a sequence that are packed, ``[1, H, T, D]`` float32, in page order."""
        x = self.collected.read(sequence, layer, role)
        return x.index_select(2, layout(spec.retention).page_tokens(0, spec.retention.pages(x.shape[2])))

    def _references(self, sequence: int, part: _Part, original: bool = False) -> list[Tensor]:
        """The inputs that a part is predicted from: the same role of the layers below, and for values also the layer's
        own keys."""
        read = partial(self._tokens, spec=part.spec) if original else self._load
        own = [read(sequence, part.layer, 0)] if part.role else []
        below = None
        for layer in reversed(part.below):
            below = with_below(read(sequence, layer, part.role), below, part.layers_below)
        return [below, *own]

    def _inputs(self, sequence: int, part: _Part) -> list[Tensor]:
        """The inputs that a part is fitted to. Those that the scheme leaves out are zeros, and so are their weights."""
        references = self._references(sequence, part, self.config.fit_on == "original")
        read = {min(distance, len(part.below)) for distance in self.config.layers_below}
        for distance, tokens in enumerate(references[0].chunk(part.layers_below, 1), start=1):
            if distance not in read:
                tokens.zero_()
        if part.role and self.config.values_from != "both":
            unused = ("keys", "values").index(self.config.values_from)
            references[unused] = torch.zeros_like(references[unused])
        return references

    def _pairs(self, part: _Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows to predict from and rows to predict, for each sequence that is not held out."""
        for sequence in self.fitted_to:
            y = _rows([self._tokens(sequence, part.layer, part.role, part.spec)])
            if part.spec.transform.predictor:
                yield _rows(self._inputs(sequence, part)), y
            else:
                yield y[:, :0], y

    def _fit(self, part: _Part, moments: Moments, dtype: torch.dtype) -> list[Tensor]:
        if not part.spec.transform.predictor:
            return []
        ridge, rank = self.config.ridge, self.config.rank
        return fit(
            part.spec.transform.predictor, partial(self._pairs, part), moments, ridge=ridge, rank=rank, dtype=dtype
        )

    def _dequantize(self, part: _Part, tensors: list[Tensor], mean: Tensor) -> tuple[float, float]:
        """Store the dequantized tokens of a part. Returns the share explained and the error, relative to the
        variance."""
        # There are no queries to fit a subspace to; it would redistribute the error, not change its energy.
        alone = dataclasses.replace(part.spec.quantizer, subspace=None)
        spec, transform = dataclasses.replace(part.spec, quantizer=alone), part.spec.transform
        residual, error, energy = 0.0, 0.0, 0.0
        for sequence in range(len(self.collected)):
            x, prediction = self._tokens(sequence, part.layer, part.role, spec), torch.zeros(())
            if transform.center:
                prediction = fit_center(x, params_dtype(x.dtype)).float()
            elif transform.predictor:
                prediction = predict(transform.predictor, tensors, self._references(sequence, part), spec.page_size)
            decoded = prediction + dequantize_pages(*quantize_pages(x - prediction, spec), spec)
            save_file({"x": decoded.contiguous()}, self._file(sequence, part.layer, part.role))
            if len(part.below) == part.layers_below:
                self._file(sequence, part.below[-1], part.role).unlink(missing_ok=True)
            if sequence in self.held_out:
                residual += (x - prediction).double().square().sum().item()
                error += (x - decoded).double().square().sum().item()
                energy += (_rows([x]).double() - mean).square().sum().item()
        return 1 - residual / energy, error / energy

    def _file(self, sequence: int, layer: int, role: int) -> Path:
        return self.folder / f"decoded-{layer}-{role}-{sequence}.safetensors"

    def _load(self, sequence: int, layer: int, role: int) -> Tensor:
        return load_file(self._file(sequence, layer, role))["x"]


def _rows(heads: list[Tensor]) -> Tensor:
    """``[1, H, T, D]`` tensors side by side: ``[T, sum of H * D]``."""
    return torch.cat([x[0].transpose(0, 1).flatten(1) for x in heads], -1)


def _flatten(tensors: list[list[Tensor]]) -> dict[str, Tensor]:
    return {f"{role}.{i}": tensor.contiguous() for role, one in enumerate(tensors) for i, tensor in enumerate(one)}


def _unflatten(tensors: dict[str, Tensor]) -> list[list[Tensor]]:
    out: list[list[Tensor]] = [[], []]
    for name in sorted(tensors, key=lambda name: tuple(map(int, name.split(".")))):
        out[int(name[0])].append(tensors[name])
    return out
