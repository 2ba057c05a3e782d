"""`PackedKV`: quantized keys or values behind the interface of a float tensor."""

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from ..codec.spec import CodecSpec, parse
from ..codec.tensors import of_model, of_state
from ..errors import KVPassError, NonFiniteError
from ..versions import warn_renamed
from .state import KVState, ModelTensors


def _written_by(func) -> KVPassError:
    return KVPassError(
        f"{func} writes to a PackedKV, which only append() can do. dequantize() returns a dequantized copy to work on."
    )


class PackedKV(TorchAOBaseTensor):
    """A ``[B, H_kv, n, D]`` tensor stored as packed pages and a full-precision window.

    Any read dequantizes it. ``append`` stores tokens; other in-place writes raise `KVPassError`. It shares storage with
    the `KVState` it was made from, and shows the first ``num_tokens`` tokens of that.
    """

    tensor_data_names: list[str] = []  # each instance has the names in `codec.tensors`
    tensor_attribute_names = ["spec", "num_tokens"]

    def __new__(cls, spec: str, num_tokens: int, **kept: Tensor):
        ring = kept["ring"]
        shape = (*ring.shape[:2], num_tokens, ring.shape[3])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=ring.dtype, device=ring.device)

    def __init__(self, spec: str, num_tokens: int, **kept: Tensor):
        super().__init__()
        self.spec, self.num_tokens, self.tensor_data_names = spec, num_tokens, list(kept)
        self.__dict__.update(kept)

    @property
    def _kept(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.tensor_data_names}

    @classmethod
    def __tensor_unflatten__(cls, tensors, attributes, outer_size, outer_stride):
        return cls(**attributes, **tensors)

    def _apply_fn_to_data(self, fn) -> "PackedKV":
        return PackedKV(self.spec, self.num_tokens, **{name: fn(tensor) for name, tensor in self._kept.items()})

    @classmethod
    def view(cls, state: KVState, num_tokens: int) -> "PackedKV":
        """The first ``num_tokens`` tokens of ``state``, sharing its storage."""
        return cls(state.text, num_tokens, **dict(zip(of_state(state.spec), state.pack, strict=True)))

    @classmethod
    def from_float(cls, x: Tensor, spec: CodecSpec, q: Tensor | None = None) -> "PackedKV":
        """Pack ``x`` ``[B, H_kv, n, D]``. ``q`` ``[B, H_q, n, D]``: the queries, for specs with a subspace.

        Raises `NonFiniteError` on NaN or infinity (on CPU), `KVPassError` if the spec does not fit ``x``.
        """
        if x.ndim != 4 or not x.is_floating_point():
            raise KVPassError(f"Expected a float [B, H_kv, n, D] tensor, got {x.dtype} of shape {tuple(x.shape)}.")
        if x.device.type == "cpu" and not torch.isfinite(x).all():
            raise NonFiniteError("The tensor holds NaN or infinity, which cannot be quantized.")
        if spec.transform.predictor:
            raise KVPassError(
                "A predictor's residual is not a tensor of its own: dequantizing it needs the layer below."
            )
        batch, heads, tokens, head_dim = x.shape
        state = KVState.allocate(spec, batch, heads, head_dim, x.dtype, x.device, tokens)
        state.append(x, 0, q)
        return cls.view(state, tokens)

    @property
    def state(self) -> KVState:
        """The `KVState` that shares storage with this tensor."""
        spec, kept = parse(self.spec), self._kept
        shared = ModelTensors(kept.pop(name) for name in of_model(spec))
        return KVState(spec, kept, shared=shared)

    def append(self, x: Tensor) -> "PackedKV":
        """This tensor followed by ``x`` ``[B, H_kv, S, D]``. The result shares storage unless it had to grow, so do not
        append to the original tensor again."""
        state = self.state
        state.append(x, self.num_tokens)
        return PackedKV.view(state, self.num_tokens + x.shape[2])

    def dequantize(self) -> Tensor:
        """The dequantized float tensor, ``[B, H_kv, n, D]``."""
        return self.state.dequantize(self.num_tokens)

    def decode(self) -> Tensor:
        """The old name of `dequantize`."""
        warn_renamed("PackedKV.decode", "PackedKV.dequantize")
        return self.dequantize()

    def nbytes_packed(self) -> int:
        """Bytes held, slack included."""
        return self.state.nbytes

    def __repr__(self, *, tensor_contents=None):
        codes = parse(self.spec).quantizer
        return f"PackedKV(shape={tuple(self.shape)}, bits={codes.bits}, per={codes.per}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__ and isinstance(args[0], cls):  # it would write to a dequantized copy
            raise _written_by(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._apply_fn_to_data(func)
        if func is torch.ops.aten.clone.default:
            return args[0]._apply_fn_to_data(torch.clone)
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise _written_by(func)
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda packed: packed.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)
