"""`ChunkCodec`: quantizes chunks of a prompt's tokens, each so that it can be dequantized alone.

A chunk is a fixed number of consecutive tokens in all layers. It keeps its own statistics (the mean of centred keys):
a store may drop any chunk of a prefix, and a request may begin in the middle of one that another request has stored.
Layers of the same shape and plan are quantized in one call.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Protocol

import torch
from torch import Tensor

from ..codec.center import fit_center
from ..codec.spec import CodecSpec
from ..codec.tensors import fitted_shapes, of_model, of_sequence, page_shapes
from ..errors import KVPassError
from ..lowering.page_codecs import Codecs, codecs_for
from ..schemes import LayerGeometry, LayerPlan, SchemeConfig

_AT_ONCE = 1 << 24  # values of keys or values that are quantized at a time


@dataclass(frozen=True)
class LayerShape:
    """The cache of one layer: KV heads, channels per head, and the dtype of the tokens."""

    heads: int
    head_dim: int
    dtype: torch.dtype


Chunk = dict[str, Tensor]
"""The tensors of one chunk on the CPU, by name: "0.key.codes" ``[layers, H, pages, ...]``, "0.key.sinks" ``[layers, H,
sinks, D]``, where 0 is the number of a set of layers that are stored alike."""


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the tensors of a chunk, by name. A size may be `ANY`."""

ANY = -1
"""In place of a size that depends on the tokens of the chunk."""


class Scheme(Protocol):
    """What plans layers: a `SchemeConfig`, or a calibration of one."""

    @property
    def name(self) -> str: ...

    def plan_of(self, layer: LayerGeometry) -> LayerPlan: ...


