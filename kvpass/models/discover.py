"""Find where a plain decoder keeps its keys and values, by running it. No names and no way of writing are assumed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..errors import KVPassError
from ..schemes import LayerGeometry, geometries
from ..schemes.geometry import Held, unequal

_LOUDER = 100.0  # the output must not change if unwritten slots hold noise this many times larger


@dataclass(frozen=True)
class Buffer:
    """A tensor stored as attribute ``name`` of ``owner``: ``[B, H_kv, T, D]``, or ``[B, T, H_kv, D]`` if ``token_dim``
    is 1."""

    path: str
    owner: nn.Module
    name: str
    token_dim: int

    def get(self) -> Tensor:
        """The current content, as ``[B, H_kv, T, D]``."""
        tensor = getattr(self.owner, self.name)
        return tensor.transpose(1, 2) if self.token_dim == 1 else tensor

    def set(self, x: Tensor) -> None:
        """Store ``x``, ``[B, H_kv, T, D]``."""
        setattr(self.owner, self.name, x.transpose(1, 2) if self.token_dim == 1 else x)


@dataclass(frozen=True)
class BufferedCache:
    """A decoder that writes keys and values into tensors of its own.

    layers: key and value buffer of each attention layer, or the reason why it is not understood.
    tokens: name of the parameter for the new tokens, ``[B, S]`` or ``[B, S, C]``.
    position: name of the parameter that says where they are written: the first position, or all of them.
    capacity: number of tokens the buffers have room for.
    """

    layers: list[tuple[Buffer, Buffer] | str]
    tokens: str
    position: str
    capacity: int

    def geometry(self) -> dict[int, LayerGeometry | str]:
        """The geometry of each layer by index, or why it is not packed."""
        return geometries(
            [pair if isinstance(pair, str) else Held(pair[0].get(), pair[1].get()) for pair in self.layers]
        )


@dataclass(frozen=True)
class HandedCache:
    """A decoder that takes the cache as argument ``parameter`` and returns the next one as item ``output`` of a tuple.
    The cache is nested lists of ``[B, H_kv, T, D]`` tensors, keys before values.

    takes_empty: whether the model treats no cache and a cache of 0 tokens alike.
    """

    examples: list[Tensor]
    structure: TreeSpec
    tokens: str
    parameter: str
    output: int
    takes_empty: bool

    def geometry(self) -> dict[int, LayerGeometry | str]:
        """The geometry of each layer by index, or why it is not packed."""
        return geometries([Held(*pair) for pair in zip(self.examples[::2], self.examples[1::2], strict=True)])


def _names(value, part: range) -> bool:
    """Whether ``value`` may be the first position of ``part``, or all its positions."""
    if not isinstance(value, Tensor):
        return type(value) is int and value == part.start
    if value.is_floating_point() or value.dtype == torch.bool:
        return False
    if value.numel() == 1 and value.ndim < 2:
        return int(value) == part.start
    return value.shape[-1:] == (len(part),) and bool((value.cpu() == torch.tensor(part)).all())


def bind(model: nn.Module, example_inputs: tuple | dict[str, Any]) -> dict[str, Any]:
    """``example_inputs`` by name. Raises `KVPassError` if they do not fit ``model.forward``."""
    args, kwargs = ((), example_inputs) if isinstance(example_inputs, dict) else (tuple(example_inputs), {})
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise KVPassError(f"example_inputs do not match {type(model).__name__}.forward: {error}") from error
    parameters = bound.signature.parameters
    if any(parameters[name].kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for name in bound.arguments):
        raise KVPassError(
            f"{type(model).__name__}.forward takes *args or **kwargs: give it a signature with named parameters."
        )
    return dict(bound.arguments)


def discover(model: nn.Module, arguments: dict[str, Any]) -> BufferedCache | HandedCache | None:
    """How ``model`` keeps keys and values, or None if it has no cache. Runs the model a few times and restores its
    buffers.

    Raises `KVPassError` if the model does not run on ``arguments``, or has a cache whose position argument is not
    understood.
    """
    probe = _Probe(model, arguments)
    return probe.buffered() or probe.handed()


class _Probe:
    """A model and inputs to run it with."""

    def __init__(self, model: nn.Module, arguments: dict[str, Any]):
        self.model, self.arguments = model, arguments
        self.kept = list(_four_dimensional(model))

    def run(self, **changed):
        try:
            with torch.no_grad():
                return self.model(**{**self.arguments, **changed})
        except Exception as error:
            raise KVPassError(f"{type(self.model).__name__} failed on its example_inputs: {error}") from error

    def written(self, louder: dict[int, tuple[int, range]] | None = None, **changed):
        """The output, and for each tensor in ``kept``, by index, the token dim and the range of tokens that was
        written.

        During the run the tensors hold noise, and far larger noise after the ranges that ``louder`` gives.
        """
        originals = [getattr(owner, name) for _, owner, name in self.kept]
        generator = torch.Generator().manual_seed(0)
        filled = [torch.randn(t.shape, generator=generator).to(t) for t in originals]
        for i, (dim, part) in (louder or {}).items():
            filled[i].narrow(dim, part.stop, filled[i].shape[dim] - part.stop).mul_(_LOUDER)
        try:
            for (_, owner, name), tensor in zip(self.kept, filled, strict=True):
                setattr(owner, name, tensor.clone())
            output = self.run(**changed)
            ranges = {}
            for i, (_, owner, name) in enumerate(self.kept):
                if (found := _changed(filled[i], getattr(owner, name))) is not None:
                    ranges[i] = found
            return output, ranges
        finally:
            for (_, owner, name), tensor in zip(self.kept, originals, strict=True):
                setattr(owner, name, tensor)

    def buffered(self) -> BufferedCache | None:
        output, ranges = self.written()
        if not ranges:
            return None
        parts = {part for _, part in ranges.values()}
        if len(parts) != 1:
            raise KVPassError(f"{type(self.model).__name__} writes its buffers at different positions: {parts}.")
        (part,) = parts
        position = self._position(part)
        for got, expected in zip(tree_leaves(self.written(ranges)[0]), tree_leaves(output), strict=True):
            if isinstance(got, Tensor) and not torch.allclose(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True):
                raise KVPassError(
                    f"{type(self.model).__name__} attends to buffer positions that have not been written yet: mask "
                    "them, or read the written part only."
                )
        layers = self._pairs({i: dim for i, (dim, _) in ranges.items()})
        sizes = {pair[0].get().shape[2] for pair in layers if not isinstance(pair, str)}
        if len(sizes) > 1:
            raise KVPassError(f"The layers' buffers have different capacities: {sorted(sizes)} tokens.")
        if not sizes:
            raise KVPassError(f"No buffers of {type(self.model).__name__} can be packed: {layers[0]}.")
        return BufferedCache(layers, self._tokens(len(part)), position, sizes.pop())

    def _pairs(self, dims: dict[int, int]) -> list[tuple[Buffer, Buffer] | str]:
        """Keys and values of each layer, given the token dims of the written tensors."""
        by_owner: dict[str, list[Buffer]] = {}
        for i, dim in dims.items():
            path, owner, name = self.kept[i]
            by_owner.setdefault(path, []).append(Buffer(path, owner, name, dim))
        layers: list[tuple[Buffer, Buffer] | str] = []
        for path, buffers in by_owner.items():
            if len(buffers) == 2 and not unequal(buffers[0].get(), buffers[1].get()):
                key, value = sorted(buffers, key=lambda buffer: "v" in buffer.name.lower().replace("kv", ""))
                layers.append((key, value))
            else:
                names = ", ".join(f"{buffer.name} {tuple(buffer.get().shape)}" for buffer in buffers)
                layers.append(f"{path} keeps {names}: expected keys and values of the same tokens, one tensor each")
        return layers

    def _position(self, part: range) -> str:
        """The parameter that moves the written range."""
        for name, value in self.arguments.items():
            if not _names(value, part):
                continue
            moved = {where for _, where in self.written(**{name: value + 1})[1].values()}
            if moved == {range(part.start + 1, part.stop + 1)}:
                return name
        raise KVPassError(
            f"{type(self.model).__name__} writes positions {part.start} to {part.stop - 1} of its buffers, but no "
            "argument gives them. kvpass must know where tokens go: let forward take the first position, or all "
            "positions, and include it in example_inputs."
        )

    def _tokens(self, count: int) -> str:
        for name, value in self.arguments.items():
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == count:
                return name
        raise KVPassError(f"No argument holds the {count} written tokens as [B, S] or [B, S, C].")

    def handed(self) -> HandedCache | None:
        """Try each optional argument with each item of the output as a cache, for one more token."""
        output = self.run()
        if not isinstance(output, tuple):
            return None
        for name, value in self.arguments.items():
            if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point():
                continue
            for i, part in enumerate(output):
                examples, structure = tree_flatten(part)
                if not _are_keys_and_values(examples, value.shape):
                    continue
                for parameter, default in inspect.signature(self.model.forward).parameters.items():
                    if self.arguments.get(parameter, default.default) is None and self._continues(
                        name, parameter, part, i, examples
                    ):
                        empty = tree_unflatten([leaf[:, :, :0] for leaf in examples], structure)
                        same = self._same(output, parameter, empty)
                        return HandedCache(examples, structure, name, parameter, i, same)
        return None

    def _same(self, output, parameter: str, cache) -> bool:
        """Whether passing ``cache`` leaves the output unchanged."""
        try:
            leaves = tree_leaves(self.run(**{parameter: cache}))
        except KVPassError:
            return False
        return all(
            torch.equal(got, expected) if isinstance(expected, Tensor) else got == expected
            for got, expected in zip(leaves, tree_leaves(output), strict=False)
        )

    def _continues(self, tokens: str, parameter: str, cache, output: int, examples: list[Tensor]) -> bool:
        """Whether one more token with ``cache`` returns the same cache, extended by one token."""
        try:
            longer = self.run(**{tokens: self.arguments[tokens][:, -1:], parameter: cache})[output]
        except (KVPassError, TypeError, IndexError):
            return False
        leaves = tree_leaves(longer)
        return len(leaves) == len(examples) and all(
            isinstance(new, Tensor)
            and new.ndim == 4
            and new.shape[2] == old.shape[2] + 1
            and torch.equal(new[:, :, :-1], old)
            for new, old in zip(leaves, examples, strict=True)
        )


def _four_dimensional(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, owner and name of every 4-dim float tensor that a module stores and does not train."""
    for path, module in model.named_modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point():
                yield path, module, name


def _changed(before: Tensor, after: Tensor) -> tuple[int, range] | None:
    """The token dim and the range of tokens that changed; None if nothing did, or not one range."""
    if before.shape != after.shape:
        return None
    changed = before != after
    for dim in (2, 1):
        others = [d for d in range(4) if d != dim]
        where = changed.any(others).nonzero().flatten()
        if 0 < len(where) < before.shape[dim] and len(where) == where[-1] - where[0] + 1:
            return dim, range(int(where[0]), int(where[-1]) + 1)
    return None


def _are_keys_and_values(leaves: list, shape: torch.Size) -> bool:
    return (
        len(leaves) > 1
        and len(leaves) % 2 == 0
        and all(isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point() for leaf in leaves)
        and all(leaf.shape[0] == shape[0] and leaf.shape[2] == shape[1] for leaf in leaves)
        and not any(unequal(*pair) for pair in zip(leaves[::2], leaves[1::2], strict=True))
    )
