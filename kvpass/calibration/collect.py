"""Store the keys and values that a model computes for some sequences on disk, so that memory does not depend on their
number."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..cache.layer import PackedLayer
from ..codec.affine import params_dtype
from ..errors import NonFiniteError
from ..eval.quality import packed
from ..models.arguments import handing
from ..models.probe import fresh_cache
from ..schemes import IdentityConfig

_ROLES = ("key", "value")


class Collected:
    """Keys and values of packed layers, one 16-bit file per sequence. Keys from before rotary embedding come with its
    tables."""

    def __init__(self, files: list[Path]):
        self.files = files

    def read(self, sequence: int, layer: int, role: int) -> Tensor:
        """Keys (role 0) or values ``[1, H_kv, T, D]`` float32 of one layer."""
        with safe_open(self.files[sequence], "pt") as file:
            return file.get_tensor(f"{layer}.{_ROLES[role]}").float()

    def tables(self, sequence: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[1, T, >= p]`` float32, if keys were collected before rotary embedding."""
        with safe_open(self.files[sequence], "pt") as file:
            return file.get_tensor("cos").float(), file.get_tensor("sin").float()


@torch.no_grad()
def collect(
    model: nn.Module, data: Sequence[Tensor], rope: Literal["post", "pre"], folder: Path, bar: tqdm
) -> Collected:
    """Run ``model`` over each of ``data`` ``[1, T]`` and store the keys and values that its attention would cache.

    rope: whether keys are taken before ("pre") or after ("post") rotary embedding.
    folder: where the files go; sequences that it already holds are not run again.

    Raises `NonFiniteError` for values that 16 bits cannot hold.
    """
    files = [folder / f"sequence-{digest(ids)}.safetensors" for ids in data]
    missing = [(ids, file) for ids, file in zip(data, files, strict=True) if not file.exists()]
    bar.update(len(data) - len(missing))
    if not missing:
        return Collected(files)
    with packed(model, IdentityConfig(rope=rope), lowering="auto" if rope == "pre" else "eager"):
        for ids, file in missing:
            cache = fresh_cache(model)
            model(input_ids=ids, **handing(model, cache), use_cache=True)
            tensors: dict[str, Tensor] = {}
            for index, layer in enumerate(cache.layers):
                if not isinstance(layer, PackedLayer):
                    continue
                if layer.rotary is not None:
                    tensors |= {
                        name: table.cpu().contiguous() for name, table in layer.rotary.contents(ids.shape[1]).items()
                    }
                for role, state in zip(_ROLES, layer.states(), strict=True):
                    x = state.dequantize(layer.tokens)
                    x = x.to(params_dtype(x.dtype))
                    if not torch.isfinite(x).all():
                        raise NonFiniteError(
                            f"Layer {index} computes non-finite {role}s in {x.dtype}: load the model in bfloat16."
                        )
                    tensors[f"{index}.{role}"] = x.cpu().contiguous()
            partial = file.with_suffix(".partial")
            save_file(tensors, partial)
            partial.replace(file)  # atomically: a file is complete or absent
            bar.update()
    return Collected(files)


def digest(*parts) -> str:
    """A short hash of texts and tensors."""
    out = hashlib.sha256()
    for part in parts:
        out.update(part.cpu().contiguous().numpy().tobytes() if isinstance(part, Tensor) else str(part).encode())
    return out.hexdigest()[:16]
