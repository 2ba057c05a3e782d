"""Models whose weights are sharded across processes: transformers' tensor parallelism (``DistributedConfig``)."""

import torch
from torch import nn

from ..errors import KVPassError


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds only parts of the weights of ``model``."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def refuse_sharded(model: nn.Module, what: str, instead: str) -> None:
    """Raise `KVPassError` if ``model`` is sharded across processes, with the reason ``what`` and the advice
    ``instead``."""
    if is_sharded(model):
        raise KVPassError(
            f"The weights of {type(model).__name__} are sharded across {torch.distributed.get_world_size()} processes "
            f"(tp_plan), and {what}: {instead}."
        )
