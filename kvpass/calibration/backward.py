"""The context of a backward pass that needs no gradients of weights, also for a model that is larger than memory."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..accelerate_hooks import is_offloaded, reloading

_SMALL = 2**16  # bytes; smaller tensors stay in memory


@contextmanager
def backward(model: nn.Module) -> Iterator[None]:
    """Within this context, operations are recorded for a backward pass, and no parameter of ``model`` requires
    gradients, so that a forward pass does not keep what only these need."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad(), _streamed(model):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


@contextmanager
def _streamed(model: nn.Module) -> Iterator[None]:
    """Within this context, a forward pass of a ``model`` with offloaded weights keeps neither those nor activations in
    memory: the backward pass loads the weights again, and reads activations from a temporary folder."""
    if not is_offloaded(model):
        yield
        return
    resident = {weight.untyped_storage().data_ptr() for weight in model.parameters() if not weight.is_meta}
    find, numbers = reloading(model), count()

    def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
        if load := find(x):
            return load
        if x.nbytes < _SMALL or x.untyped_storage().data_ptr() in resident:
            return x.detach()  # a node that kept its own output would keep itself alive
        file = Path(folder) / f"{next(numbers)}.safetensors"
        save_file({"x": x.detach().contiguous()}, file)
        return partial(_read, file, x.device)

    with tempfile.TemporaryDirectory(prefix="kvpass-") as folder, saved_tensors_hooks(pack, _unpack):
        yield


def _read(file: Path, device: torch.device) -> Tensor:
    return load_file(file, str(device))["x"]


def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()
