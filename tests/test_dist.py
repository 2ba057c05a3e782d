"""The source archive and its wheel contain every module and data file of the source tree."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvpass

ROOT = Path(__file__).parents[1]
FOLDERS = {"kvpass": "kvpass", "lowering": "kvpass/lowering"}  # installed as
FILES = "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"
REBUILT = "__pycache__", "*.egg-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names in the wheel that is made from the source archive of a copy of the tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns(*REBUILT))
    for file in FILES:
        shutil.copy(ROOT / file, tree)

    def run(*command, **options):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    run("-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})", cwd=tree)
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, *out.glob("*.tar.gz"))
    return set(ZipFile(next(out.glob("*.whl"))).namelist())


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    expected = {
        Path(target, file.relative_to(ROOT / folder)).as_posix()
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and not any(file.match(f"*/{pattern}/*") for pattern in REBUILT)
    }
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert {"kvpass/py.typed", "kvpass/lowering/py.typed"} <= expected


def test_the_license_is_shipped(wheel):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kvpass.__version__ == project["version"]
