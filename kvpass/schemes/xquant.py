"""XQuant and AsymKV (arXiv 2410.13212): 2 bits in lower layers, 1 bit above, and quantized values shared by
neighbouring layers.

A layer that shares has scales, zero points and exact tokens of its own, and dequantizes the quantized values of its
group's dominant layer. AsymKV is the same without sharing.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..fields import check_integers
from .base import LayerPlan, register_scheme, retire_preset
from .geometry import LayerGeometry
from .uniform import UniformConfig


@dataclass(frozen=True, kw_only=True)
class _LayeredConfig(UniformConfig):
    """eta_1, eta_2: share of the range cut off at both ends when 1- and 2-bit values are dequantized (XQuant eq. 9).

    depth: number of layers for which the other numbers are given; they are scaled to the model's depth. None uses them
        as they are.
    """

    eta_1: float = 0.0
    eta_2: float = 0.0
    depth: int | None = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth is not None:
            check_integers(self, depth=1)
        if self.eta:
            raise KVPassError(
                f"eta={self.eta}: bit widths differ between layers here, so pass eta_1 and eta_2 instead."
            )
        self.key(1, eta=self.eta_1), self.value(2, eta=self.eta_2)  # an impossible config fails here

    def _scaled(self, layers: int, layer: LayerGeometry) -> int:
        return layers if self.depth is None else round(layers * layer.num_layers / self.depth)

    def _coding(self, layer: LayerGeometry, two_bit_layers: int) -> dict[str, Any]:
        two = layer.index < self._scaled(two_bit_layers, layer)
        return dict(bits=2, eta=self.eta_2) if two else dict(bits=1, eta=self.eta_1)


@register_scheme(asymkv_lsq=dict(fit="lsq"), asymkv_eta=dict(eta_1=1 / 6, eta_2=0.045))
@dataclass(frozen=True, kw_only=True)
class AsymKVConfig(_LayeredConfig):
    """l_k, l_v: number of lower layers with 2-bit keys (values); the layers above have 1 bit."""

    name = "asymkv"

    l_k: int = 32
    l_v: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, l_k=0, l_v=0)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        key, value = self._coding(layer, self.l_k), self._coding(layer, self.l_v)
        return LayerPlan(self.key(**key), self.value(**value)).checked(layer)


@register_scheme(xquant_lsq=dict(eta_1=0.0, eta_2=0.0, fit="lsq"), xquant_128=dict(residual=128))
@dataclass(frozen=True, kw_only=True)
class XQuantConfig(_LayeredConfig):
    """The default is the paper's "1.38 bit" setting (Mistral, HotpotQA), with a residual of 32; "xquant-128" has the
    paper's residual of 128.

    kq, vq: number of lower layers with 2-bit keys (values); the layers above have 1 bit.
    km, vm: index of the first layer from which groups share quantized keys (values).
    group_layers: number of layers in a group (G), counted from layer 0.
    dominant: index within the group of the layer whose quantized values are stored.
    weights: weights (gamma) of the layers of a group, instead of a dominant one: their quantized values are averaged
        and rounded. In groups of more than two, each layer in turn joins the average so far, which is rounded each
        time.
    rounding: how averages are rounded: to the "nearest" integer, "floor" or "ceil".
    """

    name = "xquant"
    stores_layers_alone = False

    kq: int = 30
    vq: int = 2
    km: int = 32
    vm: int = 16
    eta_1: float = 1 / 6
    eta_2: float = 0.045
    group_layers: int = 2
    dominant: int = 0
    weights: tuple[float, ...] | None = None
    rounding: Literal["nearest", "floor", "ceil"] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, kq=0, vq=0, km=0, vm=0, group_layers=1, dominant=0)
        if self.dominant >= self.group_layers:
            raise KVPassError(f"dominant={self.dominant} is out of range for group_layers={self.group_layers}.")
        if self.fit != "minmax" and (self.dominant or self.weights is not None):
            raise KVPassError(f"fit={self.fit!r} fits groups one by one: with it, use dominant=0 and no weights.")
        if self.weights is not None:
            fits = len(self.weights) == self.group_layers and min(self.weights) >= 0 < self.weights[0]
            if not fits or self.dominant or abs(sum(self.weights) - 1) > 1e-6:
                raise KVPassError(
                    f"weights={self.weights} must be group_layers={self.group_layers} numbers of at least 0 that sum "
                    "to 1, the first above 0, with dominant=0."
                )
        elif self.rounding != "nearest":
            raise KVPassError(f"rounding={self.rounding!r} rounds averages: give the weights of the layers of a group.")

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        key, value = self._coding(layer, self.kq), self._coding(layer, self.vq)
        k_source, v_source = (self._source(layer, self._scaled(first, layer)) for first in (self.km, self.vm))
        return LayerPlan(
            self._shared(self.key(**key), k_source, layer.index),
            self._shared(self.value(**value), v_source, layer.index),
            k_source,
            v_source,
        ).checked(layer)

    def _source(self, layer: LayerGeometry, first: int) -> int | None:
        """The layer whose quantized values ``layer`` reads, if groups from layer ``first`` on share; None for its
        own."""
        source = layer.index - layer.index % self.group_layers + self.dominant
        shares = layer.index >= first and first <= source < layer.num_layers and source != layer.index
        return source if shares else None

    def _shared(self, spec: CodecSpec, source: int | None, layer: int) -> CodecSpec:
        """``spec`` for a ``layer`` that reads the quantized values of ``source``."""
        if source is None:
            return spec
        if self.weights is None:
            return replace(spec, own_codes=0.0)
        place = layer - source
        own = self.weights[place] / sum(self.weights[: place + 1])
        return replace(spec, own_codes=own, rounding=self.rounding)


_TABLE_9 = {
    "mistral": (
        (30, 2, 32, 16),
        {"truthfulqa": ("0", "0"), "hqa": ("1/6", "0.045"), "trec": ("1/6", "0"), "tqa": ("1/6", "0.09")},
    ),
    "mistral-k2": ((32, 0, 32, 16), {"2wiki": ("0", "0.09"), "msq": ("1/6", "0"), "pc": ("0", "0.045")}),
    "llama2": ((28, 0, 32, 28), {"truthfulqa": ("1/3", "0"), "hqa": ("1/6", "0.045"), "2wiki": ("1/3", "0.045")}),
    "llama2-chat": ((32, 0, 32, 20), {"trec": ("1/6", "0"), "sams": ("0", "0"), "pc": ("1/3", "0.045")}),
}
"""Table 9 of the paper: (kq, vq, km, vm) of 32 layers -> task -> (eta_1, eta_2). Each row was a preset once."""


def _retire_table_9() -> None:
    for model, ((kq, vq, km, vm), tasks) in _TABLE_9.items():
        for task, (eta_1, eta_2) in tasks.items():
            numbers = f"kq={kq}, vq={vq}, km={km}, vm={vm}, eta_1={eta_1}, eta_2={eta_2}"
            retire_preset(f"xquant-{model}-{task}", f"XQuantConfig({numbers})")


_retire_table_9()
