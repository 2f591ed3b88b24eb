"""A newcomer follows the tutorials from top to bottom: each command prints what the page shows."""

import re
import sys

import pytest

from tests.docs.pages import blocks
from tests.docs.reader import Reader
from tests.support import ROOT
from tests.training import lines

ENVIRONMENT, MODEL = ("docs/tutorial-environment.md", "docs/tutorial-model.md")
NOT_HERE = re.compile(r"pip |vllm |starpod ui|starpod train .*(runs/courier_llm|qwen)")
"""Commands that install, go on until Ctrl-C, take half an hour, or need a GPU."""
PATIENT = (("starpod check", ("--timeout", "120")), ("starpod train courier.py", ("stop.minutes=30",)))
"""Arguments with which a command succeeds on a slow machine too."""


def follow(reader: Reader, page: str) -> None:
    """Save, run and compare every block of a page."""
    (reader.folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        if block.language == "text":
            reader.compare(block.text)
        elif block.language == "python":
            reader.python(block)
        elif not block.is_shell:
            assert reader.save(block), f"no test uses this block of {block.language}:\n{block.text}"
        else:
            for command in block.commands:
                if command.startswith("starpod serve"):
                    reader.serve(command)
                elif command.startswith("pytest"):
                    reader.run(sys.executable, "-m", *command.split(), "-p", "no:cacheprovider")
                elif command.startswith("cp "):
                    reader.run(*command.split())
                elif not NOT_HERE.match(command):
                    reader.starpod(command, *next((more for start, more in PATIENT if command.startswith(start)), ()))


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_an_environment_from_nothing_to_a_curve(reader: Reader) -> None:
    follow(reader, ENVIRONMENT)
    assert (reader.folder / "courier.py").read_text() == (ROOT / "examples" / "courier.py").read_text()
    first, *_, last = lines(reader.folder / "runs" / "courier" / "evaluations.jsonl")
    assert last["success"] > first["success"] + 0.3


@pytest.mark.smollm
@pytest.mark.timeout(1200)
def test_a_real_model_on_it(reader: Reader) -> None:
    """The model is named beside its figures, in the report too."""
    follow(reader, MODEL)
    assert "SmolLM2-135M-Instruct, dequantised from Q4_1" in (reader.folder / "runs/trial/report.html").read_text()
