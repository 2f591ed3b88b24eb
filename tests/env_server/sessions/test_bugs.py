"""Environments that raise, leave, or give what no message can hold: their own session pays, and nothing else."""

import pytest

from starpod.env_server import Concurrency, Limits, Outcome
from starpod.env_server.authoring.environment import BadResult
from starpod.env_server.episodes.convert import fill_transition
from starpod.env_server.episodes.effects import Journal
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.processes.hosts import LocalHost, Pools, ResetPlan
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Want
from tests.env_server.conftest import INTACT, LOST, Client, Serve, Stream, entered, step_request, text_of
from tests.env_server.troublesome import Waiting, Walk, elsewhere, specify


@pytest.mark.parametrize(
    ("environment", "action", "told"),
    [
        ("walk-v1", "bug", "walk-v1: Step raised RuntimeError: a bug on purpose"),
        ("walk-v1", "nan", "Walk.step returned a reward of nan; it must be finite"),
        *((f"unruly{kind}-v1", "exit", "Step raised SystemExit: 3") for kind in ("", "_thread", "_process")),
        *((f"unruly{kind}-v1", "stop", "Step raised StopIteration: no more") for kind in ("", "_thread")),
        *((f"unruly{kind}-v1", "leave", "Step raised GeneratorExit: left") for kind in ("", "_thread", "_process")),
        *((f"unruly{kind}-v1", action, "") for kind in ("", "_thread", "_process") for action in ("info", "text")),
        ("unruly-v1", "array", "Unruly.step returned info with the number nan"),
        *((f"unruly{kind}-v1", "options", "OptionsError: no level 2") for kind in ("", "_thread", "_process")),
        *((f"unruly{kind}-v1", "state", "StateError: no level 2") for kind in ("", "_thread", "_process")),
        ("fragile-v1", "raise", "Step raised KeyError"),
        ("fragile-v1", "talk", "Step raised ResultTooLarge"),  # a text too large to leave its process
    ],
)
async def test_a_step_that_fails_costs_its_own_session(
    client: Client, environment: str, action: str, told: str
) -> None:
    by_call, by_row = [await client.open(environment) for _ in range(2)]
    good = await client.group("unruly-v1", 2)
    stream = Stream(client)
    rows = (good[0], 0, "fine"), (by_row, 0, action), (good[1], 0, "fine")
    first, streamed, last, _ = await stream.ask(*rows, calls=[pb.Call(renew=pb.RenewRequest())])
    assert text_of(first) == text_of(last) == "played 1"
    for failure in (streamed, await client.fails(client.step(by_call, 0, action))):
        assert failure.bug == LOST
        assert told in failure.message
    gone = await client.fails(client.step(by_call, 0, action))
    assert (gone.code, gone.reason, gone.metadata["advice"]) == ("DATA_LOSS", "SESSION_LOST", "reopen")
    lost, other = await stream.ask((by_row, 1, "fine"), (good[0], 1, "fine"))
    assert (lost.reason, text_of(other)) == ("SESSION_LOST", "played 2")
    missing = (await client.ask("Renew", session_ids=[by_call.session_id, good[0].session_id])).missing
    assert list(missing) == [by_call.session_id]
    assert await client.live() == 4


class Chatty(Walk):
    """A walk that talks much from seed 7 on, and after a step to the left."""

    spec = specify("chatty", "It talks", actions=("Left", "Right"))

    def render(self, mode: str = "text") -> str:
        return "x" * 20_000 if self.seed == 7 or self.place < self.start else "short"


@pytest.mark.parametrize("kind", ["", "_thread"])
async def test_a_reply_that_is_too_large_costs_its_own_session(serve: Serve, kind: str) -> None:
    client = await serve(Chatty, elsewhere(Chatty, Concurrency.THREAD), limits=ServerLimits(max_message_bytes=16_000))
    by_call, by_row, by_reset, good = [await client.open(f"chatty{kind}-v1") for _ in range(4)]
    streamed, other = await Stream(client).ask((by_row, 0, "Left"), (good, 0, "Right"))
    assert text_of(other) == "short"
    called = await client.fails(client.step(by_call, 0, "Left"))
    reset = await client.fails(client.ask("Reset", by_reset, epoch=1, seed=7))
    for failure in (streamed, called, reset):
        assert failure.bug == LOST
        assert "render returned what makes a reply of 20" in failure.message
    for session in (by_row, by_call, by_reset):
        assert (await client.fails(client.step(session, 1, "Right"))).reason == "SESSION_LOST"
    await client.step(good, 1, "Right")


@pytest.mark.parametrize("kind", ["", "_thread", "_process"])
async def test_an_environment_that_lost_its_machine_has_no_bug(client: Client, kind: str) -> None:
    by_call, by_row = [await client.open(f"unruly{kind}-v1") for _ in range(2)]
    (streamed,) = await Stream(client).ask((by_row, 0, "gone"))
    for failure in (streamed, await client.fails(client.step(by_call, 0, "gone"))):
        assert failure.reason == "SESSION_LOST"
        assert "was removed on purpose" in failure.message


@pytest.mark.parametrize("kind", ["", "_thread"])  # the sandbox of a process allows no fork
async def test_a_process_that_a_step_forks_ends_with_the_step(client: Client, kind: str) -> None:
    by_call, by_row = [await client.open(f"unruly{kind}-v1") for _ in range(2)]
    stepped = await client.step(by_call, 0, "fork")
    streamed, other = await Stream(client).ask((by_row, 0, "fork"), (await client.open("unruly-v1"), 0, "fine"))
    assert stepped.info["status"] == 1
    assert text_of(streamed) == text_of(other) == "played 1"


