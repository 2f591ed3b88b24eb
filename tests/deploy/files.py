"""Files of deploy/ that several tests read."""

import tomllib
from typing import Any

import yaml

from tests.support import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def services(file: str = "docker-compose.yml") -> dict[str, dict[str, Any]]:
    """The services of a compose file at the top, as they are written."""
    return dict(yaml.safe_load((ROOT / file).read_text())["services"])
