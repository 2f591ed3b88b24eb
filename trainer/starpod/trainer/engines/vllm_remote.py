"""Remote vLLM engine: servers sample over HTTP, and their development endpoints control the weights.

It supports vllm 0.31 to 0.33, started by `starpod vllm` with any model of the same architecture. For `handover: nccl`
add `--weight-transfer-config '{"backend": "nccl"}'`. Anyone who reaches the development endpoints can replace the
weights, even with `--api-key`, so the servers belong on a private network.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import openai
import torch

from starpod.client.transport import Backoff
from starpod.trainer.engines.base import EngineError, EngineLost, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.placement import Placement
from starpod.trainer.engines.served import Piece, ServedEngine, sampling_parameters
from starpod.trainer.engines.watch import Watch
from starpod.trainer.engines.weights import device_of, gather, make_folder, shapes_of, weights_of, write_weights
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.parallel.ranks import Parallel

START = (
    "starpod vllm MODEL, or VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    "--enable-scale-out"
)
LOOK_SECONDS = 5.0
"""Interval in seconds between health checks of a server with pending calls."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 8.0
"""First and longest wait in seconds before a call is retried; each wait is twice as long as the one before."""
_BUSY = (
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
"""Calls during which an engine core does not answer health checks, because it works or waits for other cores."""
_LOGPROBS_MODE = "processed_logprobs"
"""The log-probabilities that training needs: those at the sampling temperature."""
_PASSING = (408, 409, 429)
"""Statuses below 500 after which the same call may be retried."""


class VllmServer:
    """Client of one server that retries calls and raises readable errors.

    Failed calls are retried if they are idempotent, as all calls except those of a broadcast are. A call without an
    answer is not repeated: the server either works on it or hangs. Health checks ask the engine core, which answers
    between two steps. The server alone would report itself healthy even if its core hangs.

    Attributes:
        breaks: Number of lost connections.
        known_breaks: Value of `breaks` when the server was last known to be the expected process.
        instance: Id of that process; "" if the server does not report it.
    """

    def __init__(self, url: str, *, key: str, config: EngineConfig) -> None:
        self.url = url.rstrip("/")
        self.breaks = self.known_breaks = 0
        self.instance = ""
        # Health checks have separate connections, because all others may be busy with replies.
        self._client, self._checks = (
            openai.AsyncOpenAI(base_url=self.url, api_key=key or "none", timeout=timeout, max_retries=0)
            for timeout in (None, config.health_timeout)
        )
        self._retries = config.retries
        self._watch, self._watch_busy = (
            Watch(
                f"the vLLM server at {self.url}",
                interval=LOOK_SECONDS,
                health_check=partial(self._checks.get, question, cast_to=NoneType),
                health_timeout=config.health_timeout,
                reply_timeout=config.timeout,
            )
            for question in ("/is_sleeping", "/health")
        )

    async def close(self) -> None:
        await self._client.close()
        await self._checks.close()

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        session: str = "",
        once: bool = False,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Send a POST request.

        Raises EngineError if it fails, for example because the server has no such path.

        Args:
            session: Session name for a router in front of the servers.
            once: Do not retry, because the call is part of a collective operation.
            read: Converts the decoded JSON reply to the result. It raises ValueError if the reply cannot be used, and
                the call is retried. None ignores the reply.
        """
        options: Any = {"params": query or {}}
        if session:
            # A router sends all requests of a session to the server with its cache.
            options["headers"] = {"X-Session-ID": session}

        def call() -> Coroutine[Any, Any, str]:
            return self._client.post(path, body=body, cast_to=str, options=options)

        return await self._ask(call, path, 0 if once else self._retries, read)

    async def get(self, path: str, read: Callable[[Any], Any], query: Mapping[str, str] | None = None) -> Any:
        """Send a GET request, with `read` and errors as in `post`."""
        options: Any = {"params": query or {}}
        return await self._ask(lambda: self._client.get(path, cast_to=str, options=options), path, self._retries, read)

    async def info(self) -> ServerInfo:
        """Return the facts of the server's vLLM configuration that matter here."""
        info: ServerInfo = await self.get("/server_info", _read_info, {"config_format": "json"})
        return info

    async def _ask(
        self, call: Callable[[], Coroutine[Any, Any, str]], path: str, retries: int, read: Callable[[Any], Any] | None
    ) -> Any:
        backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)
        watch = self._watch_busy if path in _BUSY else self._watch
        while True:
            failure: EngineError
            try:
                text = await watch.guard(call())
                return None if read is None else read(json.loads(text))
            except json.JSONDecodeError:
                failure = EngineError(
                    f"the vLLM server at {self.url} answered {path} with {text[:80]!r}, not with JSON"
                )
            except (ValueError, RecursionError) as error:
                failure = EngineError(f"the vLLM server at {self.url} answered {path} with {error}")
            except openai.NotFoundError:
                raise EngineError(f"the server at {self.url} has no {path}; start it as: {START}") from None
            except openai.APIStatusError as error:
                failure = Refused(error.status_code, f"the vLLM server at {self.url} refused {path}: {error}")
                if error.status_code not in _PASSING and error.status_code < 500:
                    raise failure from error
            except openai.APIConnectionError as error:
                self.breaks += 1
                failure = Gone(f"the vLLM server at {self.url} is gone: {error.__cause__ or error}")
            if not retries:
                raise failure
            retries -= 1
            await asyncio.sleep(backoff.wait())


