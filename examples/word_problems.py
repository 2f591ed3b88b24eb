"""Write word problems as tasks of a file, and solutions to imitate.

    python examples/word_problems.py            # tasks.jsonl and solutions.jsonl in this folder
    starpod train examples/word_problems.yaml

A problem has one or two steps with numbers up to 12. Training and test problems are disjoint.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NAMES = ("Mia", "Ali", "Noah", "Lena", "Omar", "Ruth", "Juan", "Ines", "Emil", "Yuki")
THINGS = ("apples", "stamps", "shells", "coins", "cards", "books", "beads", "plums")
ORDER = "Write the calculation, then the answer in a line of its own, such as: Answer: 36"


def one_step(chance: random.Random) -> tuple[str, str, int]:
    """Return a question, its calculation and its answer."""
    name, thing, a, b = chance.choice(NAMES), chance.choice(THINGS), chance.randint(2, 12), chance.randint(2, 12)
    kind = chance.randrange(4)
    if kind == 0:
        return f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?", f"{a} + {b}", a + b
    if kind == 1:
        a += b
        return f"{name} has {a} {thing} and loses {b}. How many {thing} are left?", f"{a} - {b}", a - b
    if kind == 2:
        return f"{name} fills {a} boxes with {b} {thing} each. How many {thing} is that?", f"{a} * {b}", a * b
    return f"{name} shares {a * b} {thing} among {a} friends. How many {thing} does each get?", f"{a * b} / {a}", b


def two_steps(chance: random.Random) -> tuple[str, str, int]:
    """Return a question, its calculation in two lines and its answer."""
    name, thing, c = chance.choice(NAMES), chance.choice(THINGS), chance.randint(2, 9)
    a, b = chance.randint(2, 9), chance.randint(2, 9)
    begin = f"{name} has {a} bags with {b} {thing} each"
    if chance.random() < 0.5:
        return (
            f"{begin} and finds {c} more. How many {thing} is that?",
            f"{a} * {b} = {a * b}\n{a * b} + {c}",
            a * b + c,
        )
    c = min(c, a * b - 1)
    return f"{begin} and gives away {c}. How many {thing} are left?", f"{a} * {b} = {a * b}\n{a * b} - {c}", a * b - c


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--train", type=int, default=300, help="tasks to train on")
    parser.add_argument("--test", type=int, default=500, help="tasks to evaluate on")
    parser.add_argument("--solved", type=int, default=100, help="solutions of the first training tasks")
    arguments = parser.parse_args()
    chance = random.Random(0)
    problems: dict[str, tuple[int, str, int]] = {}
    while len(problems) < arguments.train + arguments.test:
        steps = chance.choice((1, 2))
        question, calculation, answer = (one_step if steps == 1 else two_steps)(chance)
        problems[question] = (steps, calculation, answer)
    tasks, solutions = [], []
    for number, (question, (steps, calculation, answer)) in enumerate(problems.items()):
        prompt = f"{question} {ORDER}"
        split = "train" if number < arguments.train else "test"
        tasks.append({"id": str(number), "prompt": prompt, "answer": str(answer), "split": split, "difficulty": steps})
        solution = f"<answer>{calculation} = {answer}\nAnswer: {answer}</answer>"
        turns = {"user": prompt, "assistant": solution}
        solutions.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    for name, rows in ("tasks", tasks), ("solutions", solutions[: arguments.solved]):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (arguments.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{arguments.folder / name}.jsonl: {text.count(chr(10))} lines")


if __name__ == "__main__":
    main()
