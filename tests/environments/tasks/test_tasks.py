"""A file of tasks as an environment: formats, rows that are refused, splits, episodes, and the word for it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.authoring.environment import OptionsError
from starpod.env_server.hosting.families import add_hosted
from starpod.env_server.registry import Registry
from starpod.environments.tasks.environment import MAX_CALLS, Tasks
from starpod.environments.tasks.hosting import host
from starpod.environments.tasks.rows import open_rows
from starpod.v1.environment_word import EnvironmentWord, WordError
from starpod.v1.values import Image
from tests.environments import episodes

PNG = b"\x89PNG\r\n\x1a\n rest"
SUMS: list[dict[str, Any]] = [{"prompt": f"{n} + {n}?", "answer": 2 * n, "id": f"q{n}"} for n in range(40)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(kind: type[Tasks], seed: int = 0, **options: Any) -> episodes.LiveEpisode:
    return episodes.start(kind, seed, **options)


def prompts(kind: type[Tasks], split: str) -> list[str]:
    """The questions of a split, in the order in which seeds choose them."""
    count = len(kind.file.splits[split])
    return [str(start(kind, seed, split=split).environment.observe()) for seed in range(count)]


def save(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of a file's name; in the layout of `datasets.save_to_disk` if it has none."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    path, table = folder / name, pa.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            write(path, rows)
        case ".csv":
            csv.write_csv(table, path)
        case ".parquet":
            parquet.write_table(table, path, row_group_size=7)
        case _:
            path.mkdir()
            (path / "dataset_info.json").write_text("{}")
            files = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
            (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}))
            for file, part in zip(files, (table[:10], table[10:]), strict=True):
                with pa.ipc.new_stream(str(path / file), table.schema) as writer:
                    writer.write_table(part)
    return path


def test_all_formats_hold_the_same_questions(tmp_path: Path) -> None:
    rows = [{**row, "prompt": f'{row["prompt"]}\n"Write, with care"'} for row in SUMS]
    kinds = [host(str(save(tmp_path, name, rows))) for name in ("a.jsonl", "a.csv", "a.parquet", "a")]
    first, *others = ({split: prompts(kind, split) for split in kind.file.splits} for kind in kinds)
    assert sorted(first["all"]) == sorted(row["prompt"] for row in rows)
    assert all(other == first for other in others)
    assert {kind.spec.id for kind in kinds} == {"a-v1"}


def test_a_dataset_with_folders_has_their_names_as_splits(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save(tmp_path / "all", "train", SUMS[:25])
    save(tmp_path / "all", "test", SUMS[25:])
    kind = host(str(tmp_path / "all"))
    assert sorted(prompts(kind, "test")) == sorted(row["prompt"] for row in SUMS[25:])
    save(tmp_path / "all", "again", [*SUMS[30:], SUMS[3]])
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "again"]}')
    with pytest.raises(WordError, match=r"all/again: row 11: it has the id or prompt of all/train: row 4"):
        host(str(tmp_path / "all"))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "tasks.jsonl: it has no rows"),
        (["text"], "tasks.jsonl:3: it is not an object"),
        ([{"prompt": "?", "anser": "x"}], "tasks.jsonl:3: it has no 'answer'; did you mean anser. Rename"),
        ([{"question": "?", "answer": "x"}], "tasks.jsonl:3: it has no 'prompt'; there are question, answer. Rename"),
        ([{"prompt": [{"role": "user"}], "answer": "x"}], "the prompt is neither text nor a list"),
        ([{"prompt": "?", "answer": " "}], "tasks.jsonl:3: the answer is empty"),
        ([{"prompt": "?", "answer": "x", "reward": "numbr"}], "there is no reward 'numbr'; did you mean number?"),
        ([{"prompt": "?", "answer": "x", "image": "../x.png"}], "there is no image '../x.png' in the folder"),
        ([{"prompt": "?", "answer": "x", "image": "tasks.jsonl"}], "the image is not PNG, JPEG, GIF or WebP"),
        ([SUMS[0], SUMS[1], SUMS[0]], "tasks.jsonl:5: it has the id or prompt of tasks.jsonl:3: remove one"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, rows: list[Any], problem: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n" + "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(WordError, match=problem):
        host(str(path))


def test_a_cell_that_reads_like_a_missing_value_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer,note\nWhat is sodium?,NA,\nWhat is not a number?,nan,null\n")
    rows = [read_row() for _, read_row in open_rows(tmp_path / "a.csv")]
    assert [(row["answer"], row.get("note")) for row in rows] == [("NA", None), ("nan", "null")]


def test_bad_bytes_and_bad_tables_are_refused(tmp_path: Path) -> None:
    for name, content, problem in (
        ("a.jsonl", b'{"prompt": "\xff"}\n', "a.jsonl:1: no JSON in UTF-8 on one line"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: .*nested too deeply"),
        ("a.csv", b"prompt,answer\na,b\nc\n", "a.csv: .*Expected 2 columns, got 1"),
        ("a.csv", b"prompt,answer\na,b\nc,\n", "a.csv: row 2: it has no 'answer'"),
        ("a.parquet", b"no", "a.parquet: "),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WordError, match=problem):
            host(str(tmp_path / name))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 60), more=st.integers(1, 60), share=st.sampled_from(["0", "0.1", "0.5"]))
def test_splits_by_digest_are_disjoint_and_keep_rows(
    tmp_path_factory: pytest.TempPathFactory, count: int, more: int, share: str
) -> None:
    path = tmp_path_factory.mktemp("splits") / "tasks.jsonl"
    rows = [{"prompt": str(number), "answer": "x"} for number in range(count + more)]
    before = host(f"{write(path, rows[:count])}?test={share}").file
    after = host(f"{write(path, rows)}?test={share}")
    parts = [set(prompts(after, split)) for split in after.file.splits if split != "all"]
    assert sum(map(len, parts)) == len(set.union(*parts)) == count + more
    assert (len(parts) == 2) == (share != "0") and all(parts)
    assert after.spec.version != before.version
    if share == "0.5" and min(count, more) > 20:
        held_out = {before.read(int(row)).prompt for row in before.splits["test"]}
        assert held_out <= set(prompts(after, "test"))


def test_named_splits_are_kept_and_equal_prompts_stay_together(tmp_path: Path) -> None:
    named = [{**row, "split": "train" if n % 3 else "dev"} for n, row in enumerate(SUMS)]
    kind = host(str(write(tmp_path / "named.jsonl", named)))
    assert sorted(kind.file.splits) == ["all", "dev", "train"] and len(prompts(kind, "dev")) == 14
    twice = [{"prompt": row["prompt"], "answer": row["answer"]} for row in SUMS] * 2
    kind = host(f"{write(tmp_path / 'twice.jsonl', twice)}?test=0.5")
    assert not set(prompts(kind, "train")) & set(prompts(kind, "test"))


def test_attempts_tools_and_feedback(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "6 * 7?"}], "answer": 42}
    ]
    kind = host(f"{write(tmp_path / 'tasks.jsonl', rows)}?attempts=2&tools=calculator,python")
    assert kind.spec.limits.max_turns == 2 + MAX_CALLS
    episode = start(kind)
    assert episode.environment.observe() == "[system]\nBe short.\n\n[user]\n6 * 7?"
    assert "You have 2 attempts." in episode.environment.instructions()

    def say(reply: str) -> tuple[str, float]:
        turn = episode.turn([reply], episodes.EVERYTHING)
        return str(turn.parts), turn.reward

    assert say("Let me see.\ncalculator[6 * (3 + 4)]") == ("calculator: 42", 0)
    assert say("calculator[6 *]")[0].startswith("calculator: Error: it is no expression")
    assert say("python[\nprint(sum([1] * 42), end='!')\n]") == ("python: 42!", 0)
    assert say("python[1 / 0]")[0] == "python: Error: ZeroDivisionError: division by zero"
    assert say("41") == ("Wrong. Attempts left: 1.", 0)
    keys = {episode.observe(episodes.EVERYTHING).state_key}
    fork = episode.environment.copy()
    assert fork.state_key() in keys and fork.expert_action() == "42"
    assert say("I say\nAnswer: 42.0") == ("Right.", 1)
    assert episode.end_reason and episode.environment.expert_action() is None
    episode = start(kind)
    assert [say("calculator[1]")[0] for _ in range(MAX_CALLS + 1)][-1].startswith("Wrong. It is not a number.")


def test_the_expert_repeats_a_worked_solution(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "answer": "1 + 1 = 2\n#### 2"}, {"prompt": "!", "answer": ["no", "never"]}]
    kind = host(str(write(tmp_path / "tasks.jsonl", rows)))
    solutions = {str(start(kind, seed).environment.expert_action()) for seed in range(2)}
    assert solutions == {"1 + 1 = 2\n#### 2", "no"}
    for seed in range(2):
        episodes.play_expertly(start(kind, seed))
    pattern = {"prompt": "?", "reward": {"kind": "regex", "pattern": "a+"}}
    kind = host(str(write(tmp_path / "free.jsonl", [pattern])))
    assert start(kind).environment.expert_action() is None


def test_a_row_by_its_id_and_its_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(PNG)
    kind = host(
        str(write(tmp_path / "tasks.jsonl", [*SUMS, {"prompt": "?", "answer": "x", "id": "p", "image": "x.png"}]))
    )
    assert start(kind, 5, id="p").environment.observe() == ["?", Image(PNG, "image/png")]
    assert start(kind, 5, id="q7").environment.observe() == "7 + 7?"
    with pytest.raises(OptionsError, match=r"tasks.jsonl has no row with the id 'q70'"):
        start(kind, 5, id="q70")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("attemts=3", "attemts: Extra inputs are not permitted; did you mean attempts?"),
        ("attempts=0", "attempts: Input should be greater than or equal to 1"),
        ("tools=calculator,pyton", "tools: Input should be 'calculator' or 'python'"),
        ("attempts", "write \\?name=value&name=value"),
    ],
)
def test_a_bad_setting_is_refused(tmp_path: Path, settings: str, problem: str) -> None:
    with pytest.raises(WordError, match=problem):
        host(f"{write(tmp_path / 'tasks.jsonl', SUMS)}?{settings}")


def test_the_word_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tasks.jsonl", SUMS)
    save(tmp_path, "saved", SUMS)
    word = EnvironmentWord.parse("./tasks.jsonl?attempts=2")
    assert word == EnvironmentWord.parse("tasks:tasks.jsonl?attempts=2") == EnvironmentWord.parse(word.serve)
    assert word.serve == f"tasks:{tmp_path}/tasks.jsonl?attempts=2" and not word.id
    registry = Registry()
    added = [add_hosted(registry, EnvironmentWord.parse(text).text) for text in ("tasks.jsonl", "saved")]
    assert added == [["tasks-v1"], ["saved-v1"]] and registry.prepare(["tasks-v1"]).ids == ["saved-v1", "tasks-v1"]
    assert os.fspath(write(tmp_path / "sokoban.jsonl", SUMS)) and host("sokoban.jsonl").spec.id == "tasks-sokoban-v1"
    with pytest.raises(WordError, match=r"no such file: taks.jsonl; did you mean tasks.jsonl"):
        EnvironmentWord.parse("taks.jsonl")
    assert EnvironmentWord.parse("skyrl-gym:gsm8k#rows=tasks.jsonl").family == "skyrl_gym"
    assert EnvironmentWord.parse("tasks").name == "tasks"
