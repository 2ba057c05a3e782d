"""Continue a long document with a quantized KV cache, and see what the cache takes.

python examples/long_document.py --text my.txt --tokens 8000 --scheme kivi

`examples/long_document.ipynb` is made of this file by `make_notebook.py`: a comment that begins with %% starts a cell.
"""

import argparse

import kvpass
from kvpass import models
from kvpass.eval import texts


def run(model_name=None, text="prose", tokens=2048, scheme="waterfill", new_tokens=48):
    # %% Load a model and the first tokens of a document: "prose", "code" or the path of a UTF-8 file
    model, tokenizer = models.load(model_name)
    prompt = texts.tokens(tokenizer, text, tokens).to(model.device)

    # %% Apply a scheme: from here on, `generate` and every other call use a quantized cache
    kvpass.apply(model, scheme=scheme)
    output = model.generate(
        prompt,
        attention_mask=prompt.new_ones(prompt.shape),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(output.sequences[0, prompt.shape[1] :]))

    # %% What the cache takes, with everything it keeps, and the same in full precision
    cache, report = output.past_key_values, kvpass.explain(model)
    print(f"{cache.get_seq_length():,} tokens, {kvpass.bits_per_value(cache):.2f} bits per value")
    print(f"{kvpass.nbytes(cache):,} bytes instead of {report.full_nbytes:,}")

    # %% What became of each layer, and why
    print(report)

    # %% Undo it: the model is as it was
    kvpass.remove(model)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id or folder; default SmolLM2-135M-Instruct, 93 MB from PyPI")
    parser.add_argument("--text", default="prose", help="prose, code, or the path of a UTF-8 file; default %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt; default %(default)s")
    parser.add_argument("--scheme", default="waterfill", help="how to store the cache; default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate; default %(default)s")
    args = parser.parse_args(argv)
    run(args.model, args.text, args.tokens, args.scheme, args.new_tokens)


if __name__ == "__main__":
    main()
