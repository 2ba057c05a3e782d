"""Time the host's part of a replayed step without a GPU; the replay itself does nothing.

    python benchmarks/replay_host.py

A model of 32 narrow layers, ``mode="reduce-overhead"``. Its first steps run in Triton's interpreter; capturing a step
then leaves a replay that does nothing. Whole calls of the model are timed after that: arguments, checks of the cache,
inputs of the replay, and the end of the forward. On a GPU, the launch of the graph is added.
"""

import os
import statistics
import time

os.environ["TRITON_INTERPRET"] = "1"

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass.runtime.steps import replay

LAYERS, STEPS = 32, 150


def nothing(layers, step):
    """A `kvpass.runtime.steps.replay.Capture`."""
    return step(), lambda: None


@torch.no_grad()
def main() -> None:
    replay.CAPTURES["cpu"] = lambda: nothing
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1 << 15,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    kvpass.apply(model, "kivi", lowering="triton", mode="reduce-overhead", max_cache_len=1 << 13)
    cache, ids = DynamicCache(config=config), torch.zeros(1, 1, dtype=torch.long)
    model(input_ids=ids.expand(1, 200), past_key_values=cache)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        model(input_ids=ids, past_key_values=cache)
        times.append(1e3 * (time.perf_counter() - begin))
    deciles = [f"{each:.2f}" for each in statistics.quantiles(times, n=10)]
    print(f"{LAYERS} layers, {STEPS} steps: median {statistics.median(times):.2f} ms, deciles {', '.join(deciles)}")
    longer = sum(each > 10 * statistics.median(times) for each in times)
    print(f"{longer} of them took more than ten times the median: they capture, or pack pages in the interpreter")
    print(str(kvpass.explain(model)).splitlines()[-1])


if __name__ == "__main__":
    main()
