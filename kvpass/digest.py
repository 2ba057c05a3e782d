"""SHA-256 of tensors, by which a damaged file is found."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(facts: Any, tensors: Mapping[str, Tensor]) -> str:
    """The hexadecimal SHA-256 of ``facts``, which JSON can hold, and of the names, dtypes, shapes and bytes of
    ``tensors``."""
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor``, copied only if it is not contiguous or not on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