@pytest.mark.parametrize(
    ("method", "result", "told"),
    [
        ("render", 5, "render returned int, not str"),
        ("render", "half \ud800", r"render returned 'half \ud800', which cannot be sent: 'utf-8' codec"),
        ("observe", 5, "observe returned int, not str or a list of parts"),
        ("observe", [5], "observe returned a part that is int"),
        ("instructions", "\ud800", r"instructions returned '\ud800', which cannot be sent"),
        ("valid_actions", [object()], "valid_actions returned [<object"),
        ("agent_id", 5, "agent_id returned 5, which cannot be sent"),
        ("score", "good", "score returned 'good'; it must be finite"),
        ("step", Outcome(reward=1e30), "step returned a reward of 1e+30; it must be finite and at most 1e+12"),
        ("step", Outcome(reward_parts={"a": 1e30}), "step returned a reward part 'a' of 1e+30"),
        ("step", Outcome(reward="high"), "step returned a reward of 'high'"),  # type: ignore[arg-type]
        ("step", Outcome(info={"\ud800": 1}), "step returned TurnDetails("),
        ("step", 5, "step returned 5; return an Outcome"),
    ],
)
async def test_a_result_that_cannot_be_used_names_its_method_and_line(method: str, result: object, told: str) -> None:
    class Trap(Walk):
        def agent_id(self) -> str:
            return ""

    def trap(*_: object) -> object:
        return result

    setattr(Trap, method, trap)
    trap.__name__ = method
    want = Want(valid_actions=True, score=True, state_key=True)
    host = LocalHost(Trap, Pools.of(1, 60.0), Journal(), want)

    async def play() -> None:
        await host.reset(ResetPlan(Walk.Options(), Limits(), 1, 1, want))
        try:
            fill_transition(pb.Transition(), await host.turn(["Left"], want))
        except BadResult as error:  # as the server does
            raise EnvironmentRaised.from_exception(Trap, error, intact=False) from error

    with pytest.raises(EnvironmentRaised) as raised:
        await play()
    assert raised.value.message.startswith(f"Trap.{told}")
    assert raised.value.message.endswith(f"(test_bugs.py, line {trap.__code__.co_firstlineno})")


async def test_a_step_that_broke_is_not_played_again_by_its_repeat_in_the_same_batch(client: Client) -> None:
    session = await client.open("unruly-v1")
    first, second = await Stream(client).ask((session, 0, "raise"), (session, 0, "raise"))
    assert (first.bug, second.reason) == (LOST, "SESSION_LOST")


async def test_a_step_that_broke_is_reported_even_where_no_call_may_be_in_flight(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=1))
    slow, session = await client.open("waiting-v1"), await client.open("unruly-v1")
    stream = Stream(client)
    await stream.send((session, 0, "raise"), calls=[pb.Call(step=step_request(slow, 0, "gate"))])
    await entered()
    await stream.until(1)
    assert stream.replies[0].bug == LOST
    Waiting.opened.set()
    await stream.until(2)
    assert (await client.fails(client.ask("Reset", session, epoch=1))).reason == "SESSION_LOST"


@pytest.mark.parametrize(
    ("environment", "action", "options"),
    [
        ("walk-v1", "Left", {"start": 10}),  # for which it has no instructions
        *(
            (f"unruly{kind}-v1", "fine", {option: True})
            for kind in ("", "_thread", "_process")
            for option in ("text", "instructions")
        ),
    ],
)
async def test_a_start_that_fails_changes_nothing(
    client: Client, environment: str, action: str, options: dict[str, bool]
) -> None:
    session = await client.open(environment)
    stepped = await client.step(session, 0, action)
    for _ in range(2):
        assert (await client.fails(client.ask("Reset", session, epoch=1, seed=1, options=options))).bug == INTACT
    assert (await client.ask("Render", session)).data.decode() == text_of(stepped)
    await client.step(session, 1, action)
    assert (await client.fails(client.group(environment, 3, options=options))).bug == INTACT
    assert await client.live() == 1


@pytest.mark.parametrize("environment", ["unruly-v1", "unruly_thread-v1"])
async def test_a_state_that_ends_the_process_is_a_bad_one(client: Client, environment: str) -> None:
    snapshot = await client.snapshot(await client.open(environment))
    failure = await client.fails(client.ask("Restore", snapshot=snapshot))
    assert (failure.reason, failure.fields) == ("BAD_ARGUMENT", ["snapshot.state"])
    assert "SystemExit(4)" in failure.message
    assert (await client.step(await client.open("walk-v1"), 0, "Right")).outcomes[0].valid


async def test_text_of_numpy_is_text(client: Client) -> None:
    session = await client.open("unruly-v1", options={"numpy": True})
    (streamed,) = await Stream(client).ask((session, 0, "fine"))
    assert text_of(session) == text_of(streamed) == text_of(await client.step(session, 1, "fine")) == "north"


async def test_errors_without_a_status_cannot_happen(client: Client) -> None:
    """Every failure carries google.rpc details, also one that the server did not foresee."""

    async def explode(*_: object) -> None:
        raise ZeroDivisionError("oops")

    client.server.calls.render = explode  # type: ignore[method-assign,assignment]
    client.server.worker.registry = None  # type: ignore[assignment]
    for call in (client.ask("Render"), client.ask("Describe")):
        failure = await client.fails(call)
        assert (failure.code, failure.reason, failure.metadata["advice"]) == ("INTERNAL", "SERVER_BUG", "give_up")
