"""Tiny random decoders: real architectures that compile in seconds."""

import torch
from transformers import DynamicCache, FalconH1Config, FalconH1ForCausalLM, LlamaConfig, LlamaForCausalLM

import kvpass

VOCABULARY = 128


def llama(
    attention: str = "sdpa",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    seed: int = 0,
    **config,
):
    """A small Llama in eval mode that never emits an end token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=4096,
            attn_implementation=attention,
            **config,
        )
    ).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def falcon_h1(layers: int = 2):
    """A small Falcon-H1 in eval mode. Each layer keeps keys, values, a convolution state and a recurrent state."""
    torch.manual_seed(0)
    config = FalconH1Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=16, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
        bos_token_id=1,
    )  # fmt: skip
    return FalconH1ForCausalLM(config).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """``[batch, length]`` random token ids, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def step_by_step(model, scheme, ids, prompt, mask=None, **options):
    """Logits after ``prompt`` tokens and after each further token, ``[B, S - prompt + 1, V]``, with the cache they were
    decoded through and the report. ``scheme`` and ``options`` are arguments of `kvpass.apply`."""
    kvpass.apply(model, scheme, **options)
    try:
        cache, rows = DynamicCache(config=model.config), []
        for stop in range(prompt, ids.shape[1] + 1):
            part = ids[:, cache.get_seq_length() : stop]
            seen = None if mask is None else mask[:, :stop]
            rows.append(model(input_ids=part, past_key_values=cache, attention_mask=seen).logits[:, -1])
        return torch.stack(rows, 1), cache, kvpass.explain(model)
    finally:
        kvpass.remove(model)


@torch.no_grad()
def called(model, calls, batch: int = 2, cache=None):
    """The logits of each call, and the cache. ``calls``: for each call, how many tokens it takes, and how many of them
    are rejected (cropped) afterwards. ``cache``: an empty one; default a new one."""
    device, cache, logits = model.device, DynamicCache(config=model.config) if cache is None else cache, []
    ids = tokens(batch, sum(new for new, _ in calls), seed=3).to(device)
    for new, rejected in calls:
        start = cache.get_seq_length()
        logits.append(model(input_ids=ids[:, start : start + new], past_key_values=cache).logits)
        if rejected:
            cache.crop(-rejected)
    return logits, cache


def left_padded():
    """Two prompts, one of which begins with padding, as arguments of a model."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    return dict(input_ids=tokens(2, 40) * mask, attention_mask=mask)


def check_saved_loaded_and_reset(model, folder):
    """Check that a cache of ``model`` continues alike once it is saved and loaded, and is as new after a reset."""
    _, cache = called(model, [(50, 0), (1, 0)])
    loaded = kvpass.load_cache(kvpass.save_cache(cache, folder / "cache.safetensors"), model)
    with torch.no_grad():
        for count in (1, 5, 1):
            rows = [model(input_ids=tokens(2, count), past_key_values=one).logits for one in (cache, loaded)]
            assert torch.equal(*rows)
        cache.reset()
        expected = model(input_ids=tokens(3, 9), past_key_values=DynamicCache(config=model.config)).logits
        assert torch.equal(model(input_ids=tokens(3, 9), past_key_values=cache).logits, expected)


def check_rows_are_selected(model, atol):
    """Check that everything a cache of ``model`` keeps follows a selection of rows."""
    expected, _ = called(model, [(20, 0), (1, 0)])
    cache, ids = DynamicCache(config=model.config), tokens(2, 21, seed=3)
    with torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        found = model(input_ids=ids[[1, 1, 0], 20:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected[1][[1, 1, 0]], atol=atol, rtol=0)


def calibrated(model, scheme):
    """``scheme``, calibrated on ``model`` if it needs that."""
    scheme = kvpass.schemes.get(scheme)
    if not scheme.needs_calibration:
        return scheme
    return kvpass.calibrate(model, tokens(2, 100, 7), scheme, progress=False)


class Letters:
    """A tokenizer with one token per character, for the models of this file."""

    chat_template = None
    bos_token = None
    eos_token_id = pad_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [min(ord(character), VOCABULARY - 1) for character in text]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))
