import { createHash, randomBytes, randomUUID } from "node:crypto";
import { isDeepStrictEqual } from "node:util";
import { status } from "@grpc/grpc-js";
import * as environment from "./hangman.js";
import type { In, Out } from "./proto.js";
import { badArgument, Refusal, unknown, unsupported } from "./refusal.js";
import { fits, readOptions } from "./requests.js";

const { id, version, actionSpace } = environment.spec;
export const MAX_MESSAGE_BYTES = 4 * 2 ** 20;
const SERVER = { serverName: id, serverVersion: version, protocolVersion: "1.0", capabilities: { stream: true } };
const LIMITS = { maxGroup: 256, maxStepActions: 256, defaultLeaseSeconds: 600, maxLeaseSeconds: 3600 };

/** A session. Nothing is random during play in this environment: the dynamics seed is reported, but not used. */
interface Session extends Omit<In<"Session">, "observation"> {
  leaseSeconds: number;
  expires: number;
  want: In<"Want"> | null;
  limits: typeof environment.spec.limits;
  options: environment.Options;
  state: environment.State;
  executed: number; // number of actions in this episode
  endReason?: In<"Transition">["endReason"];
  last?: { request: object; reply: object }; // the last Step or Reset, in case it is repeated
}

const now = () => performance.now() / 1000;
const hash = (text: string) => createHash("sha256").update(text).digest();
const draw = () => String(randomBytes(8).readBigUInt64BE());
const derive = (...from: unknown[]) => String(hash(from.join("/")).readBigUInt64BE());

/**
 * The calls of the contract. Each runs without a pause, so that calls on one session never interleave. Each changes
 * sessions at its very end, so that a call that throws has changed nothing.
 */
export class Service {
  private readonly instanceId = randomUUID();
  readonly sessions = new Map<string, Session>();
  draining = false;
  private readonly keys = new Map<string, { request: object; reply: Out<"ForkResponse">; expires: number }>();

  constructor(private readonly maxSessions: number) {}

  describe({ environmentId }: In<"DescribeRequest">): Out<"DescribeResponse"> {
    if (environmentId && environmentId !== id) throw unknown("ENVIRONMENT", `Only ${id} is here.`, { nearest: id });
    const { instanceId, sessions, draining, maxSessions } = this;
    const limits = { ...LIMITS, maxSessions, maxMessageBytes: MAX_MESSAGE_BYTES };
    return { ...SERVER, instanceId, limits, environments: [environment.spec], liveSessions: sessions.size, draining };
  }

  open(request: In<"OpenRequest">): Out<"OpenResponse"> {
    return this.once(request, () => {
      const { want, dynamicsSeed, seed = draw() } = request;
      if (request.environmentId !== id) throw unknown("ENVIRONMENT", `Only ${id} is here.`, { nearest: id });
      if (!fits(version, request.version)) throw unknown("VERSION", `Only ${version} is here.`, { available: version });
      if (!(request.leaseSeconds >= 0)) throw badArgument("lease_seconds", "Ask for 0 or more seconds.");
      const leaseSeconds = Math.min(request.leaseSeconds || LIMITS.defaultLeaseSeconds, LIMITS.maxLeaseSeconds);
      const limits = { ...environment.spec.limits, ...request.limits }; // fields that are not set are no properties
      const options = readOptions(request.options);
      const shared = { epoch: 1, leaseSeconds, expires: now() + leaseSeconds, want, limits };
      const sessions = this.members(request).map((member) =>
        this.add({ ...shared, sessionId: randomUUID(), ...begin(member, options, seed, dynamicsSeed) }),
      );
      const instructions = environment.instructions(options);
      return { sessions, environmentVersion: version, instructions, limits, leaseSeconds, instanceId: this.instanceId };
    });
  }

  reset(request: In<"ResetRequest">): Out<"ResetResponse"> {
    const session = this.find(request.sessionId);
    if (request.epoch !== session.epoch) return repeated(session, request);
    const options = request.options ? readOptions(request.options) : session.options;
    const limits = { ...session.limits, ...request.limits };
    const episode = begin(session.member, options, request.seed ?? draw(), request.dynamicsSeed);
    const next = { ...session, ...episode, epoch: session.epoch + 1, want: request.want ?? session.want, limits };
    const reply = { session: tell(next), instructions: environment.instructions(options), limits };
    Object.assign(session, next, { last: { request, reply } });
    return reply;
  }

