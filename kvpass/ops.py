"""Schemas of the ``kvpass::*`` ops. Semantics live here, implementations in `kvpass.lowering`.

A packed tensor is ``codes, scale, zero_point, ring`` plus the length carrier of its cache (see
`kvpass.layout.window.LENGTH_OFFSET`) and the text of its `CodecSpec`. The first three are pools or, in graphs, handles
of pools (`kvpass.layout.pool`), which implementations open when they have to.

encode       whole pages of ``x`` -> codes, scale, zero point. Pure.
append_      store ``x`` behind the ``length`` tokens already there and pack the pages that leave the window. ``q`` and
             ``mask`` are taps a codec may ask for (SQuat: the prompt's queries and who of them is padding). With a
             budget, ``importance`` and the ``scores`` of this call choose who is evicted, and ``slots`` hands the
             choice on to appends that are given no ``importance``.
append_layers_  the same for the keys, or the values, of many layers of one device, whose codec looks at nothing else.
decode       every stored token as ``[B, H_kv, n, D]`` in token order.
attend       attention of ``q`` over the stored past and the full-precision present ``k_new``, ``v_new``. ``causal``
             is aligned to the end of the keys. ``softcap`` 0 means none. ``sinks`` ``[H_q]`` are logits that take part
             in the softmax of each head and have no value.
attend_decoded  the same over a past that is decoded already, because the next layer needs it.
attend_scored   either of them, and what attention each token was paid, ``[B, H_kv, n + S]`` float32, over the query
             heads of a KV head: the "sum" over queries that are not padding, the largest weight over the last N of
             them ("max-N"), or nothing ("", ``[B, H_kv, 0]``). ``key`` and ``value`` are codes, scale, zero point and
             ring, or one decoded tensor. Where tokens are evicted, columns of ``mask`` count for the present only, and
             padding of the past has ``importance`` ``-inf``.
rotate       rotary embedding of decoded keys that are stored as they were before it (`codec.rope`): by tables
             ``cos``, ``sin`` ``[B, >= n, p]``, as ``rope`` says; "" leaves them as they are.
append_rotary_  store rotary tables ``[B or 1, S, p]`` of the present behind those already there; with ``slots``, drop
             those of tokens that ``spec`` has evicted in this call.

Specs with a width for every token (`codec.adaptive`) decode with side tables, handed over as ``predictor``. Their
``append_`` leaves the tokens that are due in ``edge``, and the cache codes them when the forward is over.

Predictors (`codec.predictor`) take ``predictor``, a list of weights, and look at reconstructions ``[B, H_kv, n, D]``:
that of the layer ``below``, and for values that of this layer's keys, ``beside``. An ``append_`` sees both for the
tokens that leave the window only: ``edge`` holds the layer below's and is overwritten with this one's. A mean is kept
in ``center``.

``lowering`` names the implementation ("auto" picks; see `kvpass.lowering.table`).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.lowering import inductor, reference, triton  # noqa: F401  (they register themselves)
from kvpass.lowering.table import Site, few, select

from .codec.affine import check_finite, params_dtype
from .codec.rope import rotate
from .codec.spec import parse
from .errors import KVPassError
from .layout.eviction import evict
from .layout.window import length_of

_library = torch.library.Library("kvpass", "DEF")
_STATE = "Tensor codes, Tensor scale, Tensor zero_point, Tensor ring"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OF_A_LENGTH = (*_TAGS, torch.Tag.cudagraph_unsafe)  # its sizes grow with the cache, and are read on the host

_library.define(
    'encode(Tensor x, Tensor? compensation, str spec, str lowering="auto") -> (Tensor, Tensor, Tensor)', tags=_TAGS
)
_library.define(
    "append_(Tensor(a!) codes, Tensor(b!) scale, Tensor(c!) zero_point, Tensor(d!) ring, Tensor(e!)? compensation, "
    'Tensor length, Tensor x, Tensor? q, Tensor? mask, str spec, str lowering="auto", Tensor(f!)? edge=None, '
    "Tensor? beside=None, Tensor[]? predictor=None, Tensor(g!)? center=None, Tensor(h!)? importance=None, "
    "Tensor[]? scores=None, Tensor(i!)? slots=None) -> ()",
    tags=_OF_A_LENGTH,
)
_library.define(
    "append_layers_(Tensor(a!)[] codes, Tensor(b!)[] scale, Tensor(c!)[] zero_point, Tensor(d!)[] ring, Tensor length, "
    'Tensor[] x, str spec, str lowering="auto") -> ()',
    tags=_OF_A_LENGTH,
)
_library.define(
    f'decode({_STATE}, Tensor length, str spec, str lowering="auto", Tensor? below=None, Tensor? beside=None, '
    "Tensor[]? predictor=None) -> Tensor",
    tags=_OF_A_LENGTH,
)
_library.define("rotate(Tensor x, Tensor cos, Tensor sin, str rope) -> Tensor", tags=_OF_A_LENGTH)
_ROTARY = 'Tensor? cos=None, Tensor? sin=None, str rope=""'
_library.define(
    "attend(Tensor q, Tensor k_codes, Tensor k_scale, Tensor k_zero_point, Tensor k_ring, Tensor v_codes, "
    "Tensor v_scale, Tensor v_zero_point, Tensor v_ring, Tensor length, Tensor k_new, Tensor v_new, Tensor? mask, "
    f'bool causal, float scale, float softcap, str k_spec, str v_spec, str lowering="auto", *, {_ROTARY}, '
    "Tensor? sinks=None, Tensor? center=None) -> Tensor",
    tags=_OF_A_LENGTH,
)
_library.define(
    "attend_decoded(Tensor q, Tensor k_past, Tensor v_past, Tensor k_new, Tensor v_new, Tensor? mask, bool causal, "
    f'float scale, float softcap, str lowering="auto", *, {_ROTARY}, Tensor? sinks=None) -> Tensor',
    tags=_OF_A_LENGTH,
)
_library.define(
    "attend_scored(Tensor q, Tensor[] key, Tensor[] value, Tensor length, Tensor k_new, Tensor v_new, Tensor? mask, "
    "bool causal, float scale, float softcap, str k_spec, str v_spec, str statistic, Tensor importance, "
    f'str lowering="auto", *, {_ROTARY}, Tensor? sinks=None, Tensor? center=None) -> (Tensor, Tensor)',
    tags=_OF_A_LENGTH,
)
_library.define(
    "append_rotary_(Tensor(a!) cos, Tensor(b!) sin, Tensor length, Tensor cos_new, Tensor sin_new, "
    'Tensor? slots=None, str spec="") -> ()',
    tags=_OF_A_LENGTH,
)


def _encode(x, compensation, spec, lowering="auto"):
    parsed = parse(spec)
    if x.shape[-2] % parsed.page_size:
        raise KVPassError(f"encode takes whole pages of {parsed.page_size} tokens, not {x.shape[-2]}.")
    parsed.check(x.shape[-1])
    if parsed.adaptive is not None:
        raise KVPassError("Tokens with widths of their own are coded by their cache, not by an op.")
    codes, scale, zero_point = select(Site("encode", x.device.type, (spec,), head_dim=x.shape[-1]), lowering).run(
        x, compensation, parsed
    )
    if x.device.type == "cpu":
        check_finite(scale, zero_point)
    return codes, scale, zero_point


def _append_(codes, scale, zero_point, ring, compensation, length, x, q, mask, spec, lowering="auto", edge=None,
             beside=None, predictor=None, center=None, importance=None, scores=None, slots=None):  # fmt: skip
    run = select(Site("append_", x.device.type, (spec,), head_dim=x.shape[-1]), lowering).run
    run(
        codes, scale, zero_point, ring, compensation, length_of(length), x, q, mask, parse(spec), edge, beside,
        predictor or (), center, importance, scores or (), slots,
    )  # fmt: skip


def _append_layers_(codes, scale, zero_point, ring, length, x, spec, lowering="auto"):
    run = select(Site("append_layers_", x[0].device.type, (spec,), head_dim=x[0].shape[-1]), lowering).run
    run(codes, scale, zero_point, ring, length_of(length), x, parse(spec))


def _decode(codes, scale, zero_point, ring, length, spec, lowering="auto", below=None, beside=None, predictor=None):
    run = select(Site("decode", ring.device.type, (spec,), head_dim=ring.shape[-1]), lowering).run
    references = [decoded for decoded in (below, beside) if decoded is not None]
    return run(codes, scale, zero_point, ring, length_of(length), parse(spec), references, predictor or ())


def _rotate(x, cos, sin, rope):
    return rotate(x, cos, sin, rope) if rope else x.clone()


def _refuse_both(mask, causal):
    if causal and mask is not None:
        raise KVPassError("attend takes a mask or causal=True, not both.")


def _rotary(cos, sin, rope: str, k_spec: str) -> tuple | None:
    """How keys in pages are rotated as they are read, if they are. Raises `KVPassError` if they were before."""
    if rope and not parse(k_spec).pre_rope:
        raise KVPassError(f"These keys are stored rotated, and rope={rope!r} would rotate them again.")
    return (cos, sin, rope) if rope else None


def _attend(q, kc, ks, kz, kr, vc, vs, vz, vr, length, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec,
            lowering="auto", *, cos=None, sin=None, rope="", sinks=None, center=None):  # fmt: skip
    _refuse_both(mask, causal)
    run = select(Site("attend", q.device.type, (k_spec, v_spec), few(q.shape[2]), q.shape[3]), lowering).run
    n, specs, rotary = length_of(length), (parse(k_spec), parse(v_spec)), _rotary(cos, sin, rope, k_spec)
    key, value = (kc, ks, kz, kr), (vc, vs, vz, vr)
    return run(q, key, value, n, k_new, v_new, mask, causal, scale, softcap, *specs, rotary, sinks, center)


def _attend_decoded(q, k_past, v_past, k_new, v_new, mask, causal, scale, softcap, lowering="auto", *, cos=None,
                    sin=None, rope="", sinks=None):  # fmt: skip
    _refuse_both(mask, causal)
    run = select(Site("attend_decoded", q.device.type, (), few(q.shape[2]), q.shape[3]), lowering).run
    return run(q, k_past, v_past, k_new, v_new, mask, causal, scale, softcap, (cos, sin, rope) if rope else None, sinks)


def _attend_scored(q, key, value, length, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, statistic,
                   importance, lowering="auto", *, cos=None, sin=None, rope="", sinks=None, center=None):  # fmt: skip
    _refuse_both(mask, causal)
    queries = few(q.shape[2]) if len(key) > 1 else 0
    run = select(Site("attend_scored", q.device.type, (k_spec, v_spec), queries, q.shape[3]), lowering).run
    n, specs, rotary = length_of(length), (parse(k_spec), parse(v_spec)), _rotary(cos, sin, rope, k_spec)
    return run(
        q, key, value, n, k_new, v_new, mask, causal, scale, softcap, *specs, rotary, sinks, center, statistic,
        importance,
    )  # fmt: skip


def _append_rotary_(cos, sin, length, cos_new, sin_new, slots=None, spec=""):
    start, (_, tokens, pairs) = length_of(length), cos_new.shape
    for table, new in ((cos, cos_new), (sin, sin_new)):
        table[:, start : start + tokens, :pairs] = new
    if spec and (gone := parse(spec).evicted(start + tokens)):
        for table in (cos, sin):
            kept = evict(table[:, None, : start + tokens], slots, gone, parse(spec))[:, 0]
            table[:, : kept.shape[1]] = kept


_IMPLEMENTATIONS = {
    "encode": _encode, "append_": _append_, "append_layers_": _append_layers_, "decode": _decode, "rotate": _rotate,
    "attend": _attend, "attend_decoded": _attend_decoded, "attend_scored": _attend_scored,
    "append_rotary_": _append_rotary_,
}  # fmt: skip


def _without_autocast(run: Callable) -> Callable:
    """``run``, whose arithmetic is in the dtypes it says, also where a user's autocast would change them."""

    @functools.wraps(run)
    def call(first, *args, **kwargs):
        device = (first[0] if isinstance(first, (list, tuple)) else first).device.type
        if not torch.is_autocast_enabled(device):
            return run(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return run(first, *args, **kwargs)

    return call


for _name, _run in _IMPLEMENTATIONS.items():
    _library.impl(_name, _without_autocast(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("kvpass::encode")
def _(x: Tensor, compensation, spec, lowering="auto"):
    spec, (*lead, tokens, head_dim) = parse(spec), x.shape
    pages = tokens // spec.page_size
    shapes, dtype = (spec.params_shape(head_dim), spec.zero_shape(head_dim)), params_dtype(x.dtype)
    codes = x.new_empty((*lead, pages, spec.rows, spec.columns(head_dim)), dtype=torch.uint8)
    return codes, *(x.new_empty((*lead, pages, *shape), dtype=dtype) for shape in shapes)


@torch.library.register_fake("kvpass::append_")
def _(codes, scale, zero_point, ring, compensation, length, x, q, mask, spec, lowering="auto", edge=None, beside=None,
      predictor=None, center=None, importance=None, scores=None, slots=None):  # fmt: skip
    return None


@torch.library.register_fake("kvpass::append_layers_")
def _(codes, scale, zero_point, ring, length, x, spec, lowering="auto"):
    return None


@torch.library.register_fake("kvpass::append_rotary_")
def _(cos, sin, length, cos_new, sin_new, slots=None, spec=""):
    return None


@torch.library.register_fake("kvpass::decode")
def _(codes, scale, zero_point, ring, length, spec, lowering="auto", below=None, beside=None, predictor=None):
    return ring.new_empty((*ring.shape[:2], length_of(length), ring.shape[3]))


@torch.library.register_fake("kvpass::rotate")
def _(x, cos, sin, rope):
    return x.new_empty(x.shape)


@torch.library.register_fake("kvpass::attend")
def _(q, kc, ks, kz, kr, vc, vs, vz, vr, length, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec,
      lowering="auto", *, cos=None, sin=None, rope="", sinks=None, center=None):  # fmt: skip
    return q.new_empty((*q.shape[:3], v_new.shape[3]))


@torch.library.register_fake("kvpass::attend_decoded")
def _(q, k_past, v_past, k_new, v_new, mask, causal, scale, softcap, lowering="auto", *, cos=None, sin=None,
      rope="", sinks=None):  # fmt: skip
    return q.new_empty((*q.shape[:3], v_new.shape[3]))


@torch.library.register_fake("kvpass::attend_scored")
def _(q, key, value, length, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, statistic, importance,
      lowering="auto", *, cos=None, sin=None, rope="", sinks=None, center=None):  # fmt: skip
    tokens = length_of(length) + k_new.shape[2] if statistic else 0
    out = q.new_empty((*q.shape[:3], v_new.shape[3]))
    return out, q.new_empty((*k_new.shape[:2], tokens), dtype=torch.float32)
