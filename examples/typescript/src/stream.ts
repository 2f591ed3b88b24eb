import type { ServerDuplexStream } from "@grpc/grpc-js";
import type { In, Out } from "./proto.js";
import { badArgument, toStatus } from "./refusal.js";
import type { Service } from "./service.js";

const BATCH = 1000; // replies per message, to limit its size

/** Answers each message with the replies to its calls, and reads the next one when the client has received them. */
export function stream(service: Service, link: ServerDuplexStream<In<"StreamRequest">, Out<"StreamResponse">>): void {
  link.on("data", ({ calls }: In<"StreamRequest">) => {
    const replies = calls.map((call) => answer(service, call));
    for (let start = 0; start < replies.length; start += BATCH) {
      if (link.write({ replies: replies.slice(start, start + BATCH) })) continue;
      link.pause();
      link.once("drain", () => link.resume());
    }
  });
  link.on("end", () => link.end());
}

function answer(service: Service, { callId, request: verb, ...call }: In<"Call">): Out<"Reply"> {
  try {
    if (verb === undefined) throw badArgument("request", "This call holds no request.");
    return { callId, [verb]: service[verb](call[verb] as never) };
  } catch (error) {
    return { callId, error: toStatus(error) };
  }
}
