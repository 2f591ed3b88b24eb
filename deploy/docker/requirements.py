"""Prints what an image installs beside Starpod itself: the requirements of some of its extras, one per line.

    python requirements.py server webshop

They stand apart from pyproject.toml, so that the layer with the packages is built again when they change and only then.
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """The base requirements and those of the extras. Raises KeyError for an extra that there is not."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = set(project["dependencies"])
    for extra in extras:
        wanted |= set(project["optional-dependencies"][extra])
    return sorted(wanted)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
