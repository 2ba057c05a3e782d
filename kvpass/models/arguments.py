"""What models call the arguments that kvpass passes. transformers 5.24 renamed the one that hands over a cache, and the
field of outputs that returns it: ``past_key_values`` became ``cache``. The only file that knows.
"""

import inspect
from dataclasses import fields
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = "past_key_values", "cache"
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in CACHE_NAMES)
"""What ``generate``, models and outputs of the installed transformers call it."""


def cache_argument(model: nn.Module) -> str:
    """What ``model.forward`` calls the cache: models that came with their own code may still use the older name. A
    wrapper hands on what it is given, and is given `CACHE`."""
    older = CACHE_NAMES[0]
    return older if older in inspect.signature(model.forward).parameters else CACHE


def takes_cache(model: nn.Module) -> bool:
    """Whether a parameter of ``model.forward`` is one that transformers hands a cache to."""
    return cache_argument(model) in inspect.signature(model.forward).parameters


def handing(model: nn.Module, cache: Cache) -> dict[str, Any]:
    """The argument of ``model`` that hands over ``cache``."""
    return {cache_argument(model): cache}


def keeping(model: nn.Module, count: int) -> dict[str, int]:
    """The argument that makes ``model`` compute logits of the last ``count`` tokens only, if it has one."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
