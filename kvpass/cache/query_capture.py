"""The prompt's queries, for codecs that are fitted to them (SQuat), from a forward that runs as it is.

Capturing a graph of the prompt only for its queries takes half a minute on a model of 30 layers. Where attention is a
call of SDPA they are among its arguments.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..errors import KVPassError
from .cache_state import CacheState
from .layer import PackedLayer


class QueryCapture(TorchFunctionMode):
    """Within it, each layer of ``cache`` waits for the SDPA that reads what it is about to store, and is handed the
    queries and the mask of that, until the forward ends."""

    def __init__(self, cache: CacheState):
        super().__init__()
        self.waiting: tuple[PackedLayer, Tensor, Tensor] | None = None
        self.expected, self.served = len(cache.layers), 0
        cache.context.query_capture = self

    def wait(self, layer: PackedLayer, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[B, H_kv, S, D]`` in ``layer`` when its queries come by."""
        self.waiting = layer, keys, values

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self.waiting is not None:
            self._serve(*args, **kwargs)
        return func(*args, **kwargs)

    def _serve(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_, **__) -> None:
        layer, keys, values = self.waiting
        if key.shape[2] != keys.shape[2] or query.shape[1] % keys.shape[1]:
            return
        self.waiting, self.served = None, self.served + 1
        layer.append(keys, values, query, attn_mask)

    def check(self) -> None:
        """Raise `KVPassError` if a layer was not followed by an SDPA that reads it."""
        if self.served != self.expected:
            raise KVPassError(
                f"This scheme is fitted to the queries of SDPA, but only {self.served} of {self.expected} layers "
                "called SDPA. output_attentions=True or another attn_implementation causes this: call the model as "
                "before, or kvpass.remove(model) and apply again, if need be with another scheme, such as 'kivi'."
            )
