"""One engine of `peers.py`, in its own environment; it answers lines of JSON with lines of JSON.

A question is ``{"ids": [...], "new": n, "top": k}``: read the tokens, except those known from the last question, and
generate n more. The answer has the milliseconds of each new token after the first, and the log-probabilities of the k
most likely first tokens, if the engine reports them.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

Engine = Callable[[list[int], int, int], dict]


def llama_cpp(gguf: str, cache: str, context: int, threads: int) -> Engine:
    """llama.cpp with flash attention; ``cache`` is a type of ggml."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = gguf, context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = xllamacpp.Server(params)

    def answer(ids: list[int], new: int, top: int) -> dict:
        asked = dict(prompt=ids, n_predict=new, temperature=0, cache_prompt=True, ignore_eos=True, n_probs=top)
        result = server.handle_completions(asked)
        result = json.loads(result) if isinstance(result, str) else result
        likely = []
        if top:
            first = result["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            likely = [(each["id"], each["logprob"]) for each in first]
        # tokens after the first, which comes with the prompt
        return dict(milliseconds=result["timings"]["predicted_per_token_ms"], likely=likely)

    return answer


def openvino(gguf: str, cache: str, context: int, threads: int) -> Engine:
    """OpenVINO GenAI with paged attention; ``cache`` is one of its own types, such as f32, u8 or u4. It reports only
    the log-probability of the token it chose."""
    import numpy
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = True, 2
    pipe = genai.LLMPipeline(
        gguf, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads,
        KV_CACHE_PRECISION=getattr(ov.Type, cache),
    )  # fmt: skip

    def answer(ids: list[int], new: int, top: int) -> dict:
        config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, logprobs=int(top > 0))
        tokens = numpy.array([ids], dtype=numpy.int64)
        result = pipe.generate(genai.TokenizedInputs(ov.Tensor(tokens), ov.Tensor(numpy.ones_like(tokens))), config)
        likely = [(int(result.tokens[0][0]), float(result.scores[0]))] if top else []
        return dict(milliseconds=result.perf_metrics.get_tpot().mean, likely=likely)

    return answer


ENGINES = {"llama.cpp": llama_cpp, "openvino": openvino}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("cache")
    parser.add_argument("gguf")
    parser.add_argument("context", type=int)
    parser.add_argument("threads", type=int)
    args = parser.parse_args()
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # engines print to stdout
    os.dup2(2, 1)
    engine = ENGINES[args.engine](args.gguf, args.cache, args.context, args.threads)
    for line in sys.stdin:
        print(json.dumps(engine(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
