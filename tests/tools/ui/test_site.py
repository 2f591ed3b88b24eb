"""Pages of the live site over real sockets: what they show, what they refuse, and that they follow a run."""

import gzip
import html
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
import yaml
from click.testing import CliRunner
from starlette.requests import Request
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from starpod.trainer.data.episode import ActionOutcome
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sinks import JsonlSink
from starpod.ui.app import _failed
from starpod.ui.cli import ui
from starpod.ui.reading import read_notes
from tests.support import ServerProcess, charts_of
from tests.tools.ui.conftest import a_group, site_over, wait_until
from tests.trainer.diagnostics.synthetic import WARNING, metrics_at

GROUP = "run=calm&file=train-000150.jsonl.gz&group=1"
PAGES = (
    "/",
    "/runs/calm",
    "/runs/sweep/trapped",
    "/compare?run=calm&run=sweep/trapped",
    "/compare?run=calm&run=sweep/trapped&seeds=together&log=x&log=y",
    "/episodes?run=calm",
    f"/group?{GROUP}",
    f"/episode?{GROUP}&member=1",
)


class Page(HTMLParser):
    """Links of a page, and controls without a name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.nameless: list[str] = []
        self._labels = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a":
            self.links.append(given["href"] or "")
        self._labels += tag == "label"
        named = self._labels or given.get("aria-label") or given.get("type") == "hidden"
        if tag in ("input", "select", "textarea") and not named:
            self.nameless.append(str(given))

    def handle_endtag(self, tag: str) -> None:
        self._labels -= tag == "label"


COPIES = ("cut", "odd", "read", "silent", "silent-2", "slippery", "unfinished")


@pytest.fixture(scope="module")
def copies(calm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A site over copies of the run, each with a change."""
    folder = tmp_path_factory.mktemp("copies")
    for name in COPIES:
        shutil.copytree(calm, folder / name)
    (folder / "unfinished" / "final.json").unlink()
    (folder / "cut" / "episodes" / "train-000150.update.gz").unlink()
    (folder / "odd" / "evaluations.jsonl").write_text('{"success": 0.3}\n')
    for path in itertools.product(("silent", "silent-2"), ("evaluations.jsonl", "final.json")):
        text = folder.joinpath(*path).read_text()
        folder.joinpath(*path).write_text(re.sub(r'("success\w*"): [0-9.]+', r"\1: null", text))
    (folder / "read" / "initial").mkdir()
    words = Tokenizer(WordLevel({"<user>": 1, "where?": 2}, unk_token="<user>"))
    words.save(str(folder / "read" / "initial" / "tokenizer.json"))
    members = a_group(2, [1.0, 1.0])
    members[1].turns[0].observation = "P slipped"
    members[1].turns[0].outcomes = [ActionOutcome(executed=True, valid=False, effective=False)]
    lines = "".join(json.dumps(each.to_json()) + "\n" for each in members)
    (folder / "slippery" / "episodes" / "train-000150.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with site_over(folder, page="/", shown="/runs/odd") as http:
        for name in COPIES:
            wait_until(lambda name=name: "20 episodes" in http.get(f"/episodes?run={name}&kind=final").text)
        yield http


def place(group: int = 1, run: str = "calm", member: int | None = None) -> str:
    """The query of a group, or of an episode."""
    member_words = "" if member is None else f"&member={member}"
    return f"run={run}&file=train-000150.jsonl.gz&group={group}{member_words}"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole(pages: httpx.Client, path: str) -> None:
    """A page answers, its links work, its controls have names, and nothing is loaded from another host."""
    reply = pages.get(path)
    assert reply.status_code == 200
    page = Page(reply.text)
    assert page.nameless == []
    for link in {link for link in page.links if not link.startswith("#")}:
        assert link.startswith("/"), link
    for link in list(dict.fromkeys(page.links))[:12]:
        assert pages.get(link if link.startswith("/") else path).status_code == 200, link
    assert "http://" not in re.sub(r'xmlns="[^"]*"', "", reply.text)
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_the_list_of_runs(pages: httpx.Client, runs: Path) -> None:
    text = pages.get("/").text
    assert text.index("sweep/trapped") > 0 and "65 %" in text and "40 to 80 %, final" in text and WARNING in text
    assert f"<code>starpod ui {runs} --serve frozen_lake-v1</code>" in text, "there is no server"
    found = pages.get("/?text=trapped").text
    assert "sweep/trapped" in found and 'href="/runs/calm"' not in found
    assert "No run matches" in pages.get("/?status=running").text


def test_one_run(pages: httpx.Client) -> None:
    text = pages.get("/runs/sweep/trapped").text
    for part in ("Selection", "Learning", "Echo Trap signals", "Where the time went", "Checkpoints", "Configuration"):
        (name,) = re.findall(f'<h2 id="([^"]+)">{part}</h2>', text)
        assert f'<a href="#{name}">{part}</a>' in text
    assert WARNING in text and "best" in text and "clip_<wbr>high" in text
    assert "<b>1</b><span>warning</span>" in text and "<b>150</b><span>steps</span>" in text


def test_a_run_ends_with_what_can_be_done_next(pages: httpx.Client, runs: Path) -> None:
    folder = runs / "calm"
    calls = re.findall(r"<dd><code>(starpod .*?)</code></dd>", pages.get("/runs/calm").text)
    assert calls == [
        f"starpod train --resume --run-dir {folder} stop.minutes=8",
        f"starpod ui {folder} --serve frozen_lake-v1",
        f"starpod eval {folder}",
        f"starpod watch {folder}",
        f"starpod export {folder} {folder}-model",
    ]


def test_runs_in_an_order(pages: httpx.Client) -> None:
    """The run `calm` solved 65 % of the final seeds, and `trapped` solved 75 %."""

    def order(sort: str) -> list[str]:
        return re.findall(r'name="run" value="([^"]+)"', pages.get(f"/?sort={sort}").text)

    assert order("highest+success") == ["sweep/trapped", "calm"] and order("environment") == order("")
    assert sorted(order("longest")) == ["calm", "sweep/trapped"]


def test_a_comparison(pages: httpx.Client) -> None:
    text = pages.get("/compare?run=calm&run=sweep/trapped&over=tokens").text
    # Of twenty seeds calm fails every third, trapped every fourth.
    assert "+10.0 points" in text and "A solved, B did not: 3 · B solved, A did not: 5" in text
    assert "McNemar" in text and '<code class="key">seed</code>' in text and "algorithm.<wbr>preset" not in text
    assert "sampled tokens" in text
    assert all(chart["x"] == "sampled tokens" for chart in charts_of(text))
    for chart in charts_of(text):  # a warning names its run and has its colour
        ((_, told, name, colour),) = chart["marks"]
        assert (told, name, colour) == (f"B, step 66: {WARNING}", "B", chart["lines"][1]["colour"])
    assert f"<li>B, step 66: {WARNING}</li>" in text
    assert pages.get("/compare?run=calm").status_code == 400
    assert pages.get("/compare?run=calm&run=nobody").status_code == 404


def test_a_comparison_of_chosen_metrics(pages: httpx.Client) -> None:
    names = ("policy/kl", "collect/turns_mean")
    link = "/compare?run=calm&run=sweep/trapped&over=step" + "".join(f"&metric={name}" for name in names)
    text = pages.get(link).text
    assert len(charts_of(text)) == 3  # and that of the evaluations
    assert re.findall(r'name="metric" value="([^"]+)" checked', text) == list(reversed(names))


def test_a_comparison_can_be_sent_as_a_file(pages: httpx.Client) -> None:
    """The file shows the same as the page, with its settings, and has no links to other places."""
    query = "run=calm&run=sweep/trapped&from=50&log=y"
    page, sent = pages.get(f"/compare?{query}").text, pages.get(f"/comparison.html?{query}")
    assert "attachment" in sent.headers["content-disposition"]
    body = sent.text.partition("<body")[2].partition("<script")[0]
    assert not re.search(r"<(link|img|iframe)\b|\b(src|href)=(?!\"#main)|url\((?!#)|@import", body)
    assert charts_of(sent.text) == charts_of(page) and "McNemar" in sent.text
    (view,) = re.findall(r'data-view="([^"]+)"', sent.text)
    assert html.unescape(view) == query
    (link,) = re.findall(r'href="(/comparison.html[^"]+)" download', page)
    assert pages.get(html.unescape(link)).text == sent.text


def test_a_run_without_success_is_shown_by_its_return(copies: httpx.Client) -> None:
    assert "<b>return 0.6</b>" in copies.get("/").text
    two = "/compare?run=silent&run=silent-2"
    for link in (two, f"{two}&seeds=together", "/runs/silent"):
        assert charts_of(copies.get(link).text)[0]["title"] == "Return on selection seeds"
    assert "Return on 20 episodes" in copies.get("/runs/silent").text
    both = copies.get("/compare?run=silent&run=cut").text
    assert "<b>return 0.6</b>" in both and charts_of(both)[0]["title"] == "Success on selection seeds"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A site over 50 short runs: five configurations of ten seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    for seed, rate in itertools.product(range(10), range(5)):
        (run := folder / f"lr{rate}-{seed}").mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "optimizer": {"lr": rate}}))
        metrics = {"collect/success": 0.1 * rate + 0.06 * (seed % 2)}
        lines = [{"step": step, "time": 1.0, "metrics": metrics} for step in range(1, 9 if run.name == "lr0-9" else 11)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed, count in enumerate((1100, 1100, 1)):
        (run := folder / f"long-{seed}").mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "optimizer": {"lr": 9}}))
        lines = [{"step": step, "time": 1.0, "metrics": {"collect/success": 0.5}} for step in range(count)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with site_over(folder, page="/", shown="/runs/lr4-9") as http:
        yield http


def test_seeds_of_one_configuration_are_one_line(sweep: httpx.Client) -> None:
    link = "/compare?" + urlencode({"run": [f"lr{rate}-{seed}" for rate in range(5) for seed in range(10)]}, True)
    text = sweep.get(link).text
    (chart,) = charts_of(text)
    assert [line["label"] for line in chart["lines"]] == [f"{letter}, 10 seeds" for letter in "ABCDE"]
    # Of ten values, five of which are 0.06 above the others, the deviation is 0.0316, and t is 2.262.
    assert chart["lines"][3]["points"][1] == pytest.approx([0.33] * 10)
    assert chart["lines"][3]["band"][1] == pytest.approx([0.33 - 0.0316 * 2.262 / 10**0.5] * 10, abs=1e-4)
    assert chart["lines"][0]["points"][0] == list(range(1, 9)), "up to the last common step"
    assert "compare final evaluations in pairs, mark at most 8 runs" in text
    assert "optimizer.<wbr>lr" in text and "<code>0, 1, 2, 3, 4, 5, 6, 7, 8, 9</code>" in text
    for words, told in (("&seeds=apart", "50 lines, and 8 can be distinguished"), ("&run=lr9", "marked: 51")):
        reply = sweep.get(link + words)
        assert reply.status_code == 400 and told in reply.text
    (two,) = charts_of(sweep.get("/compare?run=lr1-0&run=lr1-1&seeds=together").text)
    assert two["lines"][0]["band"] == [[], [], []] and len(two["lines"][0]["faint"]) == 2, "two seeds have no interval"


def test_a_seed_that_has_just_begun_is_compared_with_long_ones(sweep: httpx.Client) -> None:
    """Points of a long run are means, so the short run has no point at or after their first step."""
    wait_until(lambda: sweep.get("/runs/long-2").status_code == 200)
    reply = sweep.get("/compare?run=long-0&run=long-1&run=long-2&seeds=together")
    assert reply.status_code == 200 and 'class="name seeds"' in reply.text


def test_a_run_has_tags_and_a_note(sweep: httpx.Client) -> None:
    (token,) = re.findall(r'name="csrf" value="([^"]+)"', sweep.get("/runs/lr2-3").text)
    form = {"csrf": token, "run": "lr2-3", "tags": "base line, <b>,, base  line", "note": "of the\r\npaper"}
    assert sweep.post("/notes", data={**form, "csrf": "guessed"}).status_code == 403
    assert sweep.post("/notes", data=form, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    refused = sweep.post("/notes", data=form, headers={"content-encoding": "gzip"})
    assert refused.status_code == 415 and "gzip" in refused.text
    for wrong, status in (({"tags": "x" * 41}, 400), ({"note": "x" * 4001}, 400), ({"run": "../lr2-3"}, 404)):
        assert sweep.post("/notes", data=form | wrong).status_code == status
    text = sweep.post("/notes", data=form).text
    assert '<span class="chip">base line</span> <span class="chip">&lt;b&gt;</span>' in text
    assert '<p class="note">of the\npaper</p>' in text and 'value="base line, &lt;b&gt;"' in text
    wait_until(lambda: "base line</span>" in sweep.get("/").text)
    assert re.findall(r'name="run" value="([^"]+)"', sweep.get("/?text=Base+Line").text) == ["lr2-3"]
    assert "base line</span>" in sweep.get("/compare?run=lr2-3&run=lr2-4").text


@pytest.mark.parametrize("text", ['{"tags": 7, "note": []}', '["x"]', '{"tags": [7, "  ", null]}', "{"])
def test_notes_may_hold_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text(text)
    assert read_notes(tmp_path, []) == {"tags": [], "note": ""}


def test_every_two_of_several_runs_are_paired(copies: httpx.Client) -> None:
    text = copies.get("/compare?run=cut&run=read&run=unfinished").text
    assert re.findall(r'<section aria-label="([^"]+)">', text) == ["A and B", "A and C", "B and C"]
    assert text.count("McNemar") == 1 and text.count("Not paired: ") == 2


def test_episodes_by_filter(pages: httpx.Client) -> None:
    text = pages.get("/episodes?run=calm&kind=train&malformed=1").text
    assert "1 episode<" in text and "1 malformed" in text and "1 truncated" in text
    assert "0 episodes" in pages.get("/episodes?run=calm&text=zebra").text


def test_an_episode_of_an_evaluation_is_named_by_its_seed(pages: httpx.Client) -> None:
    text = pages.get("/episodes?run=calm&kind=eval&step=25").text
    assert "step 25, seed 7</a>" in text and "member 0" not in text
    assert "member 1</a> of <a" in pages.get("/episodes?run=calm&kind=train").text


def test_an_invalid_action_is_marked(copies: httpx.Client) -> None:
    text = copies.get(f"/episode?{place(2, 'slippery', 1)}").text
    assert '<span class="action">Down</span><span class="warned">invalid</span>' in text


def test_a_group_says_what_the_filter_made_of_it(pages: httpx.Client) -> None:
    """Half of three groups, rounded up, by deviation: one has it, and zeros are not kept."""
    text = pages.get(f"/group?{place()}").text
    assert ">kept</span> Its reward_std is the largest." in text
    assert re.search(r"1 of the step.*s 2 groups was trained on", text)
    assert ">left out</span> Its score tells nothing apart." in pages.get(f"/group?{place(2)}").text
    text = pages.get(f"/group?{place(3)}").text
    assert 'no action</span><q class="sub" title="nonsense xylophone">nonsense xylophone</q>' in text


def test_a_group_marks_where_its_members_part(pages: httpx.Client, copies: httpx.Client) -> None:
    marks = re.findall(r'<li class="parts">.*?</li>', pages.get(f"/group?{place(2)}").text, re.DOTALL)
    for other, mark in zip((1, 0), marks, strict=True):
        assert f"Turn 2 of member {1 - other}" in mark
        assert f"another action than member {other}, continues alone" in mark
    text = copies.get(f"/group?{place(2, 'slippery')}").text
    marks = re.findall(r'<li class="parts">.*?</li>', text, re.DOTALL)
    assert "Turn 1 of member 1" in marks[1] and "another state than member 0, continues alone" in marks[1]
    assert ">start (1)<" in text and ">start (2)<" in text


def test_a_run_that_was_cut_off_in_its_update_has_its_verdicts_computed_again(copies: httpx.Client) -> None:
    text = copies.get(f"/group?{place(1, 'cut')}").text
    assert "number 1 of 3; top_fraction 0.5 keeps 1, and always drops the 2 with deviation 0." in text
    assert "1 of the step's 3" in text
    assert "In the loss" not in copies.get(f"/episode?{place(1, 'cut', 0)}").text


def test_tokens_say_what_the_update_made_of_them(pages: httpx.Client) -> None:
    text = pages.get(f"/episode?{place(member=1)}").text
    assert "<span>group 1 (2 members), member 1</span>" in text, "and not turned into a number's end"
    assert "<span>trained on</span>" in text and "8 tokens, policy version 149; 1 clipped" in text
    rows = re.findall(r"<tr><td><code>66</code></td>(.*?)</tr>", text)
    assert [re.sub("<[^>]*>", " ", row).split() for row in rows] == [
        ["66", "0.9418", "149", "-0.867", "0.7402", "below", "yes"],
        ["66", "0.8869", "149", "+0.2", "1.0596", "below", "yes"],
    ]
    assert 'class="token clipped"' in text and 'class="token left-out"' in text
    text = pages.get(f"/episode?{place(2, member=1)}").text
    assert "<span>left out of the update</span>" in text and "In the loss" not in text


def test_an_episode_turn_by_turn(pages: httpx.Client, copies: httpx.Client) -> None:
    text = pages.get(f"/episode?{place(member=0)}").text
    for part in (
        'id="t1"',
        'id="t2"',
        "the hole is &lt;next&gt; to me",
        "policy version",
        'title="id 65, probability',
        "starpod ui ",
        "--serve frozen_lake-v1</code>",
        '<summary>Prompt, 2 tokens</summary><pre class="mono">1 2</pre>',
        "<dt>plan</dt><dd>go &lt;down&gt;</dd>",
        '<span class="plus">reached: met</span>, <span class="minus">dry: not met</span>',
        "<dt>score</dt><dd>+0.25</dd>",
        "<dt>value</dt><dd>0.5 ",
        '<dt>time</dt><dd class="muted">200 ms generating, 3 ms stepping</dd>',
    ):
        assert part in text
    assert "<dt>value</dt>" not in pages.get(f"/episode?{place(2, member=0)}").text
    assert pages.get(f"/episode?{place(member=9)}").status_code == 404
    with_tokenizer = copies.get(f"/episode?{place(1, 'read', 0)}").text
    assert '<pre class="mono"><span class="tag">&lt;user&gt;</span> where?</pre>' in with_tokenizer


def test_pictures_that_the_run_has_drawn_need_no_server(pages: httpx.Client) -> None:
    drawn = "run=calm&file=final-000150.jsonl&group=3&member=0"
    text = pages.get(f"/episode?{drawn}").text
    assert text.count(' alt="" loading="lazy" width="96"') == text.count(' loading="lazy" width="260"') == 4
    assert 'alt="The state before turn 1"' in text and 'alt="The state at the end"' in text
    assert f"/picture?{drawn}&turn=0".replace("&", "&amp;") in text
    assert pages.get(f"/picture?{drawn}&turn=1").content == b"\x89PNG two"
    assert pages.get(f"/picture?{drawn}&turn=7").status_code == 404
    other = drawn.replace("group=3", "group=4")
    assert "/picture?" not in pages.get(f"/episode?{other}").text
    assert pages.get(f"/picture?{other}&turn=0").status_code == 404  # no server was named


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nowhere", 404),
        ("/runs/nobody", 404),
        ("/runs/../../etc", 404),
        ("/episodes?run=calm&page=x", 400),
        ("/group?run=calm&file=../run.json&group=1", 404),
        ("/assets/../app.py", 404),
    ],
)
def test_what_is_not_there_is_a_sentence(pages: httpx.Client, path: str, status: int) -> None:
    reply = pages.get(path)
    assert reply.status_code == status and "Traceback" not in reply.text and "<h1>" in reply.text


