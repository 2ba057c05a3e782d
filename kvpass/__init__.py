"""kvpass: any KV-cache quantization scheme on any decoder, in one line.

>>> import kvpass
>>> kvpass.apply(model, scheme="squat")      # in place
>>> model.generate(**inputs)                 # unchanged code, packed cache
"""

from . import ops, schemes
from .api import apply, explain, remove
from .cache import bits_per_value, nbytes
from .errors import KVPassError, NonFiniteError, NotFusedError
from .retention import LogSparse, Recent, Retention, Sinks
from .tensor import PackedKV

__all__ = [
    "KVPassError",
    "LogSparse",
    "NonFiniteError",
    "NotFusedError",
    "PackedKV",
    "Recent",
    "Retention",
    "Sinks",
    "apply",
    "bits_per_value",
    "explain",
    "nbytes",
    "ops",
    "remove",
    "schemes",
]
