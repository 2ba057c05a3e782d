"""vLLM engines with packed pages, against vLLM's own cache, against kvpass's own cache, and against each other."""

import copy
import random
import statistics

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvpass

from engines import additional, server, started

SCHEMES = "kivi-sinks", "higgs-sinks"


@pytest.fixture(scope="module")
def stock(serve, smollm2, texts):
    """The output of vLLM with its own cache."""
    return serve(smollm2, [{"prompts": texts, "tokens": 300}])["phases"][0]["requests"]


def assert_same(found, expected, tolerance=1e-4):
    assert found.keys() == expected.keys()
    for number, one in expected.items():
        assert found[number]["tokens"] == one["tokens"], number
        difference = torch.tensor(found[number]["logprobs"]) - torch.tensor(one["logprobs"])
        assert difference.abs().max() <= tolerance, (number, difference.abs().max())


def test_lossless_pages_change_nothing(serve, smollm2, texts, stock):
    (phase,) = serve(smollm2, [{"prompts": texts, "tokens": 300}], "identity")["phases"]
    assert_same(phase["requests"], stock)


def alone(model, prompt, tokens, chunks) -> torch.Tensor:
    """The log-probabilities of generated ``tokens`` with kvpass's own cache; the prompt arrives in ``chunks``."""
    ids, cache, first, logits = torch.tensor([[*prompt, *tokens]]), None, 0, None
    steps = [*chunks, *(1 for _ in tokens[:-1])]
    found = []
    with torch.inference_mode():
        for step in steps:
            out = model(ids[:, first : first + step], past_key_values=cache, use_cache=True)
            cache, first, logits = out.past_key_values, first + step, out.logits[0, -1]
            if first >= len(prompt):
                found.append(logits.log_softmax(-1)[ids[0, first]])
    return torch.stack(found)


def perturbed(model, seed):
    """``model`` with embeddings changed by a rounding error of float32."""
    other = copy.deepcopy(model)
    weight = other.get_input_embeddings().weight
    with torch.no_grad():
        weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    return other


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_have_the_probability_that_kvpass_gives_them(serve, smollm2, texts, scheme):
    """And the same after a prefix hit: requests arrive one by one, in chunks of one block, so that a hit leaves the
    chunks unchanged, on which attention and the mean of centred keys depend."""
    block, tokens = 256, 24
    phases = [{"prompts": [prompt], "tokens": tokens} for prompt in texts] * 2
    found = serve(smollm2, phases, scheme, block_size=block, max_num_batched_tokens=block)["phases"]
    hits = [phase["requests"]["0"]["cached"] for phase in found]
    assert hits[4] and not any((*hits[:3], hits[5])) and not any(hit % block for hit in hits), hits
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")
    noisy = [perturbed(model, seed) for seed in range(3)]
    for one in (model, *noisy):
        kvpass.apply(one, scheme, lowering="eager")
    first = []
    for number, (phase, prompt) in enumerate(zip(found[:3], texts, strict=True)):
        (one,), (again,) = (each["requests"].values() for each in (phase, found[number + 3]))
        assert again["tokens"] == one["tokens"]
        torch.testing.assert_close(torch.tensor(again["logprobs"]), torch.tensor(one["logprobs"]), atol=1e-4, rtol=0)
        whole, rest = divmod(len(prompt), block)
        call = prompt, one["tokens"], [*[block] * whole, *([rest] if rest else [])]
        expected = alone(model, *call)
        # chunks read pages; rounding changes quantized values, and so does noise in embeddings
        others = [alone(each, *call) for each in noisy]
        flips = (others[0] - expected).abs().median()
        logprobs = torch.tensor(one["logprobs"])
        difference = (logprobs - expected).abs()
        nearest = min((logprobs[0] - each[0]).abs().item() for each in (expected, *others))
        assert nearest <= 2e-2, (number, hits, nearest)
        assert difference.median() <= max(2e-2, 2 * flips), (number, hits, difference.median(), flips)
        first.append(difference[0].item())
    assert statistics.median(first) <= 1e-2, first


