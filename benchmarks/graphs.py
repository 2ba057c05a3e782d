"""How many graphs a chat server needs: python benchmarks/graphs.py [scheme ...]

Thirty calls of ``generate`` as a chat server makes them: batches of 1 to 8, padded and not, second and third turns on a
filled cache, drafts by prompt lookup, a cache that is reset, a cache that is cropped; then the same thirty again. The
model is a Llama with two random layers, because only graphs are counted and depth adds none. A row is printed for each
call that captured a graph, and then the sum.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import kvpass
from kvpass.models.arguments import CACHE

_VOCABULARY, _PROMPT, _TURN, _NEW = 512, 150, 21, 12


@dataclass(frozen=True)
class Call:
    """One answer to ``batch`` chats, in ``turns`` turns, with ``drafts`` draft tokens and prompt chunks of ``chunk``
    tokens (0: whole prompts). ``padded``: some chats are shorter. ``reset``: reuse the cache of the previous call after
    a reset. ``cropped``: crop one token between turns."""

    batch: int = 1
    padded: bool = False
    turns: int = 1
    chunk: int = 0
    drafts: int = 0
    reset: bool = False
    cropped: bool = False


_CALLS = [Call(), Call(turns=2), Call(turns=3), Call(reset=True)]
_CALLS += [Call(batch) for batch in range(2, 9)]
_CALLS += [Call(batch, padded=True) for batch in range(2, 9)]
_CALLS += [Call(batch, padded=True, turns=2) for batch in (2, 4, 8)]
_CALLS += [Call(chunk=64), Call(2, chunk=64), Call(3, padded=True, chunk=64), Call(turns=2, cropped=True)]
_CALLS += [
    Call(drafts=4),
    Call(turns=2, drafts=4),
    Call(drafts=7),
    Call(4, padded=True, reset=True),
    Call(turns=2, reset=True),
]


def answer(model, call: Call, cache, seed: int):
    """Generate for ``call``; returns the cache that it filled."""
    rows = torch.Generator().manual_seed(seed)
    if not call.reset or cache is None:
        cache = DynamicCache(config=model.config)
    else:
        cache.reset()
    ids = torch.randint(1, _VOCABULARY, (call.batch, _PROMPT), generator=rows)
    mask = torch.ones_like(ids)
    if call.padded:
        for row in range(1, call.batch):
            mask[row, : 7 * row] = 0
    asked = {"prefill_chunk_size": call.chunk} if call.chunk else {}
    asked |= {"prompt_lookup_num_tokens": call.drafts} if call.drafts else {}
    for turn in range(call.turns):
        if turn:
            if call.cropped:
                cache.crop(-1)
            more = torch.randint(1, _VOCABULARY, (call.batch, _TURN), generator=rows)
            ids = torch.cat([ids, more], 1)
            mask = torch.cat([mask, mask.new_ones(call.batch, ids.shape[1] - mask.shape[1])], 1)
        ids = model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False,
            pad_token_id=0, **asked,
        )  # fmt: skip
        mask = torch.cat([mask, mask.new_ones(call.batch, ids.shape[1] - mask.shape[1])], 1)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=["kivi", "squat"])
    logging.set_verbosity_error()
    for scheme in parser.parse_args().schemes:
        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=2048, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = kvpass.apply(LlamaForCausalLM(config).eval(), scheme)
        cache, before, started, seen = None, 0, time.perf_counter(), 0
        torch._dynamo.reset()
        counters.clear()
        print(f"\n| {scheme}: call | graphs captured | seconds |\n|---|--:|--:|")
        for index, call in enumerate(2 * _CALLS):
            start = time.perf_counter()
            cache = answer(model, call, cache, index)
            seen = counters["stats"]["unique_graphs"]
            if seen > before:
                print(f"| {index + 1}: {call} | {seen - before} | {time.perf_counter() - start:.0f} |", flush=True)
            before = seen
        compiled = sum(graph.compiled for graph in kvpass.explain(model).graphs)
        seconds = time.perf_counter() - started
        print(f"\n{2 * len(_CALLS)} calls: {seen} graphs, {compiled} of them compiled, {seconds:.0f} s.")


if __name__ == "__main__":
    main()
