"""Quantize the keys and values of a prompt in one layer, compared with copying them and with the layer's attention.

    python benchmarks/quantize.py
    python benchmarks/quantize.py --lengths 8192,32768 --json h100.json

Variants alternate within one process; medians and ratios to the copy are printed.
"""

import torch
import torch.nn.functional as F

from kvpass.schemes import LayerGeometry, get

from timing import arguments, measure, show, write


def compare(length: int, args, dtype: torch.dtype) -> dict[str, float]:
    """Medians at one length, by variant."""
    device, shape = torch.device(args.device), (args.batch, args.kv_heads, length, args.head_dim)
    k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(args.batch, args.heads, length, args.head_dim, device=device, dtype=dtype)
    plan = get(args.scheme).plan(LayerGeometry(0, 1, args.kv_heads, args.head_dim, dtype, device))
    whole = [x[:, :, : length // spec.page_size * spec.page_size] for x, spec in ((k, plan.key), (v, plan.value))]
    texts = str(plan.key), str(plan.value)

    def quantize(name: str) -> None:
        for x, text in zip(whole, texts, strict=True):
            torch.ops.kvpass.quantize(x, [], text, name)

    variants = {"copy": lambda: (k.clone(), v.clone())}
    for name in args.lowering.split(","):
        variants[f"{args.scheme}, {name}"] = lambda name=name: quantize(name)
    variants["attention of the prompt"] = lambda: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return measure(variants, device, args.rounds)


def main() -> None:
    cuda = torch.cuda.is_available()
    lowering, lengths = ("reference,triton", "2048,8192,32768") if cuda else ("reference,inductor", "2048")
    args = arguments(__doc__, lowering, lengths, rounds=10)
    results = {}
    with torch.inference_mode():
        for length in map(int, args.lengths.split(",")):
            results[length] = compare(length, args, getattr(torch, args.dtype))
            show(f"{args.batch} x {length} tokens", results[length])
    write(args, torch.device(args.device), seconds=results)


if __name__ == "__main__":
    main()
