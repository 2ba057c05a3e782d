"""Hand-written kernels, where Triton is installed: for CUDA devices, and by name on the CPU with TRITON_INTERPRET=1."""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from . import append, launch, quantize  # noqa: F401  (they register themselves in the table)