@dataclass(frozen=True, eq=False)
class _Alike:
    """Layers that are stored alike, by their places in a group."""

    shape: LayerShape
    plan: LayerPlan
    layers: tuple[int, ...]

    def page_shapes(self, spec: CodecSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return page_shapes(spec, self.shape.head_dim, self.shape.dtype)

    @property
    def sides(self) -> tuple[tuple[str, CodecSpec], tuple[str, CodecSpec]]:
        return ("key", self.plan.key), ("value", self.plan.value)


class ChunkCodec:
    """Quantizes and dequantizes chunks of ``tokens`` tokens.

    scheme: any whose pages need nothing but the tokens in them.
    layers: the layer of the model that each cache layer belongs to, and its shape.
    num_layers: layers of the model.
    lowering: as in `kvpass.apply`.

    Raises `KVPassError`, which names an alternative, if the scheme stores more than that, or if its pages do not fit
    the heads or the chunk.
    """

    def __init__(
        self,
        scheme: SchemeConfig,
        layers: Mapping[int, LayerShape],
        num_layers: int,
        tokens: int,
        device: torch.device | str = "cpu",
        lowering: str = "auto",
    ) -> None:
        self.tokens, self.device = tokens, torch.device(device)
        plans = plans_of(scheme, layers, num_layers)
        specs = [spec for plan in plans.values() for spec in (plan.key, plan.value)]
        check_chunk_size(tokens, lcm(*(spec.page_size for spec in specs)), max(s.retention.sinks for s in specs))
        alike: dict[tuple[LayerShape, LayerPlan], list[int]] = {}
        for place, (index, shape) in enumerate(layers.items()):
            alike.setdefault((shape, plans[index]), []).append(place)
        self._alike = [_Alike(shape, plan, tuple(places)) for (shape, plan), places in alike.items()]
        self._codecs = [
            [codecs_for(spec, self.device, one.shape.head_dim, lowering) for _, spec in one.sides]
            for one in self._alike
        ]

    def shapes(self, first: bool) -> Shapes:
        """Shape and dtype of the tensors of a chunk. first: whether it is the first of its prompt."""
        found: Shapes = {}
        for number, one in enumerate(self._alike):
            lead, head_dim, dtype = (len(one.layers), one.shape.heads), one.shape.head_dim, one.shape.dtype
            for side, spec in one.sides:
                name, pages = f"{number}.{side}", self.tokens // spec.page_size
                if first and spec.retention.sinks:
                    found[f"{name}.sinks"] = (*lead, spec.retention.sinks, head_dim), dtype
                for part, (shape, kind) in fitted_shapes(spec, head_dim, dtype).items():
                    found[f"{name}.{part}"] = (*lead, *shape), kind
                for part, (shape, kind) in one.page_shapes(spec).items():
                    if prod(shape):
                        found[f"{name}.{part}"] = (*lead, pages, *shape), kind
        return found

    def nbytes(self, first: bool) -> int:
        """Bytes of a chunk."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(first).values())

    @property
    def full_nbytes(self) -> int:
        """Bytes of the tokens of a chunk as they were given."""
        values = sum(len(one.layers) * one.shape.heads * one.shape.head_dim * one.shape.dtype.itemsize
                     for one in self._alike)  # fmt: skip
        return 2 * values * self.tokens

    def quantize(self, numbers: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Chunk]:
        """Quantize N chunks.

        numbers: the number of each in its prompt, in ascending order.
        keys, values: of each layer: ``[H, N * tokens, D]``.
        """
        chunks: list[Chunk] = [{} for _ in numbers]
        at_once = max(1, _AT_ONCE // max(1, self.full_nbytes // keys[0].element_size() // 2))
        for start in range(0, len(chunks), at_once):
            some, theirs = chunks[start : start + at_once], numbers[start : start + at_once]
            span = slice(start * self.tokens, (start + len(some)) * self.tokens)
            for number, one in enumerate(self._alike):
                for (side, spec), codecs, given in zip(one.sides, self._codecs[number], (keys, values), strict=True):
                    x = torch.stack([given[place][:, span] for place in one.layers])  # [L, H, n * T, D]
                    x = x.unflatten(2, (len(some), -1)).movedim(2, 0)  # [n, L, H, T, D]
                    for name, tensor in self._side(x, one, spec, theirs, codecs):
                        for chunk, part in zip(some, tensor, strict=False):
                            chunk[f"{number}.{side}.{name}"] = part
        return [{name: part.to("cpu", copy=True).contiguous() for name, part in chunk.items()} for chunk in chunks]

    def _side(
        self, x: Tensor, one: _Alike, spec: CodecSpec, numbers: Sequence[int], codecs: Codecs
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors ``[n, L, H, ...]`` of keys or values ``x`` ``[n, L, H, T, D]`` of chunks ``numbers``; sinks
        only of the first of a prompt."""
        sinks, lead = spec.retention.sinks, x.shape[:2]
        if numbers[0] == 0 and sinks:
            yield "sinks", x[:1, ..., :sinks, :].clone()
            x = x.clone()
            x[0, ..., :sinks, :] = x[0, ..., sinks : sinks + 1, :]  # so that pages begin where chunks do
        x = x.flatten(0, 1).contiguous()
        if spec.transform.center:
            center = fit_center(x, fitted_shapes(spec, x.shape[-1], x.dtype)["center"][1])
            yield "center", center.unflatten(0, lead)
            x = (x.float() - center.float()).to(x.dtype)
        for name, tensor in zip(one.page_shapes(spec), codecs.quantize(x, [], spec), strict=True):
            if tensor.numel():
                yield name, tensor.unflatten(0, lead)

    def dequantize(
        self, numbers: Sequence[int], chunks: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inverse of `quantize` up to rounding: keys and values of each layer, ``[H, N * tokens, D]``."""
        layers = sum(len(one.layers) for one in self._alike)
        found: tuple[list[Tensor], list[Tensor]] = ([torch.empty(0)] * layers, [torch.empty(0)] * layers)
        for number, one in enumerate(self._alike):
            for (side, spec), codecs, into in zip(one.sides, self._codecs[number], found, strict=True):
                parts = [
                    {name.split(".", 2)[2]: part.to(self.device) for name, part in chunk.items()
                     if name.startswith(f"{number}.{side}.")}
                    for chunk in chunks
                ]  # fmt: skip
                x = self._tokens(parts, one, spec, codecs)  # [n, L, H, T, D]
                if numbers[0] == 0 and spec.retention.sinks:
                    x[0, ..., : spec.retention.sinks, :] = parts[0]["sinks"]
                for place, layer in zip(one.layers, x.movedim(0, 2).flatten(2, 3), strict=True):
                    into[place] = layer
        return found

    def _tokens(self, parts: Sequence[Mapping[str, Tensor]], one: _Alike, spec: CodecSpec, codecs: Codecs) -> Tensor:
        lead, kept = (len(parts), len(one.layers)), []
        for name, (shape, dtype) in one.page_shapes(spec).items():
            if prod(shape):
                kept.append(torch.cat([part[name] for part in parts]))
            else:
                pages = self.tokens // spec.page_size
                kept.append(torch.empty(prod(lead), one.shape.heads, pages, *shape, dtype=dtype, device=self.device))
        x = codecs.dequantize(kept, spec, (), ())
        if spec.transform.center:
            x = x + torch.cat([part["center"] for part in parts]).float()
        tokens: Tensor = x.to(one.shape.dtype).unflatten(0, lead)
        return tokens

    def warm(self) -> None:
        """Compile what `quantize` and `dequantize` compile."""
        x = random_tokens({place: one.shape for one in self._alike for place in one.layers}, self.tokens, self.device)
        self.dequantize([0], self.quantize([0], x, x))


def random_tokens(shapes: Mapping[int, LayerShape], tokens: int, device: torch.device) -> list[Tensor]:
    """Keys, or values, of a chunk: ``[H, tokens, D]`` for each of the layers ``shapes``, in order."""
    return [
        torch.randn(shape.heads, tokens, shape.head_dim, device=device).to(shape.dtype)
        for _, shape in sorted(shapes.items())
    ]


def check_chunk_size(tokens: int, page_size: int, sinks: int) -> None:
    """Raise `KVPassError` unless a chunk of ``tokens`` tokens holds whole pages, and more than ``sinks`` sinks."""
    if tokens % page_size:
        raise KVPassError(
            f"Chunks of {tokens} tokens do not hold whole pages of {page_size} tokens: use a multiple of {page_size}."
        )
    if sinks >= tokens:
        raise KVPassError(f"All {tokens} tokens of a chunk would be sinks: use larger chunks, or fewer sinks.")


def plans_of(scheme: Scheme, layers: Mapping[int, LayerShape], num_layers: int) -> dict[int, LayerPlan]:
    """The plans of ``layers``. Raises `KVPassError` if a chunk cannot be stored by them."""
    calibrated = not isinstance(scheme, SchemeConfig)
    if isinstance(scheme, SchemeConfig) and scheme.needs_calibration:
        raise KVPassError(
            f"{scheme.name!r} must be calibrated on a model: pass the folder of its calibration, which "
            "`python -m kvpass calibrate --scheme waterfill-static` writes. Use kivi-4, or kivi-sinks for fewer bits, "
            "without one."
        )
    found: dict[int, LayerPlan] = {}
    for index, shape in layers.items():
        previous = index - 1 if index else None
        geometry = LayerGeometry(
            index, num_layers, shape.heads, shape.head_dim, shape.dtype, torch.device("cpu"), previous
        )
        plan = found[index] = scheme.plan_of(geometry)
        shared = (plan.key_source, plan.value_source) != (None, None)
        for name, spec in (("keys", plan.key), ("values", plan.value)):
            if not calibrated and (reason := refusal(spec, shared)):
                raise KVPassError(f"The prefix store cannot keep the {name} of {scheme.name!r}. {reason}")
    return found


def refusal(spec: CodecSpec, shared: bool = False) -> str | None:
    """Why the pages of ``spec`` need more than their tokens, and what to use instead; None if they do not. shared:
    whether the layer reads the quantized values of another one."""
    transform, retention = spec.transform, spec.retention
    if retention.evicts or retention.keep != "recent":
        return "The policy drops or thins out tokens, but a prefix is needed whole. Use the scheme without the policy."
    if shared or spec.own_codes != 1 or transform.predictor:
        return "What is stored of a layer depends on another layer. Use kivi-4 or kivi-sinks."
    if transform.keeps_tables:
        return "vLLM's blocks hold keys after rotary embedding. Use kivi-4 or kivi-sinks."
    if spec.quantizer.needs_queries:
        return "The codec is fitted to a prompt's queries, which are not in vLLM's blocks. Use kivi-4 or kivi-sinks."
    if spec.quantizer.adaptive is not None:
        return "The codec chooses bit widths by attention scores, which are not in vLLM's blocks. Use kivi-4."
    if of_model(spec) or set(of_sequence(spec)) - {"center"}:
        return "The codec is fitted to a whole prompt or a model. Use kivi-4 or kivi-sinks."
    return None
