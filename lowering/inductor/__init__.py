"""Kernels that Inductor generates, for every device it serves: codecs and attention, written so that it fuses them."""

from . import attend, dense, drafts, pages  # noqa: F401  (they register themselves in the table)
