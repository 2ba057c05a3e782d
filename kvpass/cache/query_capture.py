"""Capture the prompt's queries from SDPA calls, for codecs that are fitted to them, without a graph.

Capturing a graph only for the queries of a prompt takes half a minute on a model of 30 layers. If attention calls SDPA,
they are among its arguments.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..codec.expansion import queries_of_latent
from ..errors import KVPassError
from .cache_state import CacheState
from .layer import PackedLayer


class QueryCapture(TorchFunctionMode):
    """A context in which each layer of ``cache`` waits for the SDPA call that reads its new tokens, and receives the
    queries and the mask of that call. It lasts for one forward.

    required: raise `KVPassError` for a layer whose SDPA call was not seen; otherwise it is stored without queries.
    """

    def __init__(self, cache: CacheState, required: bool = True):
        super().__init__()
        self.required = required
        self.waiting: tuple[PackedLayer, Tensor, Tensor] | None = None
        self.expected, self.served = len(cache.layers), 0
        cache.context.query_capture = self

    def wait(self, layer: PackedLayer, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[B, H_kv, S, D]`` in ``layer`` as soon as SDPA is called with their
        queries."""
        self._store_waiting()
        self.waiting = layer, keys, values

    def _store_waiting(self) -> None:
        """Store a layer whose queries were not seen, if it does not need them."""
        if self.waiting is not None and not self.required:
            (layer, keys, values), self.waiting = self.waiting, None
            layer.append(keys, values)
            self.served += 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self.waiting is not None:
            self._serve(*args, **kwargs)
        return func(*args, **kwargs)

    def _serve(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_, scale=None, **__
    ) -> None:
        layer, keys, values = self.waiting
        if key.shape[2] != keys.shape[2] or query.shape[1] % keys.shape[1]:
            return
        self.waiting, self.served = None, self.served + 1
        if layer.geometry.latent:
            layer.append(keys, values, queries_of_latent(keys, values, query, key, value, scale))
        else:
            layer.append(keys, values, query, attn_mask)

    def check(self) -> None:
        """Raise `KVPassError` if a layer needs queries, and was updated without a call of SDPA that reads it."""
        self._store_waiting()
        if self.served != self.expected:
            raise KVPassError(
                f"This scheme is fitted to the queries of SDPA, but only {self.served} of {self.expected} layers "
                "called SDPA. output_attentions=True or another attn_implementation causes this: call the model as "
                "before, or kvpass.remove(model) and apply again, if need be with another scheme, such as 'kivi'."
            )
