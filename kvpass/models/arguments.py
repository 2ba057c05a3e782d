"""The names of the arguments that kvpass passes to models.

transformers 5.24 renamed the argument that passes a cache and the output field that returns it, from
``past_key_values`` to ``cache``. No other file depends on the name.
"""

import inspect
from dataclasses import fields
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = "past_key_values", "cache"
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in CACHE_NAMES)
"""Its name in ``generate``, models and outputs of the installed transformers."""


def cache_argument(model: nn.Module) -> str:
    """The name of the cache argument of ``model.forward``; models that ship their own code may still use the older one.
    A wrapper passes its arguments on, so it gets `CACHE`."""
    older = CACHE_NAMES[0]
    return older if older in inspect.signature(model.forward).parameters else CACHE


def takes_cache(model: nn.Module) -> bool:
    """Whether ``model.forward`` has a parameter with one of the cache names of transformers."""
    return cache_argument(model) in inspect.signature(model.forward).parameters


def handing(model: nn.Module, cache: Cache) -> dict[str, Any]:
    """The keyword argument that passes ``cache`` to ``model``."""
    return {cache_argument(model): cache}


def filling(model: nn.Module, cache: Cache, logits: int | None = None) -> dict[str, Any]:
    """The keyword arguments with which ``model`` reads tokens into ``cache``. ``logits``: see `keeping`; None keeps
    all."""
    return handing(model, cache) | ({} if logits is None else keeping(model, logits)) | {"use_cache": True}


def keeping(model: nn.Module, count: int) -> dict[str, int]:
    """The keyword argument that limits the logits of ``model`` to the last ``count`` tokens, if it has one."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
