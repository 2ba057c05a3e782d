"""Length tensors, and the ring slots of exact tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import at_once
from torch.overrides import TorchFunctionMode

import kvpass  # noqa: F401  (registers the ops)
from kvpass.cache.state import KVState
from kvpass.layout.window import LENGTH_OFFSET, SEEN_OFFSET, LogSparseLayout, Writes, layout, length_of, length_tensor

from common import coded, randn

KEYS = coded(2, "channel", 8, 16)
VALUES = coded(2, "token", 8, 16, residual=16)
SINKS = coded(3, "channel", 16, 16, sinks=4, rollback=3)
LOG = coded(2, "channel", 16, 16, residual=32, sinks=2, keep="log")


@pytest.mark.parametrize("n", [0, 1, 2, 31, 100_000, LENGTH_OFFSET, SEEN_OFFSET, 1 << 31, 1 << 40])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_length_tensors_hold_their_length_without_reading_the_device(n, device):
    length = length_tensor(n, device)
    assert length_of(length) == n and type(length_of(length)) is int
    assert length.stride() == (0,) and length.untyped_storage().nbytes() == 8
    assert length.shape == (n + LENGTH_OFFSET,)
    if device == "cpu":
        assert length[0] == n
    seen = length_tensor(n, device, SEEN_OFFSET)
    assert length_of(seen, SEEN_OFFSET) == n and seen.shape != length.shape


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("spec", [KEYS, VALUES, SINKS], ids=["keys", "values", "sinks"])
@pytest.mark.parametrize("new", [1, 9])
def test_storage_is_the_same_after_billions_of_tokens(spec, new):
    """Pools of that many pages, all backed by the same memory; each write is checked after its call."""
    period, x = math.lcm(spec.retention.ring_size, spec.page_size), randn(0, 1, 1, 90, 8)
    stored = []
    for n in (period, period * (1 + (1 << 33) // period)):
        state, written = KVState.allocate(spec, 1, 1, 8, torch.float32, "cpu", 0), []
        state.ring.copy_(randn(1, *state.ring.shape))
        pools = [
            pool[:, :, :1].expand(-1, -1, spec.retention.pages(n + 90), -1, -1)
            for pool in (state.codes, state.scale, state.zero_point)
        ]
        for part in x.split(new, 2):
            torch.ops.kvpass.append_([*pools, state.ring], length_tensor(n), part, None, None, state.text)
            written += [tensor[:, :, 0].clone() for tensor in pools] + [state.ring.clone()]
            n += part.shape[2]
        stored.append(written)
    assert all(torch.equal(few, many) for few, many in zip(*stored, strict=True))
    assert not torch.equal(stored[0][0], stored[0][-4])


def test_slots_of_a_window_are_distinct_and_never_those_of_sinks():
    for spec in (KEYS, VALUES, SINKS):
        for start in range(spec.retention.sinks, 200, 7):
            slots = layout(spec.retention).slots(torch.arange(start, start + spec.retention.ring_size)).tolist()
            assert sorted(slots) == list(range(spec.retention.sinks, spec.retention.sinks + spec.retention.ring_size))
        assert layout(spec.retention).slots(torch.arange(0)).tolist() == []
        assert layout(spec.retention).slot(60) == layout(spec.retention).slot(60 + spec.retention.ring_size)
        tokens = torch.arange(90)
        assert layout(spec.retention).slots(tokens).tolist() == [
            layout(spec.retention).slot(token) for token in range(90)
        ]


@pytest.mark.parametrize("start, count", [(0, 1), (0, 3), (0, 10), (3, 5), (0, 200), (130, 1), (130, 90)])
def test_window_writes_read_back_in_order_and_keep_the_rest(start, count):
    ring = torch.full((1, 1, SINKS.retention.sinks + SINKS.retention.ring_size, 2), -1.0)
    x = torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None].expand(1, 1, -1, 2)
    layout(SINKS.retention).write([ring], start, [x])
    for token in range(start, min(start + count, SINKS.retention.sinks)):
        assert (ring[:, :, token] == token).all()
    first = max(start, SINKS.retention.sinks, start + count - SINKS.retention.ring_size)
    if first < start + count:
        tokens = torch.arange(first, start + count)
        assert torch.equal(ring[0, 0, layout(SINKS.retention).slots(tokens), 0], tokens.float())
    written = max(0, min(start + count, SINKS.retention.sinks) - start) + max(0, start + count - first)
    assert (ring[0, 0, :, 0] == -1).sum() == ring.shape[2] - written


@pytest.mark.parametrize("spec", [KEYS, VALUES, SINKS, LOG], ids=["keys", "values", "sinks", "log-sparse"])
@pytest.mark.parametrize("steps", [[1] * 90, [70, 1, 1, 30], [5, 40, 3, 64], [3] * 30], ids=len)
def test_tokens_leave_in_page_order_and_the_others_stay(spec, steps):
    tokens = torch.arange(200, dtype=torch.float32)[None, None, :, None]
    ring, n, left, where = (
        torch.full((1, 1, spec.retention.sinks + spec.retention.ring_size, 1), -1.0),
        0,
        [],
        layout(spec.retention),
    )
    for new in steps:
        x, first, last = tokens[:, :, n : n + new], spec.retention.pages(n), spec.retention.pages(n + new)
        if last > first:
            left += where.leaving(ring, n, x, first, last).flatten().tolist()
        where.write([ring], n, [x])
        n += new
        assert left == where.page_tokens(0, spec.retention.pages(n)).tolist()
        assert where.read(ring, n).flatten().tolist() == where.exact(n).tolist()


def test_token_slots_do_not_depend_on_earlier_look_ups():
    """A layout that has been used for a long text before answers like a new one."""
    tokens, asked, far = torch.arange(LOG.retention.sinks, 90), [], LogSparseLayout(LOG.retention)
    far.page_tokens(0, 500)
    for where in (far, LogSparseLayout(LOG.retention)):
        answers = [where.exact(90), where.slots(tokens), where.page_tokens(1, 3), where.token_order(90)]
        answers += [where.packed_before(tokens, page) for page in (0, 2, 5, 40)]
        asked.append([*answers, where.overwritten(tokens, 100)])
    assert all(torch.equal(a, b) for a, b in zip(*asked, strict=True))


@pytest.mark.parametrize("spec", [KEYS, SINKS, LOG], ids=["keys", "sinks", "log-sparse"])
def test_tokens_packed_before_a_page_are_those_of_earlier_pages(spec):
    tokens = torch.arange(spec.retention.sinks, 400)
    for page in (0, 1, 7):
        before = tokens[layout(spec.retention).packed_before(tokens, page)]
        assert sorted(before.tolist()) == sorted(layout(spec.retention).page_tokens(0, page).tolist())


class Interrupt(TorchFunctionMode):
    """Ctrl-C in the n-th call of a function of torch."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_an_interrupt_leaves_a_layout_unchanged():
    expected = [
        LogSparseLayout(LOG.retention).page_tokens(0, 9),
        LogSparseLayout(LOG.retention).slots(torch.arange(90)),
    ]
    interrupted = 0
    for n in range(1, 200, 3):
        where = LogSparseLayout(LOG.retention)
        where.exact(50)
        try:
            with Interrupt(n):
                where.page_tokens(0, 9)
        except KeyboardInterrupt:
            interrupted += 1
        assert torch.equal(where.page_tokens(0, 9), expected[0]), n
        assert torch.equal(where.slots(torch.arange(90)), expected[1]), n
    assert interrupted > 10