def random_requests(seed, count, longest, vocabulary=512):
    choose = random.Random(seed)
    return [[choose.randrange(vocabulary) for _ in range(choose.randint(1, longest))] for _ in range(count)]


def test_preempted_requests_lose_nothing(serve, tiny):
    """Memory suffices for some requests only; with lossless pages, recomputed tokens are the same."""
    prompts = random_requests(1, 12, 300)
    phases = [{"prompts": prompts, "tokens": 200}]
    (expected,) = serve(tiny, phases)["phases"]
    small = serve(tiny, phases, "identity", inspect=True, kv_cache_memory_bytes=18 << 20, max_model_len=512)
    (found,) = small["phases"]
    assert found["preempted"] and found["free"] == small["free"]
    assert_same(found["requests"], expected["requests"], 3e-4)  # recomputed tokens arrive in other chunks


def test_no_block_is_lost_over_two_hundred_requests(serve, tiny):
    """Requests of random lengths, many of them aborted, with memory for only some; half share a prefix, and so
    blocks."""
    choose, shared = random.Random(2), random_requests(3, 1, 1)[0] * 200
    prompts = [(shared if i % 2 else []) + one for i, one in enumerate(random_requests(4, 200, 150))]
    tokens = [choose.randint(1, 60) for _ in prompts]
    aborted = {number: choose.randint(1, 120) for number in choose.sample(range(200), 60)}
    phase = {"prompts": prompts, "tokens": tokens, "abort": aborted}
    found = serve(tiny, [phase], "kivi-sinks", inspect=True, kv_cache_memory_bytes=6 << 20, max_model_len=512)
    (done,) = found["phases"]
    assert done["free"] == found["free"]
    for number, count in enumerate(tokens):
        if number not in aborted:
            assert len(done["requests"][str(number)]["tokens"]) == count
    assert any(one["cached"] for one in done["requests"].values())


def test_two_ranks_serve_as_one_does(serve, tiny, monkeypatch):
    """Quantized values are equal until one rounds differently: ranks add in another order, and weights are random."""
    phases, found = [{"prompts": random_requests(5, 4, 300), "tokens": 60}], {}
    for scheme in ("identity", "kivi-sinks"):
        (found[scheme],) = serve(tiny, phases, scheme)["phases"]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    for scheme, one in found.items():
        (two,) = serve(tiny, phases, scheme, tensor_parallel_size=2)["phases"]
        if scheme == "identity":
            assert_same(two["requests"], one["requests"], tolerance=1e-3)
            continue
        for number, alone in one["requests"].items():
            both = two["requests"][number]
            same = next((i for i, (a, b) in enumerate(zip(alone["tokens"], both["tokens"], strict=True)) if a != b), 60)
            difference = torch.tensor(alone["logprobs"][:same]) - torch.tensor(both["logprobs"][:same])
            assert same and difference.abs().median() <= 1e-2, (number, same, difference)


