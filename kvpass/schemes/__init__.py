"""One small file per paper: a frozen config that composes codec primitives into a plan."""

from .aqua import AquaKVConfig
from .base import LayerPlan, SchemeConfig, available, check_edges, check_sources, compose, get, named, register_scheme
from .e8 import E8Config
from .gear import GEARConfig
from .geometry import Heads, LayerGeometry, geometries
from .higgs import HIGGSConfig
from .identity import IdentityConfig
from .kitty import KittyConfig
from .kivi import KIVIConfig
from .kvarn import KVarNConfig
from .kvquant import CalibratedKVQuantConfig, KVQuantConfig
from .logquant import LogQuantConfig
from .minicache import MiniCacheConfig
from .polarquant import PolarQuantConfig
from .qaq import QAQConfig
from .quarot import QuaRotConfig
from .rtn import RTNConfig
from .squat import SQuatConfig
from .storage import StorageConfig
from .turboquant import TurboQuantConfig
from .uniform import UniformConfig
from .waterfill import CalibratedWaterfillConfig, WaterfillConfig
from .xquant import AsymKVConfig, XQuantConfig
from .zipcache import ZipCacheConfig

__all__ = [
    "AquaKVConfig",
    "AsymKVConfig",
    "CalibratedKVQuantConfig",
    "CalibratedWaterfillConfig",
    "E8Config",
    "GEARConfig",
    "HIGGSConfig",
    "Heads",
    "IdentityConfig",
    "KIVIConfig",
    "KVQuantConfig",
    "KVarNConfig",
    "KittyConfig",
    "LayerGeometry",
    "LayerPlan",
    "LogQuantConfig",
    "MiniCacheConfig",
    "PolarQuantConfig",
    "QAQConfig",
    "QuaRotConfig",
    "RTNConfig",
    "SQuatConfig",
    "SchemeConfig",
    "StorageConfig",
    "TurboQuantConfig",
    "UniformConfig",
    "WaterfillConfig",
    "XQuantConfig",
    "ZipCacheConfig",
    "available",
    "check_edges",
    "check_sources",
    "compose",
    "geometries",
    "get",
    "named",
    "register_scheme",
]
