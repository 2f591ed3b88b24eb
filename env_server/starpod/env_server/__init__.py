"""Hosts environments as stateful gRPC services. Authors need only what is imported here."""

from starpod.env_server.environment import (
    INVALID,
    JSON,
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
)

__all__ = [
    "INVALID",
    "JSON",
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
]
