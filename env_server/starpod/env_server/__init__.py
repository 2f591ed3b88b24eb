"""Hosts environments as stateful gRPC services. Authors need only what is imported here."""

from starpod.env_server.environment import (
    INVALID,
    JSON,
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Image,
    Limits,
    OptionsError,
    Outcome,
    TensorSpec,
    Tool,
    ToolCall,
    Unavailable,
)

__all__ = [
    "INVALID",
    "JSON",
    "Busy",
    "Concurrency",
    "Environment",
    "EnvironmentOptions",
    "EnvironmentSpec",
    "Image",
    "Limits",
    "OptionsError",
    "Outcome",
    "TensorSpec",
    "Tool",
    "ToolCall",
    "Unavailable",
]
