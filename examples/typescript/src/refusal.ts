import { Metadata, status, type ServerErrorResponse } from "@grpc/grpc-js";
import { encode } from "./proto.js";

/** Advice by reason; the default is give_up. See section 10 of docs/protocol.md. */
const ADVICE: Record<string, string> = { UNKNOWN_SESSION: "reopen", DRAINING: "reopen", OVERLOADED: "retry" };

/** Error of a call, which has changed nothing. `more`: messages of google.rpc by name. Clients reject long ones. */
export class Refusal extends Error {
  readonly status;

  constructor(code: status, reason: string, message: string, metadata: object = {}, more: object = {}) {
    super(message.slice(0, 500));
    const info = { reason, domain: "starpod.v1", metadata: { ...metadata, advice: ADVICE[reason] ?? "give_up" } };
    const details = Object.entries({ ErrorInfo: info, ...more }).map(([name, detail]) => {
      return { type_url: `type.googleapis.com/google.rpc.${name}`, value: encode(`google.rpc.${name}`, detail) };
    });
    this.status = { code, message: this.message, details };
  }
}

export function badArgument(field: string, description: string): Refusal {
  const more = { BadRequest: { fieldViolations: [{ field: field.slice(0, 200), description }] } };
  return new Refusal(status.INVALID_ARGUMENT, "BAD_ARGUMENT", description, {}, more);
}

export function unknown(what: "ENVIRONMENT" | "VERSION" | "SESSION", message: string, metadata?: object): Refusal {
  return new Refusal(status.NOT_FOUND, `UNKNOWN_${what}`, message, metadata);
}

export function unsupported(capability: string): Refusal {
  return new Refusal(status.UNIMPLEMENTED, "UNSUPPORTED", `There is no ${capability} here.`, { capability });
}

/** Returns a google.rpc.Status for a Stream's reply. Anything but a Refusal is a bug, and leaves sessions intact. */
export function toStatus(thrown: unknown): Refusal["status"] {
  if (thrown instanceof Refusal) return thrown.status;
  console.error(thrown);
  const exception = thrown instanceof Error ? thrown.name : typeof thrown;
  return toStatus(new Refusal(status.INTERNAL, "ENVIRONMENT_BUG", String(thrown), { session: "intact", exception }));
}

/** Returns the error of a unary call. */
export function toError(thrown: unknown): Partial<ServerErrorResponse> {
  const failed = toStatus(thrown);
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", encode("google.rpc.Status", failed));
  return { code: failed.code, details: failed.message, metadata };
}
