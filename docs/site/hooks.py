"""Pages of the site that stand elsewhere in the repository, and links of its pages to other files.

A link that leads out of docs/ becomes one to a page of the site. What is no page of its own, such as a test, becomes
one that shows the file. A link to a file that is not there is left alone, and fails the strict build.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # in the repository -> on the site
    "README.md": "quick-start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
QUICK_START = "Install", "Which models", "Limits"  # sections of the README that have no longer page of their own
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)((?:#[^)\s]*)?(?=\)))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def origin(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return {page: path for path, page in PAGES.items()}.get(uri, f"docs/{uri}")


def target(path: str, link: str) -> str:
    """The page of the site for ``link`` in the file ``path`` of the repository; paths are relative to their roots."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if found in PAGES:
        return PAGES[found]
    if found.startswith("docs/") and not found.endswith((".py", ".json")):
        return found.removeprefix("docs/")
    return f"source/{found}.md" if (ROOT / found).is_file() else found


def text_of(uri: str) -> str:
    """The Markdown of a page as it stands in the repository."""
    text = (ROOT / origin(uri)).read_text(encoding="utf-8")
    return quick_start(text) if uri == PAGES["README.md"] else text


def quick_start(readme: str) -> str:
    """The introduction of the README, and what it says of installing and of limits."""
    introduction, *sections = re.split(r"^## ", readme, flags=re.MULTILINE)
    kept = {section.partition("\n")[0]: section for section in sections}
    introduction = introduction.replace("# kvpass", "# Quick start", 1)
    return introduction + "".join(f"## {kept[heading]}" for heading in QUICK_START)


def shown(path: str) -> str:
    """A page that shows a file of the repository."""
    language = {".py": "python", ".toml": "toml", ".yml": "yaml"}.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def on_files(files, config):
    """Add the pages that are not in docs/."""
    for uri in PAGES.values():
        files.append(File.generated(config, uri, content=text_of(uri)))
    linked = set()
    for file in files.documentation_pages():
        linked |= {target(origin(file.src_uri), link) for link, _ in LINK.findall(FENCE.sub("", text_of(file.src_uri)))}
    for uri in sorted(linked):
        if uri.startswith("source/"):
            path = uri.removeprefix("source/").removesuffix(".md")
            files.append(File.generated(config, uri, content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links lead to pages of the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        place = target(origin(uri), link[1])
        return os.path.relpath(place, posixpath.dirname(uri) or ".").replace(os.sep, "/") + link[2]

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)
