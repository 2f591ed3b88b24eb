"""Hooks of `make docs`: README.md is the first page, and public names without a docstring are errors."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\]\[]|\[[^\]]*\])*)\]\((?P<path>[^)\s:#]+)(?:#[^)\s]*)?\)")
log = get_plugin_logger("starpod")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by their text and the file's name: the site holds no copy of them."""
    here = ROOT / "docs" / Path(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        for base in (here, ROOT) if page.file.src_uri == "index.md" else (here,):
            target = (base / link["path"]).resolve()
            if target.exists() and not (target.is_file() and target.is_relative_to(ROOT / "docs")):
                name = str(target.relative_to(ROOT))
                return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"
        return link[0]

    return LINK.sub(named, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of public names without a docstring on the reference's pages; `--strict` makes that an error."""
    paths = config.plugins["mkdocstrings"].config.handlers["python"]["paths"]
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for module in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            loaded = griffe.load(module, search_paths=[str(ROOT / path) for path in paths], resolve_aliases=True)
            for name in undocumented(loaded, whole=loaded.exports is None):
                log.warning(f"{name} is public and has no docstring")


def undocumented(parent: Any, *, whole: bool) -> list[str]:
    """Return the paths of public names in a module or class that have no docstring.

    A field may also be documented in its class's docstring. Attributes assigned in `__init__` are not checked, because
    they belong to the implementation.

    Args:
        parent: griffe's module or class.
        whole: Whether to skip imported names: true for classes, and for modules without `__all__`.
    """
    class_text = parent.docstring.value if parent.has_docstring and parent.is_class else ""
    init = parent.members.get("__init__")
    inside = range(init.lineno, init.endlineno + 1) if init and init.is_function else range(0)
    missing = []
    for member in parent.members.values():
        special = member.name.startswith("__")
        if (
            not member.is_public
            or special
            or (member.is_alias and whole)
            or member.is_module
            or member.lineno in inside
        ):
            continue
        member = member.final_target if member.is_alias else member
        if not member.path.startswith("starpod."):
            continue
        if not member.has_docstring and not re.search(rf"\b{member.name}\b.*:|`{member.name}`", class_text):
            missing.append(member.path)
        if member.is_class:
            missing += undocumented(member, whole=True)
    return missing
