"""``kvpass demo``: watch a scheme at work."""

import argparse
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from .. import models
from ..eval import quality, texts
from ..eval.tables import QUALITY, SPEED, aligned, memory_columns
from .shared import SCHEMES, TEXT, add_tokens, at_least, chosen_schemes, prompt_tokens, say, stage

HELP = "Generate and score with full precision and with each scheme."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass demo``."""
    parser.add_argument("--schemes", default="kivi,waterfill", help=SCHEMES)
    parser.add_argument("--text", default="prose", help=TEXT)
    add_tokens(parser, context=3128, score=128)
    parser.add_argument("--new-tokens", type=at_least(1), default=48, metavar="N", help="tokens to generate")


class _Bar(BaseStreamer, tqdm):
    """A progress bar that `generate` drives as its streamer. It explains why the first calls of a scheme are slow."""

    def __init__(self, what: str, total: int, compiles: bool = False):
        super().__init__(total=total, desc=f"  {what}", unit="token", leave=False, disable=None)
        self.notes = iter(["reading the prompt", "compiling the decode step" if compiles else "", ""])
        self.calls = 0

    def put(self, value: Tensor) -> None:
        self.update(self.calls > 0)  # the first call passes the prompt
        self.calls += 1
        if (note := next(self.notes, None)) is not None:
            self.set_postfix_str(note)

    def end(self) -> None:
        pass


def run(args: argparse.Namespace) -> None:
    """``kvpass demo``."""
    chosen, split = chosen_schemes(args.schemes), prompt_tokens(args.context, args.score)
    model, tokenizer = models.load(args.model, say=say)
    ids = texts.tokens(tokenizer, args.text, args.context).to(model.device)
    prompt = ids[:, :split]
    with stage(f"Full-precision logits of the {args.score} tokens after the first {split} of {args.text!r}"):
        reference = quality.reference_logits(model, ids, split)
    rows = []
    print(f"prompt, {split} tokens, ends:  ...{tokenizer.decode(prompt[0, -60:])!r}\n", flush=True)
    for name, scheme in chosen.items():
        compiles = "" if scheme is None else " (its first step compiles: half a minute the first time)"
        reading = f"{name}: reading the prompt, generating{compiles}"
        feeding = f"{name}: scoring the real continuation, token by token"
        with quality.packed(model, scheme):
            with stage(reading), _Bar("generating", args.new_tokens, scheme is not None) as bar:
                generate: Any = model.generate
                output = generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=args.new_tokens,
                    pad_token_id=tokenizer.eos_token_id,
                    streamer=bar,
                )
            with stage(feeding), _Bar("scoring", args.score) as bar:
                rows.append(quality.score(model, ids, split, reference, name=name, step_done=bar.update))
        text = str(tokenizer.decode(output[0, split:], skip_special_tokens=True))
        print(f"[{name}] generated:\n{text.strip()}\n", flush=True)
    print(aligned(rows, [*memory_columns(model.dtype), *QUALITY, *SPEED]))
    print(
        f"\nbytes: everything the cache keeps after {ids.shape[1]} tokens. mean KL (nats) and top-1: compared with "
        f"full precision,\nover {args.score} tokens of the text's real continuation. tokens/s: median decode step, "
        f"batch 1, {torch.get_num_threads()} CPU threads, {model.device}."
    )
