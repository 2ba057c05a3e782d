"""Pools of pages, as graphs see them.

A pool ``[B, H, capacity, *page]`` grows with its cache, so its capacity would be one symbolic int for each pool of each
layer, and tracing a model of 30 layers over 180 of them would take twice as long. A graph takes a *handle* instead, a
view ``[B, H, *page]`` of the same storage. Its shape is static, and ops compute the capacity from the size of the
storage.
"""

from torch import Tensor

from ..errors import KVPassError

NDIM = 5
"""Dims of a pool."""


def handle(pool: Tensor) -> Tensor:
    """The handle of ``pool``, which is contiguous and does not share its storage; or ``pool``, if it is a handle."""
    if pool.ndim < NDIM:
        return pool
    (batch, heads, _, *page), (_, _, size, *strides) = pool.shape, pool.stride()
    return pool.as_strided((batch, heads, *page), (heads * size, size, *strides))


def capacity(tensor: Tensor, pages: int) -> int:
    """The number of pages that a pool, or the pool behind a handle, has room for. Raises `KVPassError` if it is less
    than ``pages``."""
    if tensor.ndim == NDIM:
        found = tensor.shape[2]
    elif tensor.numel():
        found = tensor.untyped_storage().nbytes() // tensor.nbytes
    else:  # pages without scales or zero points take no storage
        found = pages
    if found < pages:
        raise KVPassError(
            f"The pool has room for {found} of {pages} pages. If a compiled graph passed a copy of the pages, please "
            "report this, and use lowering='eager'."
        )
    return found


def of_capacity(handle: Tensor, capacity: int) -> Tensor:
    """The pool behind ``handle``, which has room for ``capacity`` pages."""
    (batch, heads, *page), (_, size, *strides) = handle.shape, handle.stride()
    return handle.as_strided(
        (batch, heads, capacity, *page), (heads * capacity * size, capacity * size, size, *strides)
    )


def bare_handle(pool: Tensor) -> Tensor:
    """A handle ``[1, 1, 1, 1]``, for a pool whose page size differs between layers, so that layers look alike in
    graphs; or ``pool``, if it is a handle."""
    return pool if pool.ndim < NDIM else pool.as_strided((1, 1, 1, 1), (1, 1, 1, 1))


def of_pages(tensor: Tensor, batch: int, size: int) -> Tensor:
    """The pool ``[B, 1, capacity, 1, size]`` of pages of ``size`` bytes behind a bare handle; or ``tensor``, if it is a
    pool."""
    if tensor.ndim == NDIM:
        return tensor
    rooms = tensor.untyped_storage().nbytes() // (batch * size) if size else 0
    return tensor.as_strided((batch, 1, rooms, 1, size), (rooms * size, rooms * size, size, size, 1))


def bucket(number: int) -> int:
    """``number``, or up to an eighth more, so that one object can serve all numbers of a bucket."""
    step = 1 << max(0, number.bit_length() - 4)
    return -(-number // step) * step


def whole(tensor: Tensor, pages: int) -> Tensor:
    """The pool behind ``tensor`` if that is a handle, otherwise ``tensor``. Raises like `capacity`."""
    room = capacity(tensor, pages)
    return tensor if tensor.ndim == NDIM else of_capacity(tensor, room)
