"""OpenTelemetry spans that continue the caller's trace (W3C trace context). Off by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class TracingUnavailable(RuntimeError):
    """The `tracing` extra is not installed."""


class Tracer:
    """Tracer that opens no spans, the default."""

    def span(self, method: str, metadata: Iterable[tuple[str, Any]]) -> AbstractContextManager[None]:
        """Return a context manager that opens a span around one call."""
        return nullcontext()

    def close(self) -> None:
        """Send the remaining spans."""


class OpenTelemetryTracer(Tracer):
    """Tracer that sends a span per call to an OTLP collector over gRPC, as a child of the caller's `traceparent`."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            hint = "from a clone of the repository: pip install '.[tracing]'"
            raise TracingUnavailable(f"tracing needs its extra; {hint}") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "starpod-environment-server"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        self._tracer = self._provider.get_tracer("starpod.env_server")
        self._propagator = TraceContextTextMapPropagator()

    def span(self, method: str, metadata: Iterable[tuple[str, Any]]) -> AbstractContextManager[None]:
        return self._span(method, {name: str(value) for name, value in metadata})

    @contextmanager
    def _span(self, method: str, metadata: dict[str, str]) -> Iterator[None]:
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(metadata)
        name = f"starpod.v1.EnvironmentService/{method}"
        with self._tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER):
            yield

    def close(self) -> None:
        self._provider.shutdown()
