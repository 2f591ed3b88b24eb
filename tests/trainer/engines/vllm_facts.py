"""Declarations of vllm 0.31 to 0.33 that the engines use.

The parameters that all three versions have, in their order. A bar precedes keyword-only ones.
"""

import inspect
from collections.abc import Callable
from typing import Any

SIGNATURES = {
    "AsyncLLM.from_engine_args": "engine_args start_engine_loop usage_context stat_loggers",
    "AsyncLLM.generate": "self prompt sampling_params request_id | prompt_text lora_request tokenization_kwargs "
    "trace_headers priority data_parallel_rank reasoning_ended",
    "AsyncLLM.pause_generation": "self | mode clear_cache",
    "AsyncLLM.resume_generation": "self",
    "AsyncLLM.collective_rpc": "self method timeout args kwargs",
    "AsyncLLM.shutdown": "self timeout",
    "AsyncLLM.is_sleeping": "self",
    "AsyncLLM.sleep": "self level",
    "AsyncLLM.wake_up": "self tags",
    "EngineCoreProc.run_engine_core": "args | dp_rank local_dp_rank kwargs",
    "Worker.reload_weights": "self weights_iterator weights_path is_checkpoint_format",
    "StatelessProcessGroup.create": "host port rank world_size",
    "PyNcclCommunicator.__init__": "self group device",
    "PyNcclCommunicator.broadcast": "self tensor src stream",
}

ENGINE_ARGUMENTS = frozenset(
    "model skip_tokenizer_init dtype max_model_len max_num_seqs gpu_memory_utilization tensor_parallel_size "
    "enable_prefix_caching logprobs_mode worker_extension_cls disable_log_stats enable_sleep_mode "
    "use_tqdm_on_load".split()
)
"""Fields of AsyncEngineArgs."""

SAMPLING_PARAMETERS = frozenset(
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids "
    "ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens output_kind".split()
)
"""Fields of SamplingParams, over HTTP too."""

GENERATE_REQUEST = frozenset(
    "request_id token_ids features sampling_params model stream stream_options cache_salt priority "
    "kv_transfer_params".split()
)
"""Keys of the body of POST /inference/v1/generate."""

QUERIES = {"/pause": {"mode", "clear_cache"}, "/server_info": {"config_format"}, "/get_world_size": {"include_dp"}}
"""Parameters in the query of the control endpoints."""

BODIES = {
    "/collective_rpc": {"method", "args", "kwargs", "timeout"},
    "/init_weight_transfer_engine": {"init_info"},
    "/update_weights": {"update_info"},
}
"""Keys of their bodies. All others take none."""

NO_SCALE_OUT = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "code": 403,
    }
}
"""What a server without --enable-scale-out answers to those that ask for tokens."""

NCCL_INIT = {"master_address", "master_port", "rank_offset", "world_size"}
NCCL_UPDATE = {"names", "dtype_names", "shapes"}
"""Inside of `init_info` and `update_info`, for the backend nccl: those without a default."""


def check_signature(function: Callable[..., Any], recorded: str) -> None:
    """Raises AssertionError unless a call that is written for the record can be made of the function."""
    positional, _, keywords = recorded.partition("|")
    mine = inspect.signature(function).parameters
    names = [name for name, value in mine.items() if value.kind is not inspect.Parameter.KEYWORD_ONLY]
    wanted = positional.split()
    assert names[: len(wanted)] == wanted, f"{function.__qualname__}{inspect.signature(function)}: {names} != {wanted}"
    missing = set(keywords.split()) - set(mine)
    assert not missing, f"{function.__qualname__} lacks {missing}"