def test_concurrent_threads_get_the_same_as_one():
    expected = [
        (
            n,
            LogSparseLayout(LOG.retention).exact(n),
            LogSparseLayout(LOG.retention).page_tokens(0, LOG.retention.pages(n)),
        )
        for n in range(900, 3000, 300)
    ]

    def ask(where, start):
        for n, exact, pages in expected[start:] + expected[:start]:
            assert torch.equal(where.exact(n), exact)
            assert torch.equal(where.page_tokens(0, LOG.retention.pages(n)), pages)

    for _ in range(10):
        where = LogSparseLayout(LOG.retention)
        at_once([lambda where=where, start=start: ask(where, start) for start in range(6)])


@pytest.mark.parametrize("spec", [VALUES, SINKS, LOG], ids=["recent", "sinks", "log"])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["feed", "fail", "crop"]), st.sampled_from([0, 1, 40, 60, 119]) | st.integers(0, 120)
        ),
        min_size=4,
        max_size=30,
    )
)
@settings(max_examples=200)
def test_lost_tokens_of_a_ring_are_those_overwritten(spec, history):
    """Against a ring that records, for each slot, which write of which token it holds."""
    where, writes, n = layout(spec.retention), Writes(), 0
    ring, latest = [None] * (spec.retention.sinks + spec.retention.ring_size), {}

    def write(tokens):
        for token in tokens.tolist():
            latest[token] = latest.get(token, 0) + 1
            ring[where.slot(token)] = token, latest[token]

    for what, count in history:
        target = n * count // 120 if what == "crop" else n
        if what != "crop" and count:
            write(torch.arange(n, n + count))
            writes = writes.wrote(n, n + count, spec.retention.pages(n))
        if what == "feed":
            n = target = n + count
        exact = where.exact(target)
        truth = [ring[where.slot(token)] != (token, latest[token]) for token in exact.tolist()]
        assert writes.lost(exact, where).tolist() == truth
        if any(truth):  # restored dequantized, as by a crop beyond the window
            write(exact[torch.tensor(truth)])
            writes = Writes(((0, target),), spec.retention.pages(target))
        n = target
