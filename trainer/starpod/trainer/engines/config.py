"""Configuration of the engine that samples replies."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.section import Section

Handover = Literal["auto", "ipc", "disk", "nccl"]


class EngineConfig(Section):
    """The engine that samples replies. One word is enough: `engine: vllm`."""

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["torch", "vllm", "vllm_remote"] = Field(
        default="torch",
        description="torch: the trainer's own weights, CPU or GPU; vllm: child processes, on a GPU or a CPU; "
        "vllm_remote: servers of their own.",
    )
    slots: int = Field(default=128, ge=1, description="Replies that are sampled at once; more wait.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="vllm: what it computes in; auto: what the model says."
    )
    gpu_memory_fraction: float = Field(
        default=0.4, gt=0, lt=1, description="vllm: of the GPU's memory, weights and cache; the trainer needs the rest."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="vllm: GPUs that share one copy of the model.")
    urls: tuple[str, ...] = Field(
        default=(), description="vllm_remote: servers (http://host:port) of copies of the same model."
    )
    api_key_file: str = Field(default="", description="vllm_remote: file with the key that the servers want.")
    timeout: float = Field(
        default=600.0,
        gt=0,
        description="vllm, vllm_remote: seconds that one control call may take, and one reply of a server.",
    )
    retries: int = Field(
        default=4, ge=0, description="vllm_remote: how often a call is made again before the run ends."
    )
    handover: Handover = Field(
        default="auto",
        description="How vllm gets new weights. ipc: it reads the trainer's GPU memory (vllm on one GPU); disk: "
        "through a folder; nccl: from GPU to GPU (vllm_remote); auto: ipc where it can be, else disk.",
    )
    handover_folder: str = Field(
        default="",
        description="For disk: a folder that trainer and servers see under the same name. Empty: a temporary one here.",
    )
    nccl_address: str = Field(
        default="", description="For nccl: host:port, free, on the trainer's machine, that the servers can reach."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> EngineConfig:
        if self.name == "vllm_remote" and not self.urls:
            raise ValueError("engine vllm_remote needs engine.urls, e.g. [http://127.0.0.1:8000]")
        if self.name != "vllm_remote" and self.urls:
            raise ValueError(f"engine.urls are for engine.name=vllm_remote, not {self.name}")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.urls: {url!r} does not begin with http:// or https://")
        if self.handover == "nccl" and (self.name != "vllm_remote" or not self.nccl_address):
            raise ValueError("engine.handover nccl is for engine.name=vllm_remote, and needs engine.nccl_address")
        if self.nccl_address and not self.nccl_address.rpartition(":")[2].isdigit():
            raise ValueError(f"engine.nccl_address {self.nccl_address!r} is not host:port")
        if self.handover == "ipc" and (self.name != "vllm" or self.tensor_parallel > 1):
            raise ValueError("engine.handover ipc is for engine.name=vllm with engine.tensor_parallel=1")
        return self
