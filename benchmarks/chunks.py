"""What the chunks of a prefix store cost and keep, without a server: bytes, processor time and KL.

    python benchmarks/chunks.py --schemes kivi-4 higgs-sinks --dtype bfloat16

A prompt is read by transformers. Its keys and values are quantized in chunks and dequantized, as after a hit, and the
tokens that follow are scored with them and with the originals. Times are those of the processor, of one thread.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from kvpass import models, schemes
from kvpass.prefix_store import ChunkCodec, LayerShape
from kvpass.schemes import SchemeConfig
from kvpass.vllm.calibrated_scheme import CalibratedScheme


def texts(tokenizer, count: int, length: int) -> torch.Tensor:
    """``[count, length]`` tokens of this repository's documentation."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return ids[: count * length].view(count, length)


def asked(name: str) -> SchemeConfig | CalibratedScheme:
    """A scheme by its name, its JSON, or the folder of its calibration."""
    if Path(name).is_dir():
        return CalibratedScheme.of(name)
    return schemes.get(json.loads(name) if name.startswith("{") else name)


def timed(function, *arguments, **more):
    start = time.process_time()
    return function(*arguments, **more), time.process_time() - start


def scored(model, cache: list[tuple], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after each of ``ids``, which follow ``cache``."""
    past = DynamicCache()
    for index, (k, v) in enumerate(cache):
        past.update(k.unsqueeze(0), v.unsqueeze(0), index)
    return model(ids.unsqueeze(0), past_key_values=past).logits[0].float().log_softmax(-1)


@torch.inference_mode()
def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    model, tokenizer = models.load()
    model = model.to(dtype)
    prompts = texts(tokenizer, arguments.texts, arguments.tokens + arguments.new)
    read, prompt_time = [], 0.0
    for ids in prompts:
        past = DynamicCache()
        _, took = timed(model, ids[None, : arguments.tokens], past_key_values=past)
        prompt_time += took / len(prompts)
        read.append([(layer.keys[0], layer.values[0]) for layer in past.layers])
    heads, _, head_dim = read[0][0][0].shape
    shapes = {index: LayerShape(heads, head_dim, dtype) for index in range(len(read[0]))}
    expected = [scored(model, cache, ids[arguments.tokens :]) for cache, ids in zip(read, prompts, strict=True)]
    print(f"{arguments.tokens} tokens in {arguments.dtype}, read in {prompt_time:.2f} s")
    print("| scheme | x fewer bytes | quantized in | of the prompt | dequantized in | KL | same token |")
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in arguments.schemes:
        scheme, calibrated = asked(name), None
        if isinstance(scheme, CalibratedScheme):
            calibrated = scheme.layers(1, 0, dtype)
        codec = ChunkCodec(scheme, shapes, len(shapes), arguments.chunk, calibrated=calibrated)
        codec.warm()
        numbers = range(arguments.tokens // arguments.chunk)
        spent, kl, same = [0.0, 0.0], 0.0, 0.0
        for cache, ids, right in zip(read, prompts, expected, strict=True):
            chunks, took = timed(codec.quantize, numbers, *zip(*cache, strict=True))
            spent[0] += took / len(prompts)
            found, took = timed(codec.dequantize, numbers, chunks)
            spent[1] += took / len(prompts)
            logits = scored(model, list(zip(*found, strict=True)), ids[arguments.tokens :])
            kl += float((right.exp() * (right - logits)).sum(-1).mean()) / len(prompts)
            same += float((right.argmax(-1) == logits.argmax(-1)).float().mean()) / len(prompts)
        size = sum(x.nbytes for chunk in chunks for x in chunk.values())
        fewer = codec.full_nbytes * len(chunks) / size
        print(
            f"| `{name}` | {fewer:.2f} | {spent[0]:.2f} s | {spent[0] / prompt_time:.0%} | {spent[1]:.2f} s | {kl:.4f} "
            f"| {same:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["identity", "kivi-4", '{"scheme": "kivi-4", "sinks": 4}'])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, a multiple of --chunk")
    parser.add_argument("--new", type=int, default=128, help="tokens that follow")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per chunk")
    main(parser.parse_args())
