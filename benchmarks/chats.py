"""The chats of benchmarks/serving.py: conversations over a document each, that take turns in an engine which holds few
of them.

All engines see the same texts, so that what they say next can be compared: questions and answers are both taken from
the documentation of this repository.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

STOCK, OFFLOADED = "vllm", "vllm+cpu"
_TOP = 50  # most probable tokens that are compared


def conversations(model: str, count: int, turns: int, document: int, question: int) -> list[list[list[int]]]:
    """Prompts, as token ids, by conversation and turn; each turn adds an answer and a question to the one before."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    longest = document + turns * question
    ids = ids * (1 + count * longest // len(ids))
    each = [ids[i * longest : (i + 1) * longest] for i in range(count)]
    return [[one[: document + (turn + 1) * question] for turn in range(turns)] for one in each]


def converse(job: dict) -> None:
    """Run all turns in one engine, and print a line of JSON for each."""
    from vllm import LLM, SamplingParams

    chats = conversations(job["model"], *job["sizes"])
    llm = LLM(model=job["model"], **job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=_TOP, detokenize=False)
    llm.generate([{"prompt_token_ids": chats[0][0][5:600]}], sampling, use_tqdm=False)  # compiles what is compiled
    print("READY", flush=True)
    for turn in range(len(chats[0])):
        order = random.Random(turn).sample(range(len(chats)), len(chats))
        for number in order:
            engine, prompt, first, output = llm.llm_engine, chats[number][turn], None, None
            start = time.perf_counter()
            engine.add_request(f"{number}-{turn}", {"prompt_token_ids": prompt}, sampling)
            while engine.has_unfinished_requests():
                for output in engine.step():  # noqa: B007  (the last one is complete)
                    first = first or time.perf_counter() - start
            (one,) = output.outputs
            top = {token: found.logprob for token, found in one.logprobs[0].items()}
            found = dict(chat=number, turn=turn, first=first, cached=output.num_cached_tokens, tokens=len(prompt),
                         token=one.token_ids[0], top=top)  # fmt: skip
            print("RESULT" + json.dumps(found), flush=True)
    metrics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value") and "offload" in one.name}
    print("METRICS" + json.dumps(metrics), flush=True)


def transfer(name: str, nbytes: int) -> dict:
    """The engine argument for what keeps prefixes: nothing (`STOCK`), vLLM's own offloading (`OFFLOADED`, which GPUs
    alone have), or the scheme of a prefix store, with "@" and the bits of a calibration; `identity` keeps as many bytes
    as vLLM's would."""
    if name == STOCK:
        return {}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    extra = {"cpu_bytes_to_use": nbytes, "offload_prompt_only": False, "blocks_per_chunk": 1}
    if name != OFFLOADED:
        config |= {"kv_connector": "KVPassConnector", "kv_connector_module_path": "kvpass.vllm"}
        scheme, _, bits = name.partition("@")
        extra = {"scheme": json.loads(name) if name.startswith("{") else scheme, "cpu_bytes": nbytes}
        if bits:
            extra["bits"] = float(bits)
    return {"kv_transfer_config": config | {"kv_connector_extra_config": extra}}


def run(name: str, arguments: argparse.Namespace, dtype: str, nbytes: int) -> dict:
    """Turns, metrics and log of one engine."""
    engine = dict(
        dtype=dtype, max_model_len=arguments.max_model_len, max_num_batched_tokens=arguments.chunk,
        enforce_eager=arguments.eager, kv_cache_memory_bytes=int(arguments.gib * 2**30), skip_tokenizer_init=True,
        max_logprobs=_TOP, disable_log_stats=False, **transfer(name, nbytes),
    )  # fmt: skip
    sizes = arguments.requests, arguments.turns, arguments.tokens, arguments.question
    job = json.dumps(dict(model=arguments.model, engine=engine, sizes=sizes, chats=True))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if arguments.threads:
        environment |= {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(Path(__file__).with_name("serving.py")), "--job", job]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    turns, metrics, log = [], {}, []
    for line in process.stdout:
        log.append(line)
        if line.startswith("RESULT"):
            turns.append(json.loads(line.removeprefix("RESULT")))
        if line.startswith("METRICS"):
            metrics = json.loads(line.removeprefix("METRICS"))
    if process.wait() or not turns:
        raise SystemExit("".join(log[-60:]))
    kept = [line for line in log if "kvpass keeps prefixes" in line]
    return {"turns": turns, "metrics": metrics, "log": kept}


def divergence(one: dict, other: dict) -> float:
    """KL of the next token from ``one`` to ``other``, over the most probable tokens and all others together."""
    shared = one.keys() & other.keys()
    p, q = ([math.exp(each[token]) for token in shared] for each in (one, other))
    rest = [max(1e-9, 1 - sum(each)) for each in (p, q)]
    return sum(a * math.log(a / b) for a, b in zip([*p, rest[0]], [*q, rest[1]], strict=True))


def chats(arguments: argparse.Namespace) -> None:
    """Print a table of one row per engine."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(arguments.model)
    longest = arguments.tokens + arguments.turns * arguments.question
    for dtype in arguments.dtypes:
        width = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        total = longest * arguments.requests * width * (4 if dtype == "float32" else 2)
        nbytes = int(total * arguments.share)
        print(
            f"{dtype}: {arguments.requests} conversations of {arguments.turns} turns over {arguments.tokens} tokens "
            f"each, {total / 2**20:.0f} MiB as vLLM keeps them; {nbytes / 2**20:.0f} MiB for the store"
        )
        print("| kept by | hits | first token, hit | first token, miss | mean | KL | same token |")
        print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
        base = None
        for name in (arguments.base, *arguments.schemes):
            found = run(name, arguments, dtype, nbytes)
            turns = found["turns"]
            base = base or {(one["chat"], one["turn"]): one for one in turns}
            later = [one for one in turns if one["turn"]]
            hit = [one for one in later if one["cached"] >= 0.5 * one["tokens"]]
            miss = [one for one in turns if not one["cached"]]
            pairs = [(base[one["chat"], one["turn"]], one) for one in later]
            share = sum(one["cached"] for one in later) / sum(one["tokens"] for one in later)
            kl = statistics.mean(divergence(a["top"], b["top"]) for a, b in pairs)
            same = statistics.mean(a["token"] == b["token"] for a, b in pairs)

            def seconds(some: list[dict]) -> str:
                return f"{statistics.median(one['first'] for one in some):.2f} s" if some else "-"

            mean = statistics.mean(one["first"] for one in later)
            print(
                f"| {name} | {share:.0%} | {seconds(hit)} | {seconds(miss)} | {mean:.2f} s | {kl:.4f} | {same:.0%} |",
                flush=True,
            )
            print("".join(found["log"]) + str(found["metrics"]), file=sys.stderr, flush=True)
