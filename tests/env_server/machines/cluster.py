"""A Kubernetes API on a real socket, whose pods are local processes.

Each pod has its own users, processes and root folder, so that ending all processes of a pod ends no others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import trustme
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

_USERS = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
_NAMESPACES = ["unshare", *_USERS, "--mount", "--pid", "--fork", "--kill-child"]
_ROOT = """
set -e; cd "$1"; shift
mount -t tmpfs none .; cd "$PWD"
mkdir -p app tmp proc dev etc usr
for folder in bin sbin lib lib64; do [ ! -e /$folder ] || { mkdir $folder; mount --rbind /$folder $folder; }; done
mount --rbind /usr usr; mount --rbind /dev dev; mount -t proc none proc
for name in passwd group shadow nsswitch.conf alternatives login.defs pam.d security; do
  [ ! -e /etc/$name ] || cp -r /etc/$name etc
done
# The shell reaps orphans, as the first process of a pod does.
exec chroot . /bin/sh -c 'cd /app; exec 3<&0; "$@" <&3 3<&- & wait $!' sh "$@"
"""


def missing() -> str:
    """Return why no pods can run here, or an empty text."""
    try:
        tried = subprocess.run([*_NAMESPACES, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return tried.stderr


class Cluster:
    """A cluster of one namespace, `agents`.

    Attributes:
        pods: manifests by name, with their status.
        policies: network policies.
        waits: status of new pods that never start; empty if pods start.
        port: port of the API on 127.0.0.1.
        authority: file with the certificate that signed the API's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, dict[str, Any]] = {}
        self.policies: list[dict[str, Any]] = []
        self.waits: dict[str, Any] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        pods = "/api/v1/namespaces/agents/pods"
        routes = [
            Route(pods, self._list, methods=["GET"]),
            Route(pods, self._create, methods=["POST"]),
            Route(f"{pods}/{{name}}", self._pod, methods=["GET", "DELETE"]),
            Route("/apis/networking.k8s.io/v1/namespaces/agents/networkpolicies", self._list_policies),
            WebSocketRoute(f"{pods}/{{name}}/attach", self._attach),
            WebSocketRoute(f"{pods}/{{name}}/exec", self._exec),
        ]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        authority, self.authority = trustme.CA(), folder / "ca.crt"
        authority.cert_pem.write_to_path(self.authority)
        certificate = folder / "api.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_level="error",
            ws="wsproto",
            ssl_certfile=certificate,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()

    def close(self) -> None:
        for name in list(self.pods):
            self.end(name)
        self._server.should_exit = True
        self._thread.join()

    def end(self, name: str, phase: str = "Failed", **status: Any) -> None:
        """End the processes of a pod, which then has a phase and perhaps a reason."""
        self.pods[name]["status"] = {"phase": phase, **status}
        if process := self._processes.pop(name, None):
            # The first process of the pod is reaped after all others have ended; unshare itself would end before them.
            for first in _children(process):
                os.kill(int(first), signal.SIGKILL)
            process.wait()

    def _status(self, name: str) -> None:
        process = self._processes.get(name)
        if process and process.poll() is not None:
            del self._processes[name]
            ended = {"exitCode": process.returncode, "reason": "Error", "message": self._log(name).read_text()}
            about = {"name": "machine", "image": "", "imageID": "", "ready": False, "restartCount": 0}
            self.pods[name]["status"] = {
                "phase": "Failed" if process.returncode else "Succeeded",
                "containerStatuses": [{**about, "state": {"terminated": ended}}],
            }

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def _list(self, request: Request) -> JSONResponse:
        label = request.query_params["labelSelector"]
        pods = [pod for pod in self.pods.values() if label in pod["metadata"].get("labels", {})]
        return JSONResponse({"kind": "PodList", "items": pods})

    async def _list_policies(self, request: Request) -> JSONResponse:
        return JSONResponse({"kind": "NetworkPolicyList", "items": self.policies})

    async def _create(self, request: Request) -> JSONResponse:
        pod = await request.json()
        name = pod["metadata"]["name"]
        self.pods[name] = {**pod, "status": self.waits or {"phase": "Running"}}
        if not self.waits:
            folder = self.folder / name
            folder.mkdir()
            command = [*_NAMESPACES, "sh", "-c", _ROOT, "sh", folder, *pod["spec"]["containers"][0]["command"]]
            with self._log(name).open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
                )
        return JSONResponse(self.pods[name])

    async def _pod(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in self.pods:
            return JSONResponse({"kind": "Status", "message": f'pods "{name}" not found'}, 404)
        self._status(name)
        pod = self.pods[name]
        if request.method == "DELETE":
            self.end(name)
            del self.pods[name]
        return JSONResponse(pod)

    async def _attach(self, websocket: WebSocket) -> None:
        process = self._processes[websocket.path_params["name"]]
        await self._serve(websocket, process)
        assert process.stdin
        process.stdin.close()  # stdinOnce

    async def _exec(self, websocket: WebSocket) -> None:
        guard = self._processes.get(websocket.path_params["name"])
        if not (children := _children(guard) if guard else []):
            await websocket.close()
            return
        users = ["--user", "--preserve-credentials"] if _USERS else []
        enter = ["nsenter", "--target", children[0], *users, "--mount", "--pid", "--root", "--wd"]
        command = [*enter, *websocket.query_params.getlist("command")]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        await self._serve(websocket, process)
        assert process.stdin
        process.stdin.close()

    async def _serve(self, websocket: WebSocket, process: subprocess.Popen[bytes]) -> None:
        """Connect a websocket with a process until one of them ends."""
        await websocket.accept(subprotocol="v5.channel.k8s.io")
        writing = asyncio.create_task(self._write(websocket, process))
        reading = asyncio.create_task(self._read(websocket, process))
        _, pending = await asyncio.wait([writing, reading], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(writing, reading, return_exceptions=True)

    async def _write(self, websocket: WebSocket, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        try:
            while True:
                data = await websocket.receive_bytes()
                assert data[0] == 0
                await asyncio.to_thread(process.stdin.write, data[1:])
        except (WebSocketDisconnect, BrokenPipeError):
            return

    async def _read(self, websocket: WebSocket, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        while data := await asyncio.to_thread(os.read, process.stdout.fileno(), 65_536):
            await websocket.send_bytes(b"\1" + data)
        status = await asyncio.to_thread(process.wait)
        causes = [{"reason": "ExitCode", "message": str(status)}]
        result = {"status": "Failure", "details": {"causes": causes}} if status else {"status": "Success"}
        await websocket.send_bytes(b"\3" + json.dumps(result).encode())
        await websocket.close()


def _children(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the numbers of the processes that a process has started, none if it has ended."""
    if process.poll() is not None:
        return []
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def eventually(condition: Any) -> bool:
    """Return whether a condition holds within ten seconds."""
    for _ in range(100):
        if condition():
            return True
        time.sleep(0.1)
    return False
