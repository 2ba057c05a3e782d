"""Simulate attention over a packed cache in one pass over a whole text.

This serves decoders without a cache, and evaluation; it saves no memory. The result is that of decoding token by token:
a query sees each token as it was stored when the query arrived, exact in the window, dequantized from its page
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from kvpass.lowering.reference import attention_weights

from ..cache.per_cache import RotaryState
from ..cache.state import KVState, SharedTensors
from ..codec.rope import rotate
from ..codec.spec import CodecSpec, parse
from ..compile.backend import Backend
from ..compile.calls import change
from ..compile.capture import FAILURES, translated
from ..compile.find import find_unpacked
from ..compile.normalise import normalise
from ..compile.report import GraphReport, listed
from ..compile.rewrite import simulate_attention
from ..compile.subclasses import unwrapped
from ..compile.trace import Trace
from ..errors import KVPassError, NotCapturedError, NotSimulatedError
from ..layout.window import layout
from ..models.arguments import keeping
from ..models.probe import full_attention, probe
from ..schemes import LayerGeometry, SchemeConfig, geometries
from ..schemes.calibrated import Calibration
from ..schemes.geometry import Held
from .runtime import Runtime

_CHUNK = 256  # queries per chunk: scores are [B, H_q, 256, T]


class Observer:
    """Sees every simulated attention, layer by layer, within `observed`."""

    def layer(self, q: Tensor, k: Tensor, v: Tensor, keys: KVState, values: KVState, prompt: int) -> None:
        """Called before the attention of a layer. Shapes are those of `simulate`; ``keys`` and ``values`` have stored
        all tokens."""

    def queries(self, first: int, exact: Tensor, weights: Tensor, out: Tensor, wanted: Tensor, packed: Tensor) -> None:
        """Called for the queries of a layer from ``first`` on, some at a time.

        exact, weights: attention weights over exact keys, and as simulated, ``[B, H_q, S, T]``.
        out, wanted: attention output as simulated, and with exact keys and values, ``[B, H_q, S, D]``.
        packed: ``[S, T]`` bool, the keys that are read from a page.
        """


_OBSERVERS: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """A context in which ``observer`` sees every simulated attention of this process."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


@torch.library.custom_op("kvpass::simulate", mutates_args=())
def simulate(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None,
    before: list[Tensor], rope: str, k_spec: str, v_spec: str, prompt: int, k_shared: list[Tensor],
    v_shared: list[Tensor],
) -> Tensor:  # fmt: skip
    """Causal attention of ``q`` ``[B, H_q, T, D]`` over ``k``, ``v`` ``[B, H_kv, T, D]``, packed by their specs.

    The first ``prompt`` tokens arrive together, the others one by one. ``mask``, if there is one, is itself causal.

    before: if keys are not stored as rotated, the queries and keys before rotary embedding, and its tables cos and sin
        ``[B, T, p]`` for ``rope`` (`codec.rope`).
    k_shared, v_shared: calibrated tensors of the layer, for specs whose bits a calibration allocates.
    """
    specs, tokens, repeats = (parse(k_spec), parse(v_spec)), k.shape[2], q.shape[1] // k.shape[1]
    seen_by, stored, *tables = before or [q, k]
    rotary, page_rope = (tables[0], tables[1], rope) if tables else None, specs[0].transform.page_rope
    if page_rope:  # stored after rotary embedding, which is undone page by page
        seen_by, stored = q, k
    keys = _stored(stored, specs[0], seen_by, prompt, rotary, shared=k_shared)
    values = _stored(v, specs[1], q, prompt, same_layer_keys=keys, shared=v_shared)
    k_stored, v_stored = keys.dequantize(tokens), values.dequantize(tokens)
    if rotary is not None and not page_rope:
        k_stored = rotate(k_stored, *rotary)
    for observer in _OBSERVERS:
        observer.layer(q, k, v, keys, values, prompt)
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v, k_stored, v_stored = (x.repeat_interleave(repeats, 1).to(dtype) for x in (k, v, k_stored, v_stored))
    k_packed, v_packed = (_packed(spec, tokens, prompt).to(q.device) for spec in specs)
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril() if mask is None else None
    chunks = []
    for start in range(0, tokens, _CHUNK):
        stop = min(start + _CHUNK, tokens)  # causal: no query sees later keys
        part, seen = slice(start, stop), slice(0, stop)
        scores = _scores(q[:, :, part].to(dtype) * scale, k[:, :, seen], k_stored[:, :, seen], k_packed[part, seen])
        allowed = causal[part, seen] if mask is None else mask[..., part, seen]
        weights = attention_weights(scores, allowed, softcap, sinks)[..., :stop]
        chunks.append(_sum(weights, v[:, :, seen], v_stored[:, :, seen], v_packed[part, seen]))
        for observer in _OBSERVERS:
            plain = q[:, :, part].to(dtype) * scale @ k[:, :, seen].mT
            exact = attention_weights(plain, allowed, softcap, sinks)[..., :stop]
            observer.queries(start, exact, weights, chunks[-1], exact @ v[:, :, seen], k_packed[part, seen])
    return torch.cat(chunks, 2).to(q.dtype)


