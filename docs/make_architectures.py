"""Write docs/architectures.md and the paragraph that README.md and docs/models.md quote from it.

    python docs/make_architectures.py

``make test-field`` tries each architecture and then calls this: findings in build/field replace those in
docs/field.json.
"""

import importlib.metadata
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOUND, RESULTS, PAGE = ROOT / "build" / "field", ROOT / "docs" / "field.json", ROOT / "docs" / "architectures.md"
QUOTING = ROOT / "README.md", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- begin: docs/make_architectures.py -->\n", "<!-- end -->"
PACKAGES = "transformers", "torch"
OUTCOMES = {  # each architecture gets the first one that applies
    "not built": "transformers alone does not run it at this size, or lacks a package",
    "wrong": "a use differs from the untouched model, or fails with an error that is not kvpass's",
    "refused": "`apply` says why, and the model is untouched",
    "refused in a use": "some way to use it is refused, and the error says what to do; others work",
    "whole": "every layer is packed, and its attention is fused wherever the layer is read",
    "not fused": "every layer is packed, and some are dequantized before attention",
    "not captured": "every layer is packed, but no step was captured",
    "part": "some layers are packed, and the others keep their cache in full precision",
}
GROUPS = {"causal": "Text", "image-text": "Images and text", "encoder-decoder": "Encoder-decoders", "speech": "Speech"}
LONGEST = 150


def outcome(finding: dict[str, Any]) -> str:
    """Which of `OUTCOMES` a finding is."""
    if finding.get("wrong"):
        return "wrong"
    refused = finding.get("refused", {}).keys() - {"8 bits"}  # its groups may not divide the heads of a tiny model
    if "apply" in refused or (refused and not finding.get("uses")):
        return "refused"
    if not finding.get("uses"):
        return "not built"
    if refused:
        return "refused in a use"
    if finding["packed"] < finding["layers"]:
        return "part"
    if finding.get("fused") is None:
        return "not captured"
    return "not fused" if finding["fused"] < finding["packed"] and finding.get("unfused") else "whole"


def counts(results: dict[str, Any]) -> dict[str, Counter[str]]:
    """Group -> outcome -> architectures."""
    table: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for finding in results["findings"]:
        table[finding["group"]][outcome(finding)] += 1
    return table


def quoted(results: dict[str, Any]) -> str:
    """The summary that other pages quote."""
    found = sum(counts(results).values(), Counter())
    tried = found.total() - found["not built"]
    some = [
        f"{found['whole']} are packed and fused in every layer",
        f"{found['part']} are packed in some layers; the others have a window or a state",
        f"{found['not fused']} are packed, but some layers are dequantized before attention",
        f"{found['not captured']} are packed, but their steps are not captured",
        f"{found['refused']} are refused with the reason",
        f"{found['refused in a use']} work, but are refused in some use",
        f"{found['wrong']} do not work yet in some use",
    ]
    kept = ". ".join(text for text in some if not text.startswith("0 "))
    images = sum(bool(finding.get("images")) for finding in results["findings"])
    return textwrap.fill(
        f"Of {found.total()} decoders of transformers {results['transformers']} (every class that generates text, and "
        f"variants of some), {tried} were built tiny and run untouched and packed, {images} of them with images. "
        f"{kept}.",
        120,
    )


def page(results: dict[str, Any]) -> str:
    """docs/architectures.md."""
    table = counts(results)
    head = ["| outcome | " + " | ".join(GROUPS.values()) + " | all |", "| --- |" + " --: |" * (len(GROUPS) + 1)]
    rows = []
    for name, meaning in OUTCOMES.items():
        row = [table[group][name] for group in GROUPS]
        if any(row):
            rows.append(f"| **{name}**: {meaning} | {' | '.join(map(str, row))} | {sum(row)} |")
    totals = [table[group].total() for group in GROUPS]
    rows.append(f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |")
    parts = ["\n".join(_section(group, results["findings"])) for group in GROUPS]
    return (
        "# Architectures\n\n"
        "Made by `make test-field`, which builds each class of transformers that generates text as a tiny random\n"
        "model ([tests/shrink.py](../tests/shrink.py)) and runs a prompt, single steps and `generate` on it, unpadded "
        "and\npadded, with images and token types if the class takes them ([tests/field.py](../tests/field.py)).\n"
        f"transformers {results['transformers']}, torch {results['torch']}. With lossless pages, logits match the "
        "untouched model to 1e-5\nof their standard deviation, and caches hold the same tokens; a captured step, "
        "tested in one use, matches to\n1e-4; `kvpass.remove` restores the model bit for bit. *8 bits* is the mean "
        "difference of logits with 8-bit pages,\nrelative to their standard deviation.\n\n"
        f"{quoted(results)}\n\n" + "\n".join([*head, *rows]) + "\n\n" + "\n\n".join(parts) + "\n"
    )


def _section(group: str, findings: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {GROUPS[group]}\n", "| class | outcome | packed | fused | 8 bits | images | why |"]
    lines.append("| --- | --- | --- | --: | --: | --- | --- |")
    for finding in findings:
        if finding["group"] != group:
            continue
        kind, fused, far = outcome(finding), finding.get("fused"), finding.get("eight_bits")
        packed = f"{finding['packed']} of {finding['layers']}" if finding.get("layers") else ""
        cells = [
            finding["name"], kind, packed, "" if fused is None else str(fused), "" if far is None else str(far),
            "yes" if finding.get("images") else "", _why(finding, kind),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _why(finding: dict[str, Any], kind: str) -> str:
    """The reasons, each cut to its first sentence."""
    refused, wrong = finding.get("refused", {}), finding.get("wrong", {})
    if kind == "not built":
        return _cell(next(iter(finding.get("untouched", {}).values()), ""))
    by_text: dict[str, list[str]] = {}
    for name, text in [*wrong.items(), *((name, text) for name, text in refused.items() if name != "apply")]:
        by_text.setdefault(_cell(text), []).append(name)
    reasons = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    reasons += [_cell(refused["apply"])] if "apply" in refused else []
    return "; ".join([*reasons, *map(_cell, finding.get("kept", [])), *map(_cell, finding.get("unfused", []))])


def _cell(text: str) -> str:
    """The first sentence of a reason, as the cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    first = text.split(". ")[0].rstrip(".")
    return first if len(first) <= LONGEST else first[:LONGEST].rsplit(" ", 1)[0] + " ..."


def merged(known: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The known findings for ``names``, updated by those in build/field. Empty fields and times are left out."""
    findings = {finding["name"]: finding for finding in known.get("findings", [])}
    for path in sorted(FOUND.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))["finding"]
        kept = {name: value for name, value in found.items() if name != "seconds" and value not in ({}, [], None)}
        findings[found["name"]] = kept
    ordered = sorted(findings.values(), key=lambda finding: (finding["group"], finding["name"]))
    versions = {package: importlib.metadata.version(package).partition("+")[0] for package in PACKAGES}
    return versions | dict(findings=[finding for finding in ordered if finding["name"] in names])


def with_block(text: str, results: dict[str, Any]) -> str:
    """The page with its generated block replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{quoted(results)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from shrink import architectures

    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = merged(known, set(map(str, architectures())))
    lines = ",\n  ".join(json.dumps(finding) for finding in results["findings"])
    versions = ", ".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in PACKAGES)
    RESULTS.write_text(f'{{{versions}, "findings": [\n  {lines}\n]}}\n', encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    for quoting in QUOTING:
        quoting.write_text(with_block(quoting.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(quoted(results))


if __name__ == "__main__":
    main()
