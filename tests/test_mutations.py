"""A fault in a function that much rests on fails a test: the suite guards what it says that it guards.

Each test runs in a process that has imported the packages of others, and nothing of Starpod yet: torch alone costs
seconds. A fault is planted there by the function's name, whatever its source. Programs that a test starts know nothing
of it.
"""

import contextlib
import io
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest

from tests.support import ROOT

Right = Callable[..., Any]
PACKAGES = ("google.protobuf.struct_pb2", "grpc.aio", "grpc_status.rpc_status", "hypothesis.strategies", "jinja2")
PACKAGES += ("numpy", "PIL.Image", "prometheus_client", "pydantic", "pytest_asyncio.plugin", "tokenizers", "torch")
PACKAGES += ("transformers.models.auto", "xdist.plugin", "yaml")

SERVER = "starpod.env_server"
CLIENT = "starpod.client"
TRAINER = "starpod.trainer"
GATEWAY = "starpod.gateway"
LOAD = "starpod.load"
ENVIRONMENTS = "starpod.environments"


# Wrong functions that are more than an expression. Each gets the right function first.


def average_over_empty_rows(right: Right, mask: Any, average: str, **rest: Any) -> Any:
    weights = right(mask, average, **rest)
    return weights * mask.any(1).double().mean() if average.startswith("seq") else weights


def train_on_prompts(right: Right, episode: Any) -> Any:
    samples = right(episode)
    for sample in samples:
        sample.sampled[:] = [True] * len(sample.sampled)
    return samples


def believe_the_digest(right: Right, calls: Any, table: Any, request: Any) -> Any:
    snapshot, module = request.snapshot, sys.modules[f"{SERVER}.sessions.creation"]
    snapshot.digest = module.digest_snapshot(snapshot.environment_id, snapshot.environment_version, snapshot.state)
    return right(calls, table, request)


def forget_the_reward(right: Right, transition: Any) -> Any:
    unpaid = type(transition)()
    unpaid.CopyFrom(transition)
    unpaid.reward = 0.0
    return right(unpaid)


def double_without_end(right: Right, backoff: Any, *arguments: Any) -> Any:
    span = backoff._next
    seconds = right(backoff, *arguments)
    backoff._next = 2 * span
    return seconds


def slip_to_one_side(right: Right, lake: Any, *arguments: Any, **rest: Any) -> None:
    right(lake, *arguments, **rest)
    lake.before, lake.straight = lake.before + 1 - lake.straight, 1.0


def push_off_for_nothing(right: Right, sokoban: Any, action: str) -> Any:
    solved = len(sokoban.boxes & sokoban.board.targets)
    outcome = right(sokoban, action)
    is_off = len(sokoban.boxes & sokoban.board.targets) < solved
    return replace(outcome, reward=outcome.reward - sokoban.options.box_off_reward) if is_off else outcome


def pay_the_target_again(right: Right, game: Any, action: str) -> Any:
    outcome = right(game, action)
    return replace(outcome, reward=float(game._reached())) if game.options.reward == "target" else outcome


MUTATIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "GRPO: the mean of all groups": (
        f"{TRAINER}.algorithms.credit:group_statistics",
        lambda right, values_n, groups_n: right(values_n, groups_n * 0),
        "tests/trainer/algorithms/test_credit.py::test_golden_comparisons",
    ),
    "GAE: no discount of what comes later": (
        f"{TRAINER}.algorithms.gae:gae",
        lambda right, *items, gamma=1.0, lam=1.0, **rest: right(*items, gamma=gamma, lam=lam / gamma, **rest),
        "tests/trainer/algorithms/test_gae.py::test_gae_skips_tokens_between_sampled_tokens",
    ),
    "PPO: the same bound below and above": (
        f"{TRAINER}.algorithms.losses:clipped_loss",
        lambda right, *items, low, high, **rest: right(*items, low=low, high=low, **rest),
        "tests/trainer/algorithms/test_losses.py::test_the_clip_at_one_token",
    ),
    "loss: a mean over every row, empty ones too": (
        f"{TRAINER}.algorithms.losses:token_weights",
        average_over_empty_rows,
        "tests/trainer/algorithms/test_losses.py::test_the_four_averages",
    ),
    "StarPO-S: groups by mean reward": (
        f"{TRAINER}.data.group:Group.reward_std",
        lambda right, group: sum(group.returns),
        "tests/trainer/algorithms/test_filters.py::test_starpo_s_keeps_the_most_uncertain_quarter",
    ),
    "several environments: one filter for all": (
        f"{TRAINER}.data.group:by_kind",
        lambda right, groups: {"": list(groups)},
        "tests/trainer/rollout/test_mixture.py::test_each_environment_has_a_quota_of_the_filter",
    ),
    "several policies: each learns from the turns of all agents": (
        f"{TRAINER}.data.episode:turns_of",
        lambda right, episode, agent: episode,
        "tests/trainer/test_learner.py::test_the_turns_of_one_agent",
    ),
    "several environments: one whitening for all": (
        f"{TRAINER}.algorithms.advantages:advantages_by_kind",
        lambda right, *items: sys.modules[f"{TRAINER}.algorithms.advantages"].compute_advantages(*items[:2]),
        "tests/trainer/rollout/test_mixture.py::test_the_rewards_of_one_environment_do_not_change_the_advantages_of_another",
    ),
    "token mask: prompts are trained on": (
        f"{TRAINER}.data.batch:samples_of",
        train_on_prompts,
        "tests/trainer/data/test_batch.py::test_gradients_flow_back_to_their_tokens",
    ),
    "resume: random streams begin anew": (
        f"{TRAINER}.run.persistence:restore_rng",
        lambda right, state: None,
        "tests/trainer/run/test_run.py::test_a_checkpoint_brings_back_the_random_streams",
    ),
    "replies: the end token is part of the text": (
        f"{TRAINER}.prompts.conversation:Template.decode",
        lambda right, template, reply: right(template, [*reply, template.end]),
        "tests/trainer/prompts/test_conversation.py::test_a_prefill_is_fed_and_reported_but_not_sampled",
    ),
    "replies: no end token in demonstrations": (
        f"{TRAINER}.prompts.conversation:Template.encode_reply",
        lambda right, template, text: right(template, text)[:-1],
        "tests/trainer/prompts/test_conversation.py::test_a_prefill_is_fed_and_reported_but_not_sampled",
    ),
    "a reply that was cut is not closed": (
        f"{TRAINER}.prompts.conversation:Template._close_reply",
        lambda right, template, reply, next_ids: list(next_ids),
        "tests/trainer/prompts/test_conversation.py::test_a_reply_that_was_cut_is_closed_outside_of_what_is_trained",
    ),
    "exactly once: a repeat with other actions gets the last reply": (
        f"{SERVER}.sessions.session:digest_actions",
        lambda right, actions: b"",
        "tests/env_server/sessions/test_calls.py::test_a_repeated_step_is_made_once",
    ),
    "exactly once: a step of an old epoch is made": (
        f"{SERVER}.sessions.session:ServedSession.earlier_reply",
        lambda right, session, epoch, *rest: right(session, max(epoch, session.epoch), *rest),
        "tests/env_server/sessions/test_calls.py::test_a_repeated_reset_is_made_once",
    ),
    "snapshots: the digest is not looked at": (
        f"{SERVER}.sessions.creation:SessionCreation.restore",
        believe_the_digest,
        "tests/env_server/sessions/test_calls.py::test_snapshots_are_checked",
    ),
    "tokens: any will do": (
        f"{SERVER}.transports.auth:Authenticator.identify",
        lambda right, tokens, metadata: next(iter(tokens._grants.values()), tokens._nobody),
        "tests/env_server/server/test_server.py::test_tokens_keep_strangers_out_and_tenants_apart",
    ),
    "tokens: they never expire": (
        f"{SERVER}.transports.auth:Grant.check",
        lambda right, grant: right(grant) if grant.revoked else None,
        "tests/hostile/test_tokens.py::test_an_expired_token_ends_calls_and_streams",
    ),
    "tokens: a batch counts as one call": (
        f"{SERVER}.operation.tenants:Tenant.take_calls",
        lambda right, tenant, count=1, size=0: right(tenant),
        "tests/hostile/test_tokens.py::test_a_tenants_rate_is_what_it_says",
    ),
    "tokens: a group may exceed the limit of sessions": (
        f"{SERVER}.operation.tenants:Tenant.check_sessions",
        lambda right, tenant, count: right(tenant, 1),
        "tests/hostile/test_tokens.py::test_sessions_of_a_token_are_bounded",
    ),
    "tokens: streams are not counted": (
        f"{SERVER}.operation.tenants:Tenant.stream",
        lambda right, tenant: contextlib.nullcontext(),
        "tests/hostile/test_tokens.py::test_streams_of_a_token_and_of_a_server_are_bounded",
    ),
    "seals: they do not bind the version": (
        f"{SERVER}.sessions.seal:_tag",
        lambda right, key, environment_id, version, state: right(key, environment_id, "", state),
        "tests/hostile/test_snapshots.py::test_seals",
    ),
    "states: any number of levels is written": (
        f"{SERVER}.episodes.state:_pack",
        lambda right, value, depth: right(value, depth + 9),
        "tests/env_server/episodes/test_state.py::test_what_can_be_encoded_can_be_decoded_however_deep",
    ),
    "replay: another reward is the same episode": (
        f"{CLIENT}.history:step_reply",
        forget_the_reward,
        "tests/client/test_recovery.py::test_a_replay_that_differs_in_any_field_has_diverged",
    ),
    "replay: another state is the same episode": (
        f"{CLIENT}.history:History.check",
        lambda right, history, step, reply: right(history, step, ("", reply[1])),
        "tests/client/test_history.py::test_the_check_accepts_what_was_recorded_and_nothing_else",
    ),
    "waits: they grow without bound": (
        f"{CLIENT}.transport:Backoff.wait",
        double_without_end,
        "tests/client/test_transport.py::test_waits_grow_and_stay_bounded",
    ),
    "versions: one comparator is enough": (
        f"{CLIENT}.versions:satisfies",
        lambda right, version, terms: any(right(version, term) for term in terms.split(",")),
        "tests/client/test_transport.py::test_comparators_order_versions_by_number",
    ),
    "pool: the fullest server takes the next session": (
        f"{CLIENT}.pool.placement:least_loaded",
        lambda right, hosts: max(hosts, key=lambda host: host[0].load),
        "tests/client/test_fleet.py::test_step_many_over_several_servers_and_sessions_at_once",
    ),
    "gateway: every reply begins a sample": (
        f"{GATEWAY}.lineage:Lineage.node",
        lambda right, *items: (right(*items)[0], True),
        "tests/tools/gateway/test_lineage.py::test_dropped_thoughts_begin_a_sample_where_the_template_drops_them",
    ),
    "gateway: a reply continues after its stop text": (
        f"{TRAINER}.prompts.template:Template.cut",
        lambda right, template, tokens, stops: (right(template, tokens, stops)[0], len(tokens), [*stops, ""][0]),
        "tests/tools/gateway/test_lineage.py::test_a_stop_text_cuts_the_reply_where_it_ends",
    ),
    "gateway: all sessions have one random stream": (
        f"{GATEWAY}.session:derive",
        lambda right, seed, name, *rest: right(seed, name, *rest[1 if name == "gateway" else 0 :]),
        "tests/tools/gateway/test_lineage.py::test_sampling_is_the_gateways_and_streams_are_the_sessions",
    ),
    "load: what was not measured is met": (
        f"{LOAD}.requirements:Threshold.met",
        lambda right, requirement, value: value is None or right(requirement, value),
        "tests/tools/load/test_thresholds.py::test_what_was_not_measured_is_not_met_and_said_so",
    ),
    "load: arrivals of all generators at once": (
        f"{LOAD}.plan:arrivals",
        lambda right, kind, rate, start, place, places, seed: right(kind, rate, start, place, 1, seed),
        "tests/tools/load/test_schedule.py::test_constant_arrivals_of_all_generators_are_one_clock",
    ),
    "load: fewer steps per second are better": (
        f"{LOAD}.comparison:_judge_change",
        lambda right, name, *change: right("latency", *change),
        "tests/tools/load/test_comparison.py::test_twice_as_slow_is_worse_and_the_other_way_round_better",
    ),
    "load: latencies are cut to milliseconds": (
        f"{LOAD}.measurements:Histogram.record",
        lambda right, histogram, seconds: right(histogram, [round(each, 3) for each in seconds]),
        "tests/tools/load/test_histogram.py::test_percentiles_are_those_of_hdrhistogram",
    ),
    "check: a bug is a failure of each requirement that meets it": (
        "starpod.check.runner:_run",
        lambda right, target, requirement, bugs: right(target, requirement, {}),
        "tests/tools/check/test_bugs.py::test_a_server_that_raises_is_one_failure",
    ),
    "check: two requirements with one number": (
        "starpod.check.requirement:must",
        lambda right, number, *rest, **more: right(number.replace("F-03", "F-02"), *rest, **more),
        "tests/tools/check/test_cli.py::test_ids_ascend_within_their_level_and_titles_are_one_sentence",
    ),
    "lake: slips to one side only": (
        f"{ENVIRONMENTS}.frozen_lake.lake:Lake.__init__",
        slip_to_one_side,
        "tests/environments/frozen_lake/test_frozen_lake.py::test_transitions_are_gymnasiums",
    ),
    "Sokoban: a box off its target costs nothing": (
        f"{ENVIRONMENTS}.sokoban.environment:Sokoban.step",
        push_off_for_nothing,
        "tests/environments/sokoban/test_sokoban.py::test_on_off_and_blocked",
    ),
    "shop: a price at the cap is too high": (
        f"{ENVIRONMENTS}.webshop.shop.reward:grade",
        lambda right, *items: right(*items[:3], math.nextafter(items[3], math.inf), *items[4:]),
        "tests/environments/webshop/shop/test_reward.py::test_whole_rewards_pinned_by_the_originals_tests",
    ),
    "Sudoku: a cell is paid again": (
        f"{ENVIRONMENTS}.sudoku.environment:Sudoku._pay",
        lambda right, sudoku, cell: (sudoku.paid.pop(cell, None), right(sudoku, cell))[1],
        "tests/environments/sudoku/test_sudoku.py::test_a_digit_pays_once_its_clash_is_cleared",
    ),
    "2048: the target is paid again and again": (
        f"{ENVIRONMENTS}.game_2048.environment:Game2048.step",
        pay_the_target_again,
        "tests/environments/game_2048/test_game_2048.py::test_the_target_is_paid_once_where_it_alone_is_paid",
    ),
    "tic-tac-toe: a lost game costs nothing": (
        f"{ENVIRONMENTS}.tic_tac_toe.environment:TicTacToe._end",
        lambda right, game, reward: right(game, max(reward, 0.0)),
        "tests/environments/tic_tac_toe/test_tic_tac_toe.py::test_against_an_opponent_there_is_one_agent_and_a_loss_is_fined",
    ),
}
"""What would be wrong -> the function, a wrong one in its place, and a fast test that has to notice."""


