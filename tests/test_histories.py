"""Random histories of caches: tokens fed and cropped, rows reordered, caches copied and reset, and failures, in any
order.

A cache is compared with

* the untouched model over a `DynamicCache` with the same history, for lossless schemes;
* the untouched model over the dequantized cache, at each call;
* states of the first layer that receive all surviving tokens at once, bit for bit;
* a fresh cache that receives the tokens of each row, without copies, failures, resets and batch changes;
* itself, after changes to another cache.

``KVPASS_HISTORIES=500 pytest tests/test_histories.py`` tries 500 of each kind, different ones in each run.
"""

import copy
import functools
import os
import pickle
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
import torch
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache

import kvpass
from kvpass import HeavyHitter, KVPassError, LogSparse, Recent, Sinks, StreamingLLM, schemes
from kvpass.cache.state import KVState
from kvpass.schemes import (
    CalibratedWaterfillConfig,
    IdentityConfig,
    KIVIConfig,
    LogQuantConfig,
    QAQConfig,
    SQuatConfig,
    XQuantConfig,
)

from common import assert_same_contents, changed_table, generator, only_reference
from tiny import calibrated, llama, tokens

pytestmark = [pytest.mark.usefixtures("reference_lowering"), pytest.mark.slow]

MANY = int(os.environ.get("KVPASS_HISTORIES", 0))
ROLLBACK = 16  # tokens that every scheme can crop without loss
PADDED_EVICTION = True  # to be switched on with defect 6 of issue 19: a second turn after padding raises IndexError
LONGEST = 300  # tokens of a history
ALIVE = 3  # caches at the same time
CLOSE = dict(atol=1e-4, rtol=1e-4)

LOSSLESS = {
    "Recent": IdentityConfig(residual=16),
    "sinks": IdentityConfig(residual=8, sinks=3),
    "small pages": IdentityConfig(retention=Recent(24, page_size=4)),
    "Sinks + Recent": IdentityConfig(retention=Sinks(4) + Recent(40, page_size=8)),
    "LogSparse": IdentityConfig(retention=LogSparse(8)),
    "Sinks + LogSparse": IdentityConfig(retention=Sinks(2) + LogSparse(16)),
}
PACKED = {
    "kivi": KIVIConfig(residual=16, group_size=16),
    "kivi-sinks": KIVIConfig(bits=4, group_size=8, retention=Sinks(4) + Recent(24, page_size=8)),
    "squat": SQuatConfig(residual=16, group_size=16, rank=4, block_size=8),
    "logquant": LogQuantConfig(group_size=8, window=8, sinks=1),
    "xquant": XQuantConfig(residual=16, group_size=16, kq=2, vq=0, km=0, vm=0, depth=None),
    "higgs": schemes.get("higgs", residual=16, group_size=16),
    "higgs, centred": schemes.get("higgs-sinks", residual=16, group_size=16),
    "waterfill, static": CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8),
    "waterfill, hybrid": CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8, form="hybrid"),
}
CAPTURED = {  # stored values depend on attention or positions, so every call of several tokens is captured
    "identity-pre": IdentityConfig(residual=16, rope="pre"),
    "kivi-pre": KIVIConfig(residual=16, group_size=16, rope="pre"),
    "h2o, not full": IdentityConfig(retention=HeavyHitter(512, recent=24, page_size=8)),
    "h2o": IdentityConfig(retention=HeavyHitter(32, recent=24, page_size=16)),
    "kivi+h2o": KIVIConfig(group_size=16, retention=Sinks(2) + HeavyHitter(32, recent=24, page_size=16)),
    "kivi-pre+h2o": KIVIConfig(group_size=16, rope="pre", retention=HeavyHitter(32, 24, 16, shared=True)),
    "kivi+streaming": KIVIConfig(group_size=16, retention=StreamingLLM(4, recent=48, exact=16, page_size=16)),
    "qaq, all outliers": QAQConfig(residual=16, outliers=1.0),
    "qaq": QAQConfig(residual=16, sigma_s=1e-4, sigma_x=1e-3),
    "qaq-demote": QAQConfig(residual=16, sigma_s=1e-4, sigma_x=1e-3, keep_originals=False),
}
NOTHING_LOST = {*LOSSLESS, "identity-pre", "h2o, not full", "qaq, all outliers"}
FIRST_CHUNK_DECIDES = {"squat", "higgs, centred", "waterfill, hybrid"}
IN_CI = "kivi-pre+h2o", "qaq"  # every kind of state; each takes many seconds to capture
CONFIGS = LOSSLESS | PACKED | CAPTURED


