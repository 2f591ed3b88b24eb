"""Configuration of the engine that samples replies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import FilePath, Section

Handover = Literal["auto", "ipc", "disk", "nccl"]

VLLM_PREFIX = "starpod-vllm-"
"""Beginning of the names of folders that belong to vLLM engines and servers."""
_SOCKET_FOLDER_BYTES = 70
"""A folder for sockets has a shorter path than this. A socket's path may have 107 bytes, and its name has 36."""


def vllm_sockets(folder: Path) -> dict[str, str]:
    """Return the environment variables that put vLLM's sockets into the folder; none if its path is too long.

    By default they are in the folder of all temporary files, and stay there if a process is killed.
    """
    return {"VLLM_RPC_BASE_PATH": str(folder)} if len(os.fsencode(folder)) < _SOCKET_FOLDER_BYTES else {}


class EngineConfig(Section):
    """The engine that samples replies. The name alone is enough: `engine: vllm`."""

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["torch", "vllm", "vllm_remote"] = Field(
        default="torch",
        description="Program that samples replies. torch: in the trainer, on a CPU or GPU; vllm: vLLM in the "
        "trainer, faster, on a GPU; vllm_remote: the vLLM servers at engine.urls.",
    )
    slots: int = Field(default=128, ge=1, description="Maximum replies sampled at once.")
    cache_gib: float = Field(
        default=8.0, gt=0, description="torch: maximum GiB of the cache. If slots need more, fewer replies run at once."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="vllm: dtype of computation; auto: the model's."
    )
    gpu_memory_fraction: float = Field(
        default=0.4, gt=0, lt=1, description="vllm: share of GPU memory for weights and cache."
    )
    sleep: bool = Field(default=False, description="vllm: frees the GPU's memory for the policy during updates.")
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="vllm: number of GPUs that share one copy of the model. Under torchrun, they are the GPUs of this "
        "many processes.",
    )
    urls: tuple[str, ...] = Field(default=(), description="vllm_remote: servers (http://host:port) of the same model.")
    api_key_file: FilePath = Field(default="", description="vllm_remote: file with the servers' API key.")
    timeout: float = Field(
        default=600.0,
        gt=0,
        description="vllm, vllm_remote: maximum seconds of a control call, such as the loading of weights; "
        "vllm_remote: also maximum seconds without any reply of a server.",
    )
    health_timeout: float = Field(
        default=60.0,
        gt=0,
        description="vllm, vllm_remote: seconds without an answer after which an engine core counts as hanging. It "
        "answers between steps; a server's core does not while it loads weights.",
    )
    retries: int = Field(default=4, ge=0, description="vllm_remote: retries of a call, at most 8 s apart.")
    restarts: int = Field(
        default=2,
        ge=0,
        description="vllm, vllm_remote: maximum restarts of lost engine cores or servers; the next loss ends the run.",
    )
    handover: Handover = Field(
        default="auto",
        description="Way of new weights to vLLM. ipc: GPU memory (vllm on one GPU); disk: a folder; nccl: from "
        "GPU to GPU (vllm_remote); auto: ipc if possible, else disk.",
    )
    handover_folder: FilePath = Field(
        default="",
        description="Folder for engine.handover disk, which trainer and servers share; empty: a temporary one.",
    )
    nccl_address: str = Field(
        default="", description="For engine.handover nccl: host:port of the trainer's machine, with a free port."
    )

    def computes_in(self, model: str) -> str:
        """Return the dtype in which the engine computes. model: dtype in which the policy computes."""
        return self.dtype if self.name == "vllm" and self.dtype != "auto" else model

    @model_validator(mode="after")
    def _fits_together(self) -> EngineConfig:
        if self.name == "vllm_remote" and not self.urls:
            raise ValueError("engine vllm_remote needs engine.urls, e.g. [http://127.0.0.1:8000]")
        if self.name != "vllm_remote" and self.urls:
            raise ValueError(f"engine.urls are for engine.name=vllm_remote, not {self.name}")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.urls: {url!r} does not begin with http:// or https://")
        if self.sleep and self.name != "vllm":
            raise ValueError(f"engine.sleep is for engine.name=vllm, which shares the policy's GPU, not {self.name}")
        if self.handover == "nccl" and (self.name != "vllm_remote" or not self.nccl_address):
            raise ValueError("engine.handover nccl is for engine.name=vllm_remote, and needs engine.nccl_address")
        if self.nccl_address and not self.nccl_address.rpartition(":")[2].isdigit():
            raise ValueError(f"engine.nccl_address {self.nccl_address!r} is not host:port")
        if self.handover == "ipc" and (self.name != "vllm" or self.tensor_parallel > 1):
            raise ValueError("engine.handover ipc is for engine.name=vllm with engine.tensor_parallel=1")
        return self
