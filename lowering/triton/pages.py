"""Packed pages, read by a kernel: from bytes to values without leaving registers.

Kernels walk over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and stands for one token of each of the
page's planes, T apart. Its bytes are loaded once, as one word. A plane then takes a shift and a mask, whatever the
width, and its codes become the mantissa of a float, so that no integer is converted.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Layout(NamedTuple):
    """What a kernel knows of a packed tensor when it is compiled: its spec, and how pages are walked over.

    code: values of a code. planes: tokens of a row, as many as keys and values can be unpacked in together. pairs,
    interleaved: the rotation (`kvpass.codec.rotary`) of tokens as they are read; no pairs, none.
    """

    bits: int
    code: int
    channelwise: bool
    group: int
    page: int
    planes: int
    sinks: int
    window: int
    dim: int
    pairs: int = 0
    interleaved: bool = False


class Pool(NamedTuple):
    """Pointers to a KV head of a packed tensor; ``points`` are those of its grid, None if it has none."""

    codes: tl.tensor
    scale: tl.tensor
    zero_point: tl.tensor
    points: tl.tensor | None


@triton.jit
def columns(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The channel of each column of a tile, and whether there is one: groups are padded to powers of two."""
    size: tl.constexpr = triton.next_power_of_2(GROUP)
    column = tl.arange(0, size * triton.next_power_of_2(GROUPS))
    if size == GROUP:
        return column, column < GROUP * GROUPS
    return column // size * GROUP + column % size, (column % size < GROUP) & (column // size < GROUPS)


@triton.jit
def channels(L: tl.constexpr, CODE: tl.constexpr):
    """`columns` of whole tokens, of codes for ``CODE`` channels each."""
    return columns(L.dim // CODE if L.channelwise else L.group // CODE, 1 if L.channelwise else L.dim // L.group)


@triton.jit
def tokens_of(first, stop, ROWS: tl.constexpr, L: tl.constexpr):
    """The tokens of rows ``[first, first + ROWS)`` in plane 0, and whether they are before row ``stop``."""
    of_plane: tl.constexpr = L.page // L.planes
    rows = first + tl.arange(0, ROWS)
    return L.sinks + rows // of_plane * L.page + rows % of_plane, rows < stop


@triton.jit
def words(codes, first, stop, column, real, ROWS: tl.constexpr, L: tl.constexpr):
    """All codes of rows ``[first, first + ROWS)``, ``[ROWS, columns]``, 0 from ``stop`` on."""
    tokens: tl.constexpr = L.page // L.planes
    wide: tl.constexpr = L.planes * L.bits > 32
    rows = first + tl.arange(0, ROWS)
    line = rows // tokens * (L.page * L.bits // 8) + rows % tokens
    byte = codes + line[:, None] * (L.dim // L.code) + column[None, :]
    there = (rows < stop)[:, None] & real[None, :]
    word = tl.zeros(byte.shape, tl.int64 if wide else tl.int32)
    for i in tl.static_range(L.planes * L.bits // 8):
        word |= tl.load(byte + i * tokens * (L.dim // L.code), mask=there, other=0).to(word.dtype) << 8 * i
    return word


@triton.jit
def _field(word, plane, FIRST: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """What a plane has of a bit field that begins at byte ``FIRST`` of the word."""
    count: tl.constexpr = PLANES * WIDTH // 8
    return (word >> ((FIRST + plane % count) * 8 + plane // count * WIDTH)).to(tl.int32) & ((1 << WIDTH) - 1)


@triton.jit
def _codes(word, plane, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of a plane. 3 bits are a field of 2 and one of 1, 6 bits one of 4 and one of 2."""
    if BITS % 3:
        return _field(word, plane, 0, BITS, PLANES)
    high: tl.constexpr = BITS // 3
    low = _field(word, plane, 0, 2 * high, PLANES)
    return low | _field(word, plane, PLANES * high // 4, high, PLANES) << 2 * high


@triton.jit
def _unscaled(code, points, CODE: tl.constexpr):
    """What codes stand for: themselves, or the ``CODE`` coordinates of a grid's point, beside each other."""
    if points is None:
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif CODE == 1:
        return tl.load(points + code)
    else:
        pairs = tl.join(tl.load(points + 2 * code), tl.load(points + 2 * code + 1))
        return tl.reshape(pairs, (code.shape[0], 2 * code.shape[1]))


@triton.jit
def values(word, pool, first, stop, channel, real, plane, L: tl.constexpr, WHOLE: tl.constexpr):
    """A plane of the rows of ``word``, dequantized: ``[rows, columns]`` float32.

    channel, real: those of `channels` if ``WHOLE``, otherwise any; tokens that share scales do so along whole runs of
    rows, channels along groups, of which there are only parts if not ``WHOLE``. Groups on grids have no zero point.
    """
    tokens: tl.constexpr = L.page // L.planes
    x = _unscaled(_codes(word, plane, L.bits, L.planes), pool.points, L.code)
    if L.channelwise:
        run: tl.constexpr = min(L.group, tokens, word.shape[0])
        row = first + tl.arange(0, word.shape[0] // run) * run
        group = row // tokens * (L.page // L.group) + plane * tokens // L.group + row % tokens // L.group
        where, known = group[:, None] * L.dim + channel[None, :], (row < stop)[:, None] & real[None, :]
        shape: tl.constexpr = (word.shape[0] // run, run, x.shape[1])
        dim: tl.constexpr = 1
    else:
        groups: tl.constexpr = L.dim // L.group
        padded: tl.constexpr = triton.next_power_of_2(groups) if WHOLE else x.shape[1]
        row = first + tl.arange(0, word.shape[0])
        group = tl.arange(0, padded) if WHOLE else channel // L.group
        counts = group < groups if WHOLE else real
        token = row // tokens * L.page + plane * tokens + row % tokens
        where, known = token[:, None] * groups + group[None, :], (row < stop)[:, None] & counts[None, :]
        shape: tl.constexpr = (x.shape[0], padded, x.shape[1] // padded)
        dim: tl.constexpr = 2
    scale = tl.load(pool.scale + where, mask=known, other=0).to(tl.float32)
    by_group = tl.reshape(x, shape) * tl.expand_dims(scale, dim)
    if pool.points is None:
        by_group += tl.expand_dims(tl.load(pool.zero_point + where, mask=known, other=0).to(tl.float32), dim)
    return tl.reshape(by_group, x.shape)
