"""Store the keys and values that a model computes for some sequences on disk, so that memory does not depend on their
number."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..accelerate_hooks import is_offloaded
from ..cache.layer import PackedLayer
from ..codec.affine import params_dtype
from ..errors import NonFiniteError
from ..eval.quality import packed
from ..models.arguments import filling
from ..models.probe import fresh_cache
from ..progress import bar
from ..schemes import IdentityConfig

_ROLES = ("key", "value")
_OFFLOADED = 8  # sequences to read whenever offloaded weights are loaded


class Collected:
    """Keys and values of packed layers on disk, one 16-bit file per sequence and group of layers. Keys from before
    rotary embedding come with its tables.

    Reading a layer runs ``model`` over each of ``data`` ``[1, T]`` if the files of its group are missing. If there are
    several groups, those before the one that was read last are then deleted.

    rope: whether keys are taken before ("pre") or after ("post") rotary embedding.
    folder: where the files go.
    groups: the layers of each group, in order.

    Methods raise `NonFiniteError` for values that 16 bits cannot hold.
    """

    def __init__(
        self, model: nn.Module, data: Sequence[Tensor], rope: Literal["post", "pre"], folder: Path,
        groups: Sequence[Sequence[int]], progress: bool = True,
    ):  # fmt: skip
        self.model, self.data, self.rope, self.folder = model, data, rope, folder
        self.groups, self.progress = groups, progress
        self._names = [digest(ids) for ids in data]
        self._there: list[int] = []  # groups whose files are complete, in the order of reading

    def __len__(self) -> int:
        return len(self.data)

    def first(self, count: int) -> "Collected":
        """The first ``count`` sequences."""
        return Collected(self.model, self.data[:count], self.rope, self.folder, self.groups, self.progress)

    def read(self, sequence: int, layer: int, role: int) -> Tensor:
        """Keys (role 0) or values ``[1, H_kv, T, D]`` float32 of one layer."""
        with safe_open(self._file(sequence, layer), "pt") as file:
            return file.get_tensor(f"{layer}.{_ROLES[role]}").float()

    def tables(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[1, T, >= p]`` float32, if keys were collected before rotary embedding."""
        with safe_open(self._file(sequence, layer), "pt") as file:
            return file.get_tensor("cos").float(), file.get_tensor("sin").float()

    def _file(self, sequence: int, layer: int) -> Path:
        group = next(index for index, layers in enumerate(self.groups) if layer in layers)
        if group not in self._there:
            self.collect(group)
        return self._path(sequence, group)

    def _path(self, sequence: int, group: int) -> Path:
        part = f"-{group + 1}-of-{len(self.groups)}" if len(self.groups) > 1 else ""
        return self.folder / f"sequence-{self._names[sequence]}{part}.safetensors"

    @torch.no_grad()
    def collect(self, group: int = 0) -> None:
        """Run the model over the sequences whose files of ``group`` are missing."""
        while len(self._there) > 1:  # a layer is read together with the one below it
            for sequence in range(len(self)):
                self._path(sequence, self._there[0]).unlink(missing_ok=True)
            del self._there[0]
        files = [self._path(sequence, group) for sequence in range(len(self))]
        missing = [(ids, file) for ids, file in zip(self.data, files, strict=True) if not file.exists()]
        self._there.append(group)
        if not missing:
            return
        lowering = "auto" if self.rope == "pre" else "eager"
        with (
            bar("keys and values", len(missing), "sequence", self.progress) as done,
            packed(self.model, IdentityConfig(rope=self.rope), lowering=lowering),
        ):
            for some in _batches(missing, _OFFLOADED if is_offloaded(self.model) else 1):
                tensors = self._tensors(torch.cat([ids for ids, _ in some]), self.groups[group])
                for row, (_, file) in enumerate(some):
                    partial = file.with_suffix(".partial")
                    save_file({name: x[row % len(x)][None] for name, x in tensors.items()}, partial)
                    partial.replace(file)  # atomically: a file is complete or absent
                    done.update()

    def _tensors(self, ids: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
        """Keys and values ``[N, H_kv, T, D]`` of ``layers`` for ``ids`` ``[N, T]``, and rotary tables ``[N or 1, T,
        p]``."""
        cache = fresh_cache(self.model)
        self.model(input_ids=ids, **filling(self.model, cache, 1))
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, PackedLayer):
                continue
            if layer.rotary is not None:
                tables = layer.rotary.contents(ids.shape[1])
                tensors |= {name: table.cpu().contiguous() for name, table in tables.items()}
            for role, state in zip(_ROLES, layer.states(), strict=True) if index in layers else ():
                x = state.dequantize(layer.tokens)
                x = x.to(params_dtype(x.dtype))
                if not torch.isfinite(x).all():
                    raise NonFiniteError(
                        f"Layer {index} computes non-finite {role}s in {x.dtype}: load the model in bfloat16."
                    )
                tensors[f"{index}.{role}"] = x.cpu().contiguous()
        return tensors


def _batches(missing: Sequence[tuple[Tensor, Path]], most: int) -> Iterator[list[tuple[Tensor, Path]]]:
    """Runs of sequences of one length, up to ``most`` each."""
    for _, alike in groupby(missing, lambda each: each[0].shape):
        while some := list(islice(alike, most)):
            yield some


def digest(*parts) -> str:
    """A short hash of texts and tensors."""
    out = hashlib.sha256()
    for part in parts:
        out.update(part.cpu().contiguous().numpy().tobytes() if isinstance(part, Tensor) else str(part).encode())
    return out.hexdigest()[:16]
