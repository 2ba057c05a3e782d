"""Ask a vLLM server that keeps its KV cache quantized, and print the answer as it comes.

vllm serve MODEL --additional-config '{"kvpass": {"scheme": "kivi-sinks"}}'
python examples/vllm_client.py "Name three rivers of Europe."

The client is an ordinary one that uses the standard library; only the server knows about kvpass.
"""

import argparse
import json
import urllib.error
import urllib.request


def call(url, body=None):
    """The response to a GET, or to a POST of ``body`` as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=600)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except urllib.error.URLError as error:
        raise SystemExit(f"Cannot reach {url} ({error.reason}): start the server, or say where with --url.") from error


def stream(url, body):
    """The parts of an answer, as the server sends them: events of one line each, the last of which is [DONE]."""
    with call(f"{url}/chat/completions", {**body, "stream": True}) as response:
        for line in response:
            event = line.decode().strip().removeprefix("data: ")
            if event == "[DONE]":
                return
            if event and (choices := json.loads(event)["choices"]):
                yield choices[0]["delta"].get("content") or ""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Name three rivers of Europe.")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="of the server; default %(default)s")
    parser.add_argument("--model", help="default the first one that is served")
    parser.add_argument("--max-tokens", type=int, default=128, help="the longest answer; default %(default)s")
    args = parser.parse_args(argv)
    model = args.model
    if model is None:
        with call(f"{args.url}/models") as response:
            model = json.load(response)["data"][0]["id"]
    messages = [{"role": "user", "content": args.question}]
    body = {"model": model, "messages": messages, "max_tokens": args.max_tokens, "temperature": 0}
    for part in stream(args.url, body):
        print(part, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