def test_triton_kernels_serve_what_others_do(serve, tmp_path):
    """In Triton's interpreter: kernels for GPUs store tokens and attend to blocks, in batches that change from
    step to step, with prompts in chunks, a request that is preempted, and a prefix hit."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512, head_dim=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    prompts = random_requests(10, 1, 50) + random_requests(11, 2, 150)
    phases = [{"prompts": prompts, "tokens": 12}, {"prompts": [[*prompts[-1], 7]], "tokens": 4}]
    small = dict(
        max_num_batched_tokens=96, max_model_len=136, block_size=64, kv_cache_memory_bytes=144 << 10, inspect=True
    )
    expected = serve(tmp_path, phases, "kivi-sinks", **small)["phases"]
    asked = {"scheme": "kivi-sinks", "lowering": "triton"}
    found = serve(tmp_path, phases, asked, interpreted=True, **small)["phases"]
    assert found[0]["preempted"] and found[1]["requests"]["0"]["cached"]
    for one, other in zip(found, expected, strict=True):
        for number, right in other["requests"].items():
            ours, tokens = one["requests"][number], right["tokens"]
            pairs = enumerate(zip(ours["tokens"], tokens, strict=True))
            same = next((i for i, (a, b) in pairs if a != b), len(tokens))
            difference = torch.tensor(ours["logprobs"][:same]) - torch.tensor(right["logprobs"][:same])
            assert same and difference.abs().median() <= 1e-3, (number, same, difference)


@pytest.mark.parametrize(
    ("scheme", "engine", "reason"),
    [
        ("no-such-scheme", {}, "Unknown scheme 'no-such-scheme'"),
        ("h2o", {}, "Its policy drops or thins out tokens"),
        ("kivi", {"block_size": 48}, "use a multiple of 32"),
        ("kivi", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ("A FOLDER", {}, "holds no calibration"),
        ({"scheme": "kivi", "lowering": "triton"}, {}, "Triton kernels run on CUDA devices"),
    ],
)
def test_what_cannot_be_served_is_said_at_start(tiny, tmp_path, scheme, engine, reason):
    asked = str(tmp_path) if scheme == "A FOLDER" else scheme
    done = started(dict(model=str(tiny), phases=[], inspect=False, engine=engine | additional(asked)))
    assert done.returncode and reason in done.stdout + done.stderr


def test_a_model_that_cannot_be_served_is_said_at_start(tmp_path):
    config = BloomConfig(hidden_size=128, n_head=2, n_layer=2, vocab_size=512)  # has ALiBi
    BloomForCausalLM(config).save_pretrained(tmp_path)
    done = started(dict(model=str(tmp_path), phases=[], inspect=False, engine=additional("kivi")))
    assert done.returncode and "kvpass does not support models with ALiBi" in done.stdout + done.stderr


def test_without_a_scheme_the_plugin_does_nothing(serve, tiny, monkeypatch):
    """The same tokens as when vLLM does not load it."""
    phases = [{"prompts": random_requests(6, 3, 100), "tokens": 20}]
    (with_it,) = serve(tiny, phases)["phases"]
    monkeypatch.setenv("VLLM_PLUGINS", "")
    (without,) = serve(tiny, phases)["phases"]
    assert without["requests"] == with_it["requests"]


def test_layers_with_a_sliding_window_keep_their_own_cache(serve, tmp_path):
    """Every second layer of Gemma 2, whose attention also has a softcap; with lossless pages in the others."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=512, head_dim=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=64, initializer_range=0.2)
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path)
    phases = [{"prompts": random_requests(7, 3, 300), "tokens": 60}]
    (expected,) = serve(tmp_path, phases)["phases"]
    (found,) = serve(tmp_path, phases, "identity", block_size=128)["phases"]  # which says that no gain is needed
    assert_same(found["requests"], expected["requests"])
    done = started(dict(model=str(tmp_path), phases=[], inspect=False, engine=additional("kivi")))
    assert done.returncode and "Lower --max-num-batched-tokens" in done.stdout + done.stderr


def test_a_compiled_engine_gives_what_an_eager_one_does(serve, tiny):
    """Without ``enforce_eager``, which all other tests here set to start faster."""
    phases = [{"prompts": random_requests(8, 3, 200), "tokens": 30}]
    (expected,) = serve(tiny, phases)["phases"]
    (found,) = serve(tiny, phases, "identity", enforce_eager=False)["phases"]
    assert_same(found["requests"], expected["requests"])


def test_a_chat_is_streamed(smollm2, tmp_path):
    """By OpenAI's client, from the server in the documentation."""
    from openai import OpenAI

    with server(smollm2, "kivi-sinks", tmp_path / "log") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        question = [{"role": "user", "content": "What is the capital of France?"}]
        chunks = client.chat.completions.create(
            model=str(smollm2), messages=question, stream=True, temperature=0, max_tokens=40
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(parts) > 5 and "Paris" in "".join(parts)
