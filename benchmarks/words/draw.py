"""Draw docstrings and sentences of the documentation for a reader who has not seen the code.

The reader marks each text that has to be read twice; the goal is at most 3 of 100. Draw again with another seed after
the marked ones were rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPONENTS = ("client", "env_server", "environments", "tools", "trainer")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of the sources, including docstrings of fields."""
    for component in COMPONENTS:
        for file in sorted((ROOT / component / "starpod").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def sentences() -> Iterator[tuple[str, str]]:
    """Yield the page and the text of every sentence of README.md and docs/, without tables and code."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-*] )", prose))
        for paragraph in paragraphs:
            if not paragraph.startswith(("#", "|", "!", "<")):
                # Code and names such as Dr. GRPO are no ends of sentences.
                whole = re.sub(r"`[^`]*`|\bDr\. ", lambda match: match[0].replace(" ", "\0"), paragraph)
                for sentence in re.split(r"(?<=[.:?]) (?=[A-Z`*])", whole):
                    if len(sentence.split()) > 3:
                        yield str(page.relative_to(ROOT)), sentence.replace("\0", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--docstrings", type=int, default=60, help="number of docstrings")
    parser.add_argument("--sentences", type=int, default=40, help="number of sentences of pages")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    texts = rng.sample(list(docstrings()), arguments.docstrings) + rng.sample(list(sentences()), arguments.sentences)
    for number, (source, text) in enumerate(texts, 1):
        print(f"{number}. {source}\n   {text.strip()}\n")


if __name__ == "__main__":
    main()
