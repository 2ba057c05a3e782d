"""LogQuant: KIVI's quantization, with exact tokens that get sparser with distance instead of a plain window."""

from dataclasses import dataclass

from ..errors import KVPassError
from ..fields import check_integers
from ..layout.retention import LogSparse, Retention, Sinks
from .base import register_scheme
from .kivi import KIVIConfig


@register_scheme(logquant_192=dict(window=64, group_size=64))
@dataclass(frozen=True, kw_only=True)
class LogQuantConfig(KIVIConfig):
    """KIVI's fields, and the window.

    window: W of the paper; 2W to 3W - 1 tokens are exact, chosen by its algorithm 1. Must be a multiple of
        ``group_size``, because W tokens are packed at a time. The paper's W is a third of R = 128, 192 or 256, with
        groups of 64: "logquant-192" is the one of these whose W is whole groups. (Its code quantizes the whole prefix
        again each time.)
    """

    name = "logquant"

    window: int = 32

    def __post_init__(self) -> None:
        check_integers(self, window=1)
        if self.retention is not None:
            raise KVPassError(
                "LogQuant is defined by its retention policy. To use another policy, take KIVIConfig(retention=...)."
            )
        super().__post_init__()

    def _policy(self) -> Retention:
        return Sinks(self.sinks) + LogSparse(self.window)