  step(request: In<"StepRequest">): Out<"StepResponse"> {
    const session = this.find(request.sessionId);
    const { epoch, stepIndex, limits } = session;
    const { actions, want } = request;
    if (actions.length > LIMITS.maxStepActions) throw badArgument("actions", "Send fewer: see max_step_actions.");
    if (actions.some(({ kind }) => kind !== "text")) throw badArgument("actions", "Every action is a text.");
    const turn = { ...request, want: null }; // a repeated call may want something else
    if (request.epoch !== epoch || request.stepIndex !== stepIndex) return repeated(session, turn);
    if (session.endReason) throw misplaced("EPISODE_OVER", session);

    let { state, executed } = session;
    const most = Math.min(limits.maxActions || Infinity, executed + (limits.maxActionsPerTurn || Infinity));
    const outcomes = actions.map(({ text }) => {
      const name = text!.trim().toLowerCase();
      const late = executed >= most || environment.solved(state) !== undefined;
      if (late || !actionSpace.names.includes(name)) return { executed: false, valid: late, reward: 0 };
      const played = environment.step(state, name);
      const effective = played.state !== state;
      state = played.state;
      executed += 1;
      return { executed: true, valid: true, effective, reward: played.reward };
    });
    const solved = environment.solved(state);
    const next: Session = { ...session, state, executed, stepIndex: stepIndex + 1 };
    if (solved !== undefined) next.endReason = "END_REASON_TERMINAL";
    else if (limits.maxActions && executed >= limits.maxActions) next.endReason = "END_REASON_MAX_ACTIONS";
    else if (limits.maxTurns && next.stepIndex >= limits.maxTurns) next.endReason = "END_REASON_MAX_TURNS";
    const transition = {
      observation: observe({ ...next, want: want ?? session.want }),
      reward: outcomes.reduce((sum, { reward }) => sum + reward, 0),
      outcomes,
      terminated: solved !== undefined,
      truncated: solved === undefined && next.endReason !== undefined,
      endReason: next.endReason,
      success: next.endReason && solved === true,
    };
    const reply = { transition, nextStepIndex: next.stepIndex };
    Object.assign(session, next, { last: { request: turn, reply } });
    return reply;
  }

  render({ sessionId, mode }: In<"RenderRequest">): Out<"RenderResponse"> {
    const { state } = this.find(sessionId);
    if (mode && mode !== "text") throw badArgument("mode", "The only mode is text.");
    return { mime: "text/plain; charset=utf-8", data: Buffer.from(environment.observe(state)) };
  }

  fork(request: In<"ForkRequest">): Out<"ForkResponse"> {
    return this.once(request, () => {
      const original = this.find(request.sessionId);
      const { epoch, stepIndex } = original;
      if (request.epoch !== epoch || request.stepIndex !== stepIndex) throw misplaced("OUT_OF_ORDER", original);
      const members = this.members(request);
      const seeds = request.dynamicsSeeds;
      const reseed = request.randomness === "FORK_RANDOMNESS_RESEED";
      if (seeds.length > 0 && !(reseed && seeds.length === members.length)) {
        throw badArgument("dynamics_seeds", "Give one per copy, with RESEED, or none.");
      }
      const sessions = members.map((member, place) => {
        const copy = { ...original, sessionId: randomUUID(), epoch: 1, member, last: undefined };
        if (reseed) copy.dynamicsSeed = seeds[place] ?? derive("fork", copy.dynamicsSeed, stepIndex, member);
        return this.add(copy);
      });
      return { sessions };
    });
  }

  snapshot(_: object): never {
    throw unsupported("snapshot");
  }

  readonly restore = this.snapshot;

  renew({ sessionIds }: In<"RenewRequest">): Out<"RenewResponse"> {
    return { missing: sessionIds.filter((sessionId) => !this.touch(sessionId)) };
  }

  close({ sessionIds }: In<"CloseRequest">): Out<"CloseResponse"> {
    for (const sessionId of sessionIds) this.sessions.delete(sessionId);
    return {};
  }

