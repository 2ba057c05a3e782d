"""Pages in a server's blocks: their bytes, and attention of many requests together against a cache for each request
alone."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import KVPassError, schemes
from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState, ModelTensors
from kvpass.codec.affine import params_dtype
from kvpass.codec.calibrated_layer import CalibratedLayer
from kvpass.codec.page_rope import PageTables
from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.table import select
from kvpass.paged import (
    flash_attention,
    paged_attention,
    single_query_calibrated,
    single_query_cpp,
    single_query_inductor,
)
from kvpass.paged.batch import Batch, BlockTable
from kvpass.paged.block_layout import BlockLayout
from kvpass.paged.context_spans import HIDDEN
from kvpass.paged.model_layout import ModelLayout
from kvpass.paged.paged_attention import Codecs, Layer
from kvpass.schemes import LayerGeometry

from common import DTYPES, only_reference, randn
from shared_bits import shared_tensors

HEADS, DIM = 2, 64
REFERENCE = Codecs(reference.quantize, reference.dequantize_predicted)
SERVED = (
    "identity", "kivi", "kivi-1", "kivi-3", "kivi-8", "kivi-s8", "kivi-sinks", "rtn", "quarot", "higgs", "higgs-sinks",
    "e8", "turboquant",
)  # fmt: skip


def plan_of(scheme, dtype=torch.float32, **fields):
    layer = LayerGeometry(0, 1, HEADS, DIM, dtype, torch.device("cpu"), None)
    return schemes.get(scheme, **fields).plan_of(layer)


def layout_of(plan, block_size=64, dtype=torch.float32):
    return BlockLayout(plan.key, plan.value, DIM, dtype, block_size)


class Server:
    """Blocks of one layer, allocated in random order and never freed, with caches for the same requests."""

    def __init__(self, plan, block_size, window_size, seed, dtype=torch.float32, codecs=(REFERENCE, REFERENCE)):
        self.plan, self.layout, self.random, self.dtype = (
            plan,
            layout_of(plan, block_size, dtype),
            random.Random(seed),
            dtype,
        )
        self.sizes, self.free = (block_size, window_size), list(range(1, 400))
        self.random.shuffle(self.free)
        tokens = self.layout.bytes_per_token
        cache = torch.randint(0, 256, (400, HEADS, block_size, tokens), dtype=torch.uint8)  # uninitialized memory
        window = torch.full((400, HEADS, window_size, 2 * DIM), torch.nan, dtype=dtype)
        self.layer = Layer(self.layout.views(cache), window, plan.key, plan.value, codecs, 0.3)
        self.lengths, self.tables, self.states = [], [], []

    def add(self):
        self.lengths.append(0)
        self.tables.append(([], []))
        specs = (self.plan.key, self.plan.value)
        self.states.append([KVState.allocate(spec, 1, HEADS, DIM, self.dtype, "cpu", 64) for spec in specs])

    def step(self, new: dict[int, int], seed: int):
        """Add ``new`` tokens to requests, by number. Returns attention over the blocks, and over the requests'
        caches."""
        order = list(new)
        self.random.shuffle(order)
        tokens = sum(new.values())
        q, k, v = (randn(seed + i, tokens, heads, DIM, dtype=self.dtype) for i, heads in enumerate((6, HEADS, HEADS)))
        for one in order:
            for table, size in zip(self.tables[one], self.sizes, strict=True):
                while len(table) * size < self.lengths[one] + new[one]:
                    table.append(self.free.pop())
        batch = self.batch(order, new)
        out = torch.empty_like(q)
        paged_attention.store(batch, self.layer, k, v)
        paged_attention.attend(batch, self.layer, q, out)
        expected, first = [], 0
        for one in order:
            mine = slice(first, first + new[one])
            expected.append(self.alone(one, *(x[mine].transpose(0, 1)[None] for x in (q, k, v))))
            self.lengths[one] += new[one]
            first = mine.stop
        return out, torch.cat(expected)

    def batch(self, order, new):
        past = torch.tensor([self.lengths[one] for one in order])
        counts = torch.tensor([new[one] for one in order])
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        tables = []
        for which, size in enumerate(self.sizes):
            longest = max(len(self.tables[one][which]) for one in order)
            rows = [self.tables[one][which] + [0] * (longest - len(self.tables[one][which])) for one in order]
            tables.append(BlockTable(torch.tensor(rows), size))
        pages = BlockTable(tables[0].blocks, self.layout.slots)
        return Batch(start, past, past + counts, pages, tables[1], self.layout.lead)

    def alone(self, one, q, k, v):
        n, (key, value) = self.lengths[one], self.states[one]
        packs = (Pack.of(state.pack, state.spec) for state in (key, value))
        (out,) = reference.attend(AttendCall(q, *packs, n, k, v, None, True, 0.3, 0.0, key.spec, value.spec))
        key.append(k, n)
        value.append(v, n)
        return out[0].transpose(0, 1)


class CalibratedServer(Server):
    """The same for a scheme whose tensors belong to the model. The blocks also hold another layer."""

    def __init__(self, block_size, window_size, seed, dtype=torch.float32, **fields):
        self.plan = plan_of("waterfill-static", dtype, ropes=("half-32",), recent=32, **fields)
        sides = [
            shared_tensors(spec, HEADS, DIM, seed, params_dtype(dtype)) for spec in (self.plan.key, self.plan.value)
        ]
        self.shared = CalibratedLayer.of((self.plan.key, self.plan.value), sides)
        pages, retention = ((40, 72), self.shared.page_bytes), self.plan.key.retention
        self.layout = ModelLayout(pages, retention, HEADS, DIM, dtype, block_size)
        self.random, self.dtype = random.Random(seed), dtype
        self.sizes, self.free = (block_size, window_size), list(range(1, 400))
        self.random.shuffle(self.free)
        cache = torch.randint(0, 256, (400, self.layout.nbytes + 12), dtype=torch.uint8)
        window = torch.full((400, 3 * HEADS, window_size, 2 * DIM), torch.nan, dtype=dtype)[:, HEADS : 2 * HEADS]
        self.layer = Layer(
            self.layout.views(cache)[1], window, self.plan.key, self.plan.value, (REFERENCE, REFERENCE), 0.3,
            calibrated=self.shared,
        )  # fmt: skip
        self.lengths, self.tables, self.states = [], [], []

    def add(self):
        self.lengths.append(0)
        self.tables.append(([], []))
        both = []
        for spec, tensors in ((self.plan.key, self.shared.key), (self.plan.value, self.shared.value)):
            shared = ModelTensors(tensors.values())
            both.append(KVState.allocate(spec, 1, HEADS, DIM, self.dtype, "cpu", 64, shared=shared))
        key, value = both
        value.same_layer_keys = key
        key.rotary = RotaryState(self.plan.key, 1, DIM, self.dtype, "cpu", 2048, self.shared.angles)
        self.states.append(both)

    def alone(self, one, q, k, v):
        n, (key, value) = self.lengths[one], self.states[one]
        packs = [Pack.of(state.pack, state.spec) for state in (key, value)]
        packs[0] = packs[0]._replace(page_tables=PageTables(key.rotary.cos, key.rotary.sin, "half-32"))
        (out,) = reference.attend(AttendCall(q, *packs, n, k, v, None, True, 0.3, 0.0, key.spec, value.spec))
        key.append(k, n)
        value.append(v, n)
        return out[0].transpose(0, 1)


CALIBRATED = [{0: 1, 1: 3, 2: 150}, {0: 1, 1: 29, 2: 40}, {0: 35, 1: 1}, {2: 70, 0: 64, 1: 33}, {0: 1, 1: 1, 2: 1}]
CALIBRATED += [{0: 1, 1: 90, 2: 1, 3: 97}, {3: 1, 0: 1}, {3: 200, 2: 1, 1: 1}, *({0: 1, 1: 1, 2: 1, 3: 1},) * 4]


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("ranked", [True, False])
def test_calibrated_pages_of_several_layers_share_a_block(ranked):
    """Pages of all heads, sinks before them, and keys rotated by the numbers of their pages."""
    server = CalibratedServer(96, 16, seed=3, ranked=ranked)
    for _ in range(4):
        server.add()
    for seed, new in enumerate(CALIBRATED):
        torch.testing.assert_close(*server.step(new, 10 * seed), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("reference_in_this_test")
def test_nan_in_one_request_stops_no_other():
    found = []
    for broken in (False, True):
        server = CalibratedServer(96, 16, seed=3)
        for _ in range(2):
            server.add()
            server.tables[-1][0].extend(server.free.pop() for _ in range(2))
            server.tables[-1][1].extend(server.free.pop() for _ in range(10))
        batch = server.batch([0, 1], {0: 150, 1: 150})
        k, v = (randn(seed, 300, HEADS, DIM) for seed in (1, 2))
        if broken:
            k[:150], v[:150] = torch.nan, torch.inf
        paged_attention.store(batch, server.layer, k, v)
        block, slot = batch.page(torch.tensor([1]), torch.tensor([0]))
        found.append([pool[block, 0, slot].clone() for pool in (*server.layer.blocks.key, *server.layer.blocks.value)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow_cases("dtype1-*", "*-False")
@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_calibrated_pages_equals_the_reference(dtype, ranked):
    server = CalibratedServer(96, 16, seed=3, dtype=dtype, ranked=ranked)
    plain, with_kernel = server.layer, paged_attention.with_kernel(server.layer)
    assert isinstance(with_kernel.kernel, single_query_calibrated.SingleQueryAttention)
    for _ in range(4):
        server.add()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for seed, new in enumerate(CALIBRATED):
        server.step(new, 10 * seed)
        order = list(new)
        single = {one: 1 for one in order}
        past = {one: server.lengths[one] for one in order}
        server.lengths = [n - 1 if i in past else n for i, n in enumerate(server.lengths)]
        batch = server.batch(order, single)
        server.lengths = [past.get(i, n) for i, n in enumerate(server.lengths)]
        q = randn(seed, len(order), 6, DIM, dtype=dtype)
        found = [torch.empty_like(q) for _ in range(2)]
        for layer, out in zip((plain, with_kernel), found, strict=True):
            paged_attention.attend(batch, layer, q, out)
        torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases("e8", "higgs", "kivi-s8", "quarot", "turboquant", "kvarn", "zipcache")
@pytest.mark.nightly_cases("kivi-[138]", "rtn")
@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("scheme", (*SERVED, "kvarn", "zipcache"))
def test_batched_requests_equal_single_requests(scheme):
    """Prompts in chunks among decode steps, requests that arrive later, and lengths around every page boundary."""
    server = Server(plan_of(scheme), 128, 16, seed=3)
    for _ in range(3):
        server.add()
    chunks = [{0: 1, 1: 3, 2: 150}, {0: 1, 1: 29, 2: 40}, {0: 35, 1: 1}, {0: 1, 1: 1, 2: 1}, {2: 70, 0: 64, 1: 33}]
    chunks += [{0: 1, 1: 1, 2: 1, 3: 97}, {3: 1, 0: 1}, {3: 200, 2: 1, 1: 1}, *({0: 1, 1: 1, 2: 1, 3: 1},) * 4]
    for seed, new in enumerate(chunks):
        while len(server.lengths) <= max(new):
            server.add()
        torch.testing.assert_close(*server.step(new, 10 * seed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8)
@given(data=st.data())
@only_reference()
def test_any_request_history_equals_the_requests_own_caches(dtype, data):
    scheme, residual = data.draw(st.sampled_from(("kivi", "kivi-sinks"))), data.draw(st.sampled_from((32, 64)))
    retention = data.draw(st.sampled_from((None, dict(window=40, page_size=32, sinks=data.draw(st.integers(0, 70))))))
    fields = dict(retention=retention, sinks=0) if retention else dict(residual=residual)
    server = Server(plan_of(scheme, dtype, **fields), 128, data.draw(st.sampled_from((8, 32))), seed=1, dtype=dtype)
    for _ in range(data.draw(st.integers(1, 4))):
        server.add()
    for seed in range(data.draw(st.integers(1, 6))):
        some = data.draw(st.sets(st.sampled_from(range(len(server.lengths))), min_size=1))
        new = {one: data.draw(st.sampled_from((1, 1, 2, 31, 33, 64, 90, 130))) for one in some}
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(*server.step(new, seed), atol=tolerance, rtol=tolerance)


@given(scheme=st.sampled_from(SERVED), size=st.sampled_from((64, 96, 128, 352)), dtype=st.sampled_from(DTYPES))
def test_parts_of_a_block_do_not_overlap(scheme, size, dtype):
    """Even if a server pads its blocks: writing one tensor changes no other."""
    layout = layout_of(plan_of(scheme, dtype), size, dtype)
    heads = layout.bytes_per_token * size
    raw = torch.zeros(3, HEADS * heads + 64, dtype=torch.uint8)
    cache = raw.as_strided((3, HEADS, size, layout.bytes_per_token), (raw.stride(0), heads, layout.bytes_per_token, 1))
    blocks_ = layout.views(cache)
    pages = [pool[1, 1, layout.lead :] for pool in (*blocks_.key, *blocks_.value)]  # after the part of the head
    tensors = [one for one in (*pages, *(one[1, 1] for one in blocks_.head.values())) if one.numel()]
    for number, tensor in enumerate(tensors, 1):
        tensor.copy_(torch.full((tensor[..., :1].numel() * tensor.shape[-1] * tensor.element_size(),), number,
                                dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))  # fmt: skip
    for number, tensor in enumerate(tensors, 1):
        assert (tensor.contiguous().view(torch.uint8) == number).all()
    raw[1, heads : 2 * heads] = 0
    assert not raw.any()


@pytest.mark.slow
@pytest.mark.nightly_cases("kivi-s8-*")
@pytest.mark.parametrize(
    ("scheme", "dtype", "kernel"),
    [
        ("kivi", torch.float32, single_query_cpp),
        ("kivi-sinks", torch.bfloat16, single_query_cpp),
        ("kivi-1", torch.float32, single_query_cpp),
        ("higgs", torch.float32, single_query_cpp),
        ("kivi-s8", torch.float32, single_query_inductor),
        ("higgs-sinks", torch.float32, single_query_cpp),
        (dict(scheme="kivi", scale_bits=8, sinks=4), torch.float32, single_query_inductor),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_the_single_query_kernel_equals_the_reference(scheme, dtype, kernel):
    server = Server(plan_of(scheme, dtype), 128, 16, seed=3, dtype=dtype)
    server.layer = paged_attention.with_kernel(server.layer)
    assert isinstance(server.layer.kernel, kernel.SingleQueryAttention)
    for _ in range(3):
        server.add()
    chunks = [{0: 1, 1: 1}, {0: 1}, {0: 1, 1: 1, 2: 150}, {0: 40, 1: 800}, *({0: 1, 1: 1, 2: 1},) * 70, {0: 1}]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for seed, new in enumerate(chunks):
        torch.testing.assert_close(*server.step(new, 10 * seed), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("scheme", "softcap", "one", "several"),
    [
        ("kivi", 0.0, "cpp", "cpp"),
        ("kivi", 5.0, "inductor", "reference"),
        ("higgs", 0.0, "cpp", "cpp"),
        ("kivi-s8", 0.0, "inductor", "cpp"),
        ("e8", 0.0, "reference", "cpp"),
        ("identity", 5.0, "reference", "reference"),
    ],
)
def test_the_dispatcher_selects_paged_attention(scheme, softcap, one, several):
    layer = Server(plan_of(scheme), 128, 16, seed=3).layer._replace(softcap=softcap)
    assert select(layer.dispatch("paged_attend_one", 1)).name == one
    assert select(layer.dispatch("paged_attend", 0)).name == several


def test_blocks_that_do_not_fit_are_refused():
    for scheme, size, reason in (("kivi", 48, "multiple of 32"), ("kivi-sinks", 32, "at least 64")):
        with pytest.raises(KVPassError, match=reason):
            layout_of(plan_of(scheme), size)
    with pytest.raises(KVPassError, match="first block"):
        layout_of(plan_of("waterfill"), 64)
    layout = layout_of(plan_of("kivi"))
    with pytest.raises(KVPassError, match="Blocks are"):
        layout.views(torch.zeros(2, HEADS, 64, layout.bytes_per_token + 1, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", flash_attention.DTYPES)
@pytest.mark.parametrize(("dim", "queries", "tokens"), [(80, 7, 600), (64, 101, 257), (64, 1, 3)])
def test_parts_of_a_context_add_up_to_attention(dim, queries, tokens, dtype):
    """With partly filled blocks, rows that see nothing of a part, parts that only some tiles have, and widely differing
    scores."""
    q, (k, v) = randn(1, 3, 6, queries, dim), (randn(seed, 3, 3, tokens + queries, dim) for seed in (2, 3))
    q[:, 1] *= 10
    q, k, v = (x.to(dtype) for x in (q, k, v))
    own = torch.arange(queries) <= torch.arange(queries)[:, None]
    own = own.repeat(3, 1, 1)
    own[:, 0] = False
    past = torch.arange(tokens) < torch.tensor([tokens, 0, tokens // 2])[:, None]
    masks = [torch.where(seen, 0.0, HIDDEN)[:, None] for seen in (own, past[:, None])]
    parts = flash_attention.Parts(q, 0.5)
    parts.add(torch.arange(3), k[:, :, tokens:], v[:, :, tokens:], masks[0])
    some = torch.tensor([2, 0])
    parts.add(some, k[some, :, :tokens], v[some, :, :tokens], masks[1][some])
    seen = torch.cat([past[:, None].expand(-1, queries, -1), own], -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), torch.where(seen, 0.0, HIDDEN)[:, None], scale=0.5, enable_gqa=True
    )
    seen_by = seen.any(-1)[:, None, :, None]
    error = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(parts.out * seen_by, expected * seen_by, atol=error, rtol=error)
    unmasked, masked = flash_attention.Parts(q, 0.5), flash_attention.Parts(q, 0.5)
    unmasked.add(torch.arange(3), k, v, None)
    masked.add(torch.arange(3), k, v, torch.zeros(3, 1, 1, tokens + queries))
    torch.testing.assert_close(unmasked.out, masked.out)


def test_bfloat16_products_work_without_hardware_support(monkeypatch):
    """The same code in float32; without bfloat16 support, both variants are that."""
    q, k, v = (randn(seed, 2, heads, 70, 64).bfloat16() for seed, heads in ((1, 6), (2, 3), (3, 3)))

    def attended() -> torch.Tensor:
        flash_attention._kernel.cache_clear()
        parts = flash_attention.Parts(q, 0.125)
        parts.add(torch.arange(2), k, v, None)
        return parts.out

    found, source = attended(), flash_attention.source
    monkeypatch.setattr(flash_attention, "source", lambda *given: "#undef __AVX512BF16__\n" + source(*given))
    torch.testing.assert_close(attended(), found, atol=1e-2, rtol=1e-2)
    flash_attention._kernel.cache_clear()
