"""Host any environment of an Open Reward Standard server: `starpod serve ors:http://127.0.0.1:8080/sums`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from packaging.version import InvalidVersion

from starpod.env_server.authoring.environment import (
    INVALID,
    Busy,
    Concurrency,
    EnvironmentOptions,
    EnvironmentSpec,
    Outcome,
    Tool,
)
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    publish,
    read_call,
    release_of,
    starpod_id,
)
from starpod.env_server.hosting.ors_server import (
    Block,
    CallFailed,
    ImageBlock,
    ORSError,
    ORSServer,
    PackageVersion,
    Split,
    TaskCount,
    TerminalTool,
    TextBlock,
    ToolList,
)
from starpod.env_server.hosting.request import HostingRequest, nearest
from starpod.v1.values import Action, Image, Part


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `http://HOST:PORT/ENVIRONMENT#setting=value`. Raises HostingError.

    `probed` is unused, because sessions run in the server's own process, which calls the service.
    """
    request = HostingRequest.parse(text, ("split",))
    if request.arguments:
        raise request.fail("a running server takes no arguments")
    request.choice("concurrency", Concurrency.THREAD.value)
    try:
        factory, version = _find(request)
    except (Busy, ORSError) as error:
        raise request.fail(error) from error
    spec = EnvironmentSpec(
        id=starpod_id(request, "ors", factory.name, 1),
        version=version,
        title=f"{factory.name} of {factory.server.address}",
        instructions=f"The first observation is the task. An action is {factory.grammar}.",
        grammar=factory.grammar,
        tools=tuple(factory.tools.values()),
        concurrency=Concurrency.THREAD,
    )
    probe_result = ProbeResult(version).overridden(request)
    return publish(ORSEnvironment, request, spec, probe_result, __name__, Options=EnvironmentOptions, factory=factory)


@dataclass(frozen=True, slots=True)
class ORSFactory:
    """Factory of sessions, and the conversion of their actions."""

    request: HostingRequest
    server: ORSServer
    name: str
    split: str
    """Name of the split in which a seed selects the task."""
    tasks: int
    """Number of tasks in the split."""
    tools: Mapping[str, Tool]
    answer: tuple[str, str | None] | None
    """Tool that plain text calls, and its text argument, if any. None if plain text is not an action."""

    @property
    def grammar(self) -> str:
        """The grammar of an action, for people and prompts."""
        call = 'a call of a tool, also as JSON {"tool_name": ..., "arguments": {...}}'
        if self.answer is None:
            return call
        text = f"plain text, with which {self.answer[0]} is called"
        return f"{call}; or {text}" if self.tools else text

    def read(self, action: Action) -> tuple[str, Mapping[str, Any]] | None:
        """Return the tool that an action calls and its arguments, or None if it calls none."""
        if call := read_call(action):
            return call.name, call.arguments
        if isinstance(action, str) and self.answer is not None:
            name, argument = self.answer
            return name, {argument: action} if argument else {}
        return None


class ORSEnvironment(Hosted["ORSGame"]):
    """Environment with one session of the ORS server per session. The seed selects the task."""

    factory: ClassVar[ORSFactory]

    def begin(self, dynamics_seed: int) -> ORSGame:
        return ORSGame(self.factory, self.seed)

    def render(self, mode: str = "text") -> str:
        return "\n".join(part for part in self.game.observe() if isinstance(part, str))


class ORSGame(HostedGame):
    """A live session and the blocks of the latest reply. The tools return the rewards."""

    def __init__(self, factory: ORSFactory, seed: int) -> None:
        super().__init__(factory.request.number("success_at"))
        self.factory = factory
        self.session = factory.server.create(factory.name, factory.split, seed % factory.tasks)
        try:
            self.seen: Sequence[TextBlock | ImageBlock] = factory.server.ask(
                list[Block], f"/{factory.name}/prompt", session=self.session
            )
        except BaseException:
            self.close()
            raise

    def play(self, action: Action) -> Outcome:
        call = self.factory.read(action)
        if call is None:
            return INVALID
        reply = self.factory.server.call(self.factory.name, self.session, *call)
        if isinstance(reply, CallFailed):
            self.seen = [TextBlock(type="text", text=reply.error)]
            return self.outcome(0.0, False, info={"reason": reply.reason or "error"})._replace(valid=False)
        output = reply.output
        self.seen = output.blocks
        info = {"metadata": output.metadata} if output.metadata else None
        return self.outcome(output.reward or 0.0, bool(output.finished), info=info)

    def observe(self) -> Sequence[Part]:
        return [
            Image(block.data, block.mimeType) if isinstance(block, ImageBlock) else block.text for block in self.seen
        ]

    def close(self) -> None:
        self.factory.server.delete(self.session)


# --- finding it --------------------------------------------------------------------------------------------------


def _find(request: HostingRequest) -> tuple[ORSFactory, str]:
    """Return the factory of the environment's sessions, and the server's version.

    Raises:
        HostingError: the environment cannot be hosted.
        Busy: the server does not answer.
        ORSError: the server refused a request.
    """
    url = urlsplit(request.name)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise request.fail("name it by its address: http://HOST:PORT/ENVIRONMENT")
    server, name = ORSServer(f"{url.scheme}://{url.netloc}"), url.path.strip("/").lower()
    names = server.ask(list[str], "/list_environments")
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        raise request.fail(f"the server has no environment {name!r}{nearest(name, names)}")
    kinds = {split.name: split.type for split in server.ask(list[Split], f"/{name}/splits")}
    split = request.settings.get("split") or min(kinds, key=lambda split_name: kinds[split_name] != "train")
    if split not in kinds:
        raise request.fail(f"it has no split {split!r}{nearest(split, kinds)}")
    tasks = server.ask(TaskCount, f"/{name}/num_tasks", {"split": split}).num_tasks
    if tasks < 1:
        raise request.fail(f"its split {split} has no task")
    listing = server.ask(ToolList, f"/{name}/tools")
    tools = {tool.name: Tool(tool.name, tool.description or "", tool.input_schema or {}) for tool in listing.tools}
    answer = _answer(listing.terminal_tool, tools)
    return ORSFactory(request, server, name, split, tasks, tools, answer), _version(server)


def _answer(terminal: TerminalTool | None, tools: Mapping[str, Tool]) -> tuple[str, str | None] | None:
    """Return the tool that plain text calls: the terminal tool, or the only tool if it takes one text."""
    if terminal:
        return terminal.name, terminal.arg
    if len(tools) == 1:
        ((name, tool),) = tools.items()
        fields = tool.parameters.get("properties", {})
        if len(fields) == 1 and next(iter(fields.values())).get("type") == "string":
            return name, next(iter(fields))
    return None


def _version(server: ORSServer) -> str:
    """Return MAJOR.MINOR.PATCH of the server's package, or 0.0.0 if unknown."""
    try:
        return release_of(server.ask(PackageVersion, "/version").version)
    except (ORSError, InvalidVersion):
        return "0.0.0"
