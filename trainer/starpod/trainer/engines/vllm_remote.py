"""Remote vLLM engine: servers sample over HTTP, and their development endpoints control the weights.

It supports vllm 0.31 to 0.33, started by `starpod vllm` with any model of the same architecture. For `handover: nccl`
add `--weight-transfer-config '{"backend": "nccl"}'`. Anyone who reaches the development endpoints can replace the
weights, even with `--api-key`, so the servers belong on a private network.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from starpod.trainer.engines.base import EngineError, EngineLost, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.piece import ABORT, Piece
from starpod.trainer.engines.placement import Placement
from starpod.trainer.engines.served import ServedEngine, sampling_parameters
from starpod.trainer.engines.vllm_nccl import NcclSender
from starpod.trainer.engines.vllm_server import LOGPROBS_MODE, START, ServerGone, ServerRefused, VllmServer, read_piece
from starpod.trainer.engines.weights import gather, make_folder, weights_of, write_weights
from starpod.trainer.parallel.ranks import Parallel


class RemoteVllm(ServedEngine):
    """Engine on vLLM servers, all with the same weights. `Placement` chooses one for each request.

    If a server no longer accepts connections, the engine continues with the other servers. This counts as a restart.
    At the next hand-over, all ranks drop the servers that one of them has dropped.

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
        streams = request.on_tokens is not None
        body = {
            "request_id": f"{self._name}-{next(self._ids)}",
            "token_ids": prompt,
            "cache_salt": salt,
            "sampling_params": sampling_parameters(request, limit, seed),
            "stream": streams,
        }
        pauses = self._pauses

        def read(reply: Any) -> Piece:
            piece = read_piece(reply)
            self._check_reply(piece, request, limit, pauses)
            return piece

        async def read_events(events: AsyncIterator[Any]) -> Piece:
            piece = Piece([], [])
            async for event in events:
                part = read_piece(event)
                replace(part, finish=ABORT).check(request, limit - len(piece.tokens), self._vocabulary)
                piece = piece.extend(part, request, prompt)
            self._check_reply(piece, request, limit, pauses)
            return piece

        call = {"read_events": read_events} if streams else {"read": read}
        piece: Piece | None = None
        with self._placement.place(prompt, salt) as server:
            if self._loads and self._placement.load(server) == 1:
                server.known_breaks = -1  # it was idle, so no call would have noticed that it was replaced
            try:
                reply = await server.post("/inference/v1/generate", body, session=request.conversation, **call)
                await self._check_process(server)
                piece = reply
            except ServerGone as error:
                await self._drop(server, error)
            except ServerRefused as error:
                if error.status == 503 and not self._open.is_set():
                    return Piece([], [])  # newer versions refuse requests during a pause
                raise
        if piece is None:
            return Piece([], [])
        self._placement.remember(server, [*prompt, *piece.tokens], salt)
        return piece

    async def _check_process(self, server: VllmServer) -> None:
        """Raise EngineLost if the server is another process than the one that got the weights."""
        if (breaks := server.breaks) == server.known_breaks:
            return
        instance_id = (await server.info()).instance
        if self._loads and instance_id != server.instance:
            raise EngineLost(f"the vLLM server at {server.url} was restarted, so it has different weights")
        server.instance, server.known_breaks = instance_id, breaks

    async def _drop(self, server: VllmServer, error: ServerGone) -> None:
        """Continue without a server. Raises `error` if it is the last one, no restart is left, or nccl is used."""
        if server not in self._servers:
            return
        if len(self._servers) == 1 or self._nccl is not None:
            raise error
        self._restarts.use(error)
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
                try:
                    await self._check_server(server)
                except ServerGone as error:
                    await self._drop(server, error)
            self._is_checked = True

    async def _check_server(self, server: VllmServer) -> None:
        breaks, info = server.breaks, await server.info()
        server.instance, server.known_breaks = info.instance, breaks
        if info.logprobs_mode != LOGPROBS_MODE:
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

    @staticmethod
    async def _probe(server: VllmServer) -> None:
        """Send an empty request, which has no effect, and raise EngineError if the server rejects token ids."""
        try:
            await server.post("/inference/v1/generate", {}, once=True)
        except ServerRefused as error:
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
        self._is_checked = False  # an idle server may have been replaced
        await self._check()
        await self._all("/pause", query={"mode": "abort"})

    async def resume(self) -> None:
        if self._parallel.world > 1:
            await self._agree()
        await super().resume()

    async def _agree(self) -> None:
        """Drop the servers that any rank has dropped, because the first rank gave them no weights or will give none.

        Raises EngineError on all ranks if no server is left.
        """
        instances = {server.url: server.instance for server in self._servers}
        by_rank = await self._parallel.in_thread(self._parallel.gather_objects, instances)
        if not (common := set.intersection(*map(set, by_rank))):
            raise EngineError("no vLLM server is left that all ranks reach: start the servers again, then resume")
        for server in self._servers:
            if server.url in common:
                server.instance, server.known_breaks = by_rank[0][server.url], server.breaks
            else:
                self._placement.drop(server)
                await server.close()
        self._is_checked = True  # by the first rank

    async def _go_on(self) -> None:
        if self._parallel.is_main:
            await self._all("/resume")

    async def _restart(self) -> None:
        """Reload the current weights from their folder on all servers after one was restarted. Any rank may do it."""
        if self._nccl is not None:
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
        except ServerRefused as error:
            raise EngineError(
                f"{error}. It must see the trainer's {folder} at the same path: set engine.handover_folder to a "
                "folder that both share"
            ) from error

    async def _all(self, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> None:
        async def ask(server: VllmServer) -> None:
            try:
                await server.post(path, body, query=query)
            except ServerGone as error:
                await self._drop(server, error)

        await asyncio.gather(*map(ask, self._servers))

    async def _shut_down(self) -> None:
        for server in self._servers:
            await server.close()
        if self._parallel.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
