"""Lists of fields in docstrings, ``name: what it is``, become tables of the reference."""

import re

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*): \S")


def sectioned(text: str, heading: str) -> str:
    """The docstring with each paragraph that is a list of ``name: description`` as a section of Google's style."""
    return "\n\n".join(_section(part, heading) for part in re.split(r"\n\n(?=\S)", text))


def _section(paragraph: str, heading: str) -> str:
    lines = paragraph.splitlines()
    if not all(line.startswith("    ") or ENTRY.match(line) for line in lines) or not ENTRY.match(lines[0]):
        return paragraph
    entries: list[list[str]] = []
    for line in lines:
        if found := ENTRY.match(line):
            names, description = found[1].split(", "), line[found.end(1) + 2 :]
            entries += [[f"{name}: {description}"] for name in names[:-1]]
            entries.append([f"{names[-1]}: {description}"])
        else:
            entries[-1].append(f"    {line.strip()}")
    return "\n".join([f"{heading}:", *(f"    {line}" for entry in entries for line in entry)])


class FieldLists(griffe.Extension):
    """Applies `sectioned` to classes and functions."""

    def on_class_instance(self, *, cls, **_) -> None:
        if cls.docstring:
            cls.docstring.value = sectioned(cls.docstring.value, "Attributes")

    def on_function_instance(self, *, func, **_) -> None:
        if func.docstring:
            func.docstring.value = sectioned(func.docstring.value, "Args")
