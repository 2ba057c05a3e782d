"""Strategies, data, and independent, slow and obvious formulations that the tests share."""

import dataclasses
import importlib.util
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

import kvpass  # noqa: F401  (registers the ops)
from kvpass.cache.state import KVState
from kvpass.codec import CodecSpec, Quantizer, Subspace, Transform
from kvpass.codec.tensors import of_pages
from kvpass.compile.backend import Backend
from kvpass.layout.retention import Retention
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.table import _TABLE, select

WIDTHS = (1, 2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIM = 16  # head_dim of most tests

widths = st.sampled_from(WIDTHS)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31 - 1)


def script(path: str):
    """Import a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[1] / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUANTIZING = "quantize", "append_", "append_layers_"
ROUNDS_IN_INDUCTOR = torch.__version__ >= "2.13"


def implementations(op: str) -> list[str]:
    """Every CPU implementation of ``op`` that takes all its arguments, for parametrization. The others are in
    `test_triton`, `test_few_tokens` and `test_tiles`."""
    elsewhere = {"cpp", "triton"} if op not in QUANTIZING or ROUNDS_IN_INDUCTOR else {"cpp", "triton", "inductor"}
    return sorted({row.lowering for row in _TABLE[op].values()} - elsewhere)


def dense_call(q, k, v, mask=None, causal=False, scale=1.0, softcap=0.0, **more) -> AttendCall:
    """A call of attention over ``k`` and ``v`` alone, with nothing stored."""
    return AttendCall(q, None, None, 0, k, v, mask, causal, scale, softcap, None, None, **more)


@contextmanager
def changed_table(change):
    """A context in which the table of implementations is the result of ``change``, called with op -> name ->
    implementation."""
    kept = {op: dict(rows) for op, rows in _TABLE.items()}
    change(_TABLE)
    select.cache_clear()
    try:
        yield
    finally:
        for op, rows in kept.items():
            _TABLE[op].clear()
            _TABLE[op].update(rows)
        select.cache_clear()


def only_reference():
    """A context in which "auto" means the reference: the definition of each op, without compiling anything for each
    random spec."""

    def change(table):
        for rows in table.values():
            for name in set(rows) - {"reference"}:
                del rows[name]

    return changed_table(change)


@contextmanager
def without_inductor():
    """A context in which captured graphs run as the pass leaves them."""

    def run(self, module, inputs):
        module.recompile()
        return module.forward

    compiled = Backend._compiled
    Backend._compiled = run
    try:
        yield
    finally:
        Backend._compiled = compiled


_PARTS = {"quantizer": Quantizer, "retention": Retention, "transform": Transform}


def coded(bits: int, per: str, group_size: int, page_size: int, residual: int = 0, **fields) -> CodecSpec:
    """A spec, from the fields of all its parts."""
    fields |= dict(bits=bits, per=per, group_size=group_size, page_size=page_size, window=residual + page_size)
    parts = {part: cls(**_taken(fields, cls)) for part, cls in _PARTS.items()}
    return CodecSpec(**parts, **fields)


def recoded(spec: CodecSpec, **fields) -> CodecSpec:
    """``spec`` with other ``fields`` of its parts."""
    parts = {part: dataclasses.replace(getattr(spec, part), **_taken(fields, cls)) for part, cls in _PARTS.items()}
    return dataclasses.replace(spec, **parts, **fields)


def _taken(fields: dict, cls: type) -> dict:
    """Remove the ``fields`` that ``cls`` has, and return them."""
    return {field.name: fields.pop(field.name) for field in dataclasses.fields(cls) if field.name in fields}


@st.composite
def specs(draw, per=None, subspace=False, head_dim=DIM, sinks=(0, 0, 1, 4), residuals=(0, 0, 5, 32)):
    """Valid specs for heads of ``head_dim`` channels: quantized per channel, as keys are, or per token, as values
    are."""
    per = per or draw(st.sampled_from(("channel", "token")))
    page = draw(st.sampled_from((8, 16, 24, 32)))
    groups = [g for g in (4, 8, 16, 32) if (page if per == "channel" else head_dim) % g == 0]
    return coded(
        draw(widths),
        per,
        draw(st.sampled_from(groups)),
        page,
        residual=draw(st.sampled_from(residuals)),
        sinks=draw(st.sampled_from(sinks)),
        rollback=draw(st.sampled_from((0, 3, 16))),
        subspace=Subspace(3, 1.0, True, head_dim // 2) if subspace else None,
    )


@st.composite
def chunkings(draw, longest=150):
    """Ways to cut a sequence: lists of chunk lengths, single tokens among them."""
    return draw(
        st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(20, 70)), min_size=1, max_size=14).filter(
            lambda chunks: sum(chunks) <= longest
        )
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


KINDS = ("normal", "shifted", "outliers", "mixed magnitudes", "tiny", "huge", "two values", "one-sided")


def awkward(seed: int, kind: str, *shape: int, dtype=torch.float32, limit=6e4) -> torch.Tensor:
    """Data of a kind that is hard to quantize; magnitudes from 1e-30 to ``limit``."""
    g = generator(seed)
    x = torch.randn(*shape, generator=g)
    if kind == "shifted":
        x = x * 0.01 + 100
    elif kind == "outliers":
        x = torch.where(torch.rand(*shape, generator=g) < 0.02, x * 1000, x)
    elif kind == "mixed magnitudes":
        x = x.sign() * 10 ** (torch.rand(*shape, generator=g) * (math.log10(limit) + 30) - 30)
    elif kind == "tiny":
        x = x * 1e-30
    elif kind == "huge":
        x = torch.rand(*shape, generator=g) * 2 * limit - limit
    elif kind == "two values":
        x = torch.where(x > 0, 3.0, -0.1)
    elif kind == "one-sided":
        x = -x.abs() - 7
    return x.clamp(-limit, limit).to(dtype)


def limit(bits: int) -> float:
    """Largest magnitude at which a group with both signs still has a half-precision scale."""
    return 3e4 if bits == 1 else 6e4


def spread(params: torch.Tensor, spec: CodecSpec) -> torch.Tensor:
    """Scales or zero points of pages ``[B, H, N, *]`` -> one per element, ``[B, H, N * P, D]`` float64."""
    dim = -2 if spec.quantizer.per == "channel" else -1
    return params.double().repeat_interleave(spec.quantizer.group_size, dim).flatten(2, 3)


FIELD_WIDTHS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 8: [8]}


def naive_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """``[P, D]`` quantized values -> ``[P * bits / 8, D]`` bytes, one token at a time."""
    tokens, channels = codes.shape
    out = np.zeros((tokens * bits // 8, channels), np.uint8)
    first_row, shift = 0, 0
    for width in FIELD_WIDTHS[bits]:
        rows = tokens * width // 8
        for t in range(tokens):
            for d in range(channels):
                field = (int(codes[t, d]) >> shift) % 2**width
                out[first_row + t % rows, d] += field * 2 ** (width * (t // rows))
        first_row, shift = first_row + rows, shift + width
    return out


def naive_unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """``[rows, D]`` bytes -> ``[P, D]`` quantized values, one token at a time."""
    tokens = packed.shape[0] * 8 // bits
    out = np.zeros((tokens, packed.shape[1]), np.int64)
    first_row, shift = 0, 0
    for width in FIELD_WIDTHS[bits]:
        rows = tokens * width // 8
        for t in range(tokens):
            byte = packed[first_row + t % rows].astype(np.int64)
            out[t] += (byte // 2 ** (width * (t // rows)) % 2**width) * 2**shift
        first_row, shift = first_row + rows, shift + width
    return out


def naive_codes(codes: torch.Tensor, spec: CodecSpec) -> torch.Tensor:
    """Packed pages ``[B, H, N, rows, D]`` -> int64 quantized values ``[B, H, N * P, D]`` by `naive_unpack`."""
    pages = codes.flatten(0, 2).numpy()
    if not len(pages):
        return torch.zeros(*codes.shape[:2], 0, codes.shape[-1], dtype=torch.int64)
    out = np.stack([naive_unpack(page, spec.bits) for page in pages])
    return torch.from_numpy(out).unflatten(0, codes.shape[:3]).flatten(2, 3)


def naive_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, spec: CodecSpec
) -> torch.Tensor:
    """Dense float64 values of packed pages."""
    return naive_codes(codes, spec).double() * spread(scale, spec) + spread(zero_point, spec)


def naive_attention(q, k, v, mask=None, causal=False, scale=1.0, softcap=0.0, sinks=None) -> torch.Tensor:
    """float64 attention, one (sample, head, query) at a time; ``k``, ``v`` have the KV heads only."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    batch, heads, queries, _ = q.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    out = np.zeros((batch, heads, queries, v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for s in range(queries):
                group = h // (heads // kv_heads)
                scores = k[b, group] @ q[b, h, s] * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if mask is not None:
                    row = mask[b % mask.shape[0], h % mask.shape[1], s % mask.shape[2]]
                    scores = (
                        np.where(row, scores, -np.inf) if row.dtype == torch.bool else scores + row.double().numpy()
                    )
                if causal:
                    scores[np.arange(tokens) > s + tokens - queries] = -np.inf
                weights = np.exp(scores - scores.max())
                lost = 0.0 if sinks is None else np.exp(float(sinks[h]) - scores.max())
                out[b, h, s] = weights / (weights.sum() + lost) @ v[b, group]
    return torch.from_numpy(out)