def plant(target: str, wrong: Callable[..., Any]) -> None:
    """Let the function, method or property `MODULE:NAME` do what `wrong` does, whoever has imported it."""
    module, _, names = target.partition(":")
    holder = import_module(module)
    *outer, name = names.split(".")
    for each in outer:
        holder = getattr(holder, each)
    right = vars(holder)[name]
    if isinstance(right, property):
        setattr(holder, name, property(partial(wrong, right.fget)))
    elif isinstance(holder, type):
        setattr(holder, name, lambda *items, **options: wrong(right, *items, **options))
    else:
        _replace_code(right, wrong)


def _replace_code(function: FunctionType, wrong: Callable[..., Any]) -> None:
    """Change the function itself and not its name, because other modules may have imported it."""
    right = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    right.__kwdefaults__ = function.__kwdefaults__
    planted = f"planted {function.__qualname__}"
    function.__globals__[planted] = partial(wrong, right)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = eval(f"lambda *items, **options: globals()[{planted!r}](*items, **options)").__code__


class Failures:
    """The tests that failed, as a plugin of pytest. A failure to set one up is none."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.names.append(report.nodeid)


def look_for(folder: str, title: str) -> str:
    """Run the test with the wrong function in place. Return what pytest wrote if the test passed, and else nothing."""
    target, wrong, test = MUTATIONS[title]
    plant(target, wrong)
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
    from starpod.env_server.episodes.temporary import own_folder  # not in the processes that plant faults

    titles = sys.argv[1:] or list(MUTATIONS)
    context = multiprocessing.get_context("forkserver")
    # If this process is killed, the next one removes its sockets.
    multiprocessing.current_process()._config["tempdir"] = str(own_folder())  # type: ignore[attr-defined]
    context.set_forkserver_preload(list(PACKAGES))
    missed = 0
    with context.Pool(2, maxtasksperchild=1) as processes, tempfile.TemporaryDirectory() as folder:
        written = processes.imap(partial(look_for, folder), titles)
        for title, said in zip(titles, written, strict=True):
            print(f"missed: {title}\n{said}" if said else f"caught: {title}", flush=True)
            missed += bool(said)
    sys.exit(missed > 0)


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_each_planted_fault_fails_a_test() -> None:
    command = [sys.executable, "-m", "tests.test_mutations"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
