"""Random SIGKILLs of a gateway, its engine and environment servers, while agents with OpenAI's client play.

    python -m benchmarks.serving.gateway_kills [--kills 300] [--iterations 8] [--json FILE]

There are three cases: a server that imitates vLLM; the torch engine, which dies with the gateway; and a training run
whose agents are programs (collect.agent.command). In the third case, the trainer contains gateway and engine, and is
killed once per iteration. The agents' observations and the written files are compared with the same episodes without
kills. The programs are not killed: if an agent dies, its episode is lost and reported as failed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.results import write_result
from tests.support import ROOT
from tests.tools.gateway.kills import play_among_kills, save_model, trained_among_kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of each engine")
    parser.add_argument("--iterations", type=int, default=8, help="of the training run")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/gateway_kills.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in ("vllm_remote", "torch", "collect.agent.command"):
        start = perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name == "collect.agent.command":
                result = trained_among_kills(folder, arguments.iterations)
            else:
                model = save_model(folder / "model")
                result = asyncio.run(play_among_kills(folder, model, arguments.kills, name))
        results[name] = {**result, "minutes": round((perf_counter() - start) / 60, 1)}
        print(name, results[name], flush=True)
    write_result(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
