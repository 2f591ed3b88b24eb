"""Errors in the configuration of an engine."""

from typing import Any

import pytest
from pydantic import ValidationError

from starpod.trainer.engines.config import EngineConfig

URLS = {"urls": ["http://127.0.0.1:8000"]}


def test_one_word_or_none_is_enough() -> None:
    assert EngineConfig.model_validate("vllm") == EngineConfig(name="vllm")
    assert EngineConfig().name == "torch"


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({"name": "vllm_remote"}, "needs engine.urls"),
        ({"name": "vllm"} | URLS, "vllm_remote"),
        ({"name": "vllm_remote", "urls": ["localhost:8000"]}, "http"),
        ({"name": "vllm_remote", "handover": "nccl"} | URLS, "nccl_address"),
        ({"name": "vllm", "handover": "nccl", "nccl_address": "a:1"}, "vllm_remote"),
        ({"name": "vllm_remote", "handover": "nccl", "nccl_address": "a"} | URLS, "host:port"),
        ({"name": "vllm_remote", "handover": "ipc"} | URLS, "ipc"),
        ({"name": "vllm", "handover": "ipc", "tensor_parallel": 2}, "tensor_parallel"),
        ({"name": "vlm"}, "vllm"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], about: str) -> None:
    with pytest.raises(ValidationError, match=about):
        EngineConfig.model_validate(values)
