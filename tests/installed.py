"""Check an installed wheel: ``make dist`` runs this with the Python of an environment that has only the wheel. kvpass
must be imported from there, and a model must generate with a packed cache."""

import sys
from pathlib import Path

import kvpass
from kvpass import lowering

from tiny import llama, tokens

for module in (kvpass, lowering):
    assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__

model = llama()
kvpass.apply(model, "kivi")
ids = model.generate(tokens(1, 200), max_new_tokens=4, do_sample=False)
report = kvpass.explain(model)
assert ids.shape == (1, 204) and report.packed == report.fused == 2, report
assert any(graph.compiled for graph in report.graphs), report
print(f"kvpass {kvpass.__version__}, installed, generates with a packed cache")
