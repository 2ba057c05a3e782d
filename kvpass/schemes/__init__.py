"""One small file per paper: a frozen config that composes codec primitives into a plan."""

from .base import LayerGeometry, LayerPlan, SchemeConfig, available, get, register_scheme
from .kivi import KIVIConfig
from .squat import SQuatConfig

__all__ = [
    "KIVIConfig",
    "LayerGeometry",
    "LayerPlan",
    "SQuatConfig",
    "SchemeConfig",
    "available",
    "get",
    "register_scheme",
]
