"""Plain PyTorch decoders, written as their communities write them, each with its own kind of cache.

All have 2 layers, 4 query heads, 2 key-value heads unless they predate grouped queries, and 32-wide heads.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 2, 4, 2, 32


def interleaved(positions: int) -> Tensor:
    """Rotary tables ``[positions, HEAD_DIM / 2, 2]`` for pairs of neighbours."""
    frequencies = 10000 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], -1)


def turn(x: Tensor, tables: Tensor) -> Tensor:
    """Rotate pairs of neighbours of ``x`` ``[B, S, H, D]`` by ``tables`` ``[S, D / 2, 2]``."""
    pairs, tables = x.unflatten(-1, (-1, 2)), tables[:, None]
    real = pairs[..., 0] * tables[..., 0] - pairs[..., 1] * tables[..., 1]
    imaginary = pairs[..., 1] * tables[..., 0] + pairs[..., 0] * tables[..., 1]
    return torch.stack([real, imaginary], -1).flatten(-2)


class KVCache(nn.Module):
    """Two buffers, written by index: the cache of gpt-fast."""

    def __init__(self, batch: int, tokens: int):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(batch, KV_HEADS, tokens, HEAD_DIM))
        self.register_buffer("v_cache", torch.zeros(batch, KV_HEADS, tokens, HEAD_DIM))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor):
        keys, values = self.k_cache, self.v_cache
        keys[:, :, input_pos] = k
        values[:, :, input_pos] = v
        return keys, values


class IndexPutAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.kv_cache = None

    def forward(self, x: Tensor, tables: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.wqkv(x).split(sizes, -1))
        q, k, v = (part.transpose(1, 2) for part in (turn(q, tables), turn(k, tables), v))
        k, v = self.kv_cache.update(input_pos, k, v)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class IndexPutDecoder(nn.Module):
    """gpt-fast: ``forward(idx, input_pos)``, buffers written by index, fused qkv, interleaved rotary."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(IndexPutAttention() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def setup_caches(self, batch: int, tokens: int) -> None:
        for layer in self.layers:
            layer.kv_cache = KVCache(batch, tokens)
        self.register_buffer("tables", interleaved(tokens), persistent=False)
        self.register_buffer("causal_mask", torch.ones(tokens, tokens, dtype=torch.bool).tril(), persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        mask, tables = self.causal_mask[None, None, input_pos], self.tables[input_pos]
        x = self.embedding(idx)
        for layer in self.layers:
            x = x + layer(self.norm(x), tables, mask, input_pos)
        return self.output(self.norm(x))


class SliceAssignAttention(nn.Module):
    def __init__(self, batch: int, tokens: int):
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.cache_k = torch.zeros(batch, tokens, KV_HEADS, HEAD_DIM)
        self.cache_v = torch.zeros(batch, tokens, KV_HEADS, HEAD_DIM)

    def forward(self, x: Tensor, start_pos: int, tables: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        q, k = turn(q, tables), turn(k, tables)
        self.cache_k[:batch, start_pos : start_pos + tokens] = k
        self.cache_v[:batch, start_pos : start_pos + tokens] = v
        keys, values = (cache[:batch, : start_pos + tokens] for cache in (self.cache_k, self.cache_v))
        repeats, total = HEADS // KV_HEADS, start_pos + tokens
        keys, values = (
            part[:, :, :, None].expand(batch, total, KV_HEADS, repeats, HEAD_DIM).reshape(batch, total, HEADS, HEAD_DIM)
            for part in (keys, values)
        )
        q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
        scores = q @ keys.transpose(2, 3) / math.sqrt(HEAD_DIM)
        if mask is not None:
            scores = scores + mask
        out = scores.float().softmax(-1).type_as(q) @ values
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class SliceAssignDecoder(nn.Module):
    """Meta's Llama: ``forward(tokens, start_pos)``, plain tensors ``[B, T, H, D]`` written by slices."""

    def __init__(self, batch: int = 4, tokens: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(SliceAssignAttention(batch, tokens) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tables = interleaved(tokens)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        x, count, mask = self.embedding(tokens), tokens.shape[1], None
        tables = self.tables[start_pos : start_pos + count]
        if count > 1:
            mask = torch.full((count, count), -torch.inf).triu(1)
            mask = torch.hstack([torch.zeros(count, start_pos), mask])
        for layer in self.layers:
            x = x + layer(self.norm(x), start_pos, tables, mask)
        return self.output(self.norm(x))


class CatAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None):
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).permute(0, 2, 3, 1, 4)
        k, v = self.kv(x).view(batch, tokens, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        scores = (q @ k[:, :, None].transpose(-2, -1)) * HEAD_DIM**-0.5  # [B, H_kv, r, S, T]
        hidden = torch.ones(tokens, k.shape[2], dtype=torch.bool).triu(k.shape[2] - tokens + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        y = (weights @ v[:, :, None]).permute(0, 3, 1, 2, 4).reshape(batch, tokens, -1)
        return self.out(y), (k, v)


class CatDecoder(nn.Module):
    """A cache passed in and out: ``forward(idx, past) -> logits, presents``; grouped queries by broadcasting."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(CatAttention() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, past: list | None = None):
        start = 0 if past is None else past[0][0].size(-2)
        x = self.embedding(idx) + self.positions(torch.arange(start, start + idx.shape[1]))
        presents = []
        for i, layer in enumerate(self.layers):
            y, present = layer(self.norm(x), None if past is None else past[i])
            x = x + y
            presents.append(present)
        return self.head(self.norm(x)), presents


class NanoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.c_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.c_attn(x).split(HEADS * HEAD_DIM, 2)
        q, k, v = (part.view(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, HEADS * HEAD_DIM))


class NanoDecoder(nn.Module):
    """nanoGPT: ``forward(idx)``, no cache at all."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(NanoAttention() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = x + layer(self.ln(x))
        return self.lm_head(self.ln(x))