def _scores(q: Tensor, k: Tensor, k_stored: Tensor, packed: Tensor) -> Tensor:
    """The product of ``q`` ``[B, H, S, D]`` and the keys ``[B, H, T, D]``, ``[B, H, S, T]``. ``packed`` ``[S, T]`` says
    where a query sees the stored key ``k_stored`` instead of the exact ``k``."""
    if not packed.any():
        return q @ k.mT
    scores, exact = q @ k_stored.mT, (~packed).any(0).nonzero()[:, 0]
    scores[..., exact] = torch.where(packed[:, exact], scores[..., exact], q @ k[:, :, exact].mT)
    return scores


def _sum(weights: Tensor, v: Tensor, v_stored: Tensor, packed: Tensor) -> Tensor:
    """Like `_scores`, for values: ``weights`` ``[B, H, S, T]`` -> ``[B, H, S, D]``."""
    if not packed.any():
        return weights @ v
    exact = (~packed).any(0).nonzero()[:, 0]
    return (weights * packed) @ v_stored + (weights[..., exact] * ~packed[:, exact]) @ v[:, :, exact]


@simulate.register_fake
def _(q, k, v, mask, scale, softcap, sinks, before, rope, k_spec, v_spec, prompt, k_shared, v_shared):
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _stored(
    x: Tensor,
    spec: CodecSpec,
    q: Tensor,
    prompt: int,
    rotary: tuple[Tensor, Tensor, str] | None = None,
    same_layer_keys: KVState | None = None,
    shared: Sequence[Tensor] = (),
) -> KVState:
    """A state that has stored all of ``x``.

    rotary: tables and kind of rotary embedding, for keys with page-relative RoPE.
    same_layer_keys: the state of the keys, for values.
    shared: calibrated tensors of the layer. For keys with page-relative RoPE by token numbers, the angles come first.
    """
    batch, heads, tokens, head_dim = x.shape
    pages, fits_subspace = spec.retention.pages, spec.quantizer.subspace is not None
    first = prompt if prompt or not fits_subspace else tokens  # fitting a subspace without a prompt takes all tokens
    if not pages(first):  # the mean is taken over the first page, if pages arrive one by one
        first = next((n for n in range(max(1, first), tokens) if pages(n)), tokens)
    angles, shared = (shared[0], shared[1:]) if spec.transform.numbered else (None, shared)
    tensors = SharedTensors(shared)
    state = KVState.allocate(spec, batch, heads, head_dim, x.dtype, x.device, tokens, shared=tensors)
    rope = ""
    if spec.quantizer.follows_keys:
        state.same_layer_keys = same_layer_keys
    if angles is not None:
        state.rotary = RotaryState(spec, batch, head_dim, x.dtype, x.device, tokens, angles)
        rope = spec.transform.numbered
    elif rotary is not None and spec.transform.page_rope:
        state.rotary = RotaryState.of(spec, *(table.expand(batch, -1, -1) for table in rotary[:2]))
        rope = rotary[2]
    state.append(x[:, :, :first], 0, q[:, :, : prompt or tokens] if spec.quantizer.needs_queries else None, rope=rope)
    if first < tokens:
        state.append(x[:, :, first:], first, rope=rope)
    return state


