"""Defines the arguments of each op of `kvpass.ops` as one object, which its implementations take.

Shapes: B samples, H_q query heads, H_kv KV heads, S tokens of the call, n tokens stored before it, D channels per head.
``n`` is on the host. ``length`` is the same number on the device (`kvpass.layout.window.LENGTH_OFFSET`), for kernels
that a captured graph relaunches at other lengths.

The classes are named tuples because an object is built for every op, layer and step; building a frozen dataclass takes
six times as long.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack

Past = TypeVar("Past", bound=Pack | Tensor)


class DequantizeCall(NamedTuple):
    """A call of ``kvpass::dequantize``: dequantize the ``n`` tokens of one state.

    references: the tokens that the predictor predicts from, each ``[B, H_kv, n, D]``.
    predictor: the tensors of the stored predictor.
    """

    pack: Pack
    n: int
    spec: CodecSpec
    references: Sequence[Tensor] = ()
    predictor: Sequence[Tensor] = ()


def parse_statistic(text: str) -> tuple[str, int | None]:
    """ "sum" or "max", and over how many last queries; None for all (`AttendCall.statistic`)."""
    kind, _, last = text.partition("-")
    return kind, int(last) if last else None


class AttendCall(NamedTuple, Generic[Past]):
    """A call of ``kvpass::attend``: attention over the stored past and the tokens of the call.

    q: ``[B, H_q, S, D]``.
    key, value: the past: each a `Pack` or, if it is already dequantized, ``[B, H_kv, n, D]``. Values may have another
        number of heads and of channels than keys.
    k_new, v_new: ``[B, H_kv, S, D]``, in the dtype of the cache; ``[B, H_kv, 0, D]`` in cross-attention.
    mask: ``[B or 1, H_q or 1, S, n + S]``, bool (True: may attend) or added to the scores. Not allowed with ``causal``
        or ``starts``.
    causal: each query sees the keys up to its own token, aligned to the end of the keys.
    scale, softcap: factor of the scores; bound of their tanh, 0 for none.
    k_spec, v_spec: how the past is stored, and which tokens it holds.
    rotary: cos and sin ``[B, >= n, p]`` and the text of the rotation (`kvpass.codec.rope`), for keys that are stored
        before rotary embedding.
    sinks: ``[H_q]``, logits that join the softmax of each head without a value.
    statistic: which attention mass to return: "sum" over the queries, the sum over the last N of them ("sum-N"), their
        largest weight ("max-N"), or "" for none.
    importance: with eviction: ``[B, H_kv or 1, >= n]`` float32, -inf for padding. Only the columns of ``mask`` for the
        tokens of the call are used then.
    length: ``n`` on the device, or None.
    starts: ``[B]`` int64, the number of left-padding tokens of each sample, which no query sees.
    latent: the keys are ``cat([key, value], -1)`` and the values are ``key``.
    with_lse: whether to return, as the last output, the log-sum-exp of each query's scores, ``[B, H_q, S]`` float32.
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
    latent: bool = False
    with_lse: bool = False

    @property
    def specs(self) -> tuple[CodecSpec, CodecSpec]:
        """The specs of keys and of values."""
        return self.k_spec, self.v_spec


class AppendCall(NamedTuple):
    """A call of ``kvpass::append_``: store tokens of one state, and quantize the pages that leave the window.

    pack: the state, which is written in place.
    x: ``[B, H_kv, S, D]``, stored as tokens ``[n, n + S)``.
    q: ``[B, H_q, S, D]``, the queries of the call, for codecs that are fitted to the prompt's queries.
    mask: the attention mask of the call, ``[B or 1, H_q or 1, S, n + S]``, which shows which tokens are padding.
    edge: ``[B, H, T, D]``, for predictors: the tokens that are packed in this call, in page order, as dequantized in
        several layers (`codec.predictor.with_below`). Input: those below this one. Output: this one and those below.
    same_layer_keys: for predictors of values: the ``edge`` that this layer's keys have left.
    predictor: the tensors of the stored predictor.
    importance: for eviction by attention: ``[B, H_kv or 1, >= n + S]`` float32, which is updated in place. None if
        ``slots`` already holds the decision.
    scores: attention mass of the call, each ``[B, H_kv, n + S]`` float32.
    slots: ``[B, H_kv or 1, budget]`` int64, the candidate that each slot of the packed tokens holds after the call.
    originals: for per-token bit widths: ``[B, H_kv, T, D]``, the tokens that are to be quantized after the forward.
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
    """A call of ``kvpass::append_layers_``: store tokens of several layers on one device, with equal specs.

    packs: the states, which are written in place.
    xs: ``[B, H_kv, S, D]`` for each layer, stored as tokens ``[n, n + S)``.
    qs: ``[B, H_q, S, D]``, the queries of each layer, for codecs that are fitted to the prompt's queries.
    mask: the attention mask of the call, for such codecs.
    """

    packs: Sequence[Pack]
    n: int
    xs: Sequence[Tensor]
    spec: CodecSpec
    length: Tensor | None = None
    qs: Sequence[Tensor] | None = None
    mask: Tensor | None = None
