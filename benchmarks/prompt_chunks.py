"""What it costs in quality to read a long prompt in chunks: KL after a prompt read whole, and in chunks.

    python benchmarks/prompt_chunks.py --schemes waterfill kivi --chunks 2048 4096

SmolLM2-135M-Instruct reads a prompt of `--tokens` tokens over a packed cache, and then `--score` tokens in calls of 16.
KL is in nats against the untouched model, ± half of a 95 % interval over the scored tokens. Within one call attention
reads exact keys and values, so a whole prompt sees no quantized token, and a chunk sees those of earlier chunks.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvpass import models
from kvpass.eval import texts
from kvpass.eval.quality import interval, packed
from kvpass.models.arguments import handing

CALL = 16


def logits_after(model: nn.Module, ids: Tensor, prompt: int, chunk: int) -> tuple[Tensor, float]:
    """Log-probabilities ``[S, V]`` after each token from the last of the prompt on, and the seconds of the prompt."""
    cache, start, rows = DynamicCache(config=model.config), time.perf_counter(), []
    for first in range(0, prompt, chunk):
        part = ids[:, first : min(prompt, first + chunk)]
        rows = [model(part, **handing(model, cache), logits_to_keep=1).logits[0]]
    spent = time.perf_counter() - start
    for part in ids[:, prompt:-1].split(CALL, 1):
        rows.append(model(part, **handing(model, cache)).logits[0])
    return torch.cat(rows).float().log_softmax(-1), spent


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["waterfill", "kivi"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--texts", nargs="+", default=["prose", "code"])
    parser.add_argument("--tokens", type=int, default=7936)
    parser.add_argument("--score", type=int, default=256)
    parser.add_argument("--windows", type=int, default=1, help="windows of each text")
    args = parser.parse_args()
    model, tokenizer = models.load()
    length = args.tokens + args.score
    ids = {name: texts.tokens(tokenizer, name, length * args.windows).view(-1, 1, length) for name in args.texts}
    parts = [(name, window) for name in args.texts for window in ids[name]]
    expected = [logits_after(model, window, args.tokens, args.tokens)[0] for _, window in parts]
    print(f"{args.tokens} tokens, {args.score} scored\n| scheme | text | read in | KL | prompt |", flush=True)
    print("|---|---|--:|--:|--:|", flush=True)
    for scheme in args.schemes:
        for (name, window), right in zip(parts, expected, strict=True):
            for chunk in (args.tokens, *args.chunks):
                with packed(model, scheme, lowering="eager") as applied:
                    logits, spent = logits_after(applied, window, args.tokens, chunk)
                kl = (right.exp() * (right - logits)).sum(-1)
                size = "whole" if chunk == args.tokens else chunk
                print(f"| `{scheme}` | {name} | {size} | {float(kl.mean()):.4f} ± {interval(kl.tolist()):.4f} "
                      f"| {spent:.0f} s |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