def state_of(
    spec: CodecSpec, x: torch.Tensor, chunks: list[int] | None = None, q: torch.Tensor | None = None, room: int = 0
) -> KVState:
    """A state holding ``x``, appended in ``chunks`` by the reference; the first chunk comes with the queries ``q``.
    Memory is allocated for ``room`` tokens."""
    batch, heads, tokens, dim = x.shape
    state = KVState.allocate(spec, batch, heads, dim, x.dtype, x.device, room)
    n = 0
    with only_reference():
        for chunk in x.split(chunks or [tokens], 2):
            state.append(chunk, n, q if n == 0 else None)
            n += chunk.shape[2]
    return state


def queries_for(spec: CodecSpec, seed: int, batch: int, heads: int, tokens: int = 20, dim: int = DIM):
    """Queries of a prompt for specs that need them, two query heads per KV head; otherwise None."""
    if not spec.quantizer.needs_queries:
        return None
    directions = randn(seed + 1, dim, dim) * torch.logspace(0, -2, dim)[:, None]
    return randn(seed, batch, 2 * heads, tokens, dim) @ directions


def assert_same_contents(a: KVState, b: KVState, n: int) -> None:
    """Assert that two states are equal bit for bit: used pages, every dequantized token, and the window."""
    used = a.spec.retention.pages(n)
    for name in of_pages(a.spec):
        assert torch.equal(getattr(a, name)[:, :, :used], getattr(b, name)[:, :, :used]), name
    assert torch.equal(a.dequantize(n), b.dequantize(n))
    assert torch.equal(a.window(n), b.window(n))
