import { Ajv2020 } from "ajv/dist/2020.js";
import { optionsSchema, type Options } from "./hangman.js";
import type { In } from "./proto.js";
import { badArgument } from "./refusal.js";

const ORDERS = { "==": [0], "!=": [-1, 1], ">=": [0, 1], "<=": [-1, 0], ">": [1], "<": [-1] };
const validate = new Ajv2020({ useDefaults: true }).compile<Options>(optionsSchema);

/** Returns whether a version satisfies OpenRequest.version: comparators joined by commas. */
export function fits(version: string, pins: string): boolean {
  return (pins || ">=0.0.0").split(",").every((pin) => {
    const [, sign, x, y = 0, z = 0] = /^\s*([=!<>]=|<|>|)\s*(\d+)(?:\.(\d+))?(?:\.(\d+))?\s*$/.exec(pin) ?? [];
    if (x === undefined) throw badArgument("version", 'Write comparators as in ">=1.2.0,<2.0.0".');
    const order = Math.sign(version.localeCompare(`${x}.${y}.${z}`, "en", { numeric: true }));
    return ORDERS[(sign || "==") as keyof typeof ORDERS].includes(order);
  });
}

/** Returns the given options, and the defaults of the others. */
export function readOptions(given: In<"OpenRequest">["options"]): Options {
  const fields = Object.entries(given?.fields ?? {}).map(([name, value]) => [name, value[value.kind!]]);
  const options: unknown = Object.fromEntries(fields);
  if (validate(options)) return options;
  const { instancePath, params, message } = validate.errors![0]!;
  throw badArgument(params["additionalProperty"] ?? instancePath.slice(1), `This option ${message}.`);
}
