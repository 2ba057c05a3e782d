"""Chat after a system prompt whose quantized cache is computed once and stored in a file.

python examples/chat_saved_prompt.py --system rules.txt --ask "What is forbidden?" --ask "Why?"

The first run reads the system prompt and saves its cache. Later runs load the file instead.
"""

import argparse
from pathlib import Path

import torch

import kvpass
from kvpass import models

SYSTEM = "You are the guide of a small museum of clocks. Answer in one or two short sentences."
MARK = "@@@"  # stands for the message that a question follows


def begin(tokenizer, system):
    """Tokens of a chat up to the end of the system message's text, ``[1, S]``."""
    text = tokenizer.apply_chat_template([{"role": "system", "content": system}], tokenize=False)
    return tokenizer(text[: text.rindex(system) + len(system)], add_special_tokens=False, return_tensors="pt").input_ids


def follow(tokenizer, question, previous):
    """Tokens that the template puts between the text of the ``previous`` message and the next answer, ``[1, S]``."""
    chat = [{"role": previous, "content": MARK}, {"role": "user", "content": question}]
    if previous == "assistant":  # which some templates accept only behind a question
        chat.insert(0, {"role": "user", "content": ""})
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text.rpartition(MARK)[2], add_special_tokens=False, return_tensors="pt").input_ids


@torch.no_grad()
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id or folder of a chat model; default SmolLM2-135M-Instruct")
    parser.add_argument("--system", type=Path, help="a file with the system prompt; default a short one")
    parser.add_argument("--cache", type=Path, default=Path("prompt.safetensors"), help="default %(default)s")
    parser.add_argument("--ask", action="append", help="a question; may be repeated")
    parser.add_argument("--new-tokens", type=int, default=64, help="the longest answer; default %(default)s")
    args = parser.parse_args(argv)
    questions = args.ask or ["What do you show?", "Which of them is the oldest?"]
    system = args.system.read_text(encoding="utf-8").strip() if args.system else SYSTEM

    model, tokenizer = models.load(args.model)
    kvpass.apply(model, scheme="kivi-4")
    ids = begin(tokenizer, system).to(model.device)
    if not args.cache.exists():
        print(f"reading the system prompt, {ids.shape[1]} tokens")
        kvpass.save_cache(model(ids, use_cache=True).past_key_values, args.cache)
    cache = kvpass.load_cache(args.cache, model)  # refuses the file of another model or scheme
    if cache.get_seq_length() != ids.shape[1]:
        raise SystemExit(f"{args.cache} holds another prompt: delete it, or name another file with --cache.")

    previous = "system"
    for question in questions:
        ids = torch.cat([ids, follow(tokenizer, question, previous).to(model.device)], 1)
        output = model.generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            cache=cache,  # holds the first tokens of ids already; past_key_values before transformers 5.24
            max_new_tokens=args.new_tokens,
            do_sample=False,
        )
        answer = output[:, ids.shape[1] :]
        if answer[0, -1] == tokenizer.eos_token_id:
            answer = answer[:, :-1]  # the template has one of its own; the cache does not hold it yet
        print(f"> {question}\n{tokenizer.decode(answer[0], skip_special_tokens=True).strip()}")
        ids, previous = torch.cat([ids, answer], 1), "assistant"
    print(f"{cache.get_seq_length():,} tokens in {kvpass.nbytes(cache):,} bytes")


if __name__ == "__main__":
    main()
