import { fileURLToPath } from "node:url";
import { loadSync, type MessageTypeDefinition } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./generated/environment.js";

type Messages = ProtoGrpcType["starpod"]["v1"];
/** A message as it arrives: only fields whose absence means something may be absent. */
export type In<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<any, infer T> ? T : never;
/** A message to be sent: any field may be left out. */
export type Out<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<infer T, any> ? T : never;

// The contract lies at the top of Starpod's repository; where this folder was copied out of it, in proto/.
const includeDirs = ["../proto", "../../../proto"].map((path) => fileURLToPath(new URL(path, import.meta.url)));
const readAs = { longs: String, enums: String, defaults: true, oneofs: true }; // as `npm run generate` makes the types
const files = ["starpod/v1/environment.proto", "google/rpc/error_details.proto"];
export const definition = loadSync(files, { includeDirs, ...readAs });

/** The bytes of a message that travels within another one, or as metadata. */
export function encode(name: string, message: object): Buffer {
  return (definition[name] as MessageTypeDefinition<object, object>).serialize(message);
}
