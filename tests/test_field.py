"""Every architecture of the installed transformers, built tiny: untouched against packed.

``make test-field`` tries all of them and writes docs/architectures.md. Without ``--field`` the test covers a few
architectures, each with a special feature. Findings are stored in build/field, and an architecture is tried again when
kvpass or this test changes.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from field import Finding, examine
from shrink import architectures, find

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "field"
SAMPLE = {
    "BambaForCausalLM": "counts positions from 0 at each call that is not told of them",
    "DeepseekV3ForCausalLM": "keeps what keys and values are made of",
    "GitForCausalLM": "puts image tokens in front inside of its forward",
    "Gemma3ForConditionalGeneration": "attends both ways within images, and keeps windows",
    "HrmTextForCausalLM": "attends both ways within a prefix, and calls its layers several times",
    "MllamaForConditionalGeneration": "has layers that attend to an image alone",
    "PaliGemmaForConditionalGeneration": "asks its cache whether this is the prompt",
    "Qwen2VLForConditionalGeneration": "has positions of three dimensions",
    "RobertaForCausalLM": "counts positions behind the padding token",
    "T5GemmaForConditionalGeneration": "has a decoder whose sizes are in a config of its own",
    "WhisperForConditionalGeneration": "attends to sounds",
    "ZambaForCausalLM": "has state and attention in one layer",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [str(one) for one in architectures()] if metafunc.config.getoption("--field") else SAMPLE
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", names)


@pytest.mark.field
def test_an_architecture_is_right_or_refused(name: str, pytestconfig: pytest.Config) -> None:
    """Every refusal is a kvpass error; no result is silently wrong, and no other error is raised."""
    if name not in map(str, architectures()):
        pytest.skip("the installed transformers does not have it")
    finding = found(name, pytestconfig.getoption("--steps-by")) if pytestconfig.getoption("--field") else sampled(name)
    if finding.untouched and not (finding.uses or finding.refused or finding.wrong):
        pytest.skip(f"transformers alone does not run it: {finding.untouched}")
    assert not finding.wrong, f"{name}: {json.dumps(finding.wrong, indent=1)}"


def sampled(name: str) -> Finding:
    """Without captured steps, which `test_zoo` covers."""
    return examine(find(name), "model")


def found(name: str, steps_by: str) -> Finding:
    """The stored finding of an earlier run, or a new one, which is then stored."""
    path, key = KEPT / f"{name}.json", f"{_sources()} {steps_by}"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return Finding(**kept["finding"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(key="", finding=asdict(_crashed(name)))), encoding="utf-8")
    finding = examine(find(name), steps_by)
    path.write_text(json.dumps(dict(key=key, finding=asdict(finding)), indent=1), encoding="utf-8")
    return finding


def _crashed(name: str) -> Finding:
    """The finding that remains if the process dies."""
    return Finding(name, find(name).group, wrong=dict(process="it ended without an answer"))


@cache
def _sources() -> str:
    """Everything that a finding depends on: kvpass, transformers, torch, and the code of the examination."""
    files = [path for folder in ("kvpass", "lowering") for path in sorted((ROOT / folder).rglob("*.py"))]
    files += [Path(__file__).parent / name for name in ("field.py", "inputs.py", "shrink.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return f"{digest} transformers {transformers.__version__} torch {torch.__version__}"
