"""The forward that `kvpass.apply` installs in a decoder with its own cache, in buffers or passed in and out.

The model's code stays unchanged. In the captured graph it receives the dequantized past and adds the present, which the
pass finds (`kvpass.compile.own_cache`). Without the pass the same steps run as written, with the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..cache.cache_state import CacheState
from ..cache.swap import new_layers
from ..cache.tensor import PackedKV
from ..errors import KVPassError, NotCapturedError
from ..layout.window import length_of
from ..models.discover import BufferedCache, HandedCache
from ..schemes import SchemeConfig
from .forward import start_forward
from .runtime import Runtime

_PACKED = "packed"  # placeholder for the cache among the arguments


class CustomRuntime(Runtime):
    """The common part of both runtimes for models with their own cache, which is described by ``self.found``."""

    def __init__(self, model: nn.Module, scheme: SchemeConfig, layers, *, found, **options):
        self.found, self.signature = found, inspect.signature(model.forward)
        super().__init__(model, scheme, layers, **options)
        if any(plan.evicts for plan, _ in self.plans.values()):
            raise KVPassError(
                "Evicting tokens needs a cache that counts the tokens seen separately from those kept, as a "
                "transformers cache does. Use this scheme without eviction."
            )

    def _new_cache(self) -> CacheState:
        state = CacheState(self.owner, self.lowering, self.max_cache_len)
        new_layers(state, self.plans, self.predictors)
        return state

    def _arguments(self, args, kwargs) -> dict[str, Any]:
        if self.model().training:
            raise KVPassError("The model is in training mode, but its cache is packed: call model.eval().")
        return dict(self.signature.bind(*args, **kwargs).arguments)

    def _run(self, state: CacheState, arguments: dict[str, Any]):
        """Run one complete forward over a cache."""
        new_tokens = arguments[self.found.tokens].shape[1]
        try:
            output = self._attempt(state, dict(arguments))
        except NotCapturedError as error:
            run = self._fall_back(error, state, new_tokens)
            output = self._attempt(state, dict(arguments), run)
            self._fell_back(error, state, new_tokens)
        by_index = dict(zip(self.plans, state.layers, strict=True))
        self._measure(state, [by_index.get(index) for index in range(len(self.report.layers))])
        return output

    def _attempt(self, state: CacheState, arguments: dict[str, Any], run: Callable | None = None):
        """Run the forward once, with ``run`` if it is given."""
        inputs = arguments[self.found.tokens]
        new_tokens = inputs.shape[1]
        start_forward(state, len(inputs), new_tokens)
        with self._one_forward(state, new_tokens):
            run = run or self._choose(state, new_tokens)
            if run is self.original:
                run = self._body()
            else:
                self._canonicalise(arguments)
            with self._step(state, new_tokens):
                return run(state, arguments)

    def _choose(self, state: CacheState, new_tokens: int):
        run = super()._choose(state, new_tokens)  # without a graph, a whole full-precision buffer would be allocated
        return self.captured if run is self.original and not self.eager else run

    def _canonicalise(self, arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():  # the model may write to it
                arguments[name] = value.contiguous().view(-1).view(value.shape)
            elif isinstance(value, Tensor):
                arguments[name] = value.clone(memory_format=torch.contiguous_format)
        inputs = arguments[self.found.tokens]
        if inputs.shape[1] > 1:
            torch._dynamo.maybe_mark_dynamic(inputs, 1)


class BufferRuntime(CustomRuntime):
    """For a `BufferedCache`. The model has one sequence of tokens: position 0 starts a new one, and a position before
    the last crops it."""

    found: BufferedCache

    def __init__(self, model, scheme, layers, *, found, max_cache_len, **options):
        super().__init__(model, scheme, layers, found=found, max_cache_len=max_cache_len, **options)
        self.capacity = min(found.capacity, max_cache_len or found.capacity)
        self.cache = self._new_cache()
        self.buffers = [buffer for index in self.plans for buffer in found.layers[index]]  # K, V of each layer
        own = [getattr(buffer.owner, buffer.name) for buffer in self.buffers]
        # meta tensors take no memory, and cannot be read or written between forwards
        self.stand_ins = [torch.empty_like(tensor, device="meta") for tensor in own]

    def install(self) -> None:
        """Replace the model's buffers by stand-ins without memory."""
        super().install()
        self._take_away()

    def _take_away(self) -> None:
        for buffer, stand_in in zip(self.buffers, self.stand_ins, strict=True):
            setattr(buffer.owner, buffer.name, stand_in)

    def uninstall(self) -> None:
        """Restore the buffers, with the stored tokens in them. They are empty if the cache is inconsistent."""
        if not self.cache.whole:
            for layer in self.cache.layers:
                layer.reset()
        stored = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
        super().uninstall()
        for buffer, stand_in, x in zip(self.buffers, self.stand_ins, stored, strict=True):
            setattr(buffer.owner, buffer.name, torch.zeros_like(stand_in, device=self.cache.device))
            if x is not None:
                buffer.get()[: len(x), :, : x.shape[2]] = x + 0

    def forward(self, *args, **kwargs):
        arguments = self._arguments(args, kwargs)
        with self._alone(self.cache):
            self._seek(arguments)
            if not isinstance(arguments[self.found.position], Tensor):
                arguments[self.found.position] = 0  # computed in the graph; else one graph per position
            try:
                return self._run(self.cache, arguments)
            except BaseException:
                self._take_away()  # the call may have been interrupted while the buffers were filled
                raise

    def _seek(self, arguments: dict[str, Any]) -> None:
        """Crop or reset the cache to the position that the arguments name. If the position is a tensor, this reads it
        from its device."""
        name, count = self.found.position, arguments[self.found.tokens].shape[1]
        position, stored = arguments.get(name), self.cache.tokens
        start = int(position.flatten()[0]) if isinstance(position, Tensor) else position
        if isinstance(position, Tensor) and position.numel() > 1:
            expected = torch.arange(start, start + count, device=position.device)
            if position.shape[-1] != count or not bool((position == expected).all()):
                raise KVPassError(
                    f"{name} must be {count} consecutive positions starting at {start}: a packed cache stores tokens "
                    "in order."
                )
        if start > stored:
            raise KVPassError(
                f"{name} starts at {start}, but the packed cache holds {stored} tokens: pass the next position, "
                "leaving none out."
            )
        if start + count > self.capacity:
            raise KVPassError(
                f"The cache is full: {start} tokens are stored and {count} more exceed its capacity of {self.capacity}."
            )
        if start == 0:
            self._check_owners()
        for layer in self.cache.layers if start < stored or start == 0 else ():
            layer.reset() if start == 0 else layer.crop(start - stored)

    def _check_owners(self) -> None:
        model = self.model()
        for buffer, stand_in in zip(self.buffers, self.stand_ins, strict=True):
            try:
                same = getattr(model.get_submodule(buffer.path), buffer.name) is stand_in
            except AttributeError:
                same = False
            if not same:
                raise KVPassError(
                    f"{buffer.path}.{buffer.name} was replaced after kvpass.apply (were the caches set up again?). "
                    "Call kvpass.remove(model) before setting up caches, and apply again afterwards."
                )

    def _body(self):
        original, found, runtime = self.original, self.found, self

        def call(state, arguments):
            start, count = length_of(state.context.length), arguments[found.tokens].shape[1]
            position = arguments[found.position]
            if isinstance(position, Tensor):
                positions = torch.arange(start, start + count, dtype=position.dtype, device=position.device)
                position = positions.expand(position.shape) if position.ndim else positions[0]
            else:
                position = start
            pasts = [past for layer in state.layers for past in layer.read()]
            for buffer, past in zip(runtime.buffers, pasts, strict=True):
                buffer.set(pad(past, (0, 0, 0, found.capacity - start)))
            output = original(**{**arguments, found.position: position})
            presents = [buffer.get()[:, :, start : start + count] for buffer in runtime.buffers]
            for layer, keys, values in zip(state.layers, presents[::2], presents[1::2], strict=True):
                layer.append(keys, values)
            runtime._take_away()
            return output

        return call


