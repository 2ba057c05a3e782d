"""Schemes: frozen configs that turn the geometry of a layer into a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from ..codec.spec import CodecSpec
from ..codec.tensors import of_model
from ..errors import KVPassError
from ..fields import check_types, shown
from ..layout.retention import POLICIES, Retention
from .geometry import LayerGeometry

_EVICTED_BY = {
    "attention": "attention",
    "observed": "attention of the last queries",
    "age": "age",
    "log": "log-sparse age",
}
"""How `Retention.evict` is described."""


@dataclass(frozen=True)
class LayerPlan:
    """How one layer stores its keys and values.

    key_source, value_source: the layer whose quantized values this layer reads; None for its own.
    layers_below: number of layers below whose tokens predictors read (`codec.predictor.with_below`).
    """

    key: CodecSpec
    value: CodecSpec
    key_source: int | None = None
    value_source: int | None = None
    layers_below: int = 1

    def checked(self, layer: LayerGeometry) -> LayerPlan:
        """This plan, if it fits the heads of ``layer``; raises `KVPassError` otherwise. A latent has no rotary
        embedding, so it is stored the same before and after it. The rotary part beside it belongs to the keys: if keys
        are quantized per channel, so is this part."""
        if layer.latent and self.key.transform.turns:
            as_it_is = replace(self.key.transform, pre_rope=False, page_rope=False)
            return replace(self, key=replace(self.key, transform=as_it_is)).checked(layer)
        if layer.latent and self.key.quantizer.per == "channel" != self.value.quantizer.per:
            same = replace(self.key.quantizer, subspace=None)
            transform = replace(self.key.transform, center=False)
            value = replace(self.key, quantizer=same, transform=transform, own_codes=self.value.own_codes)
            return replace(self, value=value).checked(layer)
        if self.evicts and self.key.retention != self.value.retention:
            raise KVPassError(
                "With eviction, keys and values must leave the residual window together: give both the same retention."
            )
        self.key.check(layer.head_dim)
        self.value.check(layer.value_head_dim)
        if layer.heads[0] != layer.heads[1]:
            self._check_heads(layer)
        if self.value.quantizer.follows_keys:
            self._check_leader()
        return self

    def _check_heads(self, layer: LayerGeometry) -> None:
        """Raise `KVPassError` if this plan needs keys and values of equal shape."""
        of_keys, of_values = (f"{heads.number} heads of {heads.dim}" for heads in layer.heads)
        differ = f"the keys of layer {layer.index} have {of_keys} channels, the values {of_values}"
        if self.looks_at_previous:
            raise KVPassError(f"A predicted layer needs keys and values of equal shape, but {differ}: use kivi.")
        of_heads = self.value.quantizer.follows_keys or self.adaptive or (self.evicts and not self.key.retention.shared)
        if of_heads and layer.num_key_value_heads != layer.num_value_heads:
            raise KVPassError(
                f"This scheme chooses tokens or their bit widths for keys and values together, head by head, but "
                f"{differ}: use kivi."
            )

    def _check_leader(self) -> None:
        if not self.key.quantizer.chooses:
            raise KVPassError(
                "Values follow the per-token bit widths of their keys, but these keys use one bit width, so there is "
                "nothing to follow."
            )
        key, value = self.key.retention, self.value.retention
        same = (key.page_size, key.sinks, key.keep) == (value.page_size, value.sinks, value.keep)
        if not same or value.window < key.window:
            raise KVPassError(
                "Values that follow the per-token bit widths of their keys need the keys' page_size and sinks, and a "
                "window at least as long."
            )

    @property
    def needs_queries(self) -> bool:
        """Whether the codec is fitted to the prompt's queries, which requires capturing prefill."""
        return self.key.quantizer.needs_queries

    @property
    def takes_queries(self) -> bool:
        """Whether the codec is fitted to the prompt's queries if they are known."""
        return self.key.quantizer.takes_queries

    @property
    def evicts(self) -> bool:
        """Whether tokens are evicted beyond a budget."""
        return self.key.retention.evicts

    @property
    def adaptive(self) -> bool:
        """Whether bit widths differ from token to token."""
        return self.key.quantizer.adaptive is not None

    @property
    def needs_importance(self) -> bool:
        """Whether storage depends on the attention mass of tokens."""
        return self.key.needs_importance

    @property
    def looks_at_previous(self) -> bool:
        """Whether keys or values are predicted from layers below."""
        return bool(self.key.transform.predictor or self.value.transform.predictor)

    @property
    def calibrated(self) -> bool:
        """Whether quantization grids come from a calibration."""
        return self.key.calibrated or self.value.calibrated

    @property
    def shares_out(self) -> bool:
        """Whether a calibration sets the bit widths of each head, in tensors that all caches of the model share."""
        return bool(of_model(self.key))

    def __str__(self) -> str:
        def describe(name: str, spec: CodecSpec, source: int | None) -> str:
            window = f"{spec.retention.residual}..{spec.retention.window - 1} exact"
            shared = "" if source is None else f" with the quantized values of layer {source}"
            return f"{spec.transform.of(name)} {spec.quantizer}{shared}, {window}"

        retention, subspace = self.key.retention, self.key.quantizer.subspace
        sinks = f", {retention.sinks} sinks" if retention.sinks else ""
        sparse = ", log-sparse" if retention.keep == "log" else ""
        if self.evicts:
            of = "for all layers" if retention.shared else "per head"
            sparse = f", the {retention.budget} others by {_EVICTED_BY[retention.evict]} {of}"
        if retention.span is not None:
            sparse = f", in a window of {retention.span}"
        extra = f", rank-{subspace.rank} subspace" if subspace else ""
        key = describe("K", self.key, self.key_source)
        return f"{key}{extra}; {describe('V', self.value, self.value_source)}{sinks}{sparse}"


