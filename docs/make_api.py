"""Writes docs/api.md from the docstrings of the public names: python docs/make_api.py

Signatures are as written in the source, so that the result does not depend on the version of Python.
"""

import ast
import inspect
import textwrap
from pathlib import Path

import kvpass
from kvpass import codec, eval, models, schemes
from kvpass.eval import plot, retrieval, speed, texts

PAGE = Path(__file__).with_name("api.md")
MODULES = {
    "kvpass": (kvpass, [name for name in kvpass.__all__ if name not in ("ops", "schemes")]),
    "kvpass.schemes": (schemes, schemes.__all__),
    "kvpass.codec": (codec, ["CodecSpec", "Quantizer", "Subspace", "Adaptive", "Transform"]),
    "kvpass.eval": (eval, eval.__all__),
    "kvpass.eval.retrieval": (retrieval, ["passkey", "retrieve", "ask", "Passkey", "Retrieval"]),
    "kvpass.eval.plot": (plot, ["pareto", "points", "front", "Point"]),
    "kvpass.eval.speed": (speed, ["measure", "sharing_weights", "Speed"]),
    "kvpass.models": (models, models.__all__),
    "kvpass.eval.texts": (texts, ["available", "read", "tokens"]),
}


def entry(path: str, thing) -> str:
    """One name: its signature, its docstring, and its public methods and properties."""
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]
    lines = [f"### {path}\n", "```python", _signature(node), "```\n", *_text(node)]
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and ast.get_docstring(member):
                lines += [f"**{_member(member)}**\n", *_text(member)]
    return "\n".join(lines)


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        fields = [f"    {ast.unparse(item)}" for item in node.body if isinstance(item, ast.AnnAssign)]
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        return "\n".join([f"class {node.name}{bases}:", *(fields or ["    ..."])])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def _member(node: ast.FunctionDef) -> str:
    marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
    is_property = bool(marks & {"property", "cached_property"})
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    return f"`{node.name}`" if is_property else f"`{node.name}({arguments})`"


def _text(node: ast.AST) -> list[str]:
    return ["```text", ast.get_docstring(node) or "", "```\n"]


def page() -> str:
    """The whole page."""
    parts = ["# API\n\nMade from the docstrings by `python docs/make_api.py`.\n"]
    for name, (module, names) in MODULES.items():
        parts.append(f"## {name}\n\n{(inspect.getdoc(module) or '').splitlines()[0]}\n")
        parts += [entry(f"{name}.{each}", getattr(module, each)) for each in names]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
