"""The child's side of class `process`: serve one episode to the parent, after giving up all rights."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any

from starpod.env_server.authoring.environment import Busy, Environment, Limits, MachineLost, OptionsError, Unavailable
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.episodes.live_episode import EpisodeEnded, LiveEpisode, Want
from starpod.env_server.episodes.state import StateError, decode
from starpod.env_server.processes.forking import leave_fork_server
from starpod.env_server.processes.hosts import ResetPlan, instructions_of, start_episode
from starpod.env_server.processes.wire import LENGTH, ResultTooLarge, frame, pack_error, pack_result
from starpod.env_server.registry import Reference, load_class
from starpod.env_server.sandbox.sandbox import Sandbox, close_inherited, confine, end_with_parent
from starpod.serving.user_code import end_forked_copy
from starpod.v1 import environment_pb2 as pb


def serve_episode(connection: socket.socket, reference: Reference, sandbox: Sandbox) -> None:
    """Serve one episode until the parent closes the connection.

    Args:
        sandbox: confinement of this process, which begins after the class was loaded and prepared.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sandbox.mode == "off":
        os.dup2(2, 1)  # standard output belongs to the server
    if sys.platform == "linux":
        leave_fork_server()  # a child that hangs in native code cannot notice that the server is gone
    end_with_parent()
    if sandbox.mode != "off":
        close_inherited(connection.fileno())
    stream = connection.makefile("rwb")
    environment = load_class(reference)
    environment.prepare()
    _send(stream, _confine(sandbox, environment))
    episode: LiveEpisode | None = None
    while header := stream.read(LENGTH.size):
        verb, *arguments = decode(stream.read(LENGTH.unpack(header)[0]))
        process_id = os.getpid()
        try:
            next_episode, result = _answer(environment, episode, verb, arguments)
            reply = pack_result(result)
            episode = next_episode  # not before: a reset whose reply is too large leaves the old one
        except EpisodeEnded:
            reply = pack_error("over", "")
        except StateError as error:
            reply = pack_error("state", str(error))
        except OptionsError as error:
            reply = pack_error("options", str(error))
        except Busy as busy:
            reply = pack_error("busy", busy.message, busy.retry_after)
        except MachineLost as loss:
            reply = pack_error("lost", str(loss))
        except Unavailable as missing:
            reply = pack_error("unavailable", str(missing))
        except ResultTooLarge as error:
            reply = pack_error("large", str(error), type(error).__name__)
        except BaseException as error:
            bug = EnvironmentRaised.from_exception(environment, error, intact=False)
            reply = pack_error("bug", bug.message, bug.exception)
        finally:
            end_forked_copy(process_id, environment.spec.id)
        _send(stream, reply)
    # Skip all clean-up, because the environment may be in any state.
    os._exit(0)


def _confine(sandbox: Sandbox, environment: type[Environment]) -> bytes:
    """Give up all rights that can be given up, and return the greeting for the parent process."""
    if sandbox.mode == "off":
        return pack_result("off")
    module_file = getattr(sys.modules[environment.__module__], "__file__", None)
    report = confine(sandbox, module_file)
    if sandbox.mode == "require" and report.missing_measures:
        return pack_error("refused", ", ".join(report.missing_measures))
    return pack_error("confined", json.dumps(asdict(report)))


def _send(stream: Any, reply: bytes) -> None:
    stream.write(frame(reply))
    stream.flush()


def _answer(
    environment: type[Environment], episode: LiveEpisode | None, verb: str, arguments: list[Any]
) -> tuple[LiveEpisode | None, Any]:
    """Execute a call, and return the episode after it and its result."""
    match verb, arguments:
        case "reset", [options, limits, seed, dynamics_seed, want]:
            wanted = Want(*want)
            plan = ResetPlan(environment.Options.model_validate(options), Limits(*limits), seed, dynamics_seed, wanted)
            new_episode, started = start_episode(environment, plan)
            response = pb.ResetResponse(instructions=started.instructions)
            convert.copy_observation(response.session.observation, started.observation)
            return new_episode, response.SerializeToString()
        case "load", [data]:
            loaded = LiveEpisode.load(environment, data)
            return loaded, instructions_of(loaded)
    assert episode is not None
    match verb, arguments:
        case "turn", [request, want]:
            actions = convert.actions_from(pb.StepRequest.FromString(request).actions)
            turn = episode.undoable_turn if environment.spec.slow_render else episode.turn
            return episode, convert.transition_to(turn(actions, Want(*want))).SerializeToString()
        case "observe", [want]:
            return episode, convert.observation_to(episode.observe(Want(*want))).SerializeToString()
        case "render", [mode]:
            return episode, episode.render(mode)
        case "save", []:
            return episode, episode.save()
        case "reseed", [dynamics_seed]:
            return episode.fork(dynamics_seed), None
    raise ValueError(f"unknown verb {verb}")