class HandedRuntime(CustomRuntime):
    """For a `HandedCache`. The model returns its cache as `PackedKV` tensors, which replace float tensors. Each
    returned cache can be passed to the next call once."""

    found: HandedCache

    def __init__(self, model, scheme, layers, *, found, **options):
        super().__init__(model, scheme, layers, found=found, **options)
        if (self.needs_queries or self.needs_rotation) and not found.takes_empty:
            raise KVPassError(
                f"{scheme.name!r} reads the prompt through its cache, but {type(model).__name__} does not accept an "
                f"empty {found.parameter} in place of None: use a scheme such as 'kivi'."
            )
        if any(plan.looks_at_previous or plan.adaptive for plan, _ in self.plans.values()):
            raise KVPassError(
                f"{scheme.name!r} reconstructs a layer from other layers' tensors, but in a cache that is passed in "
                "and out layers are separate: use a scheme such as 'kivi', or a transformers cache."
            )

    def forward(self, *args, **kwargs):
        arguments, parameter = self._arguments(args, kwargs), self.found.parameter
        state = self._state(arguments.pop(parameter, None))
        captured = self._choose(state, arguments[self.found.tokens].shape[1]) is not self.original
        if state.tokens or (captured and self.found.takes_empty):
            arguments[parameter] = _PACKED
        with self._alone(state):
            output = self._run(state, arguments)
        handles = [PackedKV.view(stored, state.tokens) for layer in state.layers for stored in layer.states()]
        for handle in handles:
            handle.cache = state
        cache = tree_unflatten(handles, self.found.structure)
        return (*output[: self.found.output], cache, *output[self.found.output :])

    def _state(self, cache) -> CacheState:
        """The state of the cache that was passed in; a new one for None. Raises `KVPassError` unless it is the cache
        that the latest call returned."""
        if cache is None:
            return self._new_cache()
        leaves = tree_leaves(cache)
        caches = {
            id(leaf.cache): leaf.cache for leaf in leaves if isinstance(leaf, PackedKV) and hasattr(leaf, "cache")
        }
        if len(caches) != 1 or len(leaves) != 2 * len(self.plans):
            raise KVPassError(
                f"{self.found.parameter} is not what this model returned: pass the returned cache unchanged, or None "
                "to start anew."
            )
        (state,) = caches.values()
        if state.owner != self.owner:
            raise KVPassError(f"{self.found.parameter} was packed by another model or an earlier kvpass.apply.")
        if leaves[0].num_tokens != state.tokens:
            raise KVPassError(
                f"{self.found.parameter} holds {leaves[0].num_tokens} tokens but was already continued to "
                f"{state.tokens}: pass the cache that the latest call returned."
            )
        return state

    def _body(self):
        original, found = self.original, self.found

        def call(state, arguments):
            start, count = length_of(state.context.length), arguments[found.tokens].shape[1]
            if found.parameter in arguments:
                past = [x for layer in state.layers for x in layer.read()]
                arguments = {**arguments, found.parameter: tree_unflatten(past, found.structure)}
            output = original(**arguments)
            leaves = tree_leaves(output[found.output])
            for i, layer in enumerate(state.layers):
                layer.append(*(leaf[:, :, start : start + count] for leaf in leaves[2 * i : 2 * i + 2]))
            return (*output[: found.output], *output[found.output + 1 :])

        return call
