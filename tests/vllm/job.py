"""Run one vLLM engine in a separate process: ``python job.py`` reads a job as JSON, runs it, and prints JSON.

model, engine: arguments of `vllm.LLM`.
phases: lists of prompts, generated one list after the other, each {"prompts": lists of token ids, "tokens": how many to
    generate, "abort": {number: after how many steps}, "reset": whether the engine forgets its own prefixes first,
    "damage": a folder whose files are damaged first}.
inspect: count the free blocks, which needs an engine in this process.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def run(job: dict) -> dict:
    from vllm import LLM

    defaults = dict(
        dtype="float32", enforce_eager=True, max_model_len=2048, max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 28, skip_tokenizer_init=True,
    )  # fmt: skip
    llm = LLM(model=job["model"], **defaults | job["engine"])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler if job["inspect"] else None
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks if scheduler else lambda: None
    at_start, phases = free(), []
    for phase in job["phases"]:
        if "damage" in phase:
            damage(Path(phase["damage"]))
        if phase.get("reset"):
            time.sleep(1)  # for what is stored beside the steps
            assert llm.reset_prefix_cache()
        phases.append(generate(llm.llm_engine, phase, scheduler) | {"free": free()})
    return {"free": at_start, "phases": phases}


def damage(folder: Path) -> None:
    """Change one bit of every file of the prefix store."""
    files = list(folder.rglob("*.safetensors"))
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)


def generate(engine, phase: dict, scheduler) -> dict:
    from vllm import SamplingParams

    finished, preempted, names = {}, set(), {}
    for number, prompt in enumerate(phase["prompts"]):
        tokens = phase["tokens"][number] if isinstance(phase["tokens"], list) else phase["tokens"]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)
        names[engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)] = number
    aborts, steps = {int(number): after for number, after in phase.get("abort", {}).items()}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = output
        if scheduler:
            preempted |= {one.request_id for one in scheduler.requests.values() if one.num_preemptions}
        steps += 1
        engine.abort_request([str(number) for number, after in aborts.items() if after == steps])
    return {"steps": steps, "preempted": len(preempted), "requests": {n: described(o) for n, o in finished.items()}}


def described(output) -> dict:
    (one,) = output.outputs
    chosen = zip(one.token_ids, one.logprobs or (), strict=False)
    return {
        "tokens": list(one.token_ids),
        "logprobs": [options[token].logprob for token, options in chosen],
        "cached": output.num_cached_tokens,
    }


if __name__ == "__main__":
    found = run(json.load(sys.stdin))
    print("RESULT" + json.dumps(found), flush=True)
