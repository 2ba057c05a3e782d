"""What a saved prompt costs and saves: bytes on disk, and seconds to load it or to read the prompt again.

python benchmarks/prompt_cache.py [--schemes kivi squat] [--tokens 3000]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import DynamicCache

import kvpass
from kvpass import models
from kvpass.eval import texts
from kvpass.models.arguments import CACHE, handing

_STEPS = 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; default SmolLM2-135M-Instruct")
    parser.add_argument("--schemes", nargs="+", default=["kivi", "squat", "higgs-sinks"])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--times", type=int, default=5, help="prompts and loads, in turn")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@torch.no_grad()
def read(model, ids) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, **handing(model, cache), logits_to_keep=1)
    return cache


def measure(model, scheme: str, ids: torch.Tensor, times: int, folder: Path) -> dict:
    """One row: median seconds of ``times`` prompts and loads, alternating, after one of each."""
    kvpass.apply(model, scheme, lowering="eager")
    try:
        path, seconds = folder / scheme, {"prompt": [], "save": [], "load": []}

        def timed(name, run, *args):
            start = time.perf_counter()
            result = run(*args)
            seconds[name].append(time.perf_counter() - start)
            return result

        for _ in range(times + 1):
            cache = timed("prompt", read, model, ids[:, :-1])
            timed("save", kvpass.save_cache, cache, path)
            loaded = timed("load", kvpass.load_cache, path, model)
        go_on = dict(max_new_tokens=_STEPS, do_sample=False)
        same = torch.equal(
            model.generate(ids, **{CACHE: loaded}, **go_on), model.generate(ids, **{CACHE: cache}, **go_on)
        )
        layer = cache.layers[0].geometry
        bf16 = 2 * 2 * len(cache.layers) * layer.num_key_value_heads * layer.head_dim * (ids.shape[1] - 1)
        row = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        return row | {"bytes": path.stat().st_size, "bf16_bytes": bf16, "same_continuation": same}
    finally:
        kvpass.remove(model)


def main() -> None:
    arguments = parse()
    model, tokenizer = models.load(arguments.model, say=print)
    ids = texts.tokens(tokenizer, "prose", arguments.tokens + 1)
    rows = {}
    print(f"{'scheme':<14}{'on disk':>12}{'bfloat16':>12}{'prompt':>10}{'save':>10}{'load':>10}  same continuation")
    with tempfile.TemporaryDirectory() as folder:
        for scheme in arguments.schemes:
            row = rows[scheme] = measure(model, scheme, ids, arguments.times, Path(folder))
            times = "".join(f"{row[name]:>9.3f}s" for name in ("prompt", "save", "load"))
            print(
                f"{scheme:<14}{row['bytes']:>12,}{row['bf16_bytes']:>12,}{times}  {row['same_continuation']}",
                flush=True,
            )
    if arguments.json:
        facts = {"tokens": arguments.tokens, "threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
