"""`starpod train --list` says of every job of the package what it does and how long it takes."""

import re

from starpod.trainer.commands.jobs import GROUPS, list_jobs
from starpod.trainer.configuration.section import packaged_configs


def test_every_job_has_a_title_a_description_and_minutes() -> None:
    jobs, needs_gpu = list_jobs().split(GROUPS[""])
    entry = r"^  (\w+) +{}\S.*\n {{28}}\S.*\.$"  # a title, and below it a description that is a sentence
    names = re.findall(entry.format(r"~?\d+ min  "), jobs, re.MULTILINE)
    names += re.findall(entry.format(""), needs_gpu, re.MULTILINE)
    assert {*packaged_configs()} - {*names} == {"tiny"}  # only a base of others
