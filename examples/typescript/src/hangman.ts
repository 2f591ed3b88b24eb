/** Hangman: find a hidden word letter by letter. To host another environment, write a file with the same exports. */
import { createHash } from "node:crypto";
import type { Out } from "./proto.js";
import words from "./words.json" with { type: "json" };

/** Plain data without history (`tried` is sorted), so that equal states have equal JSON. It is never modified. */
export type State = Readonly<{ word: string; tried: string; lives: number }>;
export type Options = Readonly<{ lives: number }>;

const LETTERS = [..."abcdefghijklmnopqrstuvwxyz"];

const lives = { type: "integer", description: "Wrong letters that lose.", default: 6, minimum: 1, maximum: 26 };
export const optionsSchema = { type: "object", properties: { lives }, additionalProperties: false };

export const instructions = ({ lives }: Options) =>
  "Find the hidden English word. Guess one letter at a time: every place where it stands is shown. " +
  `The wrong letter number ${lives} loses the game.`;

const can = { deterministic: true, fork: true, expertAction: true, score: true, validActions: true, stateKey: true };
export const spec = {
  id: "hangman-v1",
  version: "1.0.0", // increase it when rules, observations or rewards change
  title: "Hangman",
  instructions: instructions({ lives: lives.default }),
  actionSpace: { names: LETTERS },
  optionsSchemaJson: JSON.stringify(optionsSchema),
  renderModes: ["text"],
  limits: { maxTurns: 20, maxActionsPerTurn: 5, maxActions: 0 },
  capabilities: can,
  concurrency: "CONCURRENCY_CLASS_INLINE",
} satisfies Out<"EnvironmentSpec">;

export function reset(seed: bigint, { lives }: Options): State {
  const draw = createHash("sha256").update(`hangman/${seed}`).digest().readUInt32BE();
  return { word: words[draw % words.length]!, tried: "", lives };
}

/** Returns the same object if the action changed nothing. */
export function step(state: State, letter: string): { state: State; reward: number } {
  if (state.tried.includes(letter)) return { state, reward: -0.1 };
  const next = { ...state, tried: [...state.tried, letter].sort().join("") };
  if (!state.word.includes(letter)) return { state: { ...next, lives: state.lives - 1 }, reward: -0.1 };
  return { state: next, reward: score(next) - score(state) };
}

const shown = ({ word, tried }: State, hidden = "_") => [...word].map((one) => (tried.includes(one) ? one : hidden));

/** Share of the word that is shown: from 0 to 1 (solved). */
export const score = (state: State) => 1 - shown(state).filter((place) => place === "_").length / state.word.length;

/** Whether the word was found; undefined while the episode continues. */
export const solved = (state: State) => (state.lives === 0 ? false : score(state) === 1 || undefined);

export function observe(state: State): string {
  const wrong = [...state.tried].filter((letter) => !state.word.includes(letter));
  return `${shown(state).join(" ")} wrong ${wrong.join(" ") || "-"} lives ${state.lives}`;
}

export const validActions = ({ tried }: State) => LETTERS.filter((letter) => !tried.includes(letter));

/** Returns the letter that occurs in most of the possible words. */
export function expertAction(state: State): string {
  const pattern = new RegExp(`^${shown(state, `[^${state.tried || "-"}]`).join("")}$`);
  const possible = words.filter((word) => pattern.test(word));
  const count = (letter: string) => possible.filter((word) => word.includes(letter)).length;
  return validActions(state).reduce((best, letter) => (count(letter) > count(best) ? letter : best));
}
