"""Entropy coding of uniformly quantized coordinates.

An entropy coder stores frequent codes in fewer bits, so coordinates can have any step size instead of a whole number of
bits. At equal cost of errors in all coordinates, this comes within 0.25 bits per value of the rate-distortion bound
(Gish & Pierce 1968), where bit widths are 0.5 bits away from it. Sizes then depend on the tokens.

Codes whose expected entropies are close form one stream, which zstd compresses with a Huffman code of its own. A
Huffman code needs at least one bit per byte, so one byte holds up to 5 codes if nearly all of them are small. Larger
codes are listed as exceptions.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError

_TABLE = 8  # table entries per octave
_LOWEST, _HIGHEST = -8, 4  # log2 of the standard deviations in the table; entropies above it are those of a density
_STREAMS = 2  # streams per octave of expected standard deviations
_DEVIATIONS = 3.4  # standard deviations within which codes should be
_SAMPLED = 8  # one in so many codes is looked at to find their standard deviation
_RARE = 1 / 1024  # share of codes that may be exceptions: 64 bits each
_LEVEL = 1  # of zstd: higher levels look for repeated strings, which codes do not have
_LARGEST = 2**15 - 1
OVERHEAD = 1.05
"""Bytes of a compressed stream, relative to its entropy."""


class _Digits(NamedTuple):
    """How a byte holds ``per_byte`` codes of magnitude at most ``largest``."""

    largest: int
    per_byte: int


_DIGITS = _Digits(1, 5), _Digits(2, 3), _Digits(7, 2), _Digits(127, 1)


class Streams(NamedTuple):
    """Decompressed codes.

    data: the bytes of all streams, uint8.
    table: ``[S, 5]`` int64, of each stream its first byte, its bytes, codes per byte, the largest code that a byte
        holds, and its first row.
    exceptions: ``[E, 2]`` int32, codes that no byte holds, and their places among the codes of all streams.
    """

    data: Tensor
    table: Tensor
    exceptions: Tensor


@cache
def _entropies() -> Tensor:
    """Entropies of uniformly quantized normal variables, whose standard deviations in steps are those of the table."""
    std = torch.exp2(torch.arange(_LOWEST * _TABLE, _HIGHEST * _TABLE + 1, dtype=torch.float64) / _TABLE)
    edges = torch.arange(8 * 2**_HIGHEST, dtype=torch.float64) + 0.5
    upper = torch.special.erf(edges / (std.unsqueeze(-1) * math.sqrt(2))) / 2
    each = torch.cat([2 * upper[:, :1], upper.diff(dim=-1)], 1).clamp_min(1e-300)
    times = torch.full_like(edges, 2.0)  # positive and negative codes
    times[0] = 1
    return -(times * each * each.log2()).sum(-1)


def entropy(std: Tensor) -> Tensor:
    """Bits per value of a normal variable that is quantized with step 1, from its standard deviation; float64."""
    octaves = std.double().clamp_min(2.0 ** (_LOWEST - 1)).log2()
    place = ((octaves - _LOWEST) * _TABLE).clamp(0, (_HIGHEST - _LOWEST) * _TABLE)
    table = _entropies().to(std.device)
    below = place.floor().long().clamp_max(len(table) - 2)
    inside = table[below].lerp(table[below + 1], place - below)
    density = octaves + math.log2(2 * math.pi * math.e) / 2
    return torch.where(octaves > _HIGHEST, density, inside * (octaves >= _LOWEST))


def rescale(steps: Tensor, bits: float, size: Tensor | None = None) -> Tensor:
    """``steps`` times the factor with which normal variables of standard deviation 1 take ``bits`` bits per value.

    size: how much a bit of each counts; default 1.
    """
    size = torch.ones_like(steps, dtype=torch.float64) if size is None else size.double()
    low, high = -64.0, 64.0  # log2 of the factor
    for _ in range(60):
        middle = (low + high) / 2
        mean = float((entropy(1 / (steps.double() * 2**middle)) * size).sum() / size.sum())
        low, high = (middle, high) if mean > bits else (low, middle)
    return steps.double() * 2**high


class EntropyCoder:
    """Compresses rows of codes, of which only the expected standard deviation is known.

    std: ``[R]``, of the codes in each row.

    Raises `KVPassError` without the package zstandard.
    """

    def __init__(self, std: Tensor) -> None:
        _zstandard()
        octaves = (std.double().clamp(2.0**_LOWEST, 2.0 ** (_HIGHEST + 1)).log2() * _STREAMS).round()
        self.order = octaves.argsort(stable=True)
        self.place = self.order.argsort()
        stream, counts = octaves[self.order].unique_consecutive(return_inverse=True, return_counts=True)[1:]
        self.rows = counts.tolist()
        self.stream = stream[self.place]

    def compress(self, codes: Tensor) -> dict[str, Tensor]:
        """Compress codes ``[R, T]`` int16.

        Returns, on the CPU, ``codes`` ``[bytes]`` uint8, ``streams`` ``[S, 2]`` int32 (the number of codes per byte,
        and the bytes of each stream), and ``exceptions`` ``[E, 2]`` int32 (place and code).
        """
        compressor = _zstandard().ZstdCompressor(level=_LEVEL)
        sorted_codes, data, streams, exceptions, start = codes[self.order].cpu(), [], [], [], 0
        for rows in sorted_codes.split(self.rows):
            stream = rows.flatten()
            digits, large = _digits_of(stream)
            exceptions.append(torch.stack([large + start, stream[large]], 1).int())
            data.append(compressor.compress(_packed(stream, digits).numpy()))
            streams.append((digits.per_byte, len(data[-1])))
            start += len(stream)
        return {
            "codes": torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8),
            "streams": torch.tensor(streams, dtype=torch.int32),
            "exceptions": torch.cat(exceptions),
        }

    def streams(self, kept: Mapping[str, Tensor], tokens: int) -> Streams:
        """Decompress ``kept``, which `compress` returned for rows of ``tokens`` codes, but leave codes in bytes."""
        decompressor, data = _zstandard().ZstdDecompressor(), kept["codes"].numpy()
        found, table, start, first_byte, first_row = [], [], 0, 0, 0
        for rows, (per_byte, size) in zip(self.rows, kept["streams"].tolist(), strict=True):
            found.append(decompressor.decompress(data[start : start + size]))
            if len(found[-1]) != -(-rows * tokens // per_byte):
                raise KVPassError(
                    f"{len(found[-1])} bytes do not hold {rows} rows of {tokens} codes: the chunk is corrupt."
                )
            table.append((first_byte, len(found[-1]), per_byte, _digits(per_byte).largest, first_row))
            start, first_byte, first_row = start + size, first_byte + len(found[-1]), first_row + rows
        return Streams(torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8), torch.tensor(table),
                       kept["exceptions"])  # fmt: skip

    def decompress(self, kept: Mapping[str, Tensor], tokens: int) -> Tensor:
        """Inverse of `compress`: codes ``[R, tokens]`` int16 on the CPU."""
        data, table, exceptions = self.streams(kept, tokens)
        each = zip(data.split(table[:, 1].tolist()), table[:, 2].tolist(), self.rows, strict=True)
        codes = torch.cat([_unpacked(packed, _digits(per_byte))[: rows * tokens] for packed, per_byte, rows in each])
        places, values = exceptions.long().unbind(1)
        codes[places] = values.to(codes.dtype)
        return codes.view(-1, tokens)[self.place]


def _digits(per_byte: int) -> _Digits:
    return next(one for one in _DIGITS if one.per_byte == per_byte)


def _digits_of(stream: Tensor) -> tuple[_Digits, Tensor]:
    """How to pack codes ``[n]``, and the places of those that are too large for it: few."""
    std = float(stream[::_SAMPLED].float().square().mean().sqrt())
    magnitude, fitting = stream.abs(), [digits for digits in _DIGITS if digits.largest + 0.5 > _DEVIATIONS * std]
    for digits in fitting or _DIGITS[-1:]:
        large = (magnitude > digits.largest).nonzero().squeeze(-1)
        if len(large) <= _RARE * len(stream):
            break
    return digits, large


def _packed(stream: Tensor, digits: _Digits) -> Tensor:
    """Codes ``[n]`` int16 -> ``[ceil(n / per_byte)]`` uint8: digits in base ``2 * largest + 1``."""
    small = (stream.clamp(-digits.largest, digits.largest) + digits.largest).to(torch.uint8)
    small = torch.nn.functional.pad(small, (0, -len(small) % digits.per_byte)).view(digits.per_byte, -1)
    found = small[0]
    for other in small[1:]:
        found = found * (2 * digits.largest + 1) + other
    return found


def _unpacked(packed: Tensor, digits: _Digits) -> Tensor:
    """Inverse of `_packed` for codes that are not too large: ``[bytes * per_byte]`` int16."""
    base, left, found = 2 * digits.largest + 1, packed, []
    for _ in range(digits.per_byte - 1):
        left, digit = left // base, left % base
        found.append(digit)
    return torch.cat([left, *reversed(found)]).short() - digits.largest


def quantize(units: Tensor) -> Tensor:
    """Round coordinates in steps to codes, int16. Raises `KVPassError` for NaN and infinity."""
    if not bool(units.isfinite().all()):
        raise KVPassError("Keys or values are NaN or infinite, so they cannot be quantized.")
    return units.round().clamp(-_LARGEST, _LARGEST).short()


@cache
def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise KVPassError("Entropy coding needs the package zstandard: pip install zstandard.") from error
    return zstandard
