"""Operations that a packed cache layer refuses, each with an error that says what to do instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import KVPassError, NotCapturedError

TWICE = (
    "The model updated the same cache layer twice in one forward, as a looped decoder does. A packed cache takes one "
    "update per layer and forward. Call kvpass.remove(model); this model is not supported."
)
READ_BACK = (
    "The model reads the keys or values of a cache layer in the same forward that stored new ones there. A packed "
    "layer no longer has them in full precision. Call kvpass.remove(model); this model is not supported."
)


def stored(getter: Callable[[Any], Any]) -> Any:
    """A read-only property. Assigning or deleting it raises `KVPassError`."""

    def refuse(*_: object) -> None:
        raise KVPassError(
            f"{getter.__name__} of a packed cache layer cannot be assigned or deleted: keys and values are stored "
            "quantized. Change the cache with crop, reorder_cache, batch_select_indices, batch_repeat_interleave or "
            "reset, or call kvpass.remove(model) and use a plain cache."
        )

    return property(getter, refuse, refuse, getter.__doc__)


def removed_tokens(given: Any) -> int:
    """The argument of ``crop`` as an int; transformers 5.17 passes a tensor. Raises `KVPassError` unless it is an
    integer of at most 0."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or number > 0:
        raise KVPassError(f"crop({given!r}): pass minus the number of tokens to remove, or 0.")
    return number


def selected_rows(choose: Callable[[Tensor], Tensor], batch: int, device: torch.device) -> Tensor:
    """The row indices ``[n]`` int64 that ``choose`` returns for the indices of all ``batch`` rows. Raises `KVPassError`
    if they do not select rows. On an accelerator bounds are not checked, because that would wait for the device."""
    try:
        rows = choose(torch.arange(batch, device=device))
    except torch.OutOfMemoryError:
        raise
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise KVPassError(
            f"These rows do not select from a cache with batch size {batch} ({error}). Pass a 1-D integer tensor with "
            f"values from 0 to {batch - 1}; batch_repeat_interleave also takes an integer of at least 1."
        ) from error
    if rows.ndim != 1 or not len(rows):
        raise KVPassError(
            f"Rows of shape {list(rows.shape)} do not select a batch: pass a 1-D tensor with at least one of the "
            f"{batch} row indices."
        )
    return rows


@torch.compiler.assume_constant_result  # raised unchanged while a graph is captured, too
def refuse_number_of_tokens() -> NoReturn:
    raise NotCapturedError(
        "the model stores a different number of tokens than it is given, for example because it prepends image tokens"
    )


@torch.compiler.assume_constant_result
def refuse_place(found: torch.dtype, on: torch.device, dtype: torch.dtype, device: torch.device) -> NoReturn:
    raise KVPassError(
        f"The model computed keys or values in {found} on {on}, but kvpass was applied when they were {dtype} on "
        f"{device}. After changing the dtype or the device, call kvpass.remove(model) and apply again. Call apply "
        "outside torch.autocast: the packed model then works inside it, too."
    )
