"""Asks a server on this machine how it is, by grpc.health.v1: exit status 0 if it serves, 1 if not.

    python health.py [PORT [SERVICE]]

SERVICE is an environment's id; without one, the answer is the whole server's.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3.0


def main(port: str = "50051", service: str = "") -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}")
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    return int(reply.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