def check_edges(plans: dict[int, tuple[LayerPlan, LayerGeometry]]) -> None:
    """Raise `KVPassError` unless predicted layers have the same residual window as the layer below, and all layers
    evict the same number of tokens: a cache has one length."""
    if len({plan.key.retention if plan.evicts else None for plan, _ in plans.values()}) > 1:
        raise KVPassError(
            "If one layer evicts tokens, all layers must, with the same budget and window: a cache has one length."
        )
    for plan, layer in plans.values():
        if not plan.looks_at_previous or layer.previous_layer is None:
            continue
        previous, its = plans[layer.previous_layer]
        specs = (previous.key, previous.value, plan.key, plan.value)
        if len({spec.retention for spec in specs}) > 1:
            raise KVPassError(
                f"Layer {layer.index} is predicted from layer {layer.previous_layer}, whose residual window holds "
                "different tokens: give the keys and values of all layers the same retention."
            )
        if its.heads != layer.heads:
            raise KVPassError(
                f"Layer {layer.index} cannot be predicted from layer {layer.previous_layer}, which has "
                f"{its.num_key_value_heads} heads of {its.head_dim} instead of {layer.num_key_value_heads} of "
                f"{layer.head_dim}."
            )


def check_sources(plans: dict[int, LayerPlan]) -> None:
    """Raise `KVPassError` unless every layer that shares quantized values reads them from a packed layer stored the
    same way."""
    for index, plan in plans.items():
        for name in ("key", "value"):
            source = getattr(plan, f"{name}_source")
            if source is None:
                continue
            if source not in plans or getattr(plans[source], f"{name}_source") is not None:
                raise KVPassError(
                    f"Layer {index} shares the {name} codes of layer {source}, which stores none of its own."
                )
            if getattr(plans[source], name).stored_as != getattr(plan, name).stored_as:
                raise KVPassError(
                    f"Layers {source} and {index} share {name} codes but are stored differently: they need equal bits "
                    "and windows. Choose kq, vq, km and vm so that no layer group is split."
                )


