"""kvpass in vLLM: packed pages in vLLM's own blocks (docs/vllm.md), and a store of packed prefixes beside them
(docs/prefix-store.md). Neither does anything unless it is configured."""

from typing import Any

from .serving_config import VARIABLE


def register() -> None:
    """Called by vLLM in each of its processes, through the entry point ``vllm.general_plugins``.

    vLLM then asks `kvpass.vllm.engine` for the backend of its layers, which is vLLM's own unless a scheme is
    configured.
    """
    from .engine import register_backends

    register_backends()


def __getattr__(name: str) -> Any:
    """`KVPassConnector`, which vLLM looks up here; it imports vLLM."""
    if name != "KVPassConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import KVPassConnector

    return KVPassConnector


__all__ = ["VARIABLE", "register"]
