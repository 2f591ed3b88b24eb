"""`starpod train --list` says of every job of the package what it does and how long it takes."""

from starpod.trainer.commands.jobs import GROUPS, list_jobs, read_jobs
from starpod.trainer.configuration.section import packaged_configs


def test_every_job_has_a_title_a_description_and_minutes() -> None:
    jobs, shown = read_jobs(), list_jobs()
    assert {*packaged_configs()} - {job.name for job in jobs} == {"tiny"}  # only a base of others
    for job in jobs:
        needs_gpu = job.model not in GROUPS
        assert job.description.endswith(".") and bool(job.minutes) != needs_gpu, job
        assert f"  {job.name:16}" in shown and job.title in shown