@dataclass(frozen=True, kw_only=True)
class SchemeConfig:
    """Base of all scheme configs. Subclasses are frozen dataclasses with a ``name`` and a ``plan``."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    needs_calibration: ClassVar[bool] = False
    takes_calibration: ClassVar[bool] = False  # whether `kvpass.calibrate` can measure something for it

    def __post_init__(self) -> None:
        check_types(self)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        """The plan of one layer; raises `KVPassError` if the scheme does not fit it."""
        raise TypeError(f"{type(self).__name__} must define plan(layer)")

    def plan_of(self, layer: LayerGeometry) -> LayerPlan:
        """The plan that a model is packed with: `plan`, except for layers that `StorageConfig` skips."""
        return self.plan(layer)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data; `get` inverts it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"scheme": self.name, "version": self.version, **{name: _plain(v) for name, v in fields.items()}}

    def __str__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def _plain(value: Any) -> Any:
    if isinstance(value, SchemeConfig):
        return value.to_dict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


_Config = TypeVar("_Config", bound=SchemeConfig)
_SCHEMES: dict[str, type[SchemeConfig]] = {}
_PRESETS: dict[str, SchemeConfig] = {}
_RETIRED: dict[str, str] = {}  # name of a former preset -> the config to write instead


def register_scheme(**presets: dict[str, Any]) -> Callable[[type[_Config]], type[_Config]]:
    """Class decorator: register a config under its ``name``, plus presets given as name -> overrides.

    Underscores in preset names become hyphens.
    """

    def register(cls: type[_Config]) -> type[_Config]:
        _SCHEMES[cls.name] = cls
        _PRESETS[cls.name] = cls()
        for preset, overrides in presets.items():
            _PRESETS[preset.replace("_", "-")] = cls(**overrides)
        return cls

    return register


def retire_preset(name: str, instead: str) -> None:
    """Make `get` refuse the former preset ``name`` and suggest ``instead``, the config to write in its place."""
    _RETIRED[name] = instead


def available() -> list[str]:
    """Names that ``scheme=`` accepts."""
    return sorted(_PRESETS)


@runtime_checkable
class _Stored(Protocol):
    """A config with the fields of `StorageConfig`."""

    sinks: int
    retention: Retention | None
    rope: str


def compose(scheme: SchemeConfig, policy: Retention) -> SchemeConfig:
    """``scheme`` with another retention policy; its sinks are kept.

    Any scheme whose layers store their own tokens takes any policy. Impossible combinations raise `KVPassError`: a
    scheme that is defined by its policy (LogQuant), and eviction where layers share quantized values (XQuant). Where
    layers share positions or predictions, all heads and layers evict the same tokens.
    """
    if not isinstance(policy, Retention):
        raise KVPassError(f"{shown(policy)} is not a retention policy: use a kvpass.Retention, such as Recent(128).")
    if not isinstance(scheme, _Stored):
        raise KVPassError(f"{scheme.name!r} does not take a retention policy.")
    if policy.budget is not None and (scheme.needs_calibration or scheme.rope == "pre"):
        policy = dataclasses.replace(policy, shared=True)
    policy = dataclasses.replace(policy, sinks=max(policy.sinks, scheme.sinks))
    return _changed(scheme, {"sinks": 0, "retention": policy})


def get(scheme: str | dict[str, Any] | SchemeConfig, **overrides: Any) -> SchemeConfig:
    """Resolve a scheme.

    scheme: a name from `available`, a name and a policy of `layout.retention.POLICIES` ("kivi+h2o"), a config, or a
        dict ``{"scheme": name, **overrides}`` (as `to_dict` writes it).

    Raises `KVPassError` for unknown or removed names, unknown fields, a dict of another version, or impossible
    combinations.
    """
    if isinstance(scheme, str) and "+" in scheme:
        name, _, policy = scheme.partition("+")
        if policy not in POLICIES:
            raise KVPassError(f"Unknown policy {policy!r} in {scheme!r}. Known policies: {', '.join(POLICIES)}.")
        return get(compose(get(name), POLICIES[policy]), **overrides)
    if isinstance(scheme, dict):
        scheme = {**scheme, **overrides}
        name, version = scheme.pop("scheme", None), scheme.pop("version", None)
        if not isinstance(name, str):
            raise KVPassError('A scheme dict names its scheme: {"scheme": "kivi", "bits": 4}.')
        named = get(name)
        if version is not None and (type(version) is not int or version != named.version):
            raise KVPassError(
                f"Config version {shown(version)} of {name!r} is not supported; this kvpass reads version "
                f"{named.version}."
            )
        return _changed(named, scheme)
    if isinstance(scheme, str):
        if scheme not in _PRESETS and scheme in _RETIRED:
            raise KVPassError(f"The preset {scheme!r} was removed. Use scheme={_RETIRED[scheme]} instead.")
        if scheme not in _PRESETS:
            raise KVPassError(f"Unknown scheme {scheme!r}. Known schemes: {', '.join(available())}.")
        scheme = _PRESETS[scheme]
    if not isinstance(scheme, SchemeConfig):
        raise KVPassError(f"scheme must be a name, a dict or a config, not {type(scheme).__name__}.")
    return _changed(scheme, overrides)


def _changed(scheme: SchemeConfig, fields: dict[str, Any]) -> SchemeConfig:
    known = {field.name for field in dataclasses.fields(scheme)}
    if unknown := [name for name in fields if name not in known]:
        raise KVPassError(f"{type(scheme).__name__} has no field {shown(unknown)}; its fields are {sorted(known)}.")
    return dataclasses.replace(scheme, **fields)


def named(scheme: SchemeConfig) -> str | dict[str, Any]:
    """The shortest value of ``scheme=`` for this scheme: a name, or a dict of the fields that differ from the
    defaults."""
    for name, preset in _PRESETS.items():
        if preset == scheme:
            return name
    own, plain = scheme.to_dict(), get(scheme.name).to_dict()
    return {"scheme": scheme.name} | {field: value for field, value in own.items() if value != plain[field]}
