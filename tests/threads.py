"""Compare threads that generate with one applied model to a single thread. `test_threads` runs a part of it. This runs
all of it, and prints a table of the trials that were equal:

    python tests/threads.py [trials] [scheme ...]
"""

import os
import sys
import threading

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import kvpass
from kvpass.layout.window import layout
from kvpass.lowering.inductor import attend, pages
from kvpass.schemes import CalibratedWaterfillConfig, XQuantConfig

from tiny import calibrated, llama, tokens

SCHEMES = {
    "kivi": "kivi",
    "squat": "squat",
    "logquant": "logquant",
    "kivi-pre": "kivi-pre",
    "higgs": "higgs",
    "qaq": "qaq",
    "kivi+h2o": "kivi+h2o",
    "xquant": XQuantConfig(kq=2, vq=0, km=2, vm=0, depth=None),
    "waterfill, static": CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8),
    "waterfill, hybrid": CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8, form="hybrid"),
}


def forget():
    """Forget compiled code, as in a new process."""
    torch._dynamo.reset()
    layout.cache_clear()
    attend.attend_kernel.cache_clear()
    pages.quantizing.cache_clear()
    pages.dequantizing.cache_clear()


def at_once(calls):
    """The results of ``calls``, each run in its own thread; all threads start together. Raises the first error."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(i):
        barrier.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    workers, interval = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # switch threads as often as possible
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def generated(model, user: int, new_tokens: int = 20):
    """Tokens and logits of ``user``, whose prompt and batch size are unique."""
    ids = tokens(1 + user % 2, 200 + 37 * user, seed=user)
    out = model.generate(
        ids, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True
    )
    return out.sequences, torch.stack(out.logits)


def assert_same(got, expected):
    """Assert equal tokens, and equal logits up to the order of summation: while a thread compiles, transformers uses
    another formulation of attention in all threads."""
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=1e-4)


def applied(scheme, lowering: str):
    """A small model with ``scheme``, calibrated if needed."""
    model = llama()
    return kvpass.apply(model, calibrated(model, scheme), lowering=lowering)


def trial(scheme, lowering: str, threads: int, expected) -> None:
    """The first calls of a model, made by ``threads`` threads at once, give the ``expected`` results; so do later
    calls."""
    forget()
    model = applied(scheme, lowering)
    for _ in range(2):
        for got, one in zip(at_once([lambda u=u: generated(model, u) for u in range(threads)]), expected, strict=False):
            assert_same(got, one)


def alone(scheme, lowering: str, threads: int):
    """The results of a single thread."""
    forget()
    model = applied(scheme, lowering)
    return [generated(model, user) for user in range(threads)]


def main(trials: int = 10, *names: str) -> None:
    for name in names or SCHEMES:
        for lowering in ("eager", "auto"):
            expected = alone(SCHEMES[name], lowering, 8)
            for threads in (2, 8):
                equal = 0
                for _ in range(trials):
                    try:
                        trial(SCHEMES[name], lowering, threads, expected)
                        equal += 1
                    except Exception as error:
                        print(f"  {type(error).__name__}: {str(error)[:200]}", flush=True)
                print(f"{name:<17} {lowering:<6} {threads} threads: {equal} of {trials}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
