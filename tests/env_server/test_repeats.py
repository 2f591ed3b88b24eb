"""A Step sent again is known by its request, whatever the environment did to its actions; and what a session keeps."""

import random

import pytest
from google.protobuf import struct_pb2

from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client
from tests.env_server.test_stream import columns, transitions_of

ACTIONS = {
    "JSON": pb.Action(json="[1, 2, 3]"),
    "a tool call": pb.Action(tool_call=pb.ToolCall(name="t", arguments_json='{"a": 1}')),
    "a tensor": pb.Action(tensor=pb.Tensor(dtype="int8", shape=[3], data=b"abc")),
    "a long text": pb.Action(text="x" * 5_000),
}


@pytest.mark.parametrize("kind", ACTIONS)
async def test_an_environment_may_change_what_it_is_given(client: Client, kind: str) -> None:
    session = await client.open("altering-v1")
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[ACTIONS[kind]])
    first = await client.stub.Step(step)
    assert await client.stub.Step(step) == first
    step.actions.append(pb.Action(text="more"))
    failure = await client.fails(client.stub.Step(step))
    assert (failure.reason, failure.metadata["expected_step_index"]) == ("OUT_OF_ORDER", "1")


async def ask(client: Client, request: pb.StreamRequest) -> dict[int, pb.Transition | str]:
    """The transition of each call, or the message of its error."""
    found: dict[int, pb.Transition | str] = {}
    stream = client.stub.Stream()
    await stream.write(request)
    await stream.done_writing()
    async for response in stream:
        found.update(transitions_of(response))
        for reply in response.replies:
            found[reply.call_id] = reply.error.message if reply.HasField("error") else reply.step.transition
    return found


@pytest.mark.parametrize("environment", ["walk-v1", "altering-v1", "waiting-v1"])
async def test_rows_of_one_session_in_one_message_are_as_those_of_many(client: Client, environment: str) -> None:
    """In order, repeated or refused; and each reply shows what its step showed."""
    draw = random.Random(environment)
    text = "1" if environment == "waiting-v1" else "Right"
    for _ in range(60):
        together = [await client.open(environment, dynamics_seed=5) for _ in range(3)]
        alone = [await client.open(environment, dynamics_seed=5) for _ in range(3)]
        rows = [(draw.randrange(3), draw.choice([0, 0, 1, 1, 2])) for _ in range(draw.randrange(2, 9))]
        sent = [(call, together[place], index, (text,)) for call, (place, index) in enumerate(rows)]
        got = await ask(client, columns(sent))
        expected: dict[int, pb.Transition | str] = {}
        for call, (place, index) in enumerate(rows):
            expected |= await ask(client, columns([(call, alone[place], index, (text,))]))
        assert got == expected, rows


async def test_what_a_session_keeps_of_a_turn(client: Client) -> None:
    """Short texts as they are, a digest of anything else; a reply of more than a text as its bytes."""
    for environment, action in (("altering-v1", ACTIONS["JSON"]), ("anything-v1", pb.Action(text="y" * 2_000))):
        session = await client.open(environment)
        await client.stub.Step(pb.StepRequest(session_id=session.session_id, epoch=1, actions=[action]))
        kept = client.table[session.session_id]
        assert isinstance(kept.last_request, bytes) and len(kept.last_request) == 16
        assert isinstance(kept.last_reply, bytes) == (environment == "altering-v1")
    session = await client.open("walk-v1")
    await ask(client, columns([(1, session, 0, ("Left",))]))
    assert client.table[session.session_id].last_request == ("Left",)


async def test_options_are_measured_before_they_are_validated(client: Client) -> None:
    many = pb.OpenRequest(environment_id="walk-v1")
    many.options.fields["start"].list_value.values.extend([struct_pb2.Value()] * 8_192)
    failure = await client.fails(client.stub.Open(many))
    assert failure.reason == "BAD_ARGUMENT" and "8192 values" in failure.message
    large = pb.OpenRequest(environment_id="walk-v1")
    large.options["start"] = "x" * 66_000
    failure = await client.fails(client.stub.Open(large))
    assert failure.reason == "BAD_ARGUMENT" and "65536" in failure.message
    unknown = pb.OpenRequest(environment_id="walk-v1")
    unknown.options.update({f"x{number}": 1 for number in range(1_000)})
    failure = await client.fails(client.stub.Open(unknown))
    assert 5 < len(failure.fields) <= 20


@pytest.mark.parametrize(
    "actions",
    [
        [pb.Action(json="[" + "1," * 9_000 + "1]")],
        [pb.Action(json="[" + "1," * 5_000 + "1]")] * 2,
        [pb.Action(json='{"a":' * 60 + "[" + "{}," * 9_000 + "1]" + "}" * 60)],
        [pb.Action(tool_call=pb.ToolCall(name="t", arguments_json='{"a": [' + "0," * 9_000 + "0]}"))],
        [pb.Action(text="x" * (4 * 2**20 + 1))],
        [pb.Action(text="")] * 1_025,
    ],
    ids=["values", "values of several", "nested", "arguments", "bytes", "count"],
)
async def test_actions_are_measured_before_they_are_converted(client: Client, actions: list[pb.Action]) -> None:
    session = await client.open("anything-v1")
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=actions)
    failure = await client.fails(client.stub.Step(step))
    assert (failure.reason, failure.fields) == ("BAD_ARGUMENT", ["actions"])
    del step.actions[:]
    step.actions.add(json='["' + ",:[{" * 50_000 + '"]')  # marks in a text are none
    assert (await client.stub.Step(step)).next_step_index == 1
