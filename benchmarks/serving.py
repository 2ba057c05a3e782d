"""What packing gains in vLLM, by vLLM's own log and by time: tokens that fit, tokens per second, and chats that go on.

    build/vllm-venv/bin/python benchmarks/serving.py --what capacity
    build/vllm-venv/bin/python benchmarks/serving.py --what throughput --schemes kivi-sinks --requests 4
    build/vllm-venv/bin/python benchmarks/serving.py --what chats --schemes kivi-4 --requests 32 --turns 8 --gib 0.25

Engines run in processes of their own and alternate on the same prompts. With few requests and much memory, batches are
equal; with more requests than fit, each engine runs as many at once as its memory holds. CPU time is printed, too; it
is more reliable on a shared machine, with one thread, because waiting threads count.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpass.models import packaged_folder

from chats import STOCK, chats, converse

_FIT = re.compile(r"KV cache size: ([\d,]+) tokens.*?: ([\d.]+)x")


def prompts_of(model: str, count: int, tokens: int) -> list[list[int]]:
    """Prose of this repository, from a different position for each request."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    ids = ids * (1 + (count * 97 + tokens) // len(ids))
    return [ids[97 * i : 97 * i + tokens] for i in range(count)]


def serve(job: dict) -> None:
    """Start an engine, answer the beginnings of two requests as a warm-up, then answer all requests of the job once per
    line read."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], enable_prefix_caching=False, **job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(job["model"], job["requests"], job["tokens"])]
    if prompts:
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        some = [{"prompt_token_ids": prompt["prompt_token_ids"][:600]} for prompt in prompts[:2]]
        llm.generate(some, warm, use_tqdm=False)
    print("READY", flush=True)
    for _ in sys.stdin:
        start, first, last, done, most = now(), None, None, 0, 0
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{start}-{number}", prompt, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            last, most = now(), max(most, len(outputs))
            done += sum(output.finished for output in outputs)
            if first is None and len(outputs) == len(prompts):  # all requests are decoding
                first = last
        decoding = since(first, last) if first else None
        found = {"took": since(start, last), "decoding": decoding, "finished": done, "at_once": most}
        print("RESULT" + json.dumps(found), flush=True)


def now() -> tuple[float, float]:
    """Wall-clock seconds and CPU seconds."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float], end: tuple[float, float]) -> list[float]:
    return [b - a for a, b in zip(start, end, strict=True)]


def options(name: str) -> dict:
    """The engine arguments for vLLM's own cache ("vllm", or "vllm:fp8" for another dtype of it), or for a scheme by its
    name, the JSON of kvpass's options, or the folder of its calibration."""
    own, _, cache = name.partition(":")
    if own == STOCK:
        return {"kv_cache_dtype": cache} if cache else {}
    return {"additional_config": {"kvpass": json.loads(name) if name.startswith("{") else name}}


