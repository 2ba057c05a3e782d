"""Compose a custom scheme from codec primitives, and compare it with two existing ones.

python examples/custom_scheme.py --text my.txt --context 2048

Keys are stored as KIVI stores them: uniform values, with scales per channel. Values are stored as HIGGS stores them:
rotated, on a grid that is optimal for normal vectors. The first layers get more bits.
"""

import argparse
from dataclasses import dataclass

import kvpass
from kvpass import models
from kvpass.codec import CodecSpec, Quantizer, Transform
from kvpass.eval import bits_at, evaluate, texts
from kvpass.schemes import LayerGeometry, LayerPlan, StorageConfig, register_scheme


@register_scheme(blend_3=dict(key_bits=3, grid="d2n64"))  # "blend", and the preset "blend-3"
@dataclass(frozen=True, kw_only=True)
class BlendConfig(StorageConfig):
    """Keys of KIVI, values of HIGGS.

    key_bits, grid: of all layers but the first ones; "d2n16" takes 2 bits a value, "d2n64" 3, "d2n256" 4.
    careful: how many of the first layers store keys and values in 4 bits.
    """

    name = "blend"

    key_bits: int = 2
    grid: str = "d2n16"
    careful: int = 1
    sinks: int = 4

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        careful = layer.index < self.careful
        keys = Quantizer(4 if careful else self.key_bits, "channel", group_size=32)
        grid, bits = ("d2n256", 4) if careful else (self.grid, {"d2n16": 2, "d2n64": 3, "d2n256": 4}[self.grid])
        values = Quantizer(2 * bits, "token", layer.head_dim, grid=grid)  # one index stands for two values
        return LayerPlan(
            CodecSpec(keys, self.key_retention(), self.key_transform()),
            CodecSpec(values, self.value_retention(), Transform(rotation=0)),  # the seed of the rotation
        ).checked(layer)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id or folder; default SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="prose", help="prose, code, or the path of a UTF-8 file")
    parser.add_argument("--context", type=int, default=1024, help="tokens; the second half of them is scored")
    parser.add_argument("--token-by-token", action="store_true", help="decode each scored token by itself: slower")
    args = parser.parse_args(argv)
    model, tokenizer = models.load(args.model)
    ids, prompt = texts.tokens(tokenizer, args.text, args.context).to(model.device), args.context // 2

    schemes, one_pass = ["kivi", "higgs", "blend", "blend-3"], not args.token_by_token
    rows = evaluate(model, {args.text: ids}, prompt, schemes, one_pass=one_pass)[args.text]
    print("scheme    mean KL  bits/value at 32k")
    for row in rows:
        print(f"{row.scheme:8}  {row.kl:.4f}  {bits_at(model, row.scheme, [32768])[32768]:6.2f}")

    kvpass.apply(model, scheme="blend")
    model.generate(ids[:, :prompt], attention_mask=ids.new_ones(1, prompt), max_new_tokens=8, do_sample=False)
    print(kvpass.explain(model))
    kvpass.remove(model)


if __name__ == "__main__":
    main()
