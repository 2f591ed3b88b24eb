"""One wrong line in a function that much rests on fails a test: the suite guards what it says that it guards.

Each test runs in a process that has imported the packages of others, and nothing of Starpod yet: torch alone costs
seconds. A wrong line is planted as its module is imported, so that no file changes. Programs that a test starts know
nothing of it.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PACKAGES = ("google.protobuf.struct_pb2", "grpc.aio", "grpc_status.rpc_status", "hypothesis.strategies", "jinja2")
PACKAGES += ("numpy", "PIL.Image", "prometheus_client", "pydantic", "pytest_asyncio.plugin", "tokenizers", "torch")
PACKAGES += ("transformers.models.auto", "xdist.plugin", "yaml")

SERVER = "env_server/starpod/env_server"
CLIENT = "client/starpod/client"
TRAINER = "trainer/starpod/trainer"
GATEWAY = "tools/starpod/gateway"
LOAD = "tools/starpod/load"
ENVIRONMENTS = "environments/starpod/environments"

MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "GRPO: the mean of all groups": (
        f"{TRAINER}/algorithms/credit.py",
        "deviation_n = values_n - mean_g[index_n]",
        "deviation_n = values_n - values_n.mean()",
        "tests/trainer/algorithms/test_credit.py::test_golden_comparisons",
    ),
    "GAE: no discount of what comes later": (
        f"{TRAINER}/algorithms/gae.py",
        "delta_B + gamma * lam * advantage_B",
        "delta_B + lam * advantage_B",
        "tests/trainer/algorithms/test_gae.py::test_gae_steps_over_what_lies_between_sampled_tokens",
    ),
    "PPO: the same bound below and above": (
        f"{TRAINER}/algorithms/losses.py",
        "-ratio_BT.clamp(1 - low, 1 + high)",
        "-ratio_BT.clamp(1 - low, 1 + low)",
        "tests/trainer/algorithms/test_losses.py::test_the_clip_at_one_token",
    ),
    "loss: a mean over every row, empty ones too": (
        f"{TRAINER}/algorithms/losses.py",
        "rows = (length_B > 0).sum().clamp(min=1)",
        "rows = torch.tensor(len(length_B))",
        "tests/trainer/algorithms/test_losses.py::test_the_four_averages",
    ),
    "StarPO-S: groups by mean reward": (
        f"{TRAINER}/algorithms/filters.py",
        "scores = [group.reward_std for group in groups]",
        "scores = [sum(group.returns) for group in groups]",
        "tests/trainer/algorithms/test_filters.py::test_starpo_s_keeps_the_most_uncertain_quarter",
    ),
    "several environments: one filter for all": (
        f"{TRAINER}/algorithms/filters.py",
        "for peers in by_kind(groups).values() for group in",
        "for peers in [list(groups)] for group in",
        "tests/trainer/test_mixture.py::test_each_environment_has_a_quota_of_the_filter",
    ),
    "several policies: each learns from the turns of all agents": (
        f"{TRAINER}/data/episode.py",
        "turns=[turn for turn in episode.turns if turn.agent_id == agent]",
        "turns=list(episode.turns)",
        "tests/trainer/test_learner.py::test_the_turns_of_one_agent",
    ),
    "several environments: one whitening for all": (
        f"{TRAINER}/update.py",
        "rows.setdefault(episode.kind, []).append(row)",
        'rows.setdefault("", []).append(row)',
        "tests/trainer/test_mixture.py::test_the_rewards_of_one_environment_do_not_change_the_advantages_of_another",
    ),
    "token mask: prompts are trained on": (
        f"{TRAINER}/data/batch.py",
        "sample.sampled.extend([False] * len(turn.prompt))",
        "sample.sampled.extend([True] * len(turn.prompt))",
        "tests/trainer/data/test_batch.py::test_gradients_flow_back_to_their_tokens",
    ),
    "resume: random streams begin anew": (
        f"{TRAINER}/run/persistence.py",
        'restore_rng(state["rng"])',
        "restore_rng(capture_rng())",
        "tests/trainer/test_run.py::test_a_checkpoint_brings_back_the_random_streams",
    ),
    "replies: the end token is part of the text": (
        f"{TRAINER}/prompts/conversation.py",
        "if ids and ids[-1] in self.stop:",
        "if not ids:",
        "tests/trainer/prompts/test_conversation.py::test_a_prefill_is_fed_and_told_but_not_sampled",
    ),
    "replies: no end token in demonstrations": (
        f"{TRAINER}/prompts/conversation.py",
        "return [*self.encode(text.removeprefix(opening)), self.end]",
        "return [*self.encode(text.removeprefix(opening))]",
        "tests/trainer/prompts/test_conversation.py::test_a_prefill_is_fed_and_told_but_not_sampled",
    ),
    "a reply that was cut is not closed": (
        f"{TRAINER}/prompts/conversation.py",
        "return list(next_ids) if reply and reply[-1] == self.end else [self.end, *next_ids]",
        "return list(next_ids)",
        "tests/trainer/prompts/test_conversation.py::test_a_reply_that_was_cut_is_closed_outside_of_what_is_trained",
    ),
    "exactly once: a repeat with other actions gets the last reply": (
        f"{SERVER}/sessions/session.py",
        "and digest_actions(actions) == self.last_request",
        "and len(actions) > 0",
        "tests/env_server/sessions/test_calls.py::test_a_repeated_step_is_made_once",
    ),
    "exactly once: a step of an old epoch is made": (
        f"{SERVER}/sessions/session.py",
        "if epoch == self.epoch:",
        "if epoch <= self.epoch:",
        "tests/env_server/sessions/test_calls.py::test_a_repeated_reset_is_made_once",
    ),
    "snapshots: the digest is not looked at": (
        f"{SERVER}/sessions/calls.py",
        "snapshot.state) != snapshot.digest:",
        "snapshot.state) == b'':",
        "tests/env_server/sessions/test_calls.py::test_snapshots_are_checked",
    ),
    "tokens: any will do": (
        f"{SERVER}/transports/auth.py",
        "self._grants.get(_digest(token.strip()), self._nobody) if",
        "next(iter(self._grants.values()), self._nobody) if",
        "tests/env_server/test_server.py::test_tokens_keep_strangers_out_and_tenants_apart",
    ),
    "tokens: they never expire": (
        f"{SERVER}/transports/auth.py",
        "if self.revoked or time.time() >= self.expires:",
        "if self.revoked:",
        "tests/hostile/test_tokens.py::test_an_expired_token_ends_calls_and_streams",
    ),
    "tokens: a batch counts as one call": (
        f"{SERVER}/limits.py",
        "self._level -= count + size // BYTES_OF_A_CALL",
        "self._level -= 1",
        "tests/hostile/test_tokens.py::test_a_tenants_rate_is_what_it_says",
    ),
    "tokens: a group may exceed the limit of sessions": (
        f"{SERVER}/limits.py",
        "if limit and self.sessions + count > limit:",
        "if limit and self.sessions > limit:",
        "tests/hostile/test_tokens.py::test_sessions_of_a_token_are_bounded",
    ),
    "tokens: a stream more than the limit": (
        f"{SERVER}/limits.py",
        "if limit and self.streams >= limit:",
        "if limit and self.streams > limit:",
        "tests/hostile/test_tokens.py::test_streams_of_a_token_and_of_a_server_are_bounded",
    ),
    "seals: they do not bind the version": (
        f"{SERVER}/sessions/seal.py",
        'environment_id.encode(), version.encode(), b""))',
        'environment_id.encode(), b""))',
        "tests/hostile/test_snapshots.py::test_seals",
    ),
    "states: any number of levels is written": (
        f"{SERVER}/state.py",
        '    if depth < 0:\n        raise ValueError(f"it is nested',
        '    if depth < -9:\n        raise ValueError(f"it is nested',
        "tests/env_server/test_state.py::test_what_can_be_encoded_can_be_decoded_however_deep",
    ),
    "replay: another reward is the same episode": (
        f"{CLIENT}/history.py",
        "            transition.reward,\n",
        "            0.0,\n",
        "tests/client/test_recovery.py::test_a_replay_that_differs_in_any_field_has_diverged",
    ),
    "replay: another state is the same episode": (
        f"{CLIENT}/history.py",
        "if key and replayed_key and key != replayed_key:",
        "if key and replayed_key and not key:",
        "tests/client/test_history.py::test_the_check_accepts_what_was_recorded_and_nothing_else",
    ),
    "waits: they grow without bound": (
        f"{CLIENT}/transport.py",
        "self._next = min(span * 2, self.longest)",
        "self._next = span * 2",
        "tests/client/test_transport.py::test_waits_grow_and_stay_bounded",
    ),
    "versions: one comparator is enough": (
        f"{CLIENT}/versions.py",
        "fits &= _COMPARATORS",
        "fits |= _COMPARATORS",
        "tests/client/test_transport.py::test_comparators_order_versions_by_number",
    ),
    "pool: the fullest server takes the next session": (
        f"{CLIENT}/pool/placement.py",
        "return min(accepting_hosts, key",
        "return max(accepting_hosts, key",
        "tests/client/test_placement.py::test_small_fleets_are_filled_evenly",
    ),
    "gateway: every reply begins a sample": (
        f"{GATEWAY}/lineage.py",
        "draft.parent is None or draft.parent is not self._last",
        "draft.parent is not self",
        "tests/tools/gateway/test_lineage.py::test_dropped_thoughts_begin_a_sample_where_the_template_drops_them",
    ),
    "gateway: a reply goes on after its stop text": (
        f"{GATEWAY}/session.py",
        "return raw[:index], _count_tokens_up_to(template, tokens, raw[: index + len(stop)]), stop",
        "return raw[:index], len(tokens), stop",
        "tests/tools/gateway/test_lineage.py::test_a_stop_text_cuts_the_reply_where_it_ends",
    ),
    "gateway: all sessions have one random stream": (
        f"{GATEWAY}/session.py",
        'seed=derive(sampler.seed, "gateway", self.stream, key.hex())',
        'seed=derive(sampler.seed, "gateway", key.hex())',
        "tests/tools/gateway/test_lineage.py::test_sampling_is_the_gateways_and_streams_are_the_sessions",
    ),
    "load: what was not measured is met": (
        f"{LOAD}/requirements.py",
        "return value is not None and not math.isnan(value) and bool(",
        "return value is None or bool(",
        "tests/tools/load/test_thresholds.py::test_what_was_not_measured_is_not_met_and_said_so",
    ),
    "load: arrivals of all generators at once": (
        f"{LOAD}/plan.py",
        "            number += places\n",
        "            number += 1\n",
        "tests/tools/load/test_schedule.py::test_constant_arrivals_of_all_generators_are_one_clock",
    ),
    "load: fewer steps per second are better": (
        f"{LOAD}/report.py",
        'return "better" if (change > 0) == (name == "steps_per_second") else "worse"',
        'return "better" if change < 0 else "worse"',
        "tests/tools/load/test_comparison.py::test_twice_as_slow_is_worse_and_the_other_way_round_better",
    ),
    "load: latencies are cut to milliseconds": (
        f"{LOAD}/measurements.py",
        "np.rint(np.asarray(seconds, np.float64) * 1e6)",
        "1e3 * np.rint(np.asarray(seconds, np.float64) * 1e3)",
        "tests/tools/load/test_histogram.py::test_percentiles_are_those_of_hdrhistogram",
    ),
    "check: a bug is a failure of each requirement that meets it": (
        "tools/starpod/check/runner.py",
        'status, message = "skipped", f"stopped by the bug',
        'message = f"stopped by the bug',
        "tests/tools/check/test_bugs.py::test_a_server_that_raises_is_one_failure",
    ),
    "check: two requirements with one number": (
        "tools/starpod/check/suite/fork.py",
        '"F-03", "A fork and',
        '"F-02", "A fork and',
        "tests/tools/check/test_cli.py::test_ids_ascend_within_their_level_and_titles_are_one_sentence",
    ),
    "lake: slips to one side only": (
        f"{ENVIRONMENTS}/frozen_lake/environment.py",
        "else targets[2]",
        "else targets[0]",
        "tests/environments/frozen_lake/test_frozen_lake.py::test_transitions_are_gymnasiums",
    ),
    "Sokoban: a box off its target costs nothing": (
        f"{ENVIRONMENTS}/sokoban/environment.py",
        "reward += options.box_off_reward",
        "reward += 0",
        "tests/environments/sokoban/test_sokoban.py::test_on_off_and_blocked",
    ),
    "shop: a price at the cap is too high": (
        f"{ENVIRONMENTS}/webshop/shop/reward.py",
        "r_price = price <= goal.price_upper",
        "r_price = price < goal.price_upper",
        "tests/environments/webshop/shop/test_reward.py::test_whole_rewards_pinned_by_the_originals_tests",
    ),
    "Sudoku: a cell is paid again": (
        f"{ENVIRONMENTS}/sudoku/environment.py",
        "return reward if old_reward is None else max(reward - old_reward, 0.0)",
        "return reward",
        "tests/environments/sudoku/test_sudoku.py::test_a_digit_pays_once_its_clash_is_cleared",
    ),
    "2048: the target is paid again and again": (
        f"{ENVIRONMENTS}/game_2048/environment.py",
        "reward = float(has_reached and not had_reached)",
        "reward = float(has_reached)",
        "tests/environments/game_2048/test_game_2048.py::test_the_target_is_paid_once_where_it_alone_is_paid",
    ),
    "tic-tac-toe: a lost game costs nothing": (
        f"{ENVIRONMENTS}/tic_tac_toe/environment.py",
        "return self._end(-1.0)",
        "return self._end(0.0)",
        "tests/environments/tic_tac_toe/test_tic_tac_toe.py::test_against_an_opponent_there_is_one_agent_and_a_loss_is_fined",
    ),
}
"""What would be wrong -> the file, the line in it, the wrong one, and a fast test that has to notice."""


class Failures:
    """The tests that failed, as a plugin of pytest. A failure to set one up is none."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.names.append(report.nodeid)


