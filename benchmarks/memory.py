"""Peak memory of decoding as the context grows: python benchmarks/memory.py [--lengths N,N] [--json FILE]

SmolLM2-135M-Instruct in a separate process for each cache: a prompt in chunks of 512 tokens, and some steps at each
length, after compilation. The peak is that of the steps, minus the memory before the prompt: allocated memory on CUDA,
the resident set elsewhere (Linux only). "cache" is what `kvpass.nbytes` counts, or the keys and values of the default
cache.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, QuantizedCache

import kvpass
from kvpass import models
from kvpass.eval import texts

from decode_e2e import DEFAULT, QUANTIZED, fill, quantized
from timing import write

STEPS = 16


class Peak:
    """Peak bytes of a device since `reset`; of the process, if the device is not CUDA."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS

    def of(self, fn: Callable[[], object]) -> int:
        """Bytes by which the peak during ``fn()`` exceeds what is held before."""
        if not self.cuda:
            ctypes.CDLL(None).malloc_trim(0)  # memory that was freed counts as free
        self.reset()
        before = self.read()
        fn()
        return self.read() - before

    def read(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024


def nbytes(name: str, cache) -> int | None:
    """The size of the ``cache`` of a variant; None for `QuantizedCache`, which does not report it."""
    if name == DEFAULT:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return None if name in QUANTIZED else kvpass.nbytes(cache)


@torch.no_grad()
def measure(name: str, lengths: list[int]) -> None:
    """Print peak and cache bytes of one variant by length, as JSON."""
    model, tokenizer = models.load()
    if name not in (DEFAULT, *QUANTIZED):
        kvpass.apply(model, name)
    ids, peak, results = texts.tokens(tokenizer, "prose", lengths[-1] + STEPS), Peak(model.device), {}
    ids = ids.to(model.device)

    def new_cache():
        if name in QUANTIZED:
            return QuantizedCache(config=model.config, **QUANTIZED[name])
        return DynamicCache(config=model.config)

    warm = new_cache()
    fill(model, warm, ids, 0, 64)
    fill(model, warm, ids, 64, 64 + STEPS, chunk=1)
    del warm
    peak.reset()
    before, cache, at = peak.read(), new_cache(), 0
    for length in lengths:
        fill(model, cache, ids, at, length)
        peak.reset()
        at = length + STEPS
        fill(model, cache, ids, length, at, chunk=1)
        results[length] = dict(peak=peak.read() - before, cache=nbytes(name, cache))
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="kivi")
    parser.add_argument("--lengths", default="1024,4096,7680", help="increasing")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="also write the bytes to this file")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.measure:
        return measure(args.measure, lengths)
    model, _ = models.load()
    results = {}
    print("| | tokens | peak | cache |\n|---|--:|--:|--:|", flush=True)
    for name in (DEFAULT, *args.schemes.split(","), *quantized(model.config)):
        command = [sys.executable, __file__, "--measure", name, "--lengths", args.lengths]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        for length, found in results[name].items():
            cache = "" if found["cache"] is None else f"{found['cache'] / 1e6:.1f} MB"
            print(f"| {name} | {length} | {found['peak'] / 1e6:.1f} MB | {cache} |", flush=True)
    write(args, model.device, bytes=results)


if __name__ == "__main__":
    main()