def test_a_page_that_cannot_be_made_is_a_sentence() -> None:
    reply = _failed(Request({"type": "http", "headers": []}), KeyError("step"))
    assert reply.status_code == 500 and b"This page cannot be made (KeyError: &#39;step&#39;)" in bytes(reply.body)
    assert "default-src" in reply.headers["content-security-policy"]


def test_an_evaluation_without_a_step_is_left_out(copies: httpx.Client) -> None:
    assert copies.get("/runs/odd").status_code == 200


def test_other_names_are_refused(pages: httpx.Client) -> None:
    assert pages.get("/", headers={"host": "evil.example"}).status_code == 421


def test_a_page_hears_of_a_change(tmp_path: Path, calm: Path) -> None:
    """The stream reports a new line, and the page fetched again has it. A deleted run gives a message.

    If others can reach the site, it needs a token, which the browser keeps. SIGTERM ends it.
    """
    shutil.copytree(calm, tmp_path / "calm")
    folder = RunFolder(tmp_path / "calm")
    words = ("--host", "0.0.0.0")
    process = ServerProcess([sys.executable, "-m", "starpod.cli.main", "ui", str(tmp_path), *words])
    link = process.address.replace("0.0.0.0", "127.0.0.1")
    bare = link.partition("?")[0]
    try:
        with httpx.Client(base_url=bare, follow_redirects=True, timeout=30.0) as http:
            assert "?token=" in link and http.get("/").status_code == 401
            assert http.get("/?token=wrong").status_code == 401
            assert http.get(f"{link}&run=a&run=b").url == f"{bare}?run=a&run=b"
            assert list(http.cookies) == [f"starpod-ui-{http.base_url.port}"], "another site has its own cookie"
            wait_until(lambda: http.get("/runs/calm").status_code == 200)
            with http.stream("GET", "/events?run=calm") as stream:
                lines = (line for line in stream.iter_lines() if line.startswith("data: "))
                next(lines)
                sink = JsonlSink(folder.metrics)
                sink.write(151, metrics_at(151), ["it echoes now"])
                sink.close()
                wait_until(lambda: next(lines) != "" and "it echoes now" in http.get("/runs/calm").text)
            folder.path.rename(tmp_path / "gone")
            wait_until(lambda: http.get("/runs/calm").status_code == 404)
        assert process.terminate() == 0
    finally:
        process.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["FOLDER/none"], "is not a folder"),
        (["FOLDER", "--serve", "frozen_leak"], "frozen_lake"),
        (["FOLDER", "--serve", "frozen_lake", "--address", "127.0.0.1:1"], "give one of the two"),
        (["FOLDER", "--port", "0", "--index", "FOLDER/notes.txt"], "is not an index of runs"),
        (["FOLDER", "--base-url", "http://127.0.0.1:1/v1"], "--model NAME"),
        (["FOLDER", "--address", "127.0.0.1:1", "--model", "a"], "--model NAME"),
        (["FOLDER", "--address", "127.0.0.1:1", "--base-url", "http://127.0.0.1:1/v1"], "--model NAME"),
        (["FOLDER", "--address", "127.0.0.1:1", *("--base-url", "x", "--base-url", "y"), "--model", "a"], "--model N"),
    ],
)
def test_a_call_that_is_wrong(tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(ui, [word.replace("FOLDER", str(tmp_path)) for word in words])
    assert done.exit_code == 2 and told in done.output
