"""Architectures whose attention is written in ways of its own: packed, fused, and the same as untouched when lossless.

Others are in `test_rotary` (positions) and `test_graph`.
"""

import pytest
import torch
import transformers

import kvpass

from tiny import VOCABULARY

BASE = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
GPT = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512)
SLIDING = dict(head_dim=16, sliding_window=32)
EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

ZOO = {  # name -> config class, config, packed layers
    "masks before scaling": ("CodeGen", dict(GPT, rotary_dim=8), 2),
    "alibi, heads merged with the batch": ("Bloom", dict(vocab_size=VOCABULARY, n_layer=2, n_head=4), 2),
    "alibi, masks filled in": (
        "Mpt",
        dict(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, max_seq_len=512, use_cache=True),
        2,
    ),
    "masks by where": (
        "GPTNeo",
        dict(
            vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
            max_position_embeddings=512,
        ),
        2,
    ),
    "logits of sinks in the softmax": (
        "GptOss",
        dict(BASE, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
        1,
    ),
    "a router behind each attention": ("Qwen3Moe", dict(BASE, **EXPERTS), 2),
}  # fmt: skip


def make(kind, config):
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**config, bos_token_id=1, eos_token_id=None)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    if kind == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


@pytest.mark.parametrize("name", ZOO)
def test_attention_is_fused_and_lossless_pages_change_nothing(name):
    """Over page flushes, with left padding, strictly."""
    kind, config, layers = ZOO[name]
    model = make(kind, config)
    ids = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :6], mask[0, :6] = 0, 0

    def generate():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=45,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return out.sequences, torch.stack(out.logits)

    sequences, expected = generate()
    kvpass.apply(model, scheme="identity", strict=True)
    again, logits = generate()
    report = kvpass.explain(model)
    assert (report.packed, report.fused) == (layers, layers) and report.nbytes > 0
    assert not any(graph.refused or graph.decoded for graph in report.graphs)
    assert torch.equal(sequences, again)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    kvpass.remove(model)
    assert torch.equal(generate()[1], expected)
