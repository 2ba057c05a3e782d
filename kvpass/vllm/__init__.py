"""Packed pages in vLLM's own blocks: a plugin that does nothing unless a scheme is configured (docs/vllm.md)."""

from .serving_config import VARIABLE


def register() -> None:
    """Called by vLLM in each of its processes, through the entry point ``vllm.general_plugins``.

    vLLM then asks `kvpass.vllm.engine` for the backend of its layers, which is vLLM's own unless a scheme is
    configured.
    """
    from .engine import register_backends

    register_backends()


__all__ = ["VARIABLE", "register"]
