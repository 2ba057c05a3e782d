"""Defines the ``kvpass::*`` ops: their schemas and semantics. Implementations are in `kvpass.lowering`.

A state is passed as a list of tensors, whose names and order `kvpass.codec.tensors.of_state` gives for its `CodecSpec`.
These are the page tensors (pools or, in graphs, handles of pools; see `kvpass.layout.pool`), the ring and the fitted
tensors. The length tensor of the cache (`kvpass.layout.window.LENGTH_OFFSET`) and the text of the spec are
separate arguments.

quantize     Quantize whole pages of ``x`` and return their page tensors. ``fitted`` holds the tensors that the codec
             was fitted to. Pure.
append_      Store ``x`` after the ``length`` tokens already stored, and pack the pages that leave the window. Some
             codecs need ``q`` and ``mask`` (SQuat: the prompt's queries, and which of them are padding). With a budget,
             ``importance`` and the ``scores`` of this call determine which tokens are evicted, and ``slots`` passes the
             decision to appends without ``importance``.
append_layers_  `append_` for the keys, or the values, of several independent layers on one device. ``states`` is the
             concatenation of their states, and ``keys`` of theirs; ``q`` has one tensor per layer.
dequantize   Return all stored tokens, ``[B, H_kv, n, D]``, in token order. ``starts`` is not used here: it is for the
             ``attend`` that a graph pass substitutes.
attend       Attention of ``q`` over the stored past and the full-precision tokens of the call, ``k_new`` and ``v_new``.
             ``key`` and ``value`` are the past: a state each, or one tensor that is already dequantized because another
             layer needs it. ``causal`` is aligned to the end of the keys. ``softcap`` 0 means none. ``sinks`` ``[H_q]``
             are logits that join the softmax of each head without a value. Returns the output and, with a
             ``statistic``, the attention mass of each token, ``[B, H_kv, n + S]`` float32, over the query heads of its
             KV head: the "sum" over queries that are not padding, or the largest weight over the last N of them
             ("max-N"). ``starts`` ``[B]`` int64 is the number of left-padding tokens of each sample, which no query
             sees; it replaces a mask. ``latent``: the keys are ``cat([key, value], -1)`` and the values are ``key``,
             so that the output has its channels (MLA). ``with_lse`` also returns, as the last output, the log-sum-exp
             of the scores of each query, ``[B, H_q, S]`` float32, by which outputs over several caches are combined;
             -inf for a query that sees nothing. With eviction, only the columns of ``mask`` for the tokens of
             the call are used, and padding in the past has ``importance`` ``-inf``. With a ``span`` in the specs (a
             sliding window), the stored tokens that are behind the window of the first query are hidden, whatever the
             mask says.
rotate       Apply rotary embedding to dequantized keys that are stored before it (`codec.rope`), with tables ``cos``,
             ``sin`` ``[B, >= n, p]``. ``rope`` describes the rotation; "" means none.
append_rotary_  Store the rotary tables ``[B or 1, S, p]`` of the call after those already stored. With ``slots``, drop
             the rows of tokens that ``spec`` evicts in this call. For keys with page-relative RoPE, store the tables of
             `codec.page_rope` instead.

Keys with page-relative RoPE are appended, dequantized and attended to with their tables ``cos``, ``sin`` and their
``rope``. `append_rotary_` has to run first.

Values that reuse the token selection of their keys (`codec.token_ranks`) are appended with ``keys``: the first page
tensor of the keys, or its handle, and the tensors that `Codec.from_keys` names. The keys have to be appended first.

Specs with per-token bit widths (`codec.adaptive`) dequantize with ``planes``: one tensor with the bit planes of all
states, and the places of this state's planes. Their ``append_`` writes the tokens that leave the window to
``originals``. The cache quantizes them when the forward is over.

Predictors (`codec.predictor`) take a list of weights, ``predictor``, and dequantized tokens ``[B, H_kv, n, D]``:
``previous_layer`` and, for values, ``same_layer_keys``. ``append_`` gets only the tokens that leave the window: on
entry ``edge`` holds the dequantized tokens of the layer below, on return the dequantized tokens of this layer.
Tokens of several layers are side by side as heads (`codec.predictor.with_below`).

``lowering`` names the implementation; "auto" selects one (`kvpass.lowering.table`). The implementation receives all
arguments as one object (`kvpass.lowering.call_types`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.lowering import inductor, reference, triton  # noqa: F401  (registers ops)
from kvpass.lowering.call_types import AppendCall, AppendLayersCall, AttendCall, DequantizeCall
from kvpass.lowering.cpp import (  # noqa: F401  (registers ops)
    dequantize_allocated,
    few_tokens,
    quantize_allocated,
    quantize_grid,
    quantize_lattice,
)
from kvpass.lowering.table import AUTO, DispatchKey, attention_key, extras, select
from kvpass.lowering.window_mask import within_window

from .codec.affine import check_finite
from .codec.page_rope import PageTables, store_page_tables
from .codec.rope import rotate
from .codec.spec import CodecSpec, parse
from .codec.tensors import Pack, page_shapes
from .errors import KVPassError
from .layout.eviction import evict
from .layout.pool import of_pages
from .layout.window import length_of, offset_of

_Tensors = Sequence[Tensor]

_library = torch.library.Library("kvpass", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OF_A_LENGTH = (*_TAGS, torch.Tag.cudagraph_unsafe)  # sizes grow with the cache and are read on the host

_library.define('quantize(Tensor x, Tensor[] fitted, str spec, str lowering="auto") -> Tensor[]', tags=_TAGS)
_library.define(
    "append_(Tensor(a!)[] state, Tensor length, Tensor x, Tensor? q, Tensor? mask, str spec, "
    'str lowering="auto", Tensor(b!)? edge=None, Tensor? same_layer_keys=None, Tensor[]? predictor=None, '
    "Tensor(c!)? importance=None, Tensor[]? scores=None, Tensor(d!)? slots=None, Tensor(e!)? originals=None, "
    'Tensor? cos=None, Tensor? sin=None, str rope="", Tensor[]? keys=None) -> ()',
    tags=_OF_A_LENGTH,
)
_library.define(
    'append_layers_(Tensor(a!)[] states, Tensor length, Tensor[] x, str spec, str lowering="auto", Tensor[]? q=None, '
    'Tensor? mask=None, Tensor? cos=None, Tensor? sin=None, str rope="", Tensor[]? keys=None) -> ()',
    tags=_OF_A_LENGTH,
)
_library.define(
    'dequantize(Tensor[] state, Tensor length, str spec, str lowering="auto", Tensor? previous_layer=None, '
    "Tensor? same_layer_keys=None, Tensor[]? predictor=None, Tensor[]? planes=None, Tensor? cos=None, "
    'Tensor? sin=None, str rope="", Tensor? starts=None) -> Tensor',
    tags=_OF_A_LENGTH,
)
_library.define("rotate(Tensor x, Tensor cos, Tensor sin, str rope) -> Tensor", tags=_OF_A_LENGTH)
_library.define(
    "attend(Tensor q, Tensor[] key, Tensor[] value, Tensor length, Tensor k_new, Tensor v_new, Tensor? mask, "
    'bool causal, float scale, float softcap, str k_spec, str v_spec, str lowering="auto", *, Tensor? cos=None, '
    'Tensor? sin=None, str rope="", Tensor? sinks=None, str statistic="", Tensor? importance=None, '
    "Tensor? starts=None, bool latent=False, bool with_lse=False) -> Tensor[]",
    tags=_OF_A_LENGTH,
)
_library.define(
    "append_rotary_(Tensor(a!) cos, Tensor(b!) sin, Tensor length, Tensor cos_new, Tensor sin_new, "
    'Tensor? slots=None, str spec="") -> ()',
    tags=_OF_A_LENGTH,
)


def _quantize(x: Tensor, fitted: _Tensors, spec: str, lowering: str = "auto") -> list[Tensor]:
    parsed = parse(spec)
    if x.shape[-2] % parsed.page_size:
        raise KVPassError(f"quantize takes whole pages of {parsed.page_size} tokens; got {x.shape[-2]} tokens.")
    parsed.check(x.shape[-1])
    if parsed.quantizer.adaptive is not None:
        raise KVPassError(
            "Only a cache can quantize with a bit width per token: it needs attention scores, which this op does not "
            "take."
        )
    dispatch = DispatchKey("quantize", x.device.type, (spec,), head_dim=x.shape[-1])
    kept = select(dispatch, lowering).run(x, fitted, parsed)
    if x.device.type == "cpu":
        check_finite(*kept[1:])
    return list(kept)


def _append_(
    state: _Tensors, length: Tensor, x: Tensor, q: Tensor | None, mask: Tensor | None, spec: str,
    lowering: str = "auto", edge: Tensor | None = None, same_layer_keys: Tensor | None = None,
    predictor: _Tensors | None = None, importance: Tensor | None = None, scores: _Tensors | None = None,
    slots: Tensor | None = None, originals: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    rope: str = "", keys: _Tensors | None = None,
) -> None:  # fmt: skip
    dispatch, parsed = DispatchKey("append_", x.device.type, (spec,), head_dim=x.shape[-1]), parse(spec)
    pack = _with_page_tables(_opened(state, parsed).beside(keys or (), parsed), parsed, cos, sin, rope)
    call = AppendCall(
        pack, _stored(length, parsed), x, parsed, length, q, mask, edge, same_layer_keys, predictor or (), importance,
        scores or (), slots, originals,
    )  # fmt: skip
    select(dispatch, lowering).run(call)


def _stored(length: Tensor, spec: CodecSpec) -> int:
    """The number of tokens stored by a state with ``spec``, from its length tensor."""
    return length_of(length, offset_of(spec.retention))


def _opened(state: _Tensors, spec: CodecSpec) -> Pack:
    """The `Pack` of ``state``. If a page holds all heads of a layer, handles are replaced by pools, because a handle
    does not know the page size."""
    pack = Pack.of(state, spec)
    if not spec.codec.whole_layer:
        return pack
    _, heads, _, head_dim = pack.ring.shape
    size = spec.codec.page_bytes(pack.fitted, heads, head_dim, spec)
    return pack._replace(pools=tuple(of_pages(pool, len(pack.ring), size) for pool in pack.pools))


def _with_page_tables(pack: Pack, spec: CodecSpec, cos: Tensor | None, sin: Tensor | None, rope: str) -> Pack:
    """``pack`` with the rotary tables of its pages, if its keys have page-relative RoPE."""
    if not spec.transform.page_rope or not rope:
        return pack
    if cos is None or sin is None:
        raise KVPassError("Keys with page-relative RoPE need the rotary tables: pass cos and sin.")
    return pack._replace(page_tables=PageTables(cos, sin, rope))


def _append_layers_(
    states: _Tensors, length: Tensor, x: _Tensors, spec: str, lowering: str = "auto", q: _Tensors | None = None,
    mask: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, rope: str = "",
    keys: _Tensors | None = None,
) -> None:  # fmt: skip
    run = select(DispatchKey("append_layers_", x[0].device.type, (spec,), head_dim=x[0].shape[-1]), lowering).run
    parsed, each = parse(spec), len(states) // len(x)
    parts = (states[i : i + each] for i in range(0, len(states), each))
    packs = [_with_page_tables(_opened(part, parsed), parsed, cos, sin, rope) for part in parts]
    if keys:
        of_each = len(keys) // len(x)
        packs = [pack.beside(keys[i * of_each : (i + 1) * of_each], parsed) for i, pack in enumerate(packs)]
    run(AppendLayersCall(packs, _stored(length, parsed), x, parsed, length, q, mask))


def _dequantize(
    state: _Tensors, length: Tensor, spec: str, lowering: str = "auto", previous_layer: Tensor | None = None,
    same_layer_keys: Tensor | None = None, predictor: _Tensors | None = None, planes: _Tensors | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, rope: str = "", starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    parsed = parse(spec)
    pack = _with_page_tables(_opened(state, parsed)._replace(planes=planes or ()), parsed, cos, sin, rope)
    run = select(DispatchKey("dequantize", pack.ring.device.type, (spec,), head_dim=pack.ring.shape[-1]), lowering).run
    references = [one for one in (previous_layer, same_layer_keys) if one is not None]
    decoded: Tensor = run(DequantizeCall(pack, _stored(length, parsed), parsed, references, predictor or ()))
    return decoded


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    return rotate(x, cos, sin, rope) if rope else x.clone()


def _attend(
    q: Tensor, key: _Tensors, value: _Tensors, length: Tensor, k_new: Tensor, v_new: Tensor, mask: Tensor | None,
    causal: bool, scale: float, softcap: float, k_spec: str, v_spec: str, lowering: str = "auto", *,
    cos: Tensor | None = None, sin: Tensor | None = None, rope: str = "", sinks: Tensor | None = None,
    statistic: str = "", importance: Tensor | None = None, starts: Tensor | None = None, latent: bool = False,
    with_lse: bool = False,
) -> list[Tensor]:  # fmt: skip
    if causal and mask is not None:
        raise KVPassError("attend takes a mask or causal=True, not both.")
    if starts is not None and (mask is not None or statistic):
        raise KVPassError("attend takes starts or a mask, not both, and returns no attention mass with starts.")
    specs, coded = (parse(k_spec), parse(v_spec)), [k_spec, v_spec]
    keys: Pack | Tensor
    values: Pack | Tensor
    if len(key) == 1:
        keys, values, coded, lowering, ring = key[0], value[0], [], AUTO, key[0]
    else:
        keys, values = _with_page_tables(_opened(key, specs[0]), specs[0], cos, sin, rope), _opened(value, specs[1])
        ring = keys.ring
        if rope and not specs[0].transform.keeps_tables:
            raise KVPassError(f"These keys are stored after rotary embedding; rope={rope!r} would rotate them twice.")
    rotary: tuple[Any, Any, str] | None = (cos, sin, rope) if rope and not specs[0].transform.page_rope else None
    n, span = _stored(length, specs[0]), specs[0].retention.span
    if span is not None:
        specs = specs[0].unbounded, specs[1].unbounded
        coded = list(map(str, specs)) if coded else coded
        mask, causal, starts = within_window(span, n, q, mask, causal, starts, length)
    used = extras(mask, starts, rotary, sinks, softcap, statistic, k_new, v_new, latent, with_lse)
    run = select(attention_key(q, ring, coded, q.shape[2], used), lowering).run
    call = AttendCall(
        q, keys, values, n, k_new, v_new, mask, causal, scale, softcap, specs[0], specs[1], rotary, sinks, statistic,
        importance, length, starts, latent, with_lse,
    )  # fmt: skip
    outputs: list[Tensor] = run(call)
    return outputs


def _append_rotary_(
    cos: Tensor, sin: Tensor, length: Tensor, cos_new: Tensor, sin_new: Tensor, slots: Tensor | None = None,
    spec: str = "",
) -> None:  # fmt: skip
    (_, tokens, pairs), codec = cos_new.shape, parse(spec) if spec else None
    start = length_of(length) if codec is None else _stored(length, codec)
    if codec is not None and codec.transform.page_rope:
        store_page_tables((cos, sin), (cos_new, sin_new), length, start, codec.retention.sinks, codec.page_size)
        return
    rows = length[:1] + torch.arange(tokens, device=cos.device)  # read on the device, for captured calls
    for table, new in ((cos, cos_new), (sin, sin_new)):
        table[..., :pairs].index_copy_(1, rows, new.expand(len(table), -1, -1))
    if codec is not None and slots is not None and (gone := codec.retention.evicted(start + tokens)):
        for table in (cos, sin):
            kept = evict(table[:, None, : start + tokens], slots, gone, codec.retention)[:, 0]
            table[:, : kept.shape[1]] = kept


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "quantize": _quantize, "append_": _append_, "append_layers_": _append_layers_, "dequantize": _dequantize,
    "rotate": _rotate, "attend": _attend, "append_rotary_": _append_rotary_,
}  # fmt: skip


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run`` to disable autocast, which would change the dtypes of its arithmetic."""

    @functools.wraps(run)
    def call(first: Tensor | _Tensors, *args: Any, **kwargs: Any) -> Any:
        device = (first if isinstance(first, Tensor) else first[0]).device.type
        if not torch.is_autocast_enabled(device):
            return run(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return run(first, *args, **kwargs)

    return call


for _name, _run in _IMPLEMENTATIONS.items():
    _library.impl(_name, _without_autocast(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("kvpass::quantize")
def _(x: Tensor, fitted: _Tensors, spec: str, lowering: str = "auto") -> list[Tensor]:
    parsed, (*lead, tokens, head_dim) = parse(spec), x.shape
    pages = tokens // parsed.page_size
    kept = page_shapes(parsed, head_dim, x.dtype).values()
    return [x.new_empty((*lead, pages, *shape), dtype=dtype) for shape, dtype in kept]


@torch.library.register_fake("kvpass::append_")
def _(*args: Any, **kwargs: Any) -> None:
    return None


@torch.library.register_fake("kvpass::append_layers_")
def _(*args: Any, **kwargs: Any) -> None:
    return None


@torch.library.register_fake("kvpass::append_rotary_")
def _(*args: Any, **kwargs: Any) -> None:
    return None


@torch.library.register_fake("kvpass::dequantize")
def _(state: _Tensors, length: Tensor, spec: str, *args: Any, **kwargs: Any) -> Tensor:
    parsed = parse(spec)
    ring = Pack.of(state, parsed).ring
    return ring.new_empty((*ring.shape[:2], _stored(length, parsed), ring.shape[3]))


@torch.library.register_fake("kvpass::rotate")
def _(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("kvpass::attend")
def _(
    q: Tensor, key: _Tensors, value: _Tensors, length: Tensor, k_new: Tensor, v_new: Tensor, *args: Any,
    statistic: str = "", latent: bool = False, with_lse: bool = False, **kwargs: Any,
) -> list[Tensor]:  # fmt: skip
    returned = [q.new_empty((*q.shape[:3], (k_new if latent else v_new).shape[3]))]
    if statistic:
        tokens = length_of(length) + k_new.shape[2]
        returned.append(q.new_empty((*k_new.shape[:2], tokens), dtype=torch.float32))
    if with_lse:
        returned.append(q.new_empty(q.shape[:3], dtype=torch.float32))
    return returned
