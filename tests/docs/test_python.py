"""Python that pages show can be read, and what it imports from Starpod is there."""

import ast
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import blocks, is_there, name_of, pages


def imported(text: str) -> list[tuple[str, str]]:
    """Modules of Starpod and the names that are imported from them. Raises SyntaxError."""
    tree = compile(text, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = [
        (node.module or "", each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    ]
    found += [(each.name, "") for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "starpod"]


WITH_PYTHON = [page for page in pages() if "```python\n" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_of_the_page(page: Path) -> None:
    missing = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            names = imported(textwrap.dedent(block.text))
            missing += [f"{module}: {name}" for module, name in names if not is_there(module, name)]
    assert missing == []
