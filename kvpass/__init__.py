"""kvpass: quantizes the KV cache of any decoder, with any scheme, in one line of code.

>>> import kvpass
>>> kvpass.apply(model)      # in place
>>> model.generate(**inputs)                 # unchanged code, packed cache
"""

from importlib.metadata import version

import torch

from .quiet import quiet
from .versions import check_torch

__version__ = version("kvpass")

check_torch(torch.__version__)
with quiet("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns about what it cannot load
    from . import ops, schemes
    from .api import apply, explain, remove
    from .cache.swap import bits_per_value, nbytes
    from .cache.tensor import PackedKV
    from .calibration.fit import calibrate
    from .errors import KVPassError, NonFiniteError, NotFusedError
    from .layout.retention import (
        HeavyHitter,
        LogSparse,
        LogSparseEviction,
        Recent,
        Retention,
        Sinks,
        SnapKV,
        StreamingLLM,
    )
    from .runtime.saved import load_cache, save_cache
    from .runtime.warmup import warmup
    from .schemes.calibrated import Calibration
    from .schemes.calibrated import load_calibration as load

__all__ = [
    "Calibration",
    "HeavyHitter",
    "KVPassError",
    "LogSparse",
    "LogSparseEviction",
    "NonFiniteError",
    "NotFusedError",
    "PackedKV",
    "Recent",
    "Retention",
    "Sinks",
    "SnapKV",
    "StreamingLLM",
    "apply",
    "bits_per_value",
    "calibrate",
    "explain",
    "load",
    "load_cache",
    "nbytes",
    "ops",
    "remove",
    "save_cache",
    "schemes",
    "warmup",
]
