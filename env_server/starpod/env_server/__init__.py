"""Host environments as stateful gRPC services. An environment needs only the names imported here."""

from starpod.env_server.authoring.chat_model import ChatModel
from starpod.env_server.authoring.drawing import Canvas, encode_png, read_sprites
from starpod.env_server.authoring.environment import (
    INVALID,
    UNKNOWN_NAME,
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    MachineLost,
    OptionsError,
    Outcome,
    TensorSpec,
    Tool,
    Unavailable,
    digest,
)
from starpod.env_server.processes.confined import Confined, run_confined
from starpod.v1.untrusted import read_untrusted_json
from starpod.v1.values import JSON, Image, ToolCall

__all__ = [
    "INVALID",
    "JSON",
    "UNKNOWN_NAME",
    "Busy",
    "Canvas",
    "ChatModel",
    "Concurrency",
    "Confined",
    "Environment",
    "EnvironmentOptions",
    "EnvironmentSpec",
    "Image",
    "Limits",
    "MachineLost",
    "OptionsError",
    "Outcome",
    "TensorSpec",
    "Tool",
    "ToolCall",
    "Unavailable",
    "digest",
    "encode_png",
    "read_sprites",
    "read_untrusted_json",
    "run_confined",
]
