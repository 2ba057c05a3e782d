"""Matrix products of one row with the weights of SmolLM2-135M, the main part of a decode step with a short context.

    python benchmarks/one_row.py

Prints microseconds for a product of the MLP and for the head, by storage of the weights: floats, torchao's subclass as
users call it, and torch's ops for 8 and 4 bits alone.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

SHAPES = {"MLP, 576 to 1,536": (576, 1536, 300), "head, 576 to 49,152": (576, 49152, 10)}
_GROUP = 32


def microseconds(call: Callable, times: int) -> float:
    """Mean time of a call over ``times`` calls."""
    for _ in range(5):
        call()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return 1e6 * (time.perf_counter() - begin) / times


def variants(inputs: int, outputs: int) -> dict[str, Callable]:
    """One product for each storage of the weights."""
    x, linear = torch.randn(1, inputs).bfloat16(), nn.Linear(inputs, outputs, bias=False).bfloat16()
    wide, narrow, weight = copy.deepcopy(linear).float(), nn.Sequential(copy.deepcopy(linear)), linear.weight.float()
    quantize_(narrow, Int8WeightOnlyConfig())
    scale = weight.abs().amax(1) / 127
    eight, of_rows = (weight / scale[:, None]).round().to(torch.int8), scale.bfloat16()
    codes = torch.randint(16, weight.shape, dtype=torch.int32)
    four = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    of_groups = torch.randn(inputs // _GROUP, outputs, 2).bfloat16()
    return {
        "float32": lambda: wide(x.float()),
        "bfloat16": lambda: linear(x),
        "torchao, 8 bits": lambda: narrow(x),
        "_weight_int8pack_mm": lambda: torch._weight_int8pack_mm(x, eight, of_rows),
        "_weight_int4pack_mm_for_cpu": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, four, _GROUP, of_groups),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    for name, (inputs, outputs, times) in SHAPES.items():
        for how, call in variants(inputs, outputs).items():
            print(f"{name} | {how} | {microseconds(call, times):,.0f} us", flush=True)


if __name__ == "__main__":
    main()
