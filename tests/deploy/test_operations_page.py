"""docs/operations.md: the commands that it gives exist, and what they name is there."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml

from starpod.cli import main
from tests.deploy.files import DEPLOY
from tests.deploy.manifest_checks import call
from tests.deploy.manifests import KUBERNETES, RENDERED, containers, find, of_kind, read
from tests.deploy.test_files import exported
from tests.support import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
CLUSTER = PAGE[PAGE.index("## In a cluster") : PAGE.index("## Training")]
CODE = [
    re.sub(r"\s*\\\n\s*", " ", block).strip()
    for fenced, inline in re.findall(r"^```\n(.*?)^```|`([^`]+)`", CLUSTER, re.MULTILINE | re.DOTALL)
    for block in (fenced.replace("\\\n", " ").splitlines() if fenced else [inline.replace("\n", " ")])
]
SUBCOMMANDS = {
    "helm": {"upgrade", "uninstall", "rollback"},
    "kubectl": {"rollout", "logs", "scale", "drain", "get", "exec", "describe", "run"},
    "docker": {"build", "push"},
}


def commands(program: str) -> list[list[str]]:
    return [shlex.split(line) for line in CODE if re.match(rf"{program} \S", line)]


@pytest.mark.parametrize("program", SUBCOMMANDS)
def test_programs_have_these_commands(program: str) -> None:
    assert len(commands(program)) > 1
    for words in commands(program):
        rest = words[3:] if words[1] == "--namespace" else words[1:]
        assert rest[0] in SUBCOMMANDS[program], words


def test_starpod_has_the_commands_and_options_that_run_in_the_cluster() -> None:
    inside = [words[words.index("--") + ("exec" in words) + 1 :] for words in commands("kubectl") if "--" in words]
    assert {words[0] for words in inside} == {"check", "load"}
    for words in inside:
        try:
            call(*words)
        except click.ClickException as error:
            pytest.fail(f"{words}: {error.format_message()}")


def test_the_image_of_environments_has_what_it_is_run_with() -> None:
    (run,) = (words for words in commands("kubectl") if "run" in words)
    assert "/starpod-environment:" in run[run.index("--image") + 1]
    dockerfile = (DEPLOY / "docker" / "environment.Dockerfile").read_text()
    (extras,) = re.findall(r"requirements\.py (.+) > environment\.txt", dockerfile)
    assert main.SUBCOMMANDS[run[run.index("--") + 1]].extra in extras.split()
    # Who lacks this label is not let in.
    assert run[run.index("--labels") + 1] == "starpod/client=true"


def test_files_and_values_are_there() -> None:
    for words in commands("helm") + commands("docker"):
        for word in words:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), word
    known = yaml.safe_load((KUBERNETES / "chart" / "values.yaml").read_text())
    for words in commands("helm"):
        for assignment in (words[place + 1] for place, word in enumerate(words) if word == "--set"):
            section, key = assignment.partition("=")[0].split(".")[:2]
            assert section == "fleets" or key in known[section], assignment


def test_images_are_built_and_pushed_before_they_run() -> None:
    built: set[str] = set()
    pushed: set[str] = set()
    installed = []
    for words in (shlex.split(line) for line in CODE if re.match("(docker|helm) ", line)):
        value = dict(pairwise(words))
        if words[1] == "build":
            assert f" AS {value['--target']}\n" in (ROOT / value["-f"]).read_text()
            built.add(value["-t"])
        elif words[1] == "push":
            pushed.add(words[2])
        elif "--values" in value:
            installed.append(Path(value["--values"]).stem)
            registry = value["--set"].removeprefix("image.registry=")
            run = {registry + container["image"] for _, container, _ in containers(read(installed[-1]))}
            assert run <= built & pushed
    assert installed == ["environments", "trainer"]


def test_deployments_and_jobs_are_those_of_the_examples() -> None:
    names = {
        f"{manifest['kind'].lower()}/{manifest['metadata']['name']}"
        for name in RENDERED
        for manifest in of_kind(read(name), "Deployment", "Job")
    }
    named = {word for words in commands("kubectl") for word in words if re.match("(deployment|job)/", word)}
    assert named and named <= names
    services = {manifest["metadata"]["name"] for name in RENDERED for manifest in of_kind(read(name), "Service")}
    assert set(re.findall(r"dns:///([a-z-]+):50051", CLUSTER)) <= services


def test_metrics_are_exported_and_labelled() -> None:
    asked = set(re.findall(r"\bstarpod_\w+", CLUSTER))
    assert asked and asked <= set(exported())
    (fleet,) = set(re.findall(r'fleet="([\w-]+)"', CLUSTER))
    assert any(m["metadata"].get("labels", {}).get("starpod/fleet") == fleet for m in read("versions"))


def test_every_alert_is_explained() -> None:
    (group,) = find(read("environments"), "PrometheusRule")["spec"]["groups"]
    explained = re.findall(r"^\| `(\w+)` \|", CLUSTER[CLUSTER.index("### What to alarm on") :], re.MULTILINE)
    assert set(explained) == {rule["alert"] for rule in group["rules"]}
