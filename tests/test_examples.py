"""The scripts of examples/ run with a tiny model that is loaded from a folder."""

import json
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from kvpass import models, schemes

from common import script
from tiny import VOCABULARY, llama

EXAMPLES = sorted(path.stem for path in (Path(__file__).parents[1] / "examples").glob("*.py"))
TEMPLATE = """{% for m in messages %}<{{ m.role }}>
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""


def example(name: str):
    return script(f"examples/{name}.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a two-layer Llama and a tokenizer of one token per character."""
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    letters = {chr(code): code for code in range(1, VOCABULARY)} | {"<unk>": 0}
    tokenizer = Tokenizer(WordLevel(letters, "<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unk>", pad_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def uncompiled(monkeypatch, reference_in_this_test):
    """Steps run as the model is written, because these tests are about the scripts."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("A letter to somebody who reads caches. " * 20, encoding="utf-8")
    return str(path)


def test_every_example_has_a_test_here():
    here = Path(__file__).read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 6 and all(f'"{name}"' in here for name in EXAMPLES)


def test_a_long_document_is_continued(folder, text, uncompiled, capsys):
    given = ["--model", folder, "--text", text, "--tokens", "300", "--new-tokens", "8"]
    example("long_document").main([*given, "--scheme", "kivi"])
    out = capsys.readouterr().out
    assert "307 tokens, " in out and " bytes instead of " in out and "2 of 2 cache layers packed" in out


def test_the_notebook_is_made_of_the_script_and_runs(folder, text, uncompiled, monkeypatch):
    """After a change of the script: ``python examples/make_notebook.py``."""
    make = example("make_notebook")
    kept = json.loads(make.NOTEBOOK.read_text(encoding="utf-8"))
    made = make.notebook()
    for notebook in (kept, made):
        for cell in notebook["cells"]:
            cell.pop("outputs", None)
    assert kept == made
    code = "\n".join("".join(cell["source"]) for cell in kept["cells"] if cell["cell_type"] == "code")
    body = [line.strip() for line in make.SCRIPT.read_text(encoding="utf-8").splitlines()]
    assert all(line.strip() in body for line in code.partition("new_tokens = 48")[2].splitlines())
    outputs = make.executed(model_name=folder, text=text, tokens=300, scheme="kivi", new_tokens=8)
    assert "307 tokens, " in outputs[3] and "2 of 2 cache layers packed" in outputs[4]


def test_a_chat_continues_a_prompt_that_was_saved(folder, tmp_path, uncompiled, capsys):
    chat, file = example("chat_saved_prompt"), tmp_path / "prompt.safetensors"
    system = tmp_path / "system.txt"
    system.write_text("You are brief. " * 12, encoding="utf-8")
    given = ["--model", folder, "--cache", str(file), "--system", str(system), "--new-tokens", "6"]
    chat.main([*given, "--ask", "Why?", "--ask", "How?"])
    first = capsys.readouterr().out
    assert "reading the system prompt" in first and file.exists()
    chat.main([*given, "--ask", "Why?", "--ask", "How?"])
    assert capsys.readouterr().out == first.partition("\n")[2]
    system.write_text("You are brief, and rude. " * 12, encoding="utf-8")
    with pytest.raises(SystemExit, match="holds another prompt"):
        chat.main(given)


def test_turns_of_a_chat_are_the_tokens_of_its_template(folder):
    """The parts that the example concatenates equal the template applied to the whole conversation."""
    chat, (_, tokenizer) = example("chat_saved_prompt"), models.load(folder)
    answer = "Because."
    parts = [
        chat.begin(tokenizer, "Be brief."),
        chat.follow(tokenizer, "Why?", "system"),
        tokenizer(answer, return_tensors="pt").input_ids,
        chat.follow(tokenizer, "How?", "assistant"),
    ]
    said = [("system", "Be brief."), ("user", "Why?"), ("assistant", answer), ("user", "How?")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in said], tokenize=False, add_generation_prompt=True
    )
    assert [token for part in parts for token in part[0].tolist()] == tokenizer(whole)["input_ids"]


def test_a_custom_scheme_is_compared(folder, text, registry, uncompiled, capsys):
    example("custom_scheme").main(["--model", folder, "--text", text, "--context", "80", "--token-by-token"])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    bits = {line[0]: float(line[2]) for line in lines if line and line[0] in ("kivi", "higgs", "blend", "blend-3")}
    assert bits["higgs"] < bits["blend"] < bits["blend-3"] and "kvpass blend(" in out
    layer = partial(schemes.LayerGeometry, num_layers=2, num_key_value_heads=2, head_dim=32, dtype=None, device=None)
    careful, other = (schemes.get("blend").plan(layer(index)) for index in (0, 1))
    assert (careful.key.bits, other.key.bits) == (4, 2)


def test_schemes_are_compared_on_custom_text(folder, text, tmp_path, uncompiled, capsys):
    picture = tmp_path / "quality.svg"
    given = [
        text,
        "--model",
        folder,
        "--schemes",
        "kivi,kivi-4",
        "--context",
        "160",
        "--score",
        "60",
        "--token-by-token",
    ]
    example("evaluate_schemes").main([*given, "--plot", str(picture)])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["kivi-4", "kivi"]
    assert "kivi-4 beats kivi by " in out and picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.fixture
def server():
    """A server with two models that streams a greeting in three events, and the requests it received."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, None))
            self._answer(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if body["model"] == "missing":
                self.send_error(404, "no such model")
                return
            parts = [{"role": "assistant"}, {"content": "Hel"}, {"content": "lo — ✓"}]
            events = [json.dumps({"choices": [{"delta": part}]}) for part in parts]
            self._answer("".join(f"data: {event}\n\n" for event in [*events, '{"choices": []}', "[DONE]"]))

        def _answer(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_streams_the_answer_of_the_first_model_served(server, capsys):
    url, asked = server
    example("vllm_client").main(["Who?", "--url", url, "--max-tokens", "5"])
    assert capsys.readouterr().out == "Hello — ✓\n"
    (listed, _), (path, body) = asked
    assert (listed, path) == ("/v1/models", "/v1/chat/completions")
    assert body["model"] == "first" and body["stream"] is True and body["max_tokens"] == 5
    assert body["messages"] == [{"role": "user", "content": "Who?"}]


def test_the_client_says_what_went_wrong(server):
    client, (url, _) = example("vllm_client"), server
    with pytest.raises(SystemExit, match="answered 404"):
        client.main(["Who?", "--url", url, "--model", "missing"])
    with pytest.raises(SystemExit, match="start the server"):
        client.main(["Who?", "--url", "http://127.0.0.1:9/v1"])
