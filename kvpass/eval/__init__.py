"""What a scheme costs and saves on a model: quality, bytes and time, measured and predicted."""

from .budget import Recommendation, recommend
from .quality import Quality, evaluate, packed, reference_logits, score, score_in_one_pass
from .size import Footprint, bits_at, footprint

__all__ = [
    "Footprint",
    "Quality",
    "Recommendation",
    "bits_at",
    "evaluate",
    "footprint",
    "packed",
    "recommend",
    "reference_logits",
    "score",
    "score_in_one_pass",
]
