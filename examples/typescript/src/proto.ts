import { fileURLToPath } from "node:url";
import { loadSync, type MessageTypeDefinition } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./generated/environment.js";

type Messages = ProtoGrpcType["starpod"]["v1"];
/** A received message: only fields with explicit presence may be absent. */
export type In<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<any, infer T> ? T : never;
/** A message to send: any field may be left out. */
export type Out<Name extends keyof Messages> = Messages[Name] extends MessageTypeDefinition<infer T, any> ? T : never;

// The contract is at the top of Starpod's repository, or in proto/ if this folder was copied.
const folders = ["../proto", "../../../proto"].flatMap((path) => [path, `${path}/third_party`]);
const includeDirs = folders.map((path) => fileURLToPath(new URL(path, import.meta.url)));
const readAs = { includeDirs, longs: String, enums: String, defaults: true, oneofs: true }; // as in `npm run generate`
export const definition = loadSync(["starpod/v1/environment.proto", "google/rpc/error_details.proto"], readAs);

/** Returns the bytes of a message, to put into another message or into metadata. */
export function encode(name: string, message: object): Buffer {
  return (definition[name] as MessageTypeDefinition<object, object>).serialize(message);
}
