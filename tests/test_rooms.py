"""The rooms of the package: which one may import which. The layout of the folders must match the architecture."""

import ast
import re
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [  # each imports only from itself and from the rooms before it
    "errors",
    "quiet",
    "progress",
    "versions",
    "fields",
    "digest",
    "accelerate_hooks",
    "layout",
    "codec",
    "schemes",
    "lowering",
    "paged",
    "ops",
    "cache",
    "compile",
    "models",
    "runtime",
    "api",
    "eval",
    "calibration",
    "prefix_store",
    "vllm",
    "cli",
    "__main__",
]
MODULES = {
    ".".join(("kvpass", *path.relative_to(ROOT / folder).with_suffix("").parts)): path
    for folder in ("kvpass", ".")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if folder == "kvpass" or path.relative_to(ROOT).parts[0] == "lowering"
}


def room(module: str) -> str:
    return module.split(".")[1]


def imported(module: str, path: Path):
    package = module.removesuffix(".__init__") if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
        if source == "kvpass":
            yield from (f"kvpass.{alias.name}" for alias in node.names)
        elif source.startswith("kvpass."):
            yield source


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"kvpass.__init__"}))
def test_rooms_import_in_one_direction(module):
    above = FLOORS[FLOORS.index(room(module)) + 1 :]
    assert not {name for name in imported(module, MODULES[module]) if room(name) in above}


def test_only_a_server_has_paged_attention():
    users = {
        room(module) for module, path in MODULES.items() for name in imported(module, path) if room(name) == "paged"
    }
    assert users == {"paged", "vllm"}


def test_the_page_on_architecture_has_every_room_in_order():
    page = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("##")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert re.findall(r"`(\w+)/?`", " ".join(first_cells)) == FLOORS


def test_modules_with_different_jobs_have_different_names():
    """Modules with the same name belong together: definition and lowering."""
    seen: dict[str, list[str]] = {}
    for module in MODULES:
        if not module.endswith("__init__"):
            seen.setdefault(module.rpartition(".")[2], []).append(module)
    doubled = {name: modules for name, modules in seen.items() if len(modules) > 1}
    assert set(doubled) == {"allocated", "append", "attend", "codebook", "pages"}, doubled
