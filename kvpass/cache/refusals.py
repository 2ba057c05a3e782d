"""What a packed cache layer does not let callers and models do, and what to do instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import KVPassError, NotCapturedError

TWICE = (
    "The model stored keys in the same cache layer twice in one forward, as a decoder that runs twice does. A packed "
    "cache takes one update a layer and forward. Use kvpass.remove(model); this model is not supported."
)
READ_BACK = (
    "The model reads the keys or values of a cache layer in the forward that has just stored some there. A packed "
    "layer no longer has them in full precision. Use kvpass.remove(model); this model is not supported."
)


def stored(getter: Callable[[Any], Any]) -> Any:
    """A property that can be read, and refuses to be assigned or deleted with a `KVPassError`."""

    def refuse(*_: object) -> None:
        raise KVPassError(
            f"{getter.__name__} of a packed cache layer cannot be assigned or deleted: keys and values are stored as "
            "codes. Change the cache with crop, reorder_cache, batch_select_indices, batch_repeat_interleave or reset, "
            "or kvpass.remove(model) and use a plain cache."
        )

    return property(getter, refuse, refuse, getter.__doc__)


def removed_tokens(given: Any) -> int:
    """The argument of ``crop``, which transformers 5.17 hands over as a tensor. Raises `KVPassError` unless it is an
    integer, 0 or below."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or number > 0:
        raise KVPassError(f"crop({given!r}): pass the negative number of tokens to remove, or 0.")
    return number


def selected_rows(choose: Callable[[Tensor], Tensor], batch: int, device: torch.device) -> Tensor:
    """The rows ``[n]`` int64 that ``choose`` makes of the indices of all ``batch`` rows. Raises `KVPassError` if they
    are none; on an accelerator bounds are not checked, which would wait for the device."""
    try:
        rows = choose(torch.arange(batch, device=device))
    except torch.OutOfMemoryError:
        raise
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise KVPassError(
            f"These are no rows of a cache of {batch} sequences ({error}). Pass a 1-D tensor of integers from 0 to "
            f"{batch - 1}, or to batch_repeat_interleave an integer from 1 up."
        ) from error
    if rows.ndim != 1 or not len(rows):
        raise KVPassError(
            f"Rows of shape {list(rows.shape)} are no batch: select at least one of {batch} sequences by a 1-D tensor."
        )
    return rows


@torch.compiler.assume_constant_result  # raised as it is, also while a graph is captured
def refuse_number_of_tokens() -> NoReturn:
    raise NotCapturedError(
        "the model stores another number of tokens than it is given, as it does if it puts image tokens in front"
    )


@torch.compiler.assume_constant_result
def refuse_place(found: torch.dtype, on: torch.device, dtype: torch.dtype, device: torch.device) -> NoReturn:
    raise KVPassError(
        f"The model made keys or values in {found} on {on}; kvpass was applied when they were {dtype} on {device}. "
        "kvpass.remove(model) and apply again after changing the dtype or the device, and outside of torch.autocast: "
        "what was applied outside works within, too."
    )
