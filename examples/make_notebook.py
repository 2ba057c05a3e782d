"""Build examples/long_document.ipynb from examples/long_document.py, and run it: python examples/make_notebook.py

The parameters of ``run`` and their defaults become the first cell, its body the others. Printed output is kept.
"""

import ast
import contextlib
import io
import json
import textwrap
from pathlib import Path

SCRIPT = Path(__file__).with_name("long_document.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
MARK = "# %% "


def cells() -> list[tuple[str, str]]:
    """("markdown" or "code", source) of each cell."""
    text = SCRIPT.read_text(encoding="utf-8")
    module = ast.parse(text)
    run = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    imports = text[text.index("import kvpass") : text.index("\n\n\n")]
    defaults = [ast.get_source_segment(text, value) for value in run.args.defaults]
    given = "\n".join(f"{each.arg} = {value}" for each, value in zip(run.args.args, defaults, strict=True))
    title = ast.get_docstring(module).splitlines()[0].rstrip(".")
    found = [("markdown", f"# {title}"), ("code", f"{imports}\n\n{given}")]
    body = textwrap.dedent("\n".join(text.splitlines()[run.lineno : run.end_lineno]))
    for part in body.split(MARK)[1:]:
        heading, _, code = part.partition("\n")
        found += [("markdown", heading), ("code", code.strip())]
    return found


def notebook(outputs: list[str] | None = None) -> dict:
    """The notebook in format 4.5; ``outputs``: what each code cell printed."""
    printed, made = iter(outputs or ()), []
    for number, (kind, source) in enumerate(cells()):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        if kind == "code":
            text = next(printed, "")
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [stream] if text else []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def executed(**given: object) -> list[str]:
    """What each code cell prints, one after the other; ``given`` replaces parameters of the first one."""
    names: dict[str, object] = {}
    outputs = []
    for number, source in enumerate(source for kind, source in cells() if kind == "code"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(source, names)
        if number == 0:
            names |= given
        outputs.append(out.getvalue())
    return outputs


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(executed()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