def saved_and_loaded(cache, model):
    with TemporaryDirectory() as folder:
        return kvpass.load_cache(kvpass.save_cache(cache, f"{folder}/cache.safetensors"), model)


ROUND_TRIPS = {  # ways to obtain an equal cache
    "copy.deepcopy": lambda cache, model: copy.deepcopy(cache),
    "pickle": lambda cache, model: pickle.loads(pickle.dumps(cache)),
    "save_cache": saved_and_loaded,
}


whichs, seeds = st.integers(0, ALIVE - 1), st.integers(0, 99)
counts = st.one_of(st.just(1), st.integers(2, 9), st.integers(10, 80))  # of tokens fed at once
thens = st.sampled_from([0, 1, 2, 5, 20])  # tokens fed one by one
firsts = st.tuples(st.integers(1, 3), counts, st.none() | st.lists(st.integers(0, 9), min_size=3, max_size=3))
"""Batch size, number of tokens, and number of padding tokens in each row."""


@functools.cache
def models(layers: int, name: str | None = None):
    """A tiny model with the scheme of that name, created once per process; without a name, the same model untouched."""
    model = llama(head_dim=16, layers=layers)
    return model if name is None else kvpass.apply(model, calibrated(model, CONFIGS[name]), lowering="eager")


def like(state: KVState, x: torch.Tensor, keys: KVState | None) -> KVState:
    """A state that receives all of ``x`` at once, with the calibrated tensors and rotary tables of ``state``. ``keys``:
    the key state of its layer, for values."""
    batch, heads, count, dim = x.shape
    made = KVState.allocate(state.spec, batch, heads, dim, x.dtype, x.device, count, shared=state.shared)
    made.rotary, made.same_layer_keys = state.rotary, keys
    with only_reference():
        made.append(x, 0, rope=state.spec.transform.numbered)
    return made


class Injected(Exception):
    """The error that `failing` raises."""


