"""The kernel that a first decode step is going to ask for, as far as a prompt tells."""

from dataclasses import dataclass

import torch

from kvpass.codec.rope import rope_of
from kvpass.codec.spec import CodecSpec

from ..table import DispatchKey, extras, select
from . import background_compile
from .attend import Common, attend_kernel


@dataclass(frozen=True)
class Attended:
    """How a layer is going to be attended to; scale: of the products of queries and keys."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device


def expect(attended: Attended, key: CodecSpec, value: CodecSpec, batch: int, mass: bool) -> None:
    """Have compiled elsewhere what attends with one token of ``batch`` sequences to these codes; with ``mass`` it says
    what it paid. What quantizes is needed by the prompt, before another process could have imported torch. A guess that
    is wrong is compiled for nothing: only what all forms of call have in common is guessed."""
    device, head_dim, dtype = attended.device, attended.head_dim, attended.dtype
    group = attended.num_attention_heads // attended.num_key_value_heads
    asked = extras(None, None, None, None, 0.0, "sum" if mass else "")
    dispatch = DispatchKey("attend", device.type, (str(key), str(value)), 1, head_dim, dtype, group, asked)
    if select(dispatch).name != "inductor":  # others are built in seconds
        return
    rope = rope_of(head_dim // 2, interleaved=False) if key.transform.turns else ""  # not known yet, but common
    heads = attended.num_attention_heads, attended.num_key_value_heads
    turned = rope, head_dim // 2 if rope else 0
    common = Common(batch > 1, *heads, head_dim, dtype, device, None, *turned, None, True, attended.scale, 0.0, mass)
    background_compile.start(device, [(attend_kernel.name, (common, key.stored_as, value.stored_as))])
