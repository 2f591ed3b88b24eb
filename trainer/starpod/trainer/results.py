"""Results of a run as data frames and records, for notebooks and scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import EVALUATION, BadEpisodes, episode_files, read_episodes
from starpod.trainer.evaluation.compare import compare_evaluations, read_evaluation
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import brief, missing_result

if TYPE_CHECKING:
    from pandas import DataFrame

Kind = Literal["final", "eval", "train"]
"""Purpose of an episode: the final evaluation, an evaluation during training, or training."""


class RunResults:
    """The folder of a run. It is read again at each access, because the run may still be training.

        run = RunResults("runs/lake")
        run.metrics["collect/success"].plot()
        run.episodes(solved=False)[0]

    Raises FileNotFoundError if the folder contains no run.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._folder = RunFolder(self.path)
        if not self._folder.started:
            raise FileNotFoundError(f"{path} holds no run: name the folder of one, such as that of --run-dir")

    def __repr__(self) -> str:
        return f"RunResults({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was resolved."""
        return self._folder.read_config()

    @property
    def final(self) -> dict[str, Any] | None:
        """Metrics of the final evaluation (see `summarise`); None before it."""
        return self._folder.read_final()

    @property
    def metrics(self) -> DataFrame:
        """Metrics: a row per step, a column per metric. `time` is the time of writing, `warnings` a list of texts."""
        lines = self._folder.read_metrics()
        rows = [{**line, **line["metrics"], "warnings": line.get("warnings", [])} for line in lines]
        return self._by_step(rows, without=("metrics",))

    @property
    def evaluations(self) -> DataFrame:
        """Evaluations on the selection seeds, with a column per metric. Nested metrics have dotted names."""
        return self._by_step([_flat(line) for line in self._folder.read_evaluations()])

    def episodes(
        self, *, kind: Kind | None = None, step: int | None = None, solved: bool | None = None, environment: str = ""
    ) -> Episodes:
        """Return the recorded episodes of the latest evaluation, or of another kind or step.

        Args:
            kind: final, eval or train; None: any evaluation.
            step: Step of the evaluation or collection; None: the last one.
            solved: True: only episodes with success. False: only others.
            environment: Only episodes of this environment, given by its id or its name in the run.

        Raises:
            BadEpisodes: There are no such episodes.
        """
        kinds = EVALUATION if kind is None else (f"{kind}-",)
        files = [file for file in episode_files(self.path) if file.name.startswith(kinds)]
        if step is not None:
            files = [file for file in files if file.name.partition(".")[0].endswith(f"-{step:06}")]
        if not files:
            raise BadEpisodes(
                f"{self.path} keeps no {kind or 'evaluated'} episodes" + f" of step {step}" * (step is not None)
            )
        return Episodes(
            episode
            for episode in read_episodes(files[-1])
            if solved in (None, episode.success is True) and environment in ("", episode.environment, episode.task)
        )

    def compare(self, other: RunResults | Path | str) -> DataFrame:
        """Compare the final evaluations of two runs, paired by seed, with a row per environment.

        Differences are the other run's value minus this run's, with their 95 % interval. p_value is McNemar's exact
        test. Raises NotComparable if seeds or environments differ.
        """
        paths = self.path, other.path if isinstance(other, RunResults) else Path(other)
        comparison = compare_evaluations(*(read_evaluation(path) for path in paths))
        rows = {}
        for environment, figures in comparison.items():
            row = {name: figures[name] for name in ("pairs", "only_first", "only_second", "p_value")}
            for name in ("success", "return_mean"):
                row[f"{name}_first"], row[f"{name}_second"] = figures[name]
            for name in ("success_difference", "return_difference"):
                row[name], row[f"{name}_low"], row[f"{name}_high"] = figures[name] or (None, None, None)
            rows[environment] = row
        return _pandas().DataFrame.from_dict(rows, orient="index").rename_axis("environment")

    def _by_step(self, rows: list[dict[str, Any]], without: tuple[str, ...] = ()) -> DataFrame:
        frame = _pandas().DataFrame(rows, columns=None if rows else ["step"])
        return frame.drop(columns=list(without), errors="ignore").set_index("step")

    def _repr_html_(self) -> str:
        """Return the title, environment, algorithm and latest success as HTML, for notebooks."""
        facts, config = self._folder.read_facts(), self.config
        evaluations = self._folder.read_evaluations()
        values = self.final or (evaluations[-1] if evaluations else {})
        tasks = config.get("environments") or {"": config.get("environment", {})}
        success = "not yet"
        if values:
            success = missing_result(values) or f"{brief(values)} of {values['episodes']} episodes"
        rows = {
            "environment": ", ".join(task.get("id", name) for name, task in tasks.items()),
            "model": facts.get("model", ""),
            "algorithm": config.get("algorithm", {}).get("preset", ""),
            "success": success,
            "ended": facts.get("ended", {}).get("outcome", "not yet"),
            "folder": str(self.path),
        }
        return f"<b>{html.escape(facts.get('title', ''))}</b>{_table(rows)}"


class Episodes(list[Episode]):
    """Episodes, shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("", "seed", "solved", "return", "turns", "end"))
        rows = []
        for number, episode in enumerate(self):
            solved = {True: "yes", False: "no", None: "-"}[episode.success]
            cells = (number, episode.seed, solved, f"{episode.own_return:.4g}", len(episode.turns), episode.end)
            rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def _table(rows: Mapping[str, str]) -> str:
    return "<table>" + "".join(f"<tr><th>{k}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items()) + "</table>"


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data frames need the package pandas; from a clone of the repository: pip install '.[notebook]'"
        ) from error
    return pandas
