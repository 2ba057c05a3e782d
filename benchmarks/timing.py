"""Helpers for benchmarks: arguments for those of single ops, alternating measurements within one process, and JSON with
versions and device."""

import argparse
import ctypes
import json
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version

import torch

_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # where there is glibc


def arguments(description: str, lowering: str, lengths: str, rounds: int, **numbers: int | float) -> argparse.Namespace:
    """The arguments of a benchmark of one layer's ops, with these defaults, and further ``numbers``. Also sets the
    number of threads."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="kivi")
    parser.add_argument("--lowering", default=lowering, help="one or more, by comma")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", default=lengths)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write what was measured to this file")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def seconds(fn, device: torch.device) -> float:
    """Time of one call."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3
    _trim(0)  # or this call would pay for giving back what the variant before it has freed
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def measure(variants: dict, device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each variant, alternating."""
    times = {name: [] for name in variants}
    for fn in variants.values():
        for _ in range(3):  # compiles
            fn()
    for _ in range(rounds):
        for name, fn in variants.items():
            times[name].append(seconds(fn, device))
    return {name: statistics.median(each) for name, each in times.items()}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure({"copy": lambda: target.copy_(source)}, device, 20)["copy"]


def show(title: str, medians: dict[str, float], notes: dict[str, str] | None = None) -> None:
    """Print medians and their ratios to the first."""
    base, notes = next(iter(medians.values())), notes or {}
    print(title)
    for name, each in medians.items():
        print(f"  {name:<24} {each * 1e3:9.3f} ms  {each / base:5.2f}x  {notes.get(name, '')}".rstrip(), flush=True)


def write(args: argparse.Namespace, device: torch.device, **results) -> None:
    """Write results, with versions and device, to the file that the arguments name, if any."""
    if args.json is None:
        return
    versions = {"torch": torch.__version__}
    try:
        versions["triton"] = version("triton")
    except PackageNotFoundError:
        versions["triton"] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    with open(args.json, "w") as file:
        json.dump(dict(device=name, **versions, arguments=arguments, **results), file, indent=1)
