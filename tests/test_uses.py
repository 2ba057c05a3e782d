"""More uses of a model, each equal to the untouched model; docs/uses.md has the list.

Each use runs eagerly, and in a captured step whose graph runs as the pass leaves it.
"""

import io
import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

import kvpass

from common import without_inductor
from test_users import LOSSLESS, assert_equal, generate, mode, padded, tokenizer
from tiny import VOCABULARY, llama, tokens

PROMPT = tokens(1, 40)


def printed(model):
    """The output of a streamer, token by token."""
    streamer = TextStreamer(tokenizer(), skip_prompt=True)
    written, streamer.on_finalized_text = io.StringIO(), lambda text, stream_end=False: written.write(text)
    out = generate(model, input_ids=PROMPT, streamer=streamer)
    assert written.getvalue().split() == [str(token) for token in out[0][0, PROMPT.shape[1] :].tolist()]
    return out


def streamed_from_a_thread(model):
    """The output of generate in another thread, read as it arrives."""
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=120)
    given = dict(input_ids=PROMPT, streamer=streamer, max_new_tokens=20, do_sample=False)
    thread = threading.Thread(target=model.generate, kwargs=given)
    thread.start()
    words = "".join(streamer).split()
    thread.join()
    return torch.tensor([int(word) for word in words]), None


def rollouts(model):
    """Reinforcement learning: sample, learn in training mode, sample from the changed weights; no apply in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for turn in range(3):
        model.eval()
        found.append(generate(model, input_ids=PROMPT.repeat(2, 1), do_sample=True, top_k=20))
        model.train()
        loss = model(input_ids=found[-1][0], labels=found[-1][0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn == 1:  # weights loaded from elsewhere
            model.load_state_dict(llama(seed=5).state_dict())
    model.eval()
    assert not torch.equal(found[0][0], found[1][0])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def four_dimensional_masks(kind):
    """A user-defined mask, ``[B, 1, S, T]``: some tokens of the prompt do not see some others."""

    @torch.no_grad()
    def use(model):
        cache, total = DynamicCache(config=model.config), 50
        allowed = torch.ones(total, total, dtype=torch.bool).tril()
        allowed[20:, 5:11] = False
        mask = allowed if kind == "bool" else torch.zeros(total, total).masked_fill(~allowed, torch.finfo().min)
        ids, logits = tokens(2, total), []
        for start, stop in ((0, 40), *((i, i + 1) for i in range(40, total))):
            part = mask[None, None, start:stop, :stop].expand(2, -1, -1, -1)
            logits.append(model(input_ids=ids[:, start:stop], attention_mask=part, past_key_values=cache).logits)
        return ids, torch.cat(logits, 1)

    return use


@torch.no_grad()
def packed_sequences(model):
    """Three texts in one row, separated by positions that restart at 0."""
    positions = torch.cat([torch.arange(n) for n in (17, 9, 14)])[None]
    return PROMPT, model(input_ids=PROMPT, position_ids=positions, use_cache=False).logits


@torch.no_grad()
def some_logits(model):
    """Logits of the last tokens, of the last ones in a step of several, and of tokens by index."""
    cache = DynamicCache(config=model.config)
    given = [
        model(input_ids=PROMPT, past_key_values=cache, logits_to_keep=3).logits,
        *(model(input_ids=tokens(1, 1, i), past_key_values=cache, logits_to_keep=1).logits for i in range(3)),
        model(input_ids=tokens(1, 9), past_key_values=cache, logits_to_keep=torch.tensor([0, 8])).logits,
    ]
    return torch.tensor([x.shape[1] for x in given]), torch.cat(given, 1)


@torch.no_grad()
def embedded(model):
    """Embeddings in place of tokens, in the prompt and in steps."""
    cache, embed, ids = DynamicCache(config=model.config), model.get_input_embeddings(), tokens(2, 50)
    parts = ids.split([40] + [1] * 10, 1)
    return ids, torch.cat([model(inputs_embeds=embed(x), past_key_values=cache).logits for x in parts], 1)


def to_a_string(model):
    """Generation until a string of two tokens appears, one that greedy decoding reaches."""
    letters = [chr(33 + i if i < 94 else 256 + i) for i in range(VOCABULARY)]
    whole = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=letters[0]))
    whole.pre_tokenizer, whole.decoder = Split("", "isolated"), decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token=letters[0], unk_token=letters[0])
    said = words.decode(generate(model, input_ids=PROMPT)[0][0, PROMPT.shape[1] :])
    out = generate(model, input_ids=PROMPT, stop_strings=[said[6:8]], tokenizer=words)
    assert out[0].shape[1] < PROMPT.shape[1] + 20
    return out


class Halved(LogitsProcessor):
    """Even tokens are half as likely to be chosen."""

    def __call__(self, input_ids, scores):
        return scores - 3 * (torch.arange(scores.shape[-1]) % 2 == input_ids.shape[1] % 2)


class AfterSeven(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= PROMPT.shape[1] + 7)


def one_prompt_for_several(model):
    """The cache of a prompt, repeated for rows that continue differently; some of them are dropped."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=PROMPT, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        logits = [model(input_ids=tokens(3, 1, i), past_key_values=cache).logits for i in range(4)]
        cache.batch_select_indices(torch.tensor([0, 2]))
        logits += [model(input_ids=tokens(2, 1, i), past_key_values=cache).logits for i in range(4)]
    return torch.tensor(cache.get_seq_length()), torch.cat([x.flatten(0, 1) for x in logits])


