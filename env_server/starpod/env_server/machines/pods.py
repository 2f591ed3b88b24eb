"""A Kubernetes cluster as the engine of machines: each machine is a pod with one container."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from kubernetes import client, config, stream
from kubernetes.client.exceptions import ApiException, OpenApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.stream import ws_client
from urllib3.exceptions import HTTPError
from urllib3.util.wait import wait_for_read
from websocket import ABNF, WebSocketException, WebSocketTimeoutException

from starpod.env_server.authoring.environment import Unavailable
from starpod.env_server.machines import engine
from starpod.env_server.machines.engine import LEASE, SERVER, SESSION, MachinePlan, Variables
from starpod.env_server.machines.shell import START

logger = logging.getLogger(__name__)

NETWORK = "starpod.network"
"""Label of pods, `none` or `public`, which a NetworkPolicy selects: a pod cannot choose its network itself."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CALL_SECONDS = 60.0
_LIMITS = {"_request_timeout": (5.0, _CALL_SECONDS)}
"""Time limits of a connection to the API, and of a call."""
_POLL_SECONDS = 0.5
_READ_SECONDS = 0.05
"""Time limit of the rest of a message of which something has arrived. More is waited for without the lock."""
_REASON_SECONDS = 5.0
"""The kubelet reports why a container ended within about a second."""
_CHUNK = 32_768
_STDIN, _OUTPUTS, _STATUS = b"\0", (b"\1", b"\2"), b"\3"
"""First bytes of messages of the protocols v4.channel.k8s.io and v5.channel.k8s.io."""
_ENTER = """\
path=$PATH PATH=SYSTEM_PATH
change=$(command -v setpriv) become=$(command -v su)
PATH=$path
user=${1%%:*} group= name= gid= home=/
case $1 in *:*) group=${1#*:};; esac
uid=$user
while IFS=: read -r n _ u g _ h _; do
  if [ "$n" = "$user" ] || [ "$u" = "$user" ]; then name=$n uid=$u gid=$g home=$h; break; fi
done </etc/passwd
export HOME="$home"
[ "$uid" != 0 ] || exec /bin/sh -c "$3" sh "$2"
set -- "$@" "${group:-${gid:-$uid}}" --clear-groups
if [ -n "$change" ] && "$change" --reuid "$uid" --regid "$4" --clear-groups true 2>/dev/null; then
  [ -n "$group" ] || [ -z "$name" ] || set -- "$1" "$2" "$3" "$4" --init-groups
  exec "$change" --reuid "$uid" --regid "$4" "$5" /bin/sh -c "$3" sh "$2"
fi
[ -n "$name" ] || { name=starpod$uid; echo "$name:x:$uid:$4::$home:/bin/sh" >>/etc/passwd; }
exec "$become" -p -s /bin/sh -c "$3" "$name" sh "$2"
""".replace("SYSTEM_PATH", engine.SYSTEM_PATH)
"""Becomes the user $1, like `docker exec --user`, and runs the script $3 with the argument $2. Kubernetes can start a
process only as the container's user, which is root. Without util-linux's setpriv, su needs an entry in /etc/passwd."""
_READ = 'if [ -f "$1" ] && [ ! -L "$1" ]; then exec head -c "$2" "$1"; else exit 3; fi'
_NO_FILE = 3


