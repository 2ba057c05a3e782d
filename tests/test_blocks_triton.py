"""Triton kernels over a server's blocks against the reference: on a GPU if there is one, otherwise in the interpreter,
as in `test_triton`."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvpass.lowering import reference
from kvpass.paged import paged_attention
from kvpass.paged.batch import Batch, BlockTable
from kvpass.paged.block_layout import BlockLayout
from kvpass.paged.paged_attention import Codecs, Layer

from common import coded, dtypes, only_reference, randn, recoded, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else None)  # as in `test_triton`

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
CODECS = Codecs(reference.quantize, reference.dequantize_predicted)
WINDOW = 8  # tokens per block of the window
aten = torch.ops.aten


class NeverWaits(TorchDispatchMode):
    """A context that raises where PyTorch would wait for the device, to know a value or a shape."""

    WAITS = aten._local_scalar_dense, aten.nonzero, aten.repeat_interleave, aten.masked_select, aten.equal

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.WAITS, f"{func} waits for the device."
        return func(*args, **kwargs or {})


def layer_of(key, value, heads, dim, dtype, first, blocks, windows, slots=2, padding=0):
    """The bytes of blocks, and a layer over them with random pages and exact tokens, and with sinks and means in the
    blocks ``first``, which overlap pages in others. Block 0, which no request has, holds NaN."""
    size = key.page_size * (slots + -(-key.retention.sinks // key.page_size))
    layout = BlockLayout(key, value, dim, dtype, size)
    nbytes = heads * size * layout.bytes_per_token
    raw = torch.zeros(blocks, nbytes + padding, dtype=torch.uint8, device=DEVICE)
    views = layout.views(raw[:, :nbytes].view(blocks, heads, size, -1))
    window = randn(1, windows, heads, WINDOW, 2 * dim, dtype=dtype).to(DEVICE)
    for seed, one in enumerate((*views.key, *views.value)):
        if one.dtype == torch.uint8:
            one.copy_(randn(seed, *one.shape).mul_(1000).long() & 255)
        else:
            one.copy_(randn(seed, *one.shape))
    for scale, bits in ((views.key[1], key.bits), (views.value[1], value.bits)):
        scale.mul_(2.0**-bits)
    for seed, one in enumerate(views.head.values()):
        one[first] = randn(seed, *one[first].shape).to(one)
    for one in (*views.key[1:], *views.value[1:], *views.head.values()):
        one[0] = torch.nan
    window[0] = torch.nan
    return raw, Layer(views, window, key, value, (CODECS, CODECS), dim**-0.5 * 1.5)


def tables(generator, totals, sizes, counts, shared):
    """Block tables in random order, padded with block 0. The first ``shared`` blocks of all requests are the same."""
    found = []
    for size, count in zip(sizes, counts, strict=True):
        free = (1 + torch.randperm(count - 1, generator=generator)).tolist()
        first = [free.pop() for _ in range(shared)]
        rows = [(first + [free.pop() for _ in range(-(-n // size))])[: -(-n // size)] for n in totals]
        widest = max(1, *map(len, rows))
        found.append(torch.tensor([row + [0] * (widest - len(row)) for row in rows], device=DEVICE))
    return found


@st.composite
def specs(draw, per=("channel", "token")):
    """Specs of uniform codes, or with a mean of the keys; keys and values leave the window together or keys first."""
    page, dim = draw(st.sampled_from((16, 32))), draw(st.sampled_from((16, 48, 64)))
    shared = dict(page_size=page, sinks=draw(st.sampled_from((0, 3, page))))
    residual, later = draw(st.sampled_from((0, 5))), draw(st.sampled_from((0, page + 7)))
    bits = st.sampled_from((1, 2, 4, 8))
    key = coded(draw(bits), draw(st.sampled_from(per)), 16, residual=residual, center=draw(st.booleans()), **shared)
    return key, coded(draw(bits), "token", draw(st.sampled_from((8, 16))), residual=residual + later, **shared), dim


def batch_of(layout, totals, generator, new=None, shared=0, **known):
    """A batch of requests with ``totals`` tokens, of which ``new`` (default: one each) are new."""
    counts = [len(totals) * (-(-max(totals) // size) + 1) + 2 for size in (layout.block_size, WINDOW)]
    pages, window = tables(generator, totals, (layout.block_size, WINDOW), counts, shared)
    total = torch.tensor(totals, device=DEVICE)
    new = torch.ones_like(total) if new is None else torch.tensor(new, device=DEVICE)
    start = torch.cat([new.new_zeros(1), new.cumsum(0)])
    where = BlockTable(pages, layout.slots), BlockTable(window, WINDOW)
    return Batch(start, total - new, total, *where, layout.lead, **known), counts


@settings(max_examples=20)
@given(st.data())
@only_reference()
def test_attention_over_blocks_equals_the_reference(data):
    """Blocks in any order and shared prefixes; lengths around the ends of pages; without and with packed pages; one new
    token, or a few, or a prompt of several tiles."""
    key, value, dim = data.draw(specs())
    dtype, heads, group = (
        data.draw(dtypes),
        data.draw(st.sampled_from((1, 1, 2))),
        data.draw(st.sampled_from((1, 3, 7))),
    )
    generator = torch.Generator().manual_seed(data.draw(seeds))
    first = key.retention.sinks + value.retention.residual
    ends = (0, first, first + key.page_size - 1, first + key.page_size, first + 3 * key.page_size + 1)
    news = (1, 1, 2, 5, 40) if group < 7 else (1, 1, 3)
    requests = data.draw(st.lists(st.tuples(st.sampled_from(ends), st.sampled_from(news)), min_size=1, max_size=2))
    past, new = zip(*requests, strict=True)
    totals = [before + count for before, count in zip(past, new, strict=True)]
    layout = BlockLayout(key, value, dim, dtype, key.page_size * (2 + -(-key.retention.sinks // key.page_size)))
    batch, counts = batch_of(layout, totals, generator, new=new, shared=data.draw(st.sampled_from((0, 1))))
    _, layer = layer_of(
        key, value, heads, dim, dtype, batch.pages.blocks[:, 0], *counts, padding=data.draw(st.sampled_from((0, 64)))
    )
    layer = layer._replace(softcap=data.draw(st.sampled_from((0.0, 0.0, 3.0))))
    q = randn(9, sum(new), heads * group, dim, dtype=dtype).to(DEVICE)
    expected, got = torch.empty_like(q), torch.full_like(q, torch.nan)
    paged_attention.attend(batch, layer, q, expected)
    paged_attention.attend(batch, layer._replace(tiled=paged_attention.attend_triton.TiledAttention(layer)), q, got)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def kivi(**fields):
    key = coded(2, "channel", 16, 16, center=fields.pop("center", False), **fields)
    return key, coded(2, "token", 16, 16, **fields)


@only_reference()
def test_a_step_of_single_tokens_waits_for_nothing():
    """If the batch says so, which changes no result. A request without tokens pads the batch."""
    key, value = kivi(sinks=3, center=True)
    layout = BlockLayout(key, value, 16, torch.float32, 32)
    batch, counts = batch_of(layout, [37, 1, 0], torch.Generator().manual_seed(0), new=[1, 1, 0], most=1)
    _, layer = layer_of(key, value, 1, 16, torch.float32, batch.pages.blocks[:, 0], *counts)
    layer = layer._replace(kernel=paged_attention.attend_triton.attention_of_one(layer))
    q = randn(9, 3, 2, 16).to(DEVICE)
    expected, got = torch.zeros_like(q), torch.full_like(q, torch.nan)
    with pytest.raises(AssertionError, match="waits"), NeverWaits():
        paged_attention.attend(replace(batch, most=None), layer, q, expected)
    paged_attention.attend(replace(batch, most=None), layer, q, expected)
    with NeverWaits():
        paged_attention.attend(batch, layer, q, got)
    torch.testing.assert_close(got, expected)


@settings(max_examples=20)
@given(st.data())
@only_reference()
def test_stored_bytes_equal_the_references(data):
    """Exact tokens, sinks and due pages of requests that bring none, one or many tokens; nothing else is written."""
    key, value, dim = data.draw(specs())
    key, dtype, heads = recoded(key, center=False), data.draw(dtypes), data.draw(st.integers(1, 2))
    page, first = key.page_size, key.retention.sinks + key.retention.residual
    requests = st.tuples(
        st.sampled_from((0, 2, first + page - 1, first + 2 * page - 1)), st.sampled_from((0, 1, 1, 5, page + 1))
    )
    past, new = zip(*data.draw(st.lists(requests, min_size=1, max_size=3)), strict=True)
    layout = BlockLayout(key, value, dim, dtype, page * (2 + -(-key.retention.sinks // page)))
    totals = [before + count for before, count in zip(past, new, strict=True)]
    generator = torch.Generator().manual_seed(data.draw(seeds))
    batch, counts = batch_of(layout, totals, generator, new=new, most=max(new) + data.draw(st.sampled_from((1, 3))))
    kv = randn(5, 2, sum(new) + 2, heads, dim, dtype=dtype).to(DEVICE)
    found = []
    for make in (paged_attention._in_torch, paged_attention.store_triton.Storing):
        raw, layer = layer_of(key, value, heads, dim, dtype, batch.pages.blocks[:, 0], *counts)
        with NeverWaits() if found else nullcontext():
            paged_attention.store(batch, layer._replace(storing=make(layer)), *kv)
        found.append([one.view(torch.uint8) for one in (raw, layer.window)])
    assert all(mine.equal(theirs) for mine, theirs in zip(*found, strict=True))
