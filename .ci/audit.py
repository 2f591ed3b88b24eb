"""Check whether the locked dependencies are known to be vulnerable (`make audit`).

pip-audit asks PyPI about every pin of the lock, and reports no problem if it gets no answer, for example from an index
without that service. This program therefore counts the pins that were really checked. For the others, it checks that
the client's and the server's packages come from the index with exactly the hashes in the lock.

Exit status: 0 nothing known, 1 a vulnerability or another hash, 2 the call was wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints/requirements.lock"
SECONDS = 300


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: audit.py PIP_AUDIT", file=sys.stderr)
        return 2
    answers = ask(sys.argv[1])
    vulnerable = [answer for answer in answers if answer.get("vulns")]
    for answer in vulnerable:
        for flaw in answer["vulns"]:
            fixed = ", ".join(flaw["fix_versions"]) or "no version yet"
            print(f"{answer['name']} {answer['version']}: {flaw['id']}, mended in {fixed}")
    if vulnerable:
        return 1
    if answers:
        print(f"audit: nothing is known against {len(answers)} locked packages")
        return 0
    print("audit: no vulnerability service can be reached here; the hashes of the client and the server are checked")
    return check_hashes()


def ask(pip_audit: str) -> list[dict[str, object]]:
    """An answer for each package that the service knows; none where it cannot be reached."""
    command = [pip_audit, "--disable-pip", "--require-hashes", "--no-deps", "--progress-spinner", "off"]
    command += ["--timeout", "10", "--format", "json", "--requirement", str(LOCK)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        answers = json.loads(result.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        return []
    return [answer for answer in answers if "skip_reason" not in answer]


def check_hashes() -> int:
    """Downloads what a user of the client and the server installs directly; pip refuses another hash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    names = {normal(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in wanted}
    pins = re.findall(r"^\S+==[^\n]*(?:\n\s+--hash=[^\n]*)*", LOCK.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder, "requirements.txt")
        chosen.write_text("\n".join(pin for pin in pins if normal(pin.partition("==")[0]) in names))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", folder, "--requirement", str(chosen)]
        if subprocess.run(command).returncode:
            return 1
        print(f"audit: {len(list(Path(folder).glob('*.whl')))} packages have the hashes of the lock")
    return 0


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