class PodStream:
    """Input and output of a process in a pod, over a websocket.

    Attributes:
        status: exit status of the process; None until it has ended, and -1 if it was not started.
    """

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        # OpenSSL cannot read and write one connection in two threads at a time, and Python before 3.13 lets it.
        self._lock = threading.Lock()
        self.status: int | None = None

    def send(self, data: bytes, deadline: float) -> None:
        for start in range(0, len(data), _CHUNK):
            with self._lock:
                self._websocket.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    self._websocket.send_binary(_STDIN + data[start : start + _CHUNK])
                except WebSocketTimeoutException as error:
                    raise TimeoutError from error
                except WebSocketException as error:
                    raise BrokenPipeError(str(error)) from error

    def read(self, deadline: float) -> bytes:
        while self.status is None and (seconds := deadline - time.monotonic()) > 0:
            try:
                code, frame = self._receive(seconds)
            except WebSocketTimeoutException:
                continue  # a part of a frame came, which is kept
            except (WebSocketException, ConnectionError, ValueError):
                return b""
            channel, data = bytes(frame.data[:1]), bytes(frame.data[1:])
            if code == ABNF.OPCODE_CLOSE:
                return b""
            if channel == _STATUS:
                self.status = _read_status(data)
            elif channel in _OUTPUTS and data:
                return data
        if self.status is None:
            raise TimeoutError
        return b""

    def _receive(self, seconds: float) -> tuple[int, Any]:
        """Return the next message. Threads that send wait only while there is something to read."""
        connection = self._websocket.sock
        if connection is None:
            raise ConnectionResetError
        with self._lock:
            has_data = isinstance(connection, ssl.SSLSocket) and connection.pending()
        if not (has_data or wait_for_read(connection, seconds)):
            raise WebSocketTimeoutException
        with self._lock:
            self._websocket.settimeout(_READ_SECONDS)
            message: tuple[int, Any] = self._websocket.recv_data_frame()
            return message

    def close(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a closed connection
            self._websocket.sock.shutdown(socket.SHUT_RDWR)
        self._websocket.shutdown()


class _TimedWebSocket(ws_client.WebSocket):  # type: ignore[misc]
    """A websocket whose handshake has a time limit, which the cluster's client cannot set."""

    def connect(self, url: str, **options: Any) -> None:
        super().connect(url, timeout=_CALL_SECONDS, **options)


ws_client.WebSocket = _TimedWebSocket


class PodEngine:
    """A connection to the API of a Kubernetes cluster, for the pods of one namespace."""

    errors: ClassVar[tuple[type[Exception], ...]] = (OpenApiException, HTTPError, WebSocketException, OSError)

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self.server = engine.identity(os.getpid())
        self._configuration = configuration
        self._api = client.CoreV1Api(client.ApiClient(configuration))
        self._owners: list[dict[str, str]] = []
        self._is_network_checked = False
        with contextlib.suppress(*self.errors):  # outside of the cluster or of the namespace, there is no such pod
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                own = self._find_pod(socket.gethostname()).metadata
                self._owners = [{"apiVersion": "v1", "kind": "Pod", "name": own.name, "uid": own.uid}]

    def prepare(self, plan: MachinePlan, folder: Path | None, seconds: float, network: str) -> tuple[str, str]:
        """Warn if no NetworkPolicy keeps pods from the network. The API does not describe images, which nodes pull."""
        if plan.network or self._is_network_checked:
            return "", ""
        self._is_network_checked = True
        problem = "there is none"
        try:
            api = client.NetworkingV1Api(client.ApiClient(self._configuration))
            if any(map(_denies_egress, api.list_namespaced_network_policy(self.namespace, **_LIMITS).items)):
                return "", ""
        except self.errors as error:
            problem = _problem(error)
        logger.warning(
            "tasks without network may reach it: no NetworkPolicy of the namespace %s denies egress of pods labelled "
            "%s=none (%s); apply the one in docs/machines.md",
            *(self.namespace, NETWORK, problem),
        )
        return "", ""

    def create(self, plan: MachinePlan, name: str, session: str, image: str) -> str:
        sizes = {"cpu": f"{plan.cpus * 1000:.0f}m", "memory": f"{plan.memory_mb}Mi"}
        sizes["ephemeral-storage"] = f"{plan.storage_mb}Mi"
        container = {
            "name": "machine",
            "image": image,
            "command": plan.command,
            "stdin": True,
            "stdinOnce": True,
            "resources": {"requests": sizes, "limits": sizes},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": {
                "runAsUser": 0,
                "runAsGroup": 0,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": list(engine.CAPABILITIES)},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        server = hashlib.sha256(self.server.encode()).hexdigest()[:32]
        metadata = {
            "name": name,
            "labels": {SERVER: server, SESSION: session, NETWORK: "public" if plan.network else "none"},
            "annotations": {SERVER: self.server, SESSION: session, LEASE: plan.lease},
            "ownerReferences": self._owners,
        }
        spec = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": max(int(plan.lifetime_seconds), 1),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # the first process of the pod then reaps orphans
        }
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self._api.create_namespaced_pod(self.namespace, body, **_LIMITS)
        return name

    def start(self, machine: str, deadline: float) -> PodStream:
        while (pod := self._find_pod(machine)).status.phase != "Running":
            if pod.status.phase in ("Succeeded", "Failed") or time.monotonic() > deadline:
                raise TimeoutError(_reason(pod) or f"the pod is {pod.status.phase}")
            time.sleep(_POLL_SECONDS)
        place = (machine, self.namespace)
        return _connect(self._configuration, "connect_get_namespaced_pod_attach", *place, stderr=False)

    def open_shell(self, machine: str, user: str, variables: Variables, folder: str, deadline: float) -> PodStream:
        shell = self._execute(machine, _ENTER, user, folder, START)
        # Not as arguments: the API's audit log has those.
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        shell.send(exports.encode(errors="replace"), deadline)
        return shell

    def put(self, machine: str, archive: bytes) -> None:
        # With the protocol v4, the input cannot be closed.
        self._communicate(machine, 'head -c "$1" | tar -xf - -C /', str(len(archive)), data=archive)

    def read(self, machine: str, path: str, size: int) -> bytes | None:
        status, content = self._communicate(machine, _READ, path, str(size), size=size)
        return None if status == _NO_FILE else content

    def _communicate(
        self, machine: str, script: str, *arguments: str, data: bytes = b"", size: int = _CHUNK
    ) -> tuple[int, bytes]:
        """Run a script as root, and return its exit status and output. Raises OSError if it fails.

        size: number of bytes of output after which the agent has replaced a program.
        """
        deadline, output = time.monotonic() + _CALL_SECONDS, bytearray()
        process = self._execute(machine, f"PATH={engine.SYSTEM_PATH}\n{script}", *arguments)
        try:
            process.send(data, deadline)
            while (piece := process.read(deadline)) and len(output) <= size:
                output += piece
        finally:
            process.close()
        if len(output) > size:
            raise OSError(f"more than {size:,} bytes of output")
        if process.status not in (0, _NO_FILE):
            raise OSError(f"exit status {process.status}: {output[-500:].decode(errors='replace').strip()}")
        return process.status, bytes(output)

    def _execute(self, machine: str, script: str, *arguments: str) -> PodStream:
        options = {"command": ["/bin/sh", "-c", script, "sh", *arguments], "stderr": True}
        place = (machine, self.namespace)
        return _connect(self._configuration, "connect_get_namespaced_pod_exec", *place, **options)

    def explain(self, machine: str, error: Exception) -> str:
        deadline = time.monotonic() + _REASON_SECONDS
        while machine and time.monotonic() < deadline:
            try:
                reason = _reason(self._find_pod(machine))
            except self.errors as failure:
                is_gone = isinstance(failure, ApiException) and failure.status == 404
                return "is gone: it was ended or removed" if is_gone else f"cannot be reached: {_problem(failure)}"
            if reason:
                return f"has stopped: {reason}"
            time.sleep(_POLL_SECONDS)
        return f"failed: {_problem(error)}"

    def _find_pod(self, name: str) -> Any:
        return self._api.read_namespaced_pod(name, self.namespace, **_LIMITS)

    def remove(self, machine: str) -> None:
        try:
            self._api.delete_namespaced_pod(machine, self.namespace, grace_period_seconds=0, **_LIMITS)
        except ApiException as error:
            if error.status != 404:
                raise

    def sweep(self) -> int:
        """Remove pods whose server or first process has ended, or whose lease is over. Return their number."""
        count = 0
        for pod in self._api.list_namespaced_pod(self.namespace, label_selector=SERVER, **_LIMITS).items:
            if pod.status.phase == "Succeeded" or engine.is_left_behind(pod.metadata.annotations or {}):
                with contextlib.suppress(*self.errors):  # the next sweep tries it again, and this one the others
                    self.remove(pod.metadata.name)
                    count += 1
        if count:
            logger.warning("removed pods that ended servers left behind", extra={"pods": count})
        return count

    def commit(self, machine: str, environment: str, seconds: float) -> str:
        raise Unavailable("Kubernetes cannot save a pod as an image")

    def find_snapshot(self, name: str, environment: str) -> bool:
        return False


def connect_cluster(namespace: str = "") -> PodEngine:
    """Return the connection to the cluster that this process runs in, or else to the kubeconfig's, after a sweep.

    By default the namespace is that of the service account or of the kubeconfig's context. Raises Unavailable.
    """
    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)
            namespace = namespace or _NAMESPACE_FILE.read_text().strip()
        except ConfigException:
            config.load_kube_config(client_configuration=configuration)
            namespace = namespace or config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
        cluster = PodEngine(configuration, namespace)
        cluster.sweep()
    except (ConfigException, *PodEngine.errors) as error:
        where = f" at {configuration.host}" if configuration.host else ""
        raise Unavailable(
            f"no Kubernetes API lists pods{where} ({_problem(error)}); check `kubectl get pods`, or set KUBECONFIG"
        ) from error
    return cluster