  /** Removes expired sessions, and each key one lease after its last session. */
  reap(): void {
    for (const [sessionId, { expires }] of this.sessions) if (expires < now()) this.sessions.delete(sessionId);
    for (const [key, call] of this.keys) {
      const alive = call.reply.sessions!.some(({ sessionId }) => this.sessions.has(sessionId!));
      if (alive) call.expires = now() + LIMITS.maxLeaseSeconds;
      else if (call.expires < now()) this.keys.delete(key);
    }
  }

  /** Returns the earlier reply to the same request with this key, or otherwise the result of `create`. */
  private once<Reply extends Out<"ForkResponse">>(request: { key: string }, create: () => Reply): Reply {
    const { key } = request;
    if (Buffer.byteLength(key) > 128) throw badArgument("key", "A key has at most 128 bytes.");
    const known = this.keys.get(key);
    if (known && isDeepStrictEqual(known.request, request)) return known.reply as Reply;
    if (known) throw new Refusal(status.FAILED_PRECONDITION, "KEY_REUSED", "The key was used for another request.");
    if (this.draining) throw new Refusal(status.UNAVAILABLE, "DRAINING", "Open sessions elsewhere: this server ends.");
    const reply = create();
    if (key) this.keys.set(key, { request, reply, expires: now() + LIMITS.maxLeaseSeconds });
    return reply;
  }

  /** Returns the member numbers of new sessions. */
  private members({ count, firstMember }: { count: number; firstMember: number }): number[] {
    if (count > LIMITS.maxGroup) throw badArgument("count", `A group has at most ${LIMITS.maxGroup} sessions.`);
    if (firstMember + count > 2 ** 32) throw badArgument("first_member", "Members are numbered with 32 bits.");
    if (this.sessions.size + (count || 1) > this.maxSessions) {
      const wait = { RetryInfo: { retryDelay: { seconds: 1 } } };
      throw new Refusal(status.RESOURCE_EXHAUSTED, "OVERLOADED", "Try later.", { limit: "max_sessions" }, wait);
    }
    return Array.from({ length: count || 1 }, (_, place) => firstMember + place);
  }

  private add(session: Session): Out<"Session"> {
    const told = tell(session);
    this.sessions.set(session.sessionId, session);
    return told;
  }

  /** Renews a lease, unless it has expired. */
  private touch(sessionId: string): Session | undefined {
    const session = this.sessions.get(sessionId);
    if (!session || session.expires < now()) return undefined;
    session.expires = now() + session.leaseSeconds;
    return session;
  }

  private find(sessionId: string): Session {
    const session = this.touch(sessionId);
    if (!session) throw unknown("SESSION", "There is no such session, or no longer: open one.");
    return session;
  }
}

function begin(member: number, options: environment.Options, seed: string, given?: string) {
  const dynamicsSeed = given ?? derive("dynamics", seed, member);
  const state = environment.reset(BigInt(seed), options);
  return { member, options, seed, dynamicsSeed, state, stepIndex: 0, executed: 0, endReason: undefined };
}

const tell = (session: Session): Out<"Session"> => ({ ...session, observation: observe(session) });

function observe({ state, want, endReason }: Session): Out<"Observation"> {
  if (want?.image) throw unsupported("image");
  const observation: Out<"Observation"> = { parts: [{ text: environment.observe(state) }] };
  if (want?.stateKey) observation.stateKey = hash(JSON.stringify(state));
  if (want?.score) observation.score = environment.score(state);
  if (endReason) return observation;
  if (want?.validActions) observation.validActions = environment.validActions(state).map((text) => ({ text }));
  if (want?.expertAction) observation.expertAction = { text: environment.expertAction(state) };
  return observation;
}

/** Returns the last reply if the last request is repeated. Any other request is out of order. */
function repeated<Reply>(session: Session, request: object): Reply {
  if (!isDeepStrictEqual(session.last?.request, request)) throw misplaced("OUT_OF_ORDER", session);
  return session.last!.reply as Reply;
}

function misplaced(reason: "OUT_OF_ORDER" | "EPISODE_OVER", { epoch, stepIndex }: Session): Refusal {
  const expected = { expected_epoch: String(epoch), expected_step_index: String(stepIndex) };
  return new Refusal(status.FAILED_PRECONDITION, reason, `Now at epoch ${epoch}, step index ${stepIndex}.`, expected);
}
