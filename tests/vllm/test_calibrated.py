"""Calibrated bit widths in vLLM's blocks and in the prefix store, on a decoder with random weights."""

import random

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import kvpass
from kvpass.prefix_store import EntropyChunkCodec, LayerShape
from kvpass.vllm.calibrated_scheme import CalibratedScheme

from engines import additional, started, stored

TOKENS = 40


@pytest.fixture(scope="module")
def calibrated(tiny, tmp_path_factory):
    """The folder of a calibration with many bits: weights are random, and attention is sharp."""
    ids = torch.randint(0, 512, (3, 260), generator=torch.Generator().manual_seed(0))
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    found = kvpass.calibrate(model, ids, {"scheme": "waterfill-static", "bits": 6.0}, progress=False)
    return str(found.save(tmp_path_factory.mktemp("calibrated")))


@pytest.fixture(scope="module")
def prompts():
    choose = random.Random(1)
    return [[choose.randrange(512) for _ in range(count)] for count in (700, 300, 20)]


@pytest.fixture(scope="module")
def one_rank(serve, tiny, calibrated, prompts):
    """The same requests twice; the second time some begin with a prefix hit."""
    phases = [{"prompts": prompts, "tokens": TOKENS}] * 2
    return serve(tiny, phases, calibrated, inspect=True)


def alike(one, other) -> torch.Tensor:
    """Differences of the log-probabilities of two answers, up to the first token that differs."""
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS)
    assert same, "the first token differs"
    return (torch.tensor(one["logprobs"][:same]) - torch.tensor(other["logprobs"][:same])).abs()


def test_blocks_hold_what_kvpass_own_cache_does(tiny, calibrated, prompts, one_rank):
    """All requests in one batch, against a cache for each; each prompt is one chunk."""
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    kvpass.apply(model, kvpass.load(calibrated), lowering="eager")
    answers = one_rank["phases"][0]["requests"]
    for number, prompt in enumerate(prompts):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=TOKENS,
            do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]
        difference = alike(answers[str(number)], {"tokens": tokens, "logprobs": scores})
        assert difference.median() < 1e-3 and difference[0] < 1e-3, (number, difference)


def test_a_prefix_is_found_in_blocks_that_all_layers_share(one_rank):
    first, second = (phase["requests"] for phase in one_rank["phases"])
    assert second["0"]["cached"] > 0 and second["2"]["cached"] == 0
    assert alike(first["0"], second["0"])[0] < 0.5
    assert one_rank["phases"][1]["free"] == one_rank["free"]  # no block is lost


def test_two_ranks_have_the_bits_of_their_own_heads(serve, tiny, calibrated, prompts, one_rank, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    phases = [{"prompts": prompts, "tokens": TOKENS}]
    (both,) = serve(tiny, phases, calibrated, tensor_parallel_size=2)["phases"]
    for number, alone in one_rank["phases"][0]["requests"].items():
        assert alike(alone, both["requests"][number]).median() < 1e-2


def test_a_calibration_of_other_weights_is_refused_at_start(tiny, calibrated, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    model.save_pretrained(tmp_path)
    for engine in (additional(calibrated), stored(calibrated, cpu_bytes=1 << 24)):
        done = started(dict(model=str(tmp_path), phases=[], inspect=False, engine=engine))
        assert done.returncode and "was calibrated on other weights" in done.stdout + done.stderr


def after_a_hit(model, calibrated, prompt, hit, chunk=128, recompute=64) -> torch.Tensor:
    """Log-probabilities after ``prompt``, of which ``hit`` tokens are in chunks of the store, and all but the last
    ``recompute`` of those are taken from them."""
    cache, scheme, config = DynamicCache(), CalibratedScheme.of(calibrated), model.config
    with torch.inference_mode():
        model(torch.tensor([prompt[:hit]]), past_key_values=cache)
        given = zip(*((layer.keys[0], layer.values[0]) for layer in cache.layers), strict=True)
        shape = LayerShape(config.num_key_value_heads, config.head_dim, torch.float32)
        layers = scheme.layers(1, 0, torch.float32)
        codec = EntropyChunkCodec(dict.fromkeys(layers, shape), layers, chunk)
        numbers, loaded, kept = range(hit // chunk), DynamicCache(), hit - recompute
        for index, both in enumerate(zip(*codec.dequantize(numbers, codec.quantize(numbers, *given)), strict=True)):
            loaded.update(*(x[None, :, :kept] for x in both), index)
        return model(torch.tensor([prompt[kept:]]), past_key_values=loaded).logits[0, -1].log_softmax(-1)


def test_the_store_keeps_calibrated_chunks(serve, tiny, calibrated, prompts, tmp_path):
    """From memory, and from disk in another process; what follows sees what the codec makes of the prompt."""
    asks = [{"prompts": prompts[:1], "tokens": TOKENS, "reset": True}] * 2
    engine = stored(calibrated, cpu_bytes=1 << 24, path=str(tmp_path))
    first, second = serve(tiny, asks, **engine)["phases"]
    (third,) = serve(tiny, asks[:1], **engine)["phases"]
    assert [phase["requests"]["0"]["cached"] for phase in (first, second, third)] == [0, 576, 576]
    expected = after_a_hit(LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32), calibrated, prompts[0], 640)
    found = second["requests"]["0"]
    assert found["tokens"][0] == int(expected.argmax()) and abs(found["logprobs"][0] - float(expected.max())) < 1e-2
    assert alike(found, first["requests"]["0"]).max() > 1e-3
    assert alike(found, third["requests"]["0"]).max() < 1e-5
