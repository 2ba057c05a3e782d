"""The supported versions of torch: kvpass checks them in one place, when it is imported."""

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from kvpass import KVPassError
from kvpass.versions import NEWEST, OLDEST, check_torch

ROOT = Path(__file__).parents[1]


def test_dependency_bounds_match_the_tested_versions():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch_versions = next(r.specifier for r in map(Requirement, dependencies) if r.name == "torch")
    (major, first), (_, last) = OLDEST, NEWEST
    assert {f"{major}.{first}.0", f"{major}.{last}.9"} <= set(
        torch_versions.filter([f"{major}.{first}.0", f"{major}.{last}.9"])
    )
    assert not list(torch_versions.filter([f"{major}.{first - 1}.9", f"{major}.{last + 1}.0"]))
    assert f"torch {major}.{first} to {major}.{last}" in (ROOT / "docs" / "limits.md").read_text()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0+cu130", "2.13.2", torch.__version__])
def test_tested_versions_are_accepted_silently(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cpu", "1.13.1"])
def test_versions_that_are_too_old_are_refused(version):
    with pytest.raises(KVPassError, match=r"is too old: kvpass is tested with 2\.11 to 2\.13. Upgrade"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.14.0", "2.15.0.dev20270101+cpu", "2.14.0a0+git1234567", "3.0.0"])
def test_newer_versions_cause_a_warning(version):
    with pytest.warns(UserWarning, match=r"newer than .* \(2\.11 to 2\.13\).*tests/test_private_apis.py"):
        check_torch(version)


@pytest.mark.slow
def test_importing_kvpass_warns_once_and_first():
    program = """
import warnings, torch
torch.__version__ = "2.10.0"
try:
    import kvpass
except ValueError as error:
    print(error)
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import kvpass, kvpass.api
print(sum("newer than" in str(warning.message) for warning in seen))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    refused, count = out.stdout.strip().splitlines()
    assert "is too old: kvpass" in refused and count == "1"
