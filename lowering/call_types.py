"""What each op of `kvpass.ops` is called with, as its implementations take it: one argument, built once per call.

Shapes: B samples, H_q query heads, H_kv KV heads, S tokens of the call, n tokens stored before it, D channels of a
head. ``n`` is the number on the host, and ``length`` the same on the device (`kvpass.layout.window.LENGTH_OFFSET`), for
kernels that a captured graph launches again at other lengths.

These are named tuples because one is built for every op, layer and step: a frozen dataclass takes six times as long.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack

Past = TypeVar("Past", bound=Pack | Tensor)


class DequantizeCall(NamedTuple):
    """A call of ``kvpass::dequantize``: dequantize the ``n`` tokens of one state.

    references: what the codec's predictor looks at, ``[B, H_kv, n, D]`` each. predictor: its weights.
    """

    pack: Pack
    n: int
    spec: CodecSpec
    references: Sequence[Tensor] = ()
    predictor: Sequence[Tensor] = ()


class AttendCall(NamedTuple, Generic[Past]):
    """A call of ``kvpass::attend``: attention over the stored past and the tokens of the call.

    q: ``[B, H_q, S, D]``.
    key, value: the past: a `Pack` each, or, if it is dequantized already, ``[B, H_kv, n, D]`` each.
    k_new, v_new: ``[B, H_kv, S, D]``, in the dtype of the cache; ``[B, H_kv, 0, D]`` in cross-attention.
    mask: ``[B or 1, H_q or 1, S, n + S]``, bool (True: may attend) or added to the scores; not with ``causal`` or
        ``starts``.
    causal: each query sees the keys up to its own, aligned to the end of the keys.
    scale, softcap: factor of the scores; bound of their tanh, 0 for none.
    k_spec, v_spec: how the past is stored, and which tokens it has.
    rotary: cos and sin ``[B, >= n, p]`` and the text of the rotation (`kvpass.codec.rope`), for keys that are stored
        before rotary embedding.
    sinks: ``[H_q]``, logits that take part in the softmax of each head and have no value.
    statistic: "", or which attention mass is returned besides: "sum" over the queries, or the largest of the last N
        ("max-N").
    importance: ``[B, H_kv or 1, >= n]`` float32, -inf for padding, where tokens are evicted: columns of ``mask`` then
        count for the tokens of the call only.
    length: ``n`` on the device, or None.
    starts: ``[B]`` int64, the tokens of left padding of each sample, which no query sees.
    """

    q: Tensor
    key: Past
    value: Past
    n: int
    k_new: Tensor
    v_new: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float
    k_spec: CodecSpec
    v_spec: CodecSpec
    rotary: tuple[Tensor, Tensor, str] | None = None
    sinks: Tensor | None = None
    statistic: str = ""
    importance: Tensor | None = None
    length: Tensor | None = None
    starts: Tensor | None = None

    @property
    def specs(self) -> tuple[CodecSpec, CodecSpec]:
        """How keys, and values, are stored."""
        return self.k_spec, self.v_spec


class AppendCall(NamedTuple):
    """A call of ``kvpass::append_``: store tokens of one state, and quantize the pages that leave the window.

    pack: the state, which is written to.
    x: ``[B, H_kv, S, D]``, stored as tokens ``[n, n + S)``.
    q: ``[B, H_q, S, D]``, the queries of the call, for codecs that are fitted to those of the prompt.
    mask: that of the attention of the call, ``[B or 1, H_q or 1, S, n + S]``: it says which tokens are padding.
    edge: in, the tokens that are packed now, in the order of their pages, as the layer below dequantizes them; out, as
        this one does. Float32 ``[B, H_kv, T, D]``.
    same_layer_keys: the same of this layer's keys, for values.
    predictor: weights of the predictor, which looks at both.
    importance: ``[B, H_kv or 1, >= n + S]`` float32, where tokens are evicted by their attention, updated here; None
        where ``slots`` says already who stays.
    scores: attention mass of the call, ``[B, H_kv, n + S]`` float32 each.
    slots: ``[B, H_kv or 1, budget]`` int64, which of the candidates each slot of the packed tokens holds from now on.
    originals: ``[B, H_kv, T, D]``, where tokens with bit widths of their own wait for those.
    """

    pack: Pack
    n: int
    x: Tensor
    spec: CodecSpec
    length: Tensor | None = None
    q: Tensor | None = None
    mask: Tensor | None = None
    edge: Tensor | None = None
    same_layer_keys: Tensor | None = None
    predictor: Sequence[Tensor] = ()
    importance: Tensor | None = None
    scores: Sequence[Tensor] = ()
    slots: Tensor | None = None
    originals: Tensor | None = None


class AppendLayersCall(NamedTuple):
    """A call of ``kvpass::append_layers_``: store tokens of many layers of one device, whose specs are equal.

    packs: the states, which are written to. xs: ``[B, H_kv, S, D]`` of each layer, stored as tokens ``[n, n + S)``.
    qs: ``[B, H_q, S, D]``, the queries of each layer, for codecs that are fitted to those of the prompt.
    mask: that of the attention of the call, for them.
    """

    packs: Sequence[Pack]
    n: int
    xs: Sequence[Tensor]
    spec: CodecSpec
    length: Tensor | None = None
    qs: Sequence[Tensor] | None = None
    mask: Tensor | None = None
