"""How strongly should SQuat protect the query subspace? Mean KL by strength, prompt length and text.

    python benchmarks/squat_strength.py

The paper's lambda multiplies squared singular values, which grow with the prompt; ``strength`` is relative to the mean
query energy per channel. Both are swept, against KIVI, token by token through the packed cache.
"""

import argparse

import torch

from kvpass import models, schemes
from kvpass.eval import quality, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prompts", default="384,1024")
    parser.add_argument("--strengths", default="0.05,0.2,0.5,1,3")
    parser.add_argument("--lams", default="1e-4,1e-3")
    parser.add_argument("--score", type=int, default=192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load(args.model, say=print)

    configs = {"kivi": schemes.get("kivi")}
    configs |= {f"strength {s}": schemes.get("squat", strength=float(s)) for s in args.strengths.split(",")}
    configs |= {f"lambda {lam}": schemes.get("squat", lam=float(lam)) for lam in args.lams.split(",")}
    rows = {name: [] for name in configs}
    heads = []
    for prompt in map(int, args.prompts.split(",")):
        sources = {
            name: texts.tokens(tokenizer, name, prompt + args.score).to(model.device) for name in texts.available()
        }
        results = quality.evaluate(model, sources, prompt, list(configs.values()), lowering="eager")
        for text, qualities in results.items():
            heads.append(f"{text} {prompt}")
            for name, found in zip(configs, qualities, strict=True):
                rows[name].append(found.kl)
    print("| mean KL | " + " | ".join(heads) + " | mean |")
    print("|---|" + "--:|" * (len(heads) + 1))
    for name, kls in rows.items():
        cells = [f"{kl:.4f}" for kl in (*kls, sum(kls) / len(kls))]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
