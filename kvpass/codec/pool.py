"""Pools of pages as graphs see them.

A pool ``[B, H, capacity, *page]`` grows with its cache, so its capacity would be one symbolic int for each pool of each
layer, and tracing a model of 30 layers over 180 of them takes twice as long. A graph takes a *handle* instead, a view
``[B, H, *page]`` of the same storage: its shape is static, and ops find the capacity in the size of the storage.
"""

from torch import Tensor

from ..errors import KVPassError


def handle(pool: Tensor) -> Tensor:
    """The handle of ``pool``, which is contiguous and has its storage for itself."""
    (batch, heads, _, *page), (_, _, size, *strides) = pool.shape, pool.stride()
    return pool.as_strided((batch, heads, *page), (heads * size, size, *strides))


def whole(handle: Tensor, pages: int) -> Tensor:
    """The pool of ``handle``. Raises `KVPassError` if it has less than ``pages`` pages: it is no handle then, but a
    copy of one."""
    (batch, heads, *page), (_, size, *strides) = handle.shape, handle.stride()
    capacity = pages  # pages without scales or zero points take no storage
    if handle.numel():
        capacity = handle.untyped_storage().nbytes() // (handle.numel() * handle.itemsize)
    if capacity < pages:
        raise KVPassError(
            f"A compiled graph handed over a copy of packed pages, with room for {capacity} of {pages}: please report "
            "this, and use lowering='eager'."
        )
    return handle.as_strided(
        (batch, heads, capacity, *page), (heads * capacity * size, capacity * size, size, *strides)
    )