class Engine:
    """One engine in a process of its own."""

    def __init__(self, name: str, arguments: argparse.Namespace, dtype: str, requests: int):
        engine = dict(
            dtype=dtype,
            max_model_len=arguments.max_model_len,
            kv_cache_memory_bytes=int(arguments.gib * 2**30),
            enforce_eager=arguments.eager,
            max_num_batched_tokens=arguments.chunk,
        )
        engine |= options(name)
        job = dict(model=arguments.model, engine=engine, requests=requests, tokens=arguments.tokens, new=arguments.new)
        command = [sys.executable, __file__, "--job", json.dumps(job)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that its CPU time is the engine's
        if arguments.threads:
            environment |= {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.name, self.log = name, []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.read("READY")

    def read(self, start: str) -> str:
        """The next line that begins with ``start``."""
        for line in self.process.stdout:
            self.log.append(line)
            if line.startswith(start):
                return line.removeprefix(start)
        raise SystemExit("".join(self.log[-40:]))

    def measure(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.read("RESULT"))

    def close(self) -> None:
        self.process.stdin.close()
        for _ in self.process.stdout:
            pass
        self.process.wait()

    @property
    def capacity(self) -> tuple[int, float]:
        """Tokens that fit, and full-length requests at once, from vLLM's log."""
        tokens, requests = _FIT.search("".join(self.log)).groups()
        return int(tokens.replace(",", "")), float(requests)


def capacity(arguments: argparse.Namespace) -> None:
    print(f"| {arguments.gib:g} GiB, requests of {arguments.max_model_len:,} | dtype | tokens | requests | x |")
    print("|---|---|--:|--:|--:|")
    for dtype in arguments.dtypes:
        stock = None
        for name in (STOCK, *arguments.schemes):
            engine = Engine(name, arguments, dtype, requests=0)
            tokens, requests = engine.capacity
            engine.close()
            stock = stock or tokens
            print(f"| {name} | {dtype} | {tokens:,} | {requests:.1f} | {tokens / stock:.2f} |", flush=True)


def rates(arguments: argparse.Namespace, dtype: str) -> Iterator[dict]:
    """Of each engine: seconds and processor seconds for all requests, new tokens per second, how many requests ran at
    once, and milliseconds of a step of all of them, if there was one. Medians of all repeats."""
    engines = [Engine(name, arguments, dtype, arguments.requests) for name in (STOCK, *arguments.schemes)]
    found = {engine.name: [] for engine in engines}
    for _ in range(arguments.repeats):
        for engine in engines:
            found[engine.name].append(engine.measure())
    for engine in engines:
        engine.close()
    for name, runs in found.items():
        seconds, processor = (statistics.median(run["took"][which] for run in runs) for which in range(2))
        steps = [run["decoding"] for run in runs if run["decoding"]]
        step = [1e3 * statistics.median(each) / (arguments.new - 1) for each in zip(*steps, strict=True)]
        rate, at_once = arguments.requests * arguments.new / seconds, max(run["at_once"] for run in runs)
        yield dict(name=name, seconds=seconds, processor=processor, rate=rate, at_once=at_once, step=step)


def throughput(arguments: argparse.Namespace) -> None:
    for dtype in arguments.dtypes:
        for row in rates(arguments, dtype):
            step = row["step"]
            print(
                f"{row['name']} {dtype}: {arguments.requests} requests of {arguments.tokens} + {arguments.new} tokens, "
                f"{row['at_once']} at once, in {row['seconds']:.1f} s ({row['processor']:.1f} s of the processor), "
                f"{row['rate']:.2f} new tokens a second"
                + (f", {step[0]:.1f} ms a step of all ({step[1]:.1f} ms)" if step else ""),
                flush=True,
            )


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("capacity", "throughput", "chats"), default="capacity")
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M-Instruct, which is fetched once")
    parser.add_argument("--schemes", nargs="+", default=["kivi", "kivi-sinks", "higgs", "higgs-sinks"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step at most")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt, or of the document of a chat")
    parser.add_argument("--turns", type=int, default=8, help="of a chat")
    parser.add_argument("--question", type=int, default=200, help="tokens that a turn of a chat adds")
    parser.add_argument("--share", type=float, default=1 / 3, help="of the bytes of all chats, for the store of a chat")
    parser.add_argument("--base", default=STOCK, help="what chats are compared with, by default vLLM's blocks alone")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="by default all that vLLM takes")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return with_model(parser.parse_args(given))


def with_model(arguments: argparse.Namespace) -> argparse.Namespace:
    """``arguments`` with the folder of the default model if they name none; a job has its own."""
    if not arguments.job:
        arguments.model = arguments.model or str(packaged_folder())
    return arguments


if __name__ == "__main__":
    given = parsed()
    if given.job:
        job = json.loads(given.job)
        (converse if "chats" in job else serve)(job)
    else:
        {"capacity": capacity, "throughput": throughput, "chats": chats}[given.what](given)
