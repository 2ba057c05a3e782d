"""What the chunks of a prefix store cost and keep, without a server: bytes, processor time and KL.

    python benchmarks/chunks.py --schemes kivi-4 higgs-sinks --dtype bfloat16

A prompt is read by transformers. Its keys and values are quantized in chunks and dequantized. As after a hit, the last
tokens of the prompt are computed again from them, and the tokens that follow are scored. Times are those of the
processor, of one thread. Bits are those of a 16-bit cache, also if the model runs in float32.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from kvpass import models, schemes
from kvpass.prefix_store import ChunkCodec, EntropyChunkCodec, LayerShape
from kvpass.schemes import SchemeConfig
from kvpass.vllm.calibrated_scheme import CalibratedScheme


def texts(tokenizer, count: int, length: int) -> torch.Tensor:
    """``[count, length]`` tokens of this repository's documentation."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return ids[: count * length].view(count, length)


def asked(name: str) -> SchemeConfig | CalibratedScheme:
    """A scheme by its name, its JSON, or the folder of its calibration, with "@" and other bits if wanted."""
    folder, _, bits = name.partition("@")
    if Path(folder).is_dir():
        return CalibratedScheme.of(folder).storing(float(bits) if bits else None)
    return schemes.get(json.loads(name) if name.startswith("{") else name)


def codec_for(
    scheme: SchemeConfig | CalibratedScheme, shapes: dict[int, LayerShape], tokens: int
) -> ChunkCodec | EntropyChunkCodec:
    """What stores chunks of ``tokens`` tokens of all layers of a model."""
    if isinstance(scheme, CalibratedScheme):
        return EntropyChunkCodec(shapes, scheme.layers(1, 0, shapes[0].dtype), tokens)
    return ChunkCodec(scheme, shapes, len(shapes), tokens)


def nbytes_of_16_bits(x: torch.Tensor) -> int:
    """Bytes of a chunk's tensor if the cache has 16-bit tokens."""
    return 2 * x.numel() if x.is_floating_point() else x.nbytes


def timed(function, *arguments, **more):
    start = time.process_time()
    return function(*arguments, **more), time.process_time() - start


def scored(model, cache: list[tuple], ids: torch.Tensor, new: int) -> torch.Tensor:
    """Log-probabilities after each of the last ``new`` of ``ids``. Those before them that are not in ``cache`` are
    computed."""
    past = DynamicCache()
    for index, (k, v) in enumerate(cache):
        past.update(k.unsqueeze(0), v.unsqueeze(0), index)
    left = ids[past.get_seq_length() :]
    return model(left.unsqueeze(0), past_key_values=past).logits[0, -new:].float().log_softmax(-1)


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
    expected = [scored(model, cache, ids, arguments.new) for cache, ids in zip(read, prompts, strict=True)]
    print(f"{arguments.tokens} tokens in {arguments.dtype}, read in {prompt_time:.2f} s")
    print("| scheme | bits per value | fewer bytes | quantized in | of the prompt | dequantized in | KL | same token |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in arguments.schemes:
        codec = codec_for(asked(name), shapes, arguments.chunk)
        codec.warm()
        numbers, kept = range(arguments.tokens // arguments.chunk), arguments.tokens - arguments.recompute
        spent, kl, same, size = [0.0, 0.0], 0.0, 0.0, 0.0
        for cache, ids, right in zip(read, prompts, expected, strict=True):
            chunks, took = timed(codec.quantize, numbers, *zip(*cache, strict=True))
            spent[0] += took / len(prompts)
            found, took = timed(codec.dequantize, numbers, chunks)
            spent[1] += took / len(prompts)
            size += sum(nbytes_of_16_bits(x) for chunk in chunks for x in chunk.values()) / len(prompts)
            cache = [(k[:, :kept], v[:, :kept]) for k, v in zip(*found, strict=True)]
            logits = scored(model, cache, ids, arguments.new)
            kl += float((right.exp() * (right - logits)).sum(-1).mean()) / len(prompts)
            same += float((right.argmax(-1) == logits.argmax(-1)).float().mean()) / len(prompts)
        bits = 8 * size * dtype.itemsize / (codec.full_nbytes * len(chunks))
        print(
            f"| `{name}` | {bits:.2f} | {16 / bits:.2f} x | {spent[0]:.2f} s | {spent[0] / prompt_time:.0%} "
            f"| {spent[1]:.2f} s | {kl:.4f} | {same:.0%} |",
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
    parser.add_argument("--recompute", type=int, default=64, help="tokens at the end of the prompt to compute again")
    main(parser.parse_args())
