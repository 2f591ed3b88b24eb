"""docs/algorithms.md says what the code does."""

from pathlib import Path
from typing import get_args

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.objectives import GSPO, PPO, Average
from starpod.trainer.algorithms.sections import NoKL, NoWeights
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.configuration.kinds import USERS, kinds_of
from starpod.trainer.configuration.section import packaged_configs

DOCS = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def preset_row(name: str) -> str:
    """A preset as its row of the table."""
    config = AlgorithmConfig(preset=name)
    kl, groups, correction = config.kl, config.filter, config.correction
    clip = config.loss
    assert isinstance(clip, PPO | GSPO)
    dual = "-" if clip.dual_clip is None else f"{clip.dual_clip:g}"
    kept = "all" if groups.value is None else f"{groups.strategy} {groups.value:g}"
    cells = [
        name,
        config.advantage.kind + (", whitened" if config.whiten else ""),
        f"{clip.clip_low:.3g}, {clip.clip_high:g}, {dual}",
        clip.average,
        "off" if isinstance(kl, NoKL) else f"{kl.estimator} x {kl.coefficient:g} in {kl.where}",
        f"{config.entropy_coefficient:g}",
        "uniform ones replaced" if config.dynamic_sampling.enabled else kept,
        correction.mode if isinstance(correction, NoWeights) else f"{correction.mode} at {correction.cap:g}",
        f"{config.epochs} x {config.mini_batch_size}",
    ]
    return f"| {' | '.join(cells)} |"


def term_words(term: CreditTerm) -> str:
    """A term as its words in the table."""
    words = f"{term.block or term.unit} {term.score}"
    for name, values in (("of", term.parts), ("without", term.without), ("by", (*term.key, *term.strata))):
        words += f" {name} {' and '.join(values)}" if values else ""
    words += {"mean": "", "others": " - others", "none": " - none"}[term.baseline]
    words += {"none": "", "std": " / std", "mean": " / mean"}[term.scale]
    words += f", {term.min_peers} peers" if term.min_peers > 2 else ""
    return words + (f", at least {term.smallest:g}" if term.smallest else "")


def table_after(heading: str) -> list[str]:
    """The rows of the first table below a heading, without its head."""
    lines = DOCS.split(f"## {heading}\n", 1)[1].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return rows


def test_the_table_of_presets_is_what_the_code_has() -> None:
    assert table_after("Presets") == [preset_row(name) for name in packaged_configs("algorithm")]


def test_the_table_of_advantages_has_the_terms() -> None:
    shown = {row.split("`")[1]: row.split(" | ")[1] for row in table_after("Advantages")}
    assert {name: shown[name] for name in TERMS} == {
        name: "; ".join(term_words(term) for term in terms) for name, terms in TERMS.items()
    }


def names(key: str) -> set[str]:
    """The kinds of a section of the algorithm."""
    kinds = kinds_of(AlgorithmConfig.model_fields[key])
    assert kinds is not None
    return {*kinds.classes} - {USERS}


def test_every_choice_is_explained() -> None:
    assert [row.split("`")[1] for row in table_after("Averages")] == list(get_args(Average))
    assert {row.split("`")[1] for row in table_after("Advantages")} == names("advantage")
    assert {row.split("`")[1] for row in table_after("Which groups are trained on")} == names("filter")
    assert {row.split("`")[1] for row in table_after("Data of another policy")} == names("correction")
    assert {f"`loss={name}`" for name in names("loss") - {"ppo"} if f"`loss={name}`" not in DOCS} == set()


def test_the_files_that_are_named_exist() -> None:
    folder = Path(__file__).parents[3] / "trainer" / "starpod" / "trainer" / "algorithms"
    named = {word.strip("`,:.()") for word in DOCS.split() if word.strip("`,:.()").endswith(".py") and "/" not in word}
    assert len(named) >= 5
    assert [name for name in sorted(named) if not (folder / name).exists()] == []