def _packed(spec: CodecSpec, tokens: int, prompt: int) -> Tensor:
    """Whether the query of token ``t`` reads token ``j`` from a page, ``[T, T]``."""
    pages = spec.retention.pages(tokens)
    of_token = torch.full((tokens,), pages)
    of_token[layout(spec.retention).page_tokens(0, pages)] = torch.arange(pages).repeat_interleave(spec.page_size)
    seen = torch.tensor([spec.retention.pages(t) if t >= prompt else 0 for t in range(tokens)])
    return of_token < seen[:, None]


def scout(model: nn.Module, arguments: dict) -> dict[int, LayerGeometry | str]:
    """The causal self-attentions of ``model``, in graph order. Raises `KVPassError` if there is none."""
    held: list[Held | str] = []
    refused: list[str] = []

    def look(gm: GraphModule, inputs):
        attentions, reasons = find_unpacked(normalise(unwrapped(gm)).graph)
        refused.extend(reasons)
        held.extend(Held(*(side.present.meta["val"] for side in (one.key, one.value))) for one in attentions)
        return gm.forward

    try:
        with torch.no_grad():
            torch.compile(lambda **kwargs: model(**kwargs), backend=look, fullgraph=True)(**arguments)
    except FAILURES as error:
        reason = translated(error)
        if type(reason) is not NotCapturedError:
            raise reason from None
        raise KVPassError(
            f"{type(model).__name__} has no cache, and to simulate one, kvpass must capture its forward as one graph: "
            f"{reason}. Pass example_inputs of a decoder that keeps a cache."
        ) from error
    if not held or refused:
        reasons = listed(refused) or "no causal attention over its own tokens"
        raise KVPassError(f"No packable attention found in {type(model).__name__}: {reasons}.")
    return geometries(held)


_SIMULATE, _SHARED = torch.ops.kvpass.simulate.default, "kvpass_shared_"


class StoredAs(NamedTuple):
    """How a layer is stored: its specs as text, and its calibrated tensors."""

    key: str
    value: str
    key_tensors: list[Tensor]
    value_tensors: list[Tensor]


class SimulatedRuntime(Runtime):
    """For a decoder without a cache: the same forward, with attention as over a packed cache."""

    def __init__(self, model: nn.Module, scheme: SchemeConfig, layers, *, prompt: int = 0, **options):
        super().__init__(model, scheme, layers, **options)
        self.prompt = prompt
        self.simulations: list[Simulation] = []
        if why := unsupported(self):
            raise NotSimulatedError(
                f"{scheme.name!r} cannot be simulated in one pass: {why}. Use a decoder with a cache."
            )
        self.report.simulated = True

    def _backend(self, **options) -> Backend:
        self.simulations.append(Simulation(**options, stored=self.stored, prompt=self.prompt))
        return self.simulations[-1]

    @property
    def stored(self) -> list[StoredAs]:
        """How keys and values of each packed layer are stored."""
        shared: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = dict(self.predictors)
        return [
            StoredAs(str(plan.key), str(plan.value), *map(list, shared.get(index, ((), ()))))
            for index, (plan, _) in self.plans.items()
        ]

    def become(self, other: SimulatedRuntime) -> None:
        """From now on simulate the scheme of ``other``, a runtime of the same model, with the graph captured here."""
        for simulation in self.simulations:
            simulation.become(other.stored, other.prompt)

    def forward(self, *args, **kwargs):
        with torch.no_grad():
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[1] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 1)
            try:
                return self.captured(*args, **kwargs)
            except NotCapturedError as error:
                what = f"the forward of {type(self.model()).__name__}"
                raise self._refusal(error, what) from (error.__cause__ or error)


