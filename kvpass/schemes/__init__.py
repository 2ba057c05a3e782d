"""One small file per paper: a frozen config that composes codec primitives into a plan."""

from .base import LayerGeometry, LayerPlan, SchemeConfig, available, check_sources, get, register_scheme
from .identity import IdentityConfig
from .kivi import KIVIConfig
from .logquant import LogQuantConfig
from .rtn import RTNConfig
from .squat import SQuatConfig
from .uniform import UniformConfig
from .xquant import AsymKVConfig, XQuantConfig

__all__ = [
    "AsymKVConfig",
    "IdentityConfig",
    "KIVIConfig",
    "LayerGeometry",
    "LayerPlan",
    "LogQuantConfig",
    "RTNConfig",
    "SQuatConfig",
    "SchemeConfig",
    "UniformConfig",
    "XQuantConfig",
    "available",
    "check_sources",
    "get",
    "register_scheme",
]