@contextmanager
def failing(at: int, before: bool):
    """A context in which op number ``at`` of kvpass raises `Injected`, ``before`` or after it has run."""
    left = at

    def wrapped(run):
        def runs(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == -1 and before:
                raise Injected
            out = run(*args, **kwargs)
            if left == -1:
                raise Injected
            return out

        return runs

    def change(table):
        for op in ("append_", "append_layers_", "dequantize", "attend"):
            reference = table[op]["reference"]
            table[op]["reference"] = replace(reference, run=wrapped(reference.run))

    with changed_table(change):
        yield


@dataclass
class Call:
    """The arguments of one call: ids ``[B, S]`` after ``start`` tokens, and a mask ``[B, T]`` if there is padding."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    start: int

    @property
    def arguments(self) -> dict:
        stop = self.start + self.ids.shape[1]
        positions = torch.arange(self.start, stop).expand(self.ids.shape)
        if self.mask is not None:
            positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, self.start : stop]
        return dict(input_ids=self.ids, attention_mask=self.mask, position_ids=positions)

    def of_rows(self, rows) -> "Call":
        return Call(self.ids[rows], None if self.mask is None else self.mask[rows], self.start)

    def tokens_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of its tokens that are not padding."""
        return logits if self.mask is None else logits[self.mask[:, self.start :].bool()]


@dataclass
class Member:
    """A cache, and its history since it was empty."""

    cache: DynamicCache
    plain: DynamicCache  # of the untouched model, with the same history
    log: list[Call | int] = field(default_factory=list)  # calls, and numbers of cropped tokens
    mask: torch.Tensor | None = None
    reordered: bool = False
    restored: bool = False  # a crop put dequantized tokens into the window
    kept_from: int = 0  # a crop may restore tokens before this position from pages, dequantized
    forgot: bool = False  # exact tokens beyond the window, which a file does not hold and a failure overwrites

    def forget(self) -> None:
        self.kept_from, self.forgot = self.length, True

    logits: torch.Tensor | None = None  # of the last call
    snapshot: list[torch.Tensor] | None = None  # contents when it was last checked; None if it has changed since

    @property
    def length(self) -> int:
        return self.plain.get_seq_length()

    @property
    def batch(self) -> int:
        return self.plain.layers[0].keys.shape[0]

    def contents(self) -> list[torch.Tensor]:
        """Keys and values of each layer, dequantized."""
        return [x + 0 for layer in self.cache.layers for x in (layer.keys, layer.values)] if self.length else []


class Histories(RuleBasedStateMachine):
    """Histories of caches of the scheme ``name``. Every change of a cache is followed by calls over it."""

    name: str
    members: list[Member]

    @initialize(first=firsts, then=thens, seed=seeds)
    def begin(self, first, then, seed):
        config = CONFIGS[self.name]
        layers = 1 if self.name in CAPTURED and not MANY else 2  # capturing takes half the time
        self.model, self.untouched = models(layers, self.name), models(layers)
        self.evicts = config.retention is not None and config.retention.budget is not None
        self.lossless, self.pre_rope = self.name in NOTHING_LOST, config.rope == "pre"
        self.members = []
        self.another_one(first, then, seed)

    @precondition(lambda self: len(self.members) < ALIVE)
    @rule(first=firsts, then=thens, seed=seeds)
    def another_one(self, first, then, seed):
        self.members.append(Member(*(DynamicCache(config=self.untouched.config) for _ in range(2))))
        self.prompt(-1, first, then, seed)

    @rule(which=whichs, count=counts, then=thens, seed=seeds)
    def feed(self, which, count, then, seed):
        member = self.a_member(which)
        if member.length + count <= LONGEST:
            self.run(member, self.a_call(member, count, seed))
        self.go_on(member, then, seed)

    @rule(which=whichs, count=st.integers(1, ROLLBACK), then=thens, seed=seeds)
    def crop(self, which, count, then, seed):
        self.take_back(self.a_member(which), count)
        self.go_on(self.a_member(which), then, seed)

    @rule(which=whichs, share=st.floats(0, 1), then=thens, seed=seeds)
    def crop_far(self, which, share, then, seed):
        member = self.a_member(which)
        self.take_back(member, int(share * member.length))
        self.go_on(member, then, seed)

    @rule(which=whichs, then=thens, seed=seeds)
    def reorder(self, which, then, seed):
        member = self.a_member(which)
        order = torch.randint(member.batch, (member.batch,), generator=generator(seed))
        self.rebatch(member, order, lambda cache: cache.reorder_cache(order))
        self.go_on(member, then, seed)

    @rule(which=whichs, then=thens, seed=seeds)
    def repeat(self, which, then, seed):
        member = self.a_member(which)
        if member.batch <= 2:
            rows = torch.arange(member.batch).repeat_interleave(2)
            self.rebatch(member, rows, lambda cache: cache.batch_repeat_interleave(2))
            self.go_on(member, then, seed)

    @rule(which=whichs, then=thens, seed=seeds)
    def select(self, which, then, seed):
        member = self.a_member(which)
        rows = torch.randperm(member.batch, generator=generator(seed))[: 1 + seed % 3]
        self.rebatch(member, rows, lambda cache: cache.batch_select_indices(rows))
        self.go_on(member, then, seed)

    @rule(which=whichs, first=firsts, then=thens, seed=seeds)
    def reset(self, which, first, then, seed):
        cache = self.a_member(which).cache
        cache.reset()
        self.members[which % len(self.members)] = Member(cache, DynamicCache(config=self.untouched.config))
        self.prompt(which, first, then, seed)

    @rule(which=whichs, how=st.sampled_from(sorted(ROUND_TRIPS)), both=st.booleans(), then=thens, seed=seeds)
    def round_trip(self, which, how, both, then, seed):
        """The copy continues, alone or ``both``."""
        member = self.a_member(which)
        other = copy.copy(member)
        other.cache, other.plain, other.log = (
            ROUND_TRIPS[how](member.cache, self.model),
            copy.deepcopy(member.plain),
            [*member.log],
        )
        if how == "save_cache":
            other.forget()
        if both and len(self.members) < ALIVE:
            self.members.append(other)
        else:
            self.members[which % len(self.members)] = other
        self.look_at(other)
        self.go_on(other, then, seed)

    @rule(which=whichs, count=counts, at=st.integers(0, 7), before=st.booleans(), first=firsts, then=thens, seed=seeds)
    def fail(self, which, count, at, before, first, then, seed):
        """The cache is as before, or refuses every use until it is reset. It may refuse only if tokens have been
        overwritten or moved."""
        member = self.a_member(which)
        if member.length + count > LONGEST:
            return
        call = self.a_call(member, count, seed)
        try:
            with failing(at, before), torch.no_grad():
                logits = self.model(**call.arguments, past_key_values=member.cache).logits
        except Injected:
            if self.refuses(member):
                assert count > ROLLBACK or self.evicts, f"refused after a failure over {count} tokens"
                return self.reset(which, first, then, seed)
            self.look_at(member)
            member.forget()
        else:
            self.succeeded(member, call, logits)
        self.go_on(member, then, seed)

    # ------------------------------------------------------------ calls

    def a_member(self, which: int) -> Member:
        return self.members[which % len(self.members)]

    def prompt(self, which: int, first, then: int, seed: int) -> None:
        """The first call of a history."""
        batch, count, padding = first
        member = self.a_member(which)
        if padding and count > max(padding) and (PADDED_EVICTION or not self.evicts):
            member.mask = (torch.arange(count) >= torch.tensor(padding[:batch])[:, None]).long()
        self.run(member, Call(tokens(batch, count, seed=seed), member.mask, 0))
        self.go_on(member, then, seed)

    def go_on(self, member: Member, count: int, seed: int) -> None:
        """Feed further tokens, one by one."""
        for i in range(min(count, LONGEST - member.length)):
            self.run(member, self.a_call(member, 1, seed + i), compare=i == count - 1)

    def a_call(self, member: Member, count: int, seed: int) -> Call:
        """The next tokens of a history."""
        ones = torch.ones(member.batch, count, dtype=torch.long)
        mask = None if member.mask is None else torch.cat([member.mask, ones], 1)
        return Call(tokens(member.batch, count, seed=seed), mask, member.length)

    def refuses(self, member: Member) -> bool:
        """Whether the next call is refused. A call that is not refused is cropped again."""
        tried = copy.deepcopy(member.cache)
        try:
            self.model(**self.a_call(member, 1, 0).arguments, past_key_values=tried)
        except KVPassError:
            return True
        return False

    # ------------------------------------------------------------ what must be the case

    @torch.no_grad()
    def run(self, member: Member, call: Call, compare: bool = True) -> None:
        decoded = self.after_decoded(member, call) if compare else None
        self.succeeded(member, call, self.model(**call.arguments, past_key_values=member.cache).logits)
        if decoded is not None:
            torch.testing.assert_close(call.tokens_of(member.logits), decoded, **CLOSE)

    def after_decoded(self, member: Member, call: Call) -> torch.Tensor | None:
        """Logits of the untouched model over the dequantized cache; None if keys still have to be rotated, or if a mask
        cannot express which tokens are left."""
        gone = member.length and member.cache.layers[0].tokens < member.length
        if self.pre_rope or not member.length or (gone and call.mask is not None):
            return None
        cache, contents = DynamicCache(config=self.untouched.config), member.contents()
        for i in range(len(contents) // 2):
            cache.update(*contents[2 * i : 2 * i + 2], i)
        return call.tokens_of(self.untouched(**call.arguments, past_key_values=cache).logits)

    @torch.no_grad()
    def succeeded(self, member: Member, call: Call, logits: torch.Tensor) -> None:
        expected = self.untouched(**call.arguments, past_key_values=member.plain).logits
        member.log.append(call)
        member.mask, member.logits = call.mask, logits
        if self.lossless:
            torch.testing.assert_close(call.tokens_of(logits), call.tokens_of(expected), **CLOSE)
        member.snapshot = None

    @invariant()
    def only_what_was_changed_has_changed(self):
        for member in getattr(self, "members", []):
            self.look_at(member)

    def look_at(self, member: Member) -> None:
        """Check that ``member`` is unchanged; if it was changed on purpose, compare it with the untouched cache."""
        if member.snapshot is None:
            member.snapshot = member.contents()
            self.check(member)
        for now, was in zip(member.contents(), member.snapshot, strict=True):
            assert torch.equal(now, was)

    def check(self, member: Member) -> None:
        layers = member.cache.layers
        assert member.cache.get_seq_length() == member.length
        for layer in layers:
            assert layer.seen == member.length and layer.tokens == member.snapshot[0].shape[2]
            assert layer.seen == layer.tokens or self.evicts
        if not member.length:
            return
        values = 2 * sum(layer.keys.numel() for layer in member.plain.layers)
        assert kvpass.bits_per_value(member.cache) == 8 * kvpass.nbytes(member.cache) / values
        if member.restored or self.evicts or self.name.startswith("qaq") or self.name in FIRST_CHUNK_DECIDES:
            return
        first, keys = member.plain.layers[0], None
        for state, x in zip(layers[0].states(), (first.keys, first.values), strict=True):
            if not state.spec.transform.pre_rope:
                keys = like(state, x, keys)
                assert_same_contents(state, keys, member.length)

    def take_back(self, member: Member, count: int) -> None:
        if not 0 < count < member.length:
            return
        layer, spec = member.cache.layers[0], member.cache.layers[0].plan.key
        refused = layer.seen > layer.tokens and layer.tokens - count < spec.retention.sinks + spec.retention.budget
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if refused:
                with pytest.raises(KVPassError, match="tokens were evicted"):
                    member.cache.crop(-count)
                return
            member.cache.crop(-count)
        restored = any("dequantized values instead of exact ones" in str(warning.message) for warning in caught)
        assert not restored or count > ROLLBACK or member.length - count < member.kept_from
        member.restored |= restored
        member.plain.crop(-count)
        member.kept_from = member.length
        member.log.append(count)
        if member.mask is not None:
            member.mask = member.mask[:, : member.length]
        member.snapshot = None

    def rebatch(self, member: Member, rows: torch.Tensor, change) -> None:
        before = member.contents()
        change(member.cache), change(member.plain)
        for mine, was in zip(member.contents(), before, strict=True):
            assert torch.equal(mine, was[rows])
        member.log = [call if isinstance(call, int) else call.of_rows(rows) for call in member.log]
        member.mask = None if member.mask is None else member.mask[rows]
        member.logits, member.reordered = member.logits[rows], True
        member.snapshot = None

    def teardown(self):
        for member in getattr(self, "members", []):
            if member.log and not (member.forgot and member.restored):
                self.check_replay(member)

    @torch.no_grad()
    def check_replay(self, member: Member) -> None:
        cache = DynamicCache(config=self.untouched.config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for what in member.log:
                if isinstance(what, int):
                    cache.crop(-what)
                else:
                    logits = self.model(**what.arguments, past_key_values=cache).logits
        assert [layer.tokens for layer in cache.layers] == [layer.tokens for layer in member.cache.layers]
        calls = [what for what in member.log if isinstance(what, Call)]
        again = Member(cache, member.plain).contents()
        pairs = [
            (calls[-1].tokens_of(member.logits), calls[-1].tokens_of(logits)),
            *zip(member.contents(), again, strict=True),
        ]
        for mine, theirs in pairs:
            if member.reordered:  # batches of other sizes are multiplied in another order
                assert torch.isclose(mine, theirs, atol=1e-2, rtol=1e-2).float().mean() > 0.98
            else:
                assert torch.equal(mine, theirs)


@torch._dynamo.config.patch(recompile_limit=64)  # a process meets more forms of call here than a user's does
def try_histories(name: str, examples: int, steps: int) -> None:
    machine = type("HistoriesOfOne", (Histories,), {"name": name})
    if MANY:
        options = settings(max_examples=MANY, stateful_step_count=40, derandomize=False)
    else:
        machine, options = (
            seed(crc32(name.encode()))(machine),
            settings(max_examples=examples, stateful_step_count=steps, phases=[Phase.generate]),
        )
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_histories_equal_the_untouched_model(name):
    try_histories(name, examples=3, steps=12)


@pytest.mark.parametrize("name", PACKED)
def test_histories_over_packed_tokens_equal_a_replay_of_the_remaining_tokens(name):
    try_histories(name, examples=3, steps=12)


@pytest.mark.parametrize("name", CAPTURED if MANY else IN_CI)
def test_attention_dependent_histories_equal_a_replay_of_the_remaining_tokens(name):
    try_histories(name, examples=2, steps=10)
