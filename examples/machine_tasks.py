"""Small tasks for a shell, as folders in Harbor's format: eight kinds at five levels.

    python examples/machine_tasks.py machine_tasks
    starpod serve harbor:machine_tasks

Each task has an instruction, files, a reference solution and a verifier. The same seed makes the same tasks.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORDS = "amber basil cedar delta ember fjord grove hazel iris jade karst lotus maple nectar olive pearl".split()
SERVICES = ("billing", "search", "mail", "login", "cart")
TEST = """#!/bin/sh
cd /app
if python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
TASK = """schema_version = "1.1"

[task]
name = "starpod/{name}"

[metadata]
category = "{kind}"
difficulty = "{level}"

[agent]
timeout_sec = 300

[verifier]
timeout_sec = 60

[environment]
build_timeout_sec = 600
cpus = 1
memory_mb = 512
network_mode = "no-network"
"""
CHECK = """import os, stat, subprocess, tarfile
from pathlib import Path

def read(name): return Path(name).read_text().strip()
def mode(name): return stat.S_IMODE(os.stat(name).st_mode)
# What the agent wrote runs as the agent's user, which cannot write the reward.
def run(*command):
    user, more = os.stat(".").st_uid, {"env": {**os.environ, "HOME": "/tmp"}, "text": True, "timeout": 20}
    result = subprocess.run(command, capture_output=True, user=user, group=user, extra_groups=[], **more)
    return result.stdout.strip()
def git(*command): return run("git", "-c", "safe.directory=*", *command)

"""


@dataclass(frozen=True, slots=True)
class ShellTask:
    """The parts of a task that differ from those of others."""

    instruction: str
    solution: str
    check: str
    """Python statements that fail unless the task is solved. They run in /app, after `CHECK`."""
    files: dict[str, str] = field(default_factory=dict)
    """Contents by path below /app."""
    prepare: str = "true"
    """A command that runs in /app while the image is built."""
    packages: tuple[str, ...] = ()
    """Debian packages, each with a program of its name."""


def find_word(rng: random.Random, level: int) -> ShellTask:
    word, *others = rng.sample(WORDS, len(WORDS))
    folders = ["", *(f"{folder}/" for folder in rng.sample(WORDS, level)), "deep/er/and/deeper/"][: level + 1]
    names = [f"{rng.choice(folders)}{name}-{number}.txt" for number in range(3 * level) for name in ("note", "list")]
    files = {name: " ".join(rng.choices(others, k=12)) + "\n" for name in names}
    target = rng.choice(names)
    files[target] += f"{word}\n"
    return ShellTask(
        f"One file in /app contains the word {word}. Write the path of that file, relative to /app, to answer.txt.",
        f"grep -rl {word} * > answer.txt",
        f'assert read("answer.txt").removeprefix("./").removeprefix("/app/") == {target!r}',
        files,
    )


def edit_settings(rng: random.Random, level: int) -> ShellTask:
    keys = rng.sample(WORDS, 6 + level)
    before = {key: str(rng.randrange(10, 100)) for key in keys}
    changes = {key: str(rng.randrange(1000, 10_000)) for key in rng.sample(keys, level)}
    wanted = [f"{key}={value}" for key, value in {**before, **changes}.items()]
    what = ", ".join(f"{key} to {value}" for key, value in changes.items())
    return ShellTask(
        f"In the file settings.ini, set {what}. Change nothing else.",
        "\n".join(f"sed -i 's/^{key}=.*/{key}={value}/' settings.ini" for key, value in changes.items()),
        f'assert read("settings.ini").splitlines() == {wanted}',
        {"settings.ini": "".join(f"{key}={value}\n" for key, value in before.items())},
    )


def fix_function(rng: random.Random, level: int) -> ShellTask:
    number = rng.randrange(3, 20)
    name, argument, wrong, right, call, result = (
        ("plus", "value", f"value - {number}", f"value + {number}", "plus(50)", 50 + number),
        ("largest", "values", "min(values)", "max(values)", f"largest([1, {number}, 2])", max(2, number)),
        ("total", "count", "sum(range(count))", "sum(range(count + 1))", f"total({number})", sum(range(number + 1))),
        ("mirrored", "text", "text == text[:-1]", "text == text[::-1]", "mirrored('abcba')", True),
        ("middle", "values", "values[len(values) // 2]", "sorted(values)[len(values) // 2]", "middle([9, 1, 5])", 5),
    )[level - 1]
    pattern = wrong.replace("[", r"\[")
    return ShellTask(
        f"The test in test_{name}.py fails. Fix {name}.py. Run the test with: python3 test_{name}.py",
        f"sed -i 's|return {pattern}|return {right}|' {name}.py\npython3 test_{name}.py",
        f'assert run("python3", "-c", "import {name}; print({name}.{call})") == "{result}"',
        {
            f"{name}.py": f"def {name}({argument}):\n    return {wrong}\n",
            f"test_{name}.py": f"from {name} import {name}\n\nassert {call} == {result}, {call}\nprint('passed')\n",
        },
    )


