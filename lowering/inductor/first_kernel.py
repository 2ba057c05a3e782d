"""Predicts, during the prompt, which kernel the first decode step will need, and compiles it in the background."""

from dataclasses import dataclass

import torch

from kvpass.codec.rope import rope_of
from kvpass.codec.spec import CodecSpec

from ..table import DispatchKey, select
from . import background_compile
from .attend import attend_kernel
from .attention_graph import Signature


@dataclass(frozen=True)
class AttentionShape:
    """The attention shapes of a layer. scale: factor of the products of queries and keys."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device


def compile_ahead(shape: AttentionShape, key: CodecSpec, value: CodecSpec, batch: int, mass: bool) -> None:
    """Start compiling, in another process, the kernel that attends with one token of ``batch`` sequences.

    Kernels that quantize are not started: the prompt needs them before another process could have imported torch. A
    wrong guess only wastes a compilation, so only the most common form of call is guessed.

    key, value: specs of keys and values. mass: whether the kernel also returns attention mass.
    """
    device, head_dim, dtype = shape.device, shape.head_dim, shape.dtype
    used = ("attention mass",) if mass else ()
    dispatch = DispatchKey("attend", device.type, (str(key), str(value)), 1, head_dim, dtype, used)
    if select(dispatch).name != "inductor":  # other lowerings compile within seconds
        return
    rope = rope_of(head_dim // 2, interleaved=False) if key.transform.turns else ""  # not known yet; the common case
    heads = shape.num_attention_heads, shape.num_key_value_heads
    tables = rope, head_dim // 2 if rope else 0
    signature = Signature(batch > 1, *heads, head_dim, dtype, device, None, *tables, None, True, shape.scale, 0.0, mass)
    background_compile.start(device, [(attend_kernel.name, (signature, key.stored_as, value.stored_as))])
