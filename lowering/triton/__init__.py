"""Hand-written Triton kernels for CUDA devices, if Triton is installed; by name also on CPUs (TRITON_INTERPRET=1)."""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from . import append, dequantize_fields, launch, launch_latent, quantize  # noqa: F401  (importing them registers them)
