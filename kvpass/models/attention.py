"""Replace attention kernels of transformers that cannot be captured by an equivalent implementation while kvpass is
applied. No other file sets attention implementations."""

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

KERNELS = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class PortableAttention:
    """The attention of ``model`` in ATen ops: "sdpa", or "eager" if SDPA lacks something the model needs (softcap,
    sinks)."""

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
        """Switch to the ATen implementation."""
        for config, _, portable in self.own:
            config._attn_implementation = portable

    def uninstall(self) -> None:
        """Restore the model's own implementation."""
        for config, own, _ in self.own:
            config._attn_implementation = own

    def __str__(self) -> str:
        """The sentence for `kvpass.explain`; empty if nothing was replaced."""
        changes = dict.fromkeys(f"{portable!r} replaces {own!r}" for _, own, portable in self.own)
        return "; ".join(changes) and f"attn_implementation: {'; '.join(changes)} while kvpass is applied"


def _configs(model: nn.Module) -> Iterator[tuple[PretrainedConfig, PreTrainedModel]]:
    """Every config that an attention module may read, once, with a model it belongs to."""
    seen = set()
    for submodule in model.modules():
        config = getattr(submodule, "config", None)
        if isinstance(submodule, PreTrainedModel) and id(config) not in seen:
            seen.add(id(config))
            yield config, submodule


def _portable(config: PretrainedConfig, model: PreTrainedModel) -> str:
    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not softcap else "eager"
