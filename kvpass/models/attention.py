"""Attention implementations of transformers that are kernels of their own: nothing to capture, so another form of
the same function takes their place while kvpass is applied. The only file that sets them."""

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

KERNELS = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class PortableAttention:
    """The attention of ``model`` written as ATen: "sdpa", or "eager" where SDPA lacks something (softcap, sinks)."""

    def __init__(self, model: nn.Module):
        self.own = [
            (config, config._attn_implementation, _portable(config, submodule))
            for config, submodule in _configs(model)
            if config._attn_implementation in KERNELS
        ]

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_) -> None:
        self.uninstall()

    def install(self) -> None:
        """Write it so."""
        for config, _, portable in self.own:
            config._attn_implementation = portable

    def uninstall(self) -> None:
        """Give the model its own implementation back."""
        for config, own, _ in self.own:
            config._attn_implementation = own

    def __str__(self) -> str:
        """What `kvpass.explain` says of it; empty if nothing changed."""
        changes = dict.fromkeys(f"{portable!r} replaces {own!r}" for _, own, portable in self.own)
        return "; ".join(changes) and f"attn_implementation: {'; '.join(changes)} while kvpass is applied"


def _configs(model: nn.Module) -> Iterator[tuple[PretrainedConfig, PreTrainedModel]]:
    """Every config an attention module may look at, once, with a model it belongs to."""
    seen = set()
    for submodule in model.modules():
        config = getattr(submodule, "config", None)
        if isinstance(submodule, PreTrainedModel) and id(config) not in seen:
            seen.add(id(config))
            yield config, submodule


def _portable(config: PretrainedConfig, model: PreTrainedModel) -> str:
    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not softcap else "eager"