def count_errors(rng: random.Random, level: int) -> ShellTask:
    service = rng.choice(SERVICES)
    entries = [
        (rng.choices(("INFO", "WARN", "ERROR"), (6, 2, 2))[0], rng.choice(SERVICES)) for _ in range(20 * level**2)
    ]
    entries += [("ERROR", service)] * (len(entries) // 4)
    rng.shuffle(entries)
    lines = [f"{second:05d} {kind} {name} code={rng.randrange(900)}" for second, (kind, name) in enumerate(entries)]
    errors = Counter(name for kind, name in entries if kind == "ERROR")
    question, answer, command = (
        ("the number of lines with ERROR", errors.total(), "grep -c ERROR app.log"),
        ("the number of lines with WARN", [kind for kind, _ in entries].count("WARN"), "grep -c WARN app.log"),
        (f"the number of ERROR lines of {service}", errors[service], f"grep -c 'ERROR {service}' app.log"),
        (
            "the number of different services with an ERROR",
            len(errors),
            "grep ERROR app.log | cut -d ' ' -f 3 | sort -u | wc -l",
        ),
        (
            "the name of the service with most ERROR lines",
            service,
            "grep ERROR app.log | cut -d ' ' -f 3 | sort | uniq -c | sort -n | tail -1 | awk '{print $2}'",
        ),
    )[level - 1]
    return ShellTask(
        f"Look at the file app.log. Write {question} to answer.txt.",
        f"{command} > answer.txt",
        f'assert read("answer.txt") == "{answer}"',
        {"app.log": "\n".join(lines) + "\n"},
    )


def set_permissions(rng: random.Random, level: int) -> ShellTask:
    one, other = rng.sample(WORDS, 2)
    files = {
        f"bin/{one}.sh": "echo one\n",
        f"bin/{other}.sh": "echo other\n",
        f"data/{one}.key": "key\n",
        "data/a.txt": "a\n",
    }
    script, key = f"bin/{one}.sh", f"data/{one}.key"
    what, command, check = (
        (f"Make {script} executable.", f"chmod +x {script}", f'assert mode("{script}") & 0o100'),
        (f"Let only the owner read and write {key}.", f"chmod 600 {key}", f'assert mode("{key}") == 0o600'),
        (
            "Make all scripts in bin executable, and no file in data.",
            "chmod +x bin/*.sh",
            "assert all(mode(file) & 0o100 for file in Path('bin').glob('*.sh'))\n"
            "assert not any(mode(file) & 0o111 for file in Path('data').iterdir())",
        ),
        (
            "Take the right to write from group and others, for all files in bin and data. Change nothing else.",
            "chmod -R go-w bin data",
            "assert all(mode(file) == 0o644 for name in ('bin', 'data') for file in Path(name).iterdir())",
        ),
        (
            "Give bin and data the mode 750, and all files in them the mode 640.",
            "chmod 750 bin data\nchmod 640 bin/* data/*",
            "assert mode('bin') == mode('data') == 0o750\n"
            "assert all(mode(file) == 0o640 for name in ('bin', 'data') for file in Path(name).iterdir())",
        ),
    )[level - 1]
    return ShellTask(what, command, check, files, "chmod 666 bin/* data/* && chmod 755 bin data")


def use_git(rng: random.Random, level: int) -> ShellTask:
    name, word, other = rng.sample(WORDS, 3)
    commit = "git add -A && git commit -q -m"
    prepare = [
        "git init -q -b main . && git config user.name A && git config user.email a@example.org",
        f"{commit} first",
        f"echo {word} >> log.txt && {commit} 'add {word}'",
        f"echo {other} >> log.txt && {commit} 'add {other}'",
    ]
    what, command, check = (
        (f"Create a branch called {name}.", f"git branch {name}", f'assert git("rev-parse", "--verify", "{name}")'),
        (
            f"Commit the new file with the message {name}.",
            f"git add -A\ngit commit -m {name}",
            f'assert git("log", "-1", "--format=%s") == "{name}" and git("status", "--porcelain") == ""',
        ),
        (
            "The file readme.txt was deleted. Restore it from git.",
            "git checkout readme.txt",
            f'assert read("readme.txt") == "{name}"',
        ),
        (
            f"Write the full hash of the commit that added {word} to log.txt to answer.txt.",
            f"git log -S {word} --format=%H -- log.txt > answer.txt",
            'assert read("answer.txt") == git("rev-parse", "main~1")',
        ),
        (
            "Undo the last commit with a new commit, so that the history stays.",
            "git revert --no-edit HEAD",
            f'assert read("log.txt").split() == ["{word}"] and git("rev-list", "--count", "main") == "4"',
        ),
    )[level - 1]
    prepare += {2: ["echo new > new.txt"], 3: ["rm readme.txt"]}.get(level, [])
    return ShellTask(what, command, check, {"readme.txt": f"{name}\n"}, " && ".join(prepare), ("git",))


def handle_archives(rng: random.Random, level: int) -> ShellTask:
    folder, wanted, other = rng.sample(WORDS, 3)
    files = {f"{folder}/{wanted}.csv": f"{wanted}\n", f"{folder}/{other}.txt": f"{other}\n"}
    pack = f"tar -czf data.tar.gz {folder}"
    unpacked = f'assert read("{folder}/{wanted}.csv") == "{wanted}"'
    names = "sorted(member.name for member in tarfile.open('{}') if member.isfile())"
    what, command, check, prepare = (
        (
            f"Pack the folder {folder} into {folder}.tar.gz.",
            f"tar -czf {folder}.tar.gz {folder}",
            f"assert {names.format(folder + '.tar.gz')} == {sorted(files)}",
            "true",
        ),
        ("Unpack data.tar.gz here.", "tar -xzf data.tar.gz", unpacked, f"{pack} && rm -r {folder}"),
        (
            f"Unpack {folder}/{wanted}.csv from data.tar.gz, and no other file.",
            f"tar -xzf data.tar.gz {folder}/{wanted}.csv",
            f"{unpacked}\nassert os.listdir('{folder}') == ['{wanted}.csv']",
            f"{pack} && rm -r {folder}",
        ),
        (
            "The archive outer.tar contains another archive. Unpack both here.",
            "tar -xf outer.tar\ntar -xzf data.tar.gz",
            unpacked,
            f"{pack} && tar -cf outer.tar data.tar.gz && rm -r {folder} data.tar.gz",
        ),
        (
            f"Pack only the .csv files of the folder {folder} into tables.tar.gz, with the folder in their names.",
            f"tar -czf tables.tar.gz {folder}/*.csv",
            f"assert {names.format('tables.tar.gz')} == ['{folder}/{wanted}.csv']",
            "true",
        ),
    )[level - 1]
    return ShellTask(what, command, check, files, prepare)


def repair_script(rng: random.Random, level: int) -> ShellTask:
    word, other = rng.sample(WORDS, 2)
    wrong, right, script, output = (
        ("ehco", "echo", f"ehco {word}", word),
        ("WORD", "word", f"word={word}\necho $WORD", word),
        (
            "in 1 2;",
            "in 1 2 3;",
            f"for number in 1 2; do\n  echo {word} $number\ndone",
            f"{word} 1\n{word} 2\n{word} 3",
        ),
        ("$file", '"$file"', f'file="{word} {other}.txt"\ncat $file', other),
        (
            "-gt",
            "-lt",
            f"number=0\nwhile [ $number -gt 3 ]; do\n  number=$((number + 1))\ndone\necho {word} $number",
            f"{word} 3",
        ),
    )[level - 1]
    return ShellTask(
        f"The script run.sh should print {' and then '.join(output.splitlines())}, but it does not. Repair it.",
        f"sed -i 's/{wrong}/{right}/' run.sh" if level != 4 else f"sed -i 's/cat {wrong}/cat {right}/' run.sh",
        f'assert run("sh", "run.sh") == {output!r}',
        {"run.sh": f"{script}\n", f"{word} {other}.txt": f"{other}\n"},
    )


KINDS: dict[str, Callable[[random.Random, int], ShellTask]] = {
    "find": find_word,
    "edit": edit_settings,
    "fix": fix_function,
    "count": count_errors,
    "permissions": set_permissions,
    "git": use_git,
    "archive": handle_archives,
    "script": repair_script,
}


def write_task(task: ShellTask, folder: Path, kind: str, level: int, base: str) -> None:
    """Write a task's folder, in place of an older one."""
    shutil.rmtree(folder, ignore_errors=True)
    install = "".join(
        f"RUN command -v {name} || (apt-get update && apt-get install -y --no-install-recommends {name})\n"
        for name in task.packages
    )
    contents = {
        "instruction.md": f"{task.instruction}\n",
        "task.toml": TASK.format(name=folder.name, kind=kind, level=level),
        "environment/Dockerfile": f"FROM {base}\n{install}WORKDIR /app\nCOPY files/ /app/\nRUN {task.prepare}\n",
        "solution/solve.sh": f"#!/bin/bash\n{task.solution}\n",
        "tests/test.sh": TEST,
        "tests/check.py": f"{CHECK}{task.check}\n",
        **{f"environment/files/{name}": text for name, text in task.files.items()},
    }
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the tasks")
    parser.add_argument("--seed", type=int, default=0, help="names, numbers and files; default 0")
    parser.add_argument("--copies", type=int, default=1, help="tasks of each kind and level; default 1")
    parser.add_argument("--levels", type=int, default=5, choices=range(1, 6), help="highest level; default 5")
    parser.add_argument("--base", default="python:3.11-slim", help="base image, with Python; default python:3.11-slim")
    arguments = parser.parse_args()
    for kind, make in KINDS.items():
        for level in range(1, arguments.levels + 1):
            for copy in range(arguments.copies):
                task = make(random.Random(f"{arguments.seed} {kind} {level} {copy}"), level)
                name = f"{kind}-{level}" + (f"-{copy}" if arguments.copies > 1 else "")
                write_task(task, arguments.folder / name, kind, level, arguments.base)
    print(f"{len(KINDS) * arguments.levels * arguments.copies} tasks in {arguments.folder}")


if __name__ == "__main__":
    main()
