"""Save a packed cache to a file and load it, so that another process can continue a prompt without reading it again.

The file is in safetensors format with JSON in its metadata, so loading it executes no code. It fits only the model,
scheme and dtype it was saved with; loading it for anything else raises an error that names the difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from ..accelerate_hooks import device_of
from ..cache.cache_state import CacheState
from ..cache.cross import CrossLayer
from ..cache.layer import PackedLayer
from ..cache.sliding import SlidingLayer
from ..cache.state import Storage
from ..cache.swap import cache_layers, cross_layers, state_of
from ..digest import bytes_of, digest
from ..errors import KVPassError
from ..layout.window import Writes
from ..models.probe import fresh_cache
from ..schemes.fingerprint import check_settings, fingerprint, settings
from .applied import runtime_of
from .runtime import Runtime
from .transformers import TransformersRuntime

_FORMAT = 3
_UNPACKED = DynamicLayer, DynamicSlidingWindowLayer


def save_cache(cache: Cache, path: str | Path) -> Path:
    """Write a packed ``cache`` of transformers to the file ``path`` (usually ``*.safetensors``) and return the path.

    The file holds quantized values, scales, zero points, exact tokens and other state of the scheme, without unused
    memory, for the whole batch. Sliding-window layers are saved in full precision. An existing file is replaced only
    when the new one is complete.

    Raises `KVPassError` if the cache is not packed, empty, or inconsistent, if it has other kinds of layers (linear
    attention), or if its model is gone; `OSError` if the file cannot be written.
    """
    runtime, path = TransformersRuntime.of(cache), Path(path)
    state, layers = state_of(cache), cache_layers(cache)
    if state is None or not state.tokens:
        raise KVPassError("The cache is empty: run the model first.")
    for index, layer in enumerate(layers):
        if isinstance(layer, PackedLayer):
            layer.cache.refuse_unless_whole()
        elif type(layer) not in _UNPACKED:
            raise KVPassError(
                f"Layer {index} of this cache is {type(layer).__name__}, which is not packed and cannot be saved yet: "
                "keep the cache in memory (copy.deepcopy), or run the prompt again."
            )
    facts = {
        "format": _FORMAT,
        "made_by": _maker(runtime),
        "batch": state.batch,
        "layers": [_numbers_of(layer) for layer in layers],
    }
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for index, layer in enumerate(layers)
        for name, tensor in _tensors_of(index, layer)
    }
    metadata = {"facts": facts, "sha256": digest(facts, tensors)}
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, {"kvpass": json.dumps(metadata)})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


@torch.inference_mode(False)
def load_cache(path: str | Path, model: nn.Module) -> Cache:
    """Load the cache that `save_cache` wrote to ``path``, onto the devices of ``model``. Pass it to the model as
    ``cache`` (called ``past_key_values`` before transformers 5.24).

    model: the model it was saved with, with the same active adapters and config, packed with the same scheme and dtype;
        inside ``torch.autocast`` if it was saved inside it.

    Raises `KVPassError` if the file is missing, truncated, modified, or of another version, or if the model, adapter,
    config, scheme or dtype differs. The message names the difference.
    """
    runtime = runtime_of(model)
    if not isinstance(runtime, TransformersRuntime):
        raise KVPassError("Caches of decoders outside transformers cannot be loaded: run the prompt again.")
    facts, tensors = _read(Path(path))
    try:
        _check_maker(facts["made_by"], _maker(runtime))
        return _filled(runtime, facts, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        if isinstance(error, KVPassError):
            raise
        raise KVPassError(f"{path} holds no readable cache: {error!r}. Run the prompt again.") from error


def _maker(runtime: Runtime) -> dict[str, Any]:
    """Everything that determines the meaning of quantized values: the model, its numerics, the scheme, and the spec of
    each layer."""
    model, hashed = runtime.model(), hashlib.sha256()
    for tensor in chain.from_iterable(chain.from_iterable(runtime.predictors.values())):
        hashed.update(bytes_of(tensor))
    layers = [
        [str(plan.key), str(plan.value), plan.key_source, plan.value_source, geometry.index,
         *geometry.sizes, str(geometry.dtype)]
        for plan, geometry in (*runtime.plans.values(), *runtime.cross.values())
    ]  # fmt: skip
    return {
        "model": type(model).__name__,
        "settings": settings(model) | {"autocast": _autocast(model)},
        "weights": fingerprint(model),
        "scheme": str(runtime.scheme),
        "calibration": hashed.hexdigest()[:16],
        "layers": layers,
    }


def _autocast(model: nn.Module) -> str | None:
    """The dtype of the active ``torch.autocast``; None if autocast is off."""
    kind = device_of(model).type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def _check_maker(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, mine in ours.items():
        if name == "settings":
            check_settings(theirs[name], mine, "This cache was saved with")
        elif theirs[name] != mine:
            raise KVPassError(
                f"This cache was saved with another {name}: {theirs[name]}, but here it is {mine}. Apply the scheme it "
                "was saved with to the model it was saved with, or run the prompt again."
            )


def _parts(layer: PackedLayer) -> Iterator[tuple[str, Storage]]:
    for name in ("key_state", "value_state", "rotary", "importance"):
        if (part := getattr(layer, name)) is not None:
            yield name, part


def _numbers_of(layer: CacheLayerMixin) -> dict[str, Any]:
    """The state of a layer except its tensors."""
    if not isinstance(layer, PackedLayer):
        return {"kind": type(layer).__name__, "tokens": layer.get_seq_length()}
    states = [asdict(state.writes) for state in layer.states()]
    lengths = {"tokens": layer.tokens + _behind(layer), "seen": layer.seen, "max_cache_len": layer.max_cache_len}
    return {"kind": "packed", "states": states, "behind": _behind(layer), **lengths}


def _behind(layer: PackedLayer) -> int:
    """The number of tokens that ``layer`` freed because they were behind its window."""
    return layer.behind if isinstance(layer, SlidingLayer) else 0


def _tensors_of(index: int, layer: CacheLayerMixin) -> Iterator[tuple[str, Tensor]]:
    if isinstance(layer, PackedLayer):
        for part, storage in _parts(layer):
            yield from ((f"{index}.{part}.{name}", t) for name, t in storage.contents(layer.tokens).items())
        yield from ((f"{index}.{name}", held) for name, held in layer.beside().items())
    elif layer.is_initialized:
        yield from ((f"{index}.{name}", getattr(layer, name)) for name in ("keys", "values"))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and tensors of a file. Raises `KVPassError` unless the file is exactly what `save_cache` wrote."""
    try:
        with safe_open(path, "pt") as file:
            metadata = (file.metadata() or {}).get("kvpass")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except OSError as error:
        raise KVPassError(f"{path} cannot be read: {error}. Save the cache with kvpass.save_cache.") from error
    except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
        raise KVPassError(
            f"{path} is not a safetensors file, or is truncated: {error}. Run the prompt again."
        ) from error
    if metadata is None:
        raise KVPassError(f"{path} holds no packed cache: kvpass.save_cache did not write it.")
    try:
        metadata = json.loads(metadata)
        facts, sha256 = metadata["facts"], metadata["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        facts = sha256 = None
    if sha256 != digest(facts, tensors):
        raise KVPassError(f"{path} was modified after it was written: run the prompt again.")
    if facts["format"] != _FORMAT:
        raise KVPassError(
            f"{path} has format {facts['format']!r}, but this kvpass reads format {_FORMAT}: run the prompt again. "
            "Older formats did not record the model's adapters and settings."
        )
    return facts, tensors


def _filled(runtime: TransformersRuntime, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Cache:
    """A new cache of ``runtime`` with the saved contents."""
    cache = fresh_cache(runtime.model())
    runtime.adopt(cache)
    layers = list(zip(cache_layers(cache), facts["layers"], strict=True))
    for index, (layer, numbers) in enumerate(layers):
        kind = "packed" if isinstance(layer, PackedLayer) else type(layer).__name__
        if numbers["kind"] != kind:
            raise KVPassError(f"Layer {index} was saved as {numbers['kind']}, but here it is {kind}.")
    saved: dict[CacheState, list[dict[str, Any]]] = {}
    for layer, numbers in layers:
        if isinstance(layer, PackedLayer):
            saved.setdefault(layer.cache, []).append(numbers)
    for state, of_layers in saved.items():
        _restore(state, facts["batch"], of_layers)
    for index, (layer, numbers) in enumerate(layers):
        own = {name.removeprefix(f"{index}."): t for name, t in tensors.items() if name.startswith(f"{index}.")}
        if isinstance(layer, PackedLayer):
            _fill_packed(layer, numbers, own)
        elif own:
            layer.lazy_initialization(own["keys"].to(runtime.model().device), own["values"])
            layer.keys, layer.values = (own[name].to(layer.device) for name in ("keys", "values"))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = numbers["tokens"]
    if isinstance(cache, EncoderDecoderCache):
        cache.is_updated = {index: layer.get_seq_length() > 0 for index, layer in enumerate(cross_layers(cache))}
    return cache


def _restore(state: CacheState, batch: int, layers: list[dict[str, Any]]) -> None:
    """Make room in a new cache, and set the length that was saved for each of its ``layers``."""
    lengths = {(saved["tokens"], saved["seen"], saved["max_cache_len"]) for saved in layers if saved["states"]}
    if not lengths:  # nothing was stored
        return
    if len(lengths) > 1 or not all(saved["states"] for saved in layers):
        raise KVPassError("The layers of this cache were saved with different lengths: run the prompt again.")
    ((tokens, seen, max_cache_len),) = lengths
    if max_cache_len is not None:
        state.max_cache_len = max_cache_len
    state.batch = batch
    for layer, numbers in zip(state.layers, layers, strict=True):
        if isinstance(layer, SlidingLayer):
            layer.behind = int(numbers["behind"])
    state.allocate(batch, tokens)
    state.tokens, state.seen, state.filled = tokens, seen, True


def _fill_packed(layer: PackedLayer, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if not numbers["states"]:  # nothing was stored
        return
    tokens = numbers["tokens"] - _behind(layer)
    for part, storage in _parts(layer):
        own = {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
        storage.fill(tokens, own)
    for state, saved in zip(layer.states(), numbers["states"], strict=True):
        state.writes = Writes(tuple((int(first), int(stop)) for first, stop in saved["spans"]), int(saved["packed"]))
    layer.fill_beside(tensors)
    if isinstance(layer, CrossLayer):
        layer.written = tokens
