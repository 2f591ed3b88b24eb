import { fileURLToPath } from "node:url";
import { loadSync, type MessageTypeDefinition } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./generated/environment.js";

type Messages = ProtoGrpcType["starpod"]["v1"];
/** A received message: only fields with explicit presence may be absent. */
export type In<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<any, infer T> ? T : never;
/** A message to send: any field may be left out. */
export type Out<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<infer T, any> ? T : never;

// The contract is at the top of Starpod's repository, or in proto/ if this folder was copied.
const includeDirs = ["../proto", "../../../proto"]
  .flatMap((folder) => [folder, `${folder}/third_party`]) // the google.rpc messages of errors
  .map((path) => fileURLToPath(new URL(path, import.meta.url)));
const readAs = { longs: String, enums: String, defaults: true, oneofs: true }; // as in `npm run generate`
const files = ["starpod/v1/environment.proto", "google/rpc/error_details.proto"];
export const definition = loadSync(files, { includeDirs, ...readAs });

/** Returns the bytes of a message, to put into another message or into metadata. */
export function encode(name: string, message: object): Buffer {
  return (definition[name] as MessageTypeDefinition<object, object>).serialize(message);
}