def taken_back(model):
    """A turn of a chat that is cropped and repeated in other words."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=PROMPT, past_key_values=cache)
        model(input_ids=tokens(1, 20, 1), past_key_values=cache)
        cache.crop(-20)
        logits = [model(input_ids=tokens(1, n, 2), past_key_values=cache).logits for n in (13, 1, 1)]
    return torch.tensor(cache.get_seq_length()), torch.cat(logits, 1)


def watched(model):
    """Hooks that read and change the outputs of layers, added before the first call."""
    seen = []

    def steer(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        seen.append(hidden[:, -1].detach().clone())
        return (hidden + 0.1, *output[1:]) if isinstance(output, tuple) else hidden + 0.1

    handle = model.model.layers[0].register_forward_hook(steer)
    try:
        out = generate(model, input_ids=PROMPT)
    finally:
        handle.remove()
    return out[0], torch.cat([out[1].flatten(0, 1), torch.nn.functional.pad(torch.cat(seen), (0, VOCABULARY - 64))])


def scored(model):
    """The likelihood of a text, and of a padded batch."""
    ids, mask = padded("left")
    with torch.no_grad():
        alone = model(input_ids=PROMPT, labels=PROMPT).loss
        batch = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    return torch.zeros(0), torch.stack([alone, batch])


USES = {
    "a streamer that prints": printed,
    "a streamer of another thread": streamed_from_a_thread,
    "rollouts of reinforcement learning": rollouts,
    "4-D masks, bool": four_dimensional_masks("bool"),
    "4-D masks, float": four_dimensional_masks("float"),
    "packed sequences": packed_sequences,
    "logits_to_keep": some_logits,
    "inputs_embeds": embedded,
    "stop strings": to_a_string,
    "a logits processor": mode(input_ids=PROMPT, logits_processor=LogitsProcessorList([Halved()])),
    "a stopping criterion": mode(input_ids=PROMPT, stopping_criteria=[AfterSeven()]),
    "constrained tokens": mode(
        input_ids=PROMPT, prefix_allowed_tokens_fn=lambda row, ids: list(range(ids.shape[0] % 5, VOCABULARY, 5))
    ),
    "a repetition penalty": mode(input_ids=PROMPT, repetition_penalty=1.5, no_repeat_ngram_size=2),
    "guidance": mode(input_ids=PROMPT, guidance_scale=1.5, negative_prompt_ids=tokens(1, 12, 4)),
    "a watermark": mode(input_ids=PROMPT, watermarking_config=dict(bias=2.0)),
    "samples with a seed": mode(input_ids=tokens(2, 30), do_sample=True, top_p=0.9, temperature=1.3),
    "several answers to each": mode(input_ids=tokens(2, 30), do_sample=True, num_return_sequences=3),
    "several beams of each": mode(input_ids=tokens(2, 30), num_beams=4, num_return_sequences=2, length_penalty=0.5),
    "sampled beams": mode(input_ids=PROMPT, num_beams=3, do_sample=True),
    "a static cache": mode(input_ids=PROMPT, cache_implementation="static"),
    "one prompt for several": one_prompt_for_several,
    "a turn taken back": taken_back,
    "hooks": watched,
    "scoring": scored,
    "without a cache": mode(input_ids=PROMPT, use_cache=False),
}


CAPTURED = (  # uses that differ in how the model is called, not in logits; with hooks no step is compiled
    "a streamer of another thread",
    "rollouts of reinforcement learning",
    "4-D masks, bool",
    "4-D masks, float",
    "logits_to_keep",
    "inputs_embeds",
    "guidance",
    "a static cache",
    "one prompt for several",
    "hooks",
)


@pytest.mark.parametrize("use", USES)
def test_a_use_equals_the_untouched_model(use):
    expected = USES[use](llama())
    assert_equal(USES[use](kvpass.apply(llama(), LOSSLESS, lowering="eager")), expected)


@pytest.mark.slow
@pytest.mark.parametrize("use", CAPTURED)
def test_a_captured_use_equals_the_untouched_model(use):
    torch._dynamo.reset()
    expected = USES[use](llama())
    with without_inductor():
        model = kvpass.apply(llama(), LOSSLESS, lowering="reference")
        assert_equal(USES[use](model), expected)
    report = kvpass.explain(model)
    assert report.hooked_steps if use == "hooks" else any(graph.compiled for graph in report.graphs)


def test_a_packed_model_is_saved_and_loaded_unchanged(tmp_path):
    model = kvpass.apply(llama(), LOSSLESS, lowering="eager")
    expected = generate(model, input_ids=PROMPT)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_equal(generate(loaded, input_ids=PROMPT), expected)
