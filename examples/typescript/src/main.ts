import { parseArgs } from "node:util";
import { Server, ServerCredentials, type handleUnaryCall, type ServiceDefinition } from "@grpc/grpc-js";
import { ReflectionService } from "@grpc/reflection";
import { HealthImplementation } from "grpc-health-check";
import { spec } from "./hangman.js";
import { definition } from "./proto.js";
import { toError } from "./refusal.js";
import { MAX_MESSAGE_BYTES, Service } from "./service.js";
import { stream } from "./stream.js";

const text = (value: string) => ({ type: "string", default: value }) as const;
const options = { host: text("127.0.0.1"), port: text("50051"), "max-sessions": text("20000") };
const { values } = parseArgs({ options });
const service = new Service(Number(values["max-sessions"]));
const health = new HealthImplementation({ "": "SERVING", [spec.id]: "SERVING" });
const server = new Server({ "grpc.max_receive_message_length": MAX_MESSAGE_BYTES });

const verbs = ["describe", "open", "reset", "step", "render", "fork", "snapshot", "restore", "renew", "close"] as const;
const calls = verbs.map((verb) => {
  const answer: handleUnaryCall<never, object> = ({ request }, callback) => {
    try {
      callback(null, service[verb](request));
    } catch (error) {
      callback(toError(error));
    }
  };
  return [verb, answer];
});
const contract = definition["starpod.v1.EnvironmentService"] as ServiceDefinition;
server.addService(contract, { ...Object.fromEntries(calls), stream: stream.bind(null, service) });
health.addToServer(server);
new ReflectionService(definition).addToServer(server);
setInterval(() => service.reap(), 1000);

/** Refuses new sessions, and waits until the others are closed, for 30 seconds at most. A second signal exits. */
async function drain(): Promise<void> {
  if (service.draining) process.exit();
  service.draining = true;
  for (const name of ["", spec.id]) health.setStatus(name, "NOT_SERVING");
  for (let left = 300; left > 0 && service.sessions.size > 0; left--)
    await new Promise((done) => setTimeout(done, 100));
  server.tryShutdown(() => process.exit()); // the last replies may still be in transit
  setTimeout(() => process.exit(), 1000);
}
process.on("SIGTERM", drain).on("SIGINT", drain);

server.bindAsync(`${values.host}:${values.port}`, ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(error.message);
    process.exit(1);
  }
  console.log(`Serving ${spec.id} on ${values.host}:${port}`);
});