def _connect(configuration: client.Configuration, method: str, *arguments: str, **options: Any) -> PodStream:
    """Open the connection of a method of the API that attaches to a process or executes one."""
    options |= {"stdin": True, "stdout": True, "tty": False, "binary": True, "_preload_content": False}
    # `stream` changes its client during the call, so each call needs a client that no other thread uses.
    with client.ApiClient(configuration) as api:
        call = getattr(client.CoreV1Api(api), method)
        return PodStream(stream.stream(call, *arguments, **options).sock)


def _reason(pod: Any) -> str:
    """Return why a pod has ended or does not start, or an empty text."""
    conditions = pod.status.conditions or []
    states = [container.state for container in pod.status.container_statuses or [] if container.state]
    causes = [pod.status, *(condition for condition in conditions if condition.type == "DisruptionTarget")]
    causes += [state.terminated or state.waiting for state in states]
    causes += [condition for condition in conditions if (condition.type, condition.status) == ("PodScheduled", "False")]
    for cause in causes:
        if cause and cause.reason:
            return ": ".join(filter(None, [cause.reason, (cause.message or "").strip()]))
    return "it is being deleted" if pod.metadata.deletion_timestamp else ""


def _denies_egress(policy: Any) -> bool:
    """Return whether a NetworkPolicy selects the pods without network and allows them no egress."""
    spec = policy.spec
    is_selecting = (spec.pod_selector.match_labels or {}).items() <= {NETWORK: "none"}.items()
    has_conditions = bool(spec.pod_selector.match_expressions or spec.egress)
    return is_selecting and not has_conditions and "Egress" in (spec.policy_types or [])


def _problem(error: Exception) -> str:
    """Return an error as one line; of the API's errors, the message for people."""
    text = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
    with contextlib.suppress(AttributeError, TypeError, ValueError, KeyError):
        text = json.loads(error.body)["message"]  # type: ignore[attr-defined]
    return text.splitlines()[0][:300] if text else type(error).__name__


def _read_status(data: bytes) -> int:
    """Return the exit status in the last message of a process; -1 if it was not started."""
    result = json.loads(data)
    causes = (result.get("details") or {}).get("causes") or []
    codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
    return 0 if result.get("status") == "Success" else (codes or [-1])[0]
