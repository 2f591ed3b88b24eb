"""Server of the lake over dm_env_rpc, built like that project's catch example: one thread and one world per stream.

python -m benchmarks.peers.dm_env_rpc_server --port N
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from dm_env_rpc.v1 import dm_env_rpc_pb2 as dm
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc
from dm_env_rpc.v1.tensor_utils import pack_tensor, unpack_tensor

from benchmarks.serving.lake import new_episode, next_seed
from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from starpod.environments.frozen_lake import ACTIONS

ACTION_UID, TEXT_UID, REWARD_UID = 1, 1, 2
MAX_SESSIONS = 2048
NOTHING = Want()


class LakeServicer(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """Service with one lake per stream. The step after the last one of a sequence resets it."""

    def Process(  # noqa: N802 - the name is the protocol's
        self, requests: Iterator[dm.EnvironmentRequest], context: grpc.ServicerContext
    ) -> Iterator[dm.EnvironmentResponse]:
        episode = new_episode()
        fresh = True
        for request in requests:
            response = dm.EnvironmentResponse()
            match request.WhichOneof("payload"):
                case "create_world":
                    response.create_world.world_name = "lake"
                case "join_world":
                    response.join_world.specs.CopyFrom(_specs())
                case "step":
                    fresh = _step(episode, fresh, request.step, response.step)
                case "reset":
                    episode.reset(next_seed(), 0)
                    fresh = True
                    response.reset.specs.CopyFrom(_specs())
                case "leave_world":
                    response.leave_world.SetInParent()
                case "destroy_world":
                    response.destroy_world.SetInParent()
                case kind:
                    response.error.message = f"{kind} is not supported"
            yield response


def _step(episode: LiveEpisode, fresh: bool, request: Any, response: Any) -> bool:
    """Answer a step; the first of a sequence only observes. Returns whether the next one starts a new sequence."""
    if fresh:
        if episode.turns:
            episode.reset(next_seed(), 0)
        text, reward, has_ended = episode.observe(NOTHING).parts, 0.0, False
    else:
        action = ACTIONS[int(unpack_tensor(request.actions[ACTION_UID]))]
        transition = episode.turn([action], NOTHING)
        text, reward, has_ended = transition.observation.parts, transition.reward, bool(transition.end_reason)
    response.state = dm.EnvironmentStateType.TERMINATED if has_ended else dm.EnvironmentStateType.RUNNING
    for uid in request.requested_observations:
        response.observations[uid].CopyFrom(pack_tensor(text if uid == TEXT_UID else reward))
    return has_ended


def _specs() -> dm.ActionObservationSpecs:
    specs = dm.ActionObservationSpecs()
    specs.actions[ACTION_UID].CopyFrom(dm.TensorSpec(name="action", dtype=dm.DataType.INT64))
    specs.observations[TEXT_UID].CopyFrom(dm.TensorSpec(name="text", dtype=dm.DataType.STRING))
    specs.observations[REWARD_UID].CopyFrom(dm.TensorSpec(name="reward", dtype=dm.DataType.DOUBLE))
    return specs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=MAX_SESSIONS))
    dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(LakeServicer(), server)
    port = server.add_insecure_port(f"127.0.0.1:{parser.parse_args().port}")
    server.start()
    print(f"Serving the lake on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
