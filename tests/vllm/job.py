"""One engine of vLLM in a process of its own: ``python job.py '{...}'`` runs what the JSON says and prints JSON.

model, engine: arguments of `vllm.LLM`. phases: prompts that are generated one list after the other, as lists of token
ids, or {"prompts": ..., "tokens": ..., "abort": {number: after how many steps}}.
"""

import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def run(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    defaults = dict(dtype="float32", enforce_eager=True, max_model_len=2048, kv_cache_memory_bytes=1 << 29, seed=0)
    llm = LLM(model=job["model"], **defaults | job["engine"])
    engine, found = llm.llm_engine, []
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool if job.get("inspect") else None
    at_start = pool.get_num_free_blocks() if pool else None
    for phase in job["phases"]:
        finished, preempted = {}, 0
        for number, prompt in enumerate(phase["prompts"]):
            tokens = phase["tokens"][number] if isinstance(phase["tokens"], list) else phase["tokens"]
            sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        aborts = {int(number): after for number, after in phase.get("abort", {}).items()}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
            steps += 1
            engine.abort_request([str(number) for number, after in aborts.items() if after == steps])
        if pool:
            scheduler = engine.engine_core.engine_core.scheduler
            preempted = getattr(scheduler, "kvpass_preemptions", 0)
        found.append(
            {
                "steps": steps,
                "preempted": preempted,
                "free": pool.get_num_free_blocks() if pool else None,
                "requests": {
                    number: {
                        "tokens": list(one.outputs[0].token_ids),
                        "logprobs": [
                            max(options.values(), key=lambda each: each.logprob).logprob
                            for options in one.outputs[0].logprobs
                        ],
                        "cached": one.num_cached_tokens,
                    }
                    for number, one in finished.items()
                },
            }
        )
    return {"free": at_start, "phases": found}


if __name__ == "__main__":
    result = run(json.loads(sys.argv[1]))
    print("RESULT" + json.dumps(result))