class Simulator:
    """Scores texts in one pass.

    The forward of a transformers decoder is captured once for all schemes, and once more for schemes that store keys
    before rotary embedding.

    Raises `NotSimulatedError` for models with other kinds of layers.
    """

    def __init__(self, model: nn.Module):
        self.model, self.layers = model, full_attention(probe(model))
        if reasons := {layer for layer in self.layers.values() if isinstance(layer, str)}:
            raise NotSimulatedError(
                f"kvpass does not pack every layer of {type(model).__name__}: {'; '.join(sorted(reasons))}."
            )
        self.captured: dict[bool, SimulatedRuntime] = {}  # key: whether keys are stored before rotary embedding

    @torch.no_grad()
    def logits(self, ids: Tensor, prompt: int, scheme: SchemeConfig | Calibration) -> Tensor:
        """Logits ``[S - prompt, V]`` after each token of ``ids`` ``[1, S]`` that follows the prompt, from one forward.
        They equal those of decoding token by token through a cache packed by ``scheme``.

        Raises `NotSimulatedError` for schemes that cannot be simulated in one pass, and for models whose attention is
        not all found in one graph.
        """
        fitted = scheme.predictors if isinstance(scheme, Calibration) else {}
        options = dict(strict=True, lowering="auto", max_cache_len=None, predictors=fitted)
        config = scheme.scheme if isinstance(scheme, Calibration) else scheme
        runtime = SimulatedRuntime(self.model, config, self.layers, prompt=prompt, **options)
        if runtime.needs_rotation not in self.captured:
            self.captured[runtime.needs_rotation] = runtime
            runtime.prepare()
        captured = self.captured[runtime.needs_rotation]
        captured.become(runtime)
        scored = ids.shape[1] - prompt
        with captured.attention:
            return captured.forward(input_ids=ids, use_cache=False, **keeping(self.model, scored)).logits[0, -scored:]


def unsupported(runtime: Runtime) -> str:
    """Why a scheme cannot be simulated in one pass; empty if it can."""
    plans = [plan for plan, _ in runtime.plans.values()]
    if any(plan.key_source is not None or plan.value_source is not None for plan in plans):
        return "layers share quantized values"
    if runtime.needs_importance or any(plan.adaptive for plan in plans):
        return "what is stored depends on attention scores"
    if any(plan.calibrated for plan in plans):
        return "its quantization grid is calibrated"
    return "each layer is predicted from the one below" if runtime.looks_at_previous else ""


class Simulation(Backend):
    """A backend that replaces every causal attention by `simulate` and runs the graph without Inductor."""

    def __init__(self, *, stored: list[StoredAs], prompt: int, **options):
        super().__init__(**options)
        self.stored, self.prompt = stored, prompt
        self.modules: list[GraphModule] = []

    def _compile(self, gm: GraphModule, example_inputs, trace: Trace):
        normal = normalise(gm)
        trace.stage("normalised", normal.module)
        attentions, refused = find_unpacked(normal.graph)
        trace.stage("found", normal.module, attentions, refused)
        if len(attentions) != len(self.stored) or refused:
            reasons = listed(refused) or "its control flow depends on the inputs"
            raise NotSimulatedError(
                f"This call has {len(attentions)} causal attentions, but kvpass.apply found {len(self.stored)}: "
                f"{reasons}."
            )
        specs = [(of.key, of.value) for of in self.stored]
        module = simulate_attention(normal, example_inputs, attentions, specs, self.prompt)
        self._store(module)
        trace.stage("rewritten", module)
        self.modules.append(module)
        trace.report = GraphReport(len(attentions), 0, 0, 0, [], compiled=False)
        self.graphs.append(trace.report)
        return lambda *inputs: module.forward(*inputs)  # a lambda, because `become` compiles it again

    def become(self, stored: list[StoredAs], prompt: int) -> None:
        """Simulate another storage, in existing graphs and in later ones."""
        self.stored, self.prompt = stored, prompt
        for module in self.modules:
            self._store(module)

    def _store(self, module: GraphModule) -> None:
        """Make the attentions of ``module`` use the current storage of keys and values."""
        graph, nodes = module.graph, module.graph.find_nodes(op="call_function", target=_SIMULATE)
        before = [node for node in graph.find_nodes(op="get_attr") if node.target.startswith(_SHARED)]
        for layer, (node, of) in enumerate(zip(nodes, self.stored, strict=True)):
            shared: dict[str, list[Node]] = {"k_shared": [], "v_shared": []}
            for (name, given), tensors in zip(shared.items(), (of.key_tensors, of.value_tensors), strict=True):
                for i, tensor in enumerate(tensors):
                    module.register_buffer(attribute := f"{_SHARED}{layer}_{name}_{i}", tensor, persistent=False)
                    with graph.inserting_before(node):
                        given.append(graph.get_attr(attribute))
            change(node, k_spec=of.key, v_spec=of.value, prompt=self.prompt, **shared)
        for node in before:
            graph.erase_node(node)
        module.recompile()