class Gone(EngineError):
    """The server does not accept connections."""


class Refused(EngineError):
    """The server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts that a server reports about itself. `instance` is the id of its process, or "" if it reports none."""

    instance: str
    logprobs_mode: str
    max_length: float


def _read_info(reply: Any) -> ServerInfo:
    match reply:
        case {"vllm_config": dict(config)}:
            model = config.get("model_config") or {}
            if isinstance(model, dict):
                length = model.get("max_model_len", math.inf)
                if type(length) in (int, float):
                    mode = str(model.get("logprobs_mode", _LOGPROBS_MODE))
                    return ServerInfo(str(config.get("instance_id", "")), mode, length)
    raise ValueError(f"{reply!r:.200}, which is no configuration of vLLM")


def _read_world_size(reply: Any) -> int:
    match reply:
        case {"world_size": int(size)} if size > 0:
            return size
    raise ValueError(f"{reply!r:.200}, which is no number of workers")


def _read_piece(reply: Any) -> Piece:
    """Return a reply's tokens as the server sent them. Raises ValueError if a field is missing."""
    try:
        (choice,) = reply["choices"]
        places = (choice["logprobs"] or {}).get("content") or ()
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        logprobs = [place["logprob"] for place in places]
        cached_tokens = details.get("cached_tokens") or 0
        return Piece(choice["token_ids"] or [], logprobs, choice["finish_reason"], cached_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{reply!r:.200}, which is no reply of tokens ({error!r})") from error


class RemoteVllm(ServedEngine):
    """Engine on vLLM servers, all with the same weights. `Placement` chooses one for each request.

    If a server no longer accepts connections, the engine continues with the other servers. This counts as a restart.

    Until the first `load`, the servers sample from the weights that they were started with. The first rank controls the
    servers and hands the weights over. A sharded model is gathered one parameter at a time.
    """

    def __init__(
        self, config: EngineConfig, *, max_context: int, vocabulary: int, parallel: Parallel | None = None
    ) -> None:
        super().__init__(
            slots=config.slots,
            max_context=max_context,
            vocabulary=vocabulary,
            restarts=config.restarts,
            parallel=parallel,
        )
        try:
            key = Path(config.api_key_file).read_text(encoding="utf-8-sig").strip() if config.api_key_file else ""
        except OSError as error:
            raise EngineError(f"engine.api_key_file cannot be read: {error}") from None
        servers = [VllmServer(url, key=key, config=config) for url in config.urls]
        self._placement = Placement(servers, first=self._parallel.rank)
        self._ids = itertools.count()
        self._check_lock = asyncio.Lock()
        self._is_checked = False
        # Folder of the current weights, from which restarted servers load them; None before the first hand-over.
        self._weights_folder: Path | None = None
        folder = make_folder(config.handover_folder) if self._parallel.is_main else Path()
        self._folder = self._parallel.broadcast_object(folder)
        nccl = config.handover == "nccl"
        self._nccl = NcclSender(servers, config.nccl_address, self._parallel) if nccl else None

    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        await self._check()
        body = {
            "request_id": f"{self._name}-{next(self._ids)}",
            "token_ids": prompt,
            "cache_salt": salt,
            "sampling_params": sampling_parameters(request, limit, seed),
        }
        pauses = self._pauses

        def read(reply: Any) -> Piece:
            piece = _read_piece(reply)
            self._check_reply(piece, request, limit, pauses)
            return piece

        piece: Piece | None = None
        with self._placement.place(prompt, salt) as server:
            try:
                piece = await server.post("/inference/v1/generate", body, session=request.conversation, read=read)
            except Gone as error:
                await self._drop(server, error)
            except Refused as error:
                if error.status == 503 and not self._open.is_set():
                    return Piece([], [])  # newer versions refuse requests during a pause
                raise
        if piece is None:
            return Piece([], [])
        if (breaks := server.breaks) != server.known_breaks:
            instance_id = (await server.info()).instance
            if self._loads and instance_id != server.instance:
                raise EngineLost(f"the vLLM server at {server.url} was restarted, so it has other weights")
            server.instance, server.known_breaks = instance_id, breaks
        self._placement.remember(server, [*prompt, *piece.tokens], salt)
        return piece

    async def _drop(self, server: VllmServer, error: Gone) -> None:
        """Continue without a server. Raises `error` if it is the last one, no restart is left, or nccl is used."""
        if server not in self._servers:
            return
        if len(self._servers) == 1 or self._nccl is not None or self._stats.restarts >= self._restarts:
            raise error
        self._stats.restarts += 1
        self._placement.drop(server)
        await server.close()

    @property
    def _servers(self) -> list[VllmServer]:
        return self._placement.servers

    async def _check(self) -> None:
        """Check once that the servers can be controlled and report the log-probabilities that training needs."""
        async with self._check_lock:
            if self._is_checked:
                return
            for server in self._servers:
                breaks, info = server.breaks, await server.info()
                server.instance, server.known_breaks = info.instance, breaks
                if info.logprobs_mode != _LOGPROBS_MODE:
                    raise EngineError(
                        f"the vLLM server at {server.url} reports {info.logprobs_mode}, not the log-probabilities at "
                        f"the sampling temperature; start it as: {START}"
                    )
                if info.max_length < self._max_context:
                    raise EngineError(
                        f"the vLLM server at {server.url} takes contexts of {info.max_length:g} tokens, but the run "
                        f"needs {self._max_context}: start it with --max-model-len {self._max_context}"
                    )
                await self._probe(server)
            self._is_checked = True

    @staticmethod
    async def _probe(server: VllmServer) -> None:
        """Send an empty request, which has no effect, and raise EngineError if the server rejects token ids."""
        try:
            await server.post("/inference/v1/generate", {}, once=True)
        except Refused as error:
            if error.status == 403:
                raise EngineError(
                    f"the vLLM server at {server.url} returns no token ids: start it as: {START}"
                ) from error

    async def pause(self) -> None:
        """Interrupt all replies, after all ranks have stopped sending requests."""
        self._close_gate()
        if self._parallel.world > 1:
            await self._parallel.in_thread(self._parallel.barrier)
        await super().pause()

    async def load(self, version: int, model: torch.nn.Module) -> None:
        """Hand over the weights.

        With nccl, no rank waits here for the other ranks. If the broadcast fails, they hang while gathering weights.
        """
        await (self._load(version, model) if self._nccl is not None else super().load(version, model))

    async def _halt(self) -> None:
        if self._parallel.is_main:
            await self._halt_servers()

    async def _halt_servers(self) -> None:
        if any(server.breaks != server.known_breaks for server in self._servers):
            self._is_checked = False
        await self._check()
        await self._all("/pause", query={"mode": "abort"})

    async def _go_on(self) -> None:
        if self._parallel.is_main:
            await self._all("/resume")

    async def _restart(self) -> None:
        """Reload the current weights from their folder on all servers after one was restarted. Any rank may do it."""
        self._is_checked = False
        if self._nccl is not None and self._version:
            raise EngineError(
                "a vLLM server was restarted, so it no longer receives broadcast weights: start all servers, then "
                "resume the run, or set engine.handover to disk"
            )
        if self._weights_folder is None:
            return
        await self._halt_servers()
        await self._reload(self._weights_folder)
        await self._all("/resume")

    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        folder = self._folder / f"weights-{version}"
        if not self._parallel.is_main:
            await self._parallel.in_thread(gather, weights_of(model))
        elif self._nccl is not None:
            await self._nccl.send(model)
        else:
            before = self._weights_folder
            await self._parallel.in_thread(write_weights, model, folder)
            await self._reload(folder)
            if before not in (None, folder):
                shutil.rmtree(before, ignore_errors=True)
        self._weights_folder = folder if self._nccl is None else None

    async def _reload(self, folder: Path) -> None:
        try:
            await self._all("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        except Refused as error:
            raise EngineError(
                f"{error}. It must see the trainer's {folder} at the same path: set engine.handover_folder to a "
                "folder that both share"
            ) from error

    async def _all(self, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> None:
        async def ask(server: VllmServer) -> None:
            try:
                await server.post(path, body, query=query)
            except Gone as error:
                await self._drop(server, error)

        await asyncio.gather(*map(ask, self._servers))

    async def _shut_down(self) -> None:
        for server in self._servers:
            await server.close()
        if self._parallel.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)


class NcclSender:
    """Broadcasts weights from the trainer's GPU to the servers' GPUs, one parameter at a time.

    The first call creates a process group in which the trainer is rank 0 and the servers' workers are the other ranks.
    The servers reach the trainer at `address` ("host:port"). The trainer needs vllm, for its communicator, and a policy
    on a GPU.
    """

    def __init__(self, servers: list[VllmServer], address: str, parallel: Parallel) -> None:
        self._servers = servers
        self._parallel = parallel
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._group: Any = None

    async def send(self, model: torch.nn.Module) -> None:
        """Send the weights and return when all servers have them. Raises EngineError."""
        device = device_of(model)
        if device.type != "cuda":
            raise EngineError("engine.handover nccl sends from the policy's GPU memory, but the policy is on the CPU")
        if self._group is None:
            self._group = await self._join(device)
        names, shapes = zip(*shapes_of(model), strict=True)
        types = [str(compute_dtype(model)).removeprefix("torch.")] * len(names)
        update = {"update_info": {"names": list(names), "dtype_names": types, "shapes": list(shapes)}}
        await asyncio.gather(*(server.post("/start_weight_update", once=True) for server in self._servers))
        # These calls return only after the broadcast.
        calls = [asyncio.ensure_future(server.post("/update_weights", update, once=True)) for server in self._servers]
        await self._together(calls, self._parallel.in_thread(self._broadcast, model, device))
        await asyncio.gather(*(server.post("/finish_weight_update", once=True) for server in self._servers))

    async def _join(self, device: torch.device) -> Any:
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            hint = "from a clone of the repository: pip install '.[vllm]'"
            raise EngineError(f"engine.handover nccl needs vllm here; {hint} ({error})") from None
        sizes = [await server.get("/get_world_size", _read_world_size) for server in self._servers]
        world = 1 + sum(sizes)

        def rendezvous() -> Any:
            group = StatelessProcessGroup.create(host=self._host, port=self._port, rank=0, world_size=world)
            return PyNcclCommunicator(group, device=device)

        calls, rank = [], 1
        for server, size in zip(self._servers, sizes, strict=True):
            info = {"master_address": self._host, "master_port": self._port, "rank_offset": rank, "world_size": world}
            call = server.post("/init_weight_transfer_engine", {"init_info": info}, once=True)
            calls.append(asyncio.ensure_future(call))
            rank += size
        return await self._together(calls, self._parallel.in_thread(rendezvous))

    async def _together(self, calls: Sequence[asyncio.Future[Any]], work: Any) -> Any:
        """Run the servers' calls and the trainer's part of a collective operation at the same time.

        Errors of the servers are raised at once, because the trainer's part would hang without them.
        """
        own_call = asyncio.ensure_future(work)
        done, _ = await asyncio.wait((*calls, own_call), return_when=asyncio.FIRST_EXCEPTION)
        for call in {*calls, own_call} - done:
            call.cancel()
        for call in (*calls, own_call):
            if call in done and (error := call.exception()) is not None:
                raise error
        return own_call.result()

    def _broadcast(self, model: torch.nn.Module, device: torch.device) -> None:
        # Use the stream that computes the weights, or they could be sent before they are complete.
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            for _, weight in weights_of(model):
                self._group.broadcast(weight.contiguous(), src=0, stream=stream)
            torch.cuda.synchronize()