def look_for(folder: str, mutation: tuple[str, str, str, str]) -> str:
    """Run the test with the wrong line in its place. Return what pytest wrote if the test passed, and else nothing."""
    file, line, wrong, test = mutation
    path, read = ROOT / file, SourceFileLoader.get_code
    source = path.read_text()
    if source.count(line) != 1:
        return f"{file} no longer holds {line!r} once: adapt the table"

    def read_wrong(loader: SourceFileLoader, name: str) -> Any:
        if Path(loader.path) != path:
            return read(loader, name)
        return loader.source_to_code(source.replace(line, wrong).encode(), str(path))  # type: ignore[arg-type]

    SourceFileLoader.get_code = read_wrong  # type: ignore[method-assign, assignment]
    failures, written = Failures(), io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        options = [
            "-q",
            "-x",
            "--tb=line",
            "--disable-warnings",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            f"--basetemp={folder}/{os.getpid()}",
        ]
        pytest.main([*options, "--timeout=60", test], plugins=[failures])
    return "" if failures.names else written.getvalue()[-2000:] or "no output"


def main() -> None:
    """Plant the faults with these titles, or all, two at a time. The exit status is 1 if a test misses one."""
    from starpod.env_server.temporary import own_folder  # not in the processes that plant faults

    titles = sys.argv[1:] or list(MUTATIONS)
    context = multiprocessing.get_context("forkserver")
    # If this process is killed, the next one removes its sockets.
    multiprocessing.current_process()._config["tempdir"] = str(own_folder())  # type: ignore[attr-defined]
    context.set_forkserver_preload(list(PACKAGES))
    missed = 0
    with context.Pool(2, maxtasksperchild=1) as processes, tempfile.TemporaryDirectory() as folder:
        written = processes.imap(partial(look_for, folder), [MUTATIONS[title] for title in titles])
        for title, said in zip(titles, written, strict=True):
            print(f"missed: {title}\n{said}" if said else f"caught: {title}", flush=True)
            missed += bool(said)
    sys.exit(missed > 0)


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_each_wrong_line_fails_a_test() -> None:
    command = [sys.executable, "-m", "tests.test_mutations"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
