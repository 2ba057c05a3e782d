"""``kvpass explain``: how each layer of a model is stored and attended."""

import argparse

import torch
from transformers import DynamicCache

from .. import api, models
from ..eval import texts
from ..eval.quality import packed
from ..models.arguments import handing
from .shared import SCHEMES, say, scheme, stage

HELP = "Show for each layer whether a scheme packs its cache and fuses its attention, or why not."
_PROMPT = 64  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass explain``."""
    parser.add_argument("--scheme", help=f"default: the default of kvpass.apply; one of: {SCHEMES}")
    parser.add_argument("--strict", action="store_true", help="fail if any attention is not fused")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """``kvpass explain``."""
    chosen = scheme(args.scheme)
    model, tokenizer = models.load(args.model, say=say)
    ids = texts.tokens(tokenizer, "prose", _PROMPT + 1).to(model.device)
    with packed(model, chosen, strict=args.strict):
        cache = DynamicCache(config=model.config)
        with stage(f"{_PROMPT} tokens, and one decode step, which compiles"):
            for part in ids.split(_PROMPT, 1):
                model(input_ids=part, **handing(model, cache))
        print(api.explain(model))
