"""Pages of the live site over real sockets: what they show, what they refuse, and that they follow a run."""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sinks import JsonlSink
from tests.support import ServerProcess
from tests.tools.ui.conftest import a_group, serve_site, wait_until
from tests.trainer.diagnostics.synthetic import WARNING, metrics_at

GROUP = "run=calm&file=train-000150.jsonl.gz&group=1"
PAGES = (
    "/",
    "/runs/calm",
    "/runs/sweep/trapped",
    "/compare?run=calm&run=sweep/trapped",
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


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole(site: str, path: str) -> None:
    """It answers, its links lead somewhere, its controls have names, and nothing comes from another place."""
    reply = httpx.get(site + path)
    assert reply.status_code == 200
    page = Page(reply.text)
    assert page.nameless == []
    for link in {link for link in page.links if not link.startswith("#")}:
        assert link.startswith("/"), link
    for link in list(dict.fromkeys(page.links))[:12]:
        assert httpx.get(site + link if link.startswith("/") else site + path).status_code == 200, link
    assert "http://" not in re.sub(r'xmlns="[^"]*"', "", reply.text)
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_the_list_of_runs(site: str) -> None:
    text = httpx.get(site).text
    assert text.index("sweep/trapped") > 0 and "65 %" in text and "40 to 80 %, final" in text and WARNING in text
    found = httpx.get(f"{site}/?text=trapped").text
    assert "sweep/trapped" in found and 'href="/runs/calm"' not in found
    assert "No run fits" in httpx.get(f"{site}/?status=running").text


def test_one_run(site: str) -> None:
    text = httpx.get(f"{site}/runs/sweep/trapped").text
    for part in ("Selection", "Learning", "Echo Trap signals", "Where the time went", "Checkpoints", "Configuration"):
        (name,) = re.findall(f'<h2 id="([^"]+)">{part}</h2>', text)
        assert f'<a href="#{name}">{part}</a>' in text
    assert WARNING in text and "best" in text and "clip_high" in text
    assert "<b>1</b><span>warning</span>" in text and "<b>150</b><span>steps</span>" in text


def test_a_run_ends_with_what_can_be_done_next(site: str, runs: Path) -> None:
    folder = runs / "calm"
    calls = re.findall(r"<dd><code>(starpod .*?)</code></dd>", httpx.get(f"{site}/runs/calm").text)
    assert calls == [
        f"starpod train --resume --run-dir {folder}",
        f"starpod ui {folder} --serve frozen_lake-v1",
        f"starpod eval {folder} 127.0.0.1:50051 --environment frozen_lake-v1",
        f"starpod watch {folder}",
        f"starpod export {folder} {folder}-model",
    ]


def test_runs_in_an_order(site: str) -> None:
    """Of calm 65 % of the final seeds were solved, of trapped 75 %."""

    def order(sort: str) -> list[str]:
        return re.findall(r'name="run" value="([^"]+)"', httpx.get(f"{site}/?sort={sort}").text)

    assert order("highest+success") == ["sweep/trapped", "calm"] and order("environment") == order("")
    assert sorted(order("longest")) == ["calm", "sweep/trapped"]


def test_without_a_server_the_list_says_how_to_have_one(site: str, runs: Path) -> None:
    assert f"<code>starpod ui {runs} --serve frozen_lake-v1</code>" in httpx.get(site).text


def test_a_comparison(site: str) -> None:
    text = httpx.get(f"{site}/compare?run=calm&run=sweep/trapped&over=tokens").text
    # Of twenty seeds calm fails every third, trapped every fourth.
    assert "+10.0 points" in text and "A solved, B did not: 3 · B solved, A did not: 5" in text
    assert "McNemar" in text and '<code class="key">seed</code>' in text and "algorithm.<wbr>preset" not in text
    assert "sampled tokens" in text
    assert re.search(r'<title>B, step 66: reward deviation[^<]*</title><line class="mark"', text)
    assert f"<li>B, step 66: {WARNING}</li>" in text
    assert httpx.get(f"{site}/compare?run=calm").status_code == 400
    assert httpx.get(f"{site}/compare?run=calm&run=nobody").status_code == 404


def test_a_comparison_of_chosen_metrics(site: str) -> None:
    names = ("policy/kl", "collect/turns_mean")
    link = f"{site}/compare?run=calm&run=sweep/trapped&over=step" + "".join(f"&metric={name}" for name in names)
    text = httpx.get(link).text
    assert text.count('<div class="wide">') == 3  # and that of the evaluations
    assert re.findall(r'name="metric" value="([^"]+)" checked', text) == list(reversed(names))
    (own,) = re.findall(r'id="link" href="([^"]+)"', text)
    assert httpx.get(site + html.unescape(own)).text == text


def test_every_two_of_several_runs_are_paired(calm: Path, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        shutil.copytree(calm, tmp_path / name)
    (tmp_path / "third" / "final.json").unlink()
    for address in serve_site(tmp_path, page="/episodes?run=third&kind=final", shown="20 episodes"):
        text = httpx.get(f"{address}/compare?run=first&run=second&run=third").text
    assert re.findall(r'<section aria-label="([^"]+)">', text) == ["A and B", "A and C", "B and C"]
    assert text.count("McNemar") == 1 and text.count("Not paired: ") == 2


def test_episodes_by_filter(site: str) -> None:
    text = httpx.get(f"{site}/episodes?run=calm&kind=train&malformed=1").text
    assert "1 episode<" in text and "1 malformed" in text and "1 truncated" in text
    assert "0 episodes" in httpx.get(f"{site}/episodes?run=calm&text=zebra").text


def test_a_group_says_what_the_filter_made_of_it(site: str) -> None:
    """Half of three groups, rounded up, by deviation: one has it, and zeros are not kept."""
    text = httpx.get(f"{site}/group?{GROUP}").text
    assert ">kept</span> Its reward_std is the largest." in text
    assert re.search(r"1 of the step.*s 2 groups was trained on", text)
    text = httpx.get(f"{site}/group?{GROUP.replace('group=1', 'group=2')}").text
    assert ">left out</span> Its score tells nothing apart." in text


def test_a_group_marks_where_its_members_part(site: str, calm: Path, tmp_path: Path) -> None:
    group = GROUP.replace("group=1", "group=2")
    marks = re.findall(r'<li class="parts">.*?</li>', httpx.get(f"{site}/group?{group}").text, re.DOTALL)
    for other, mark in zip((1, 0), marks, strict=True):
        assert f"Turn 2 of member {1 - other}" in mark
        assert f"another action than member {other}, goes on alone" in mark
    shutil.copytree(calm, tmp_path / "slippery")
    path = tmp_path / "slippery" / "episodes" / "train-000150.jsonl.gz"
    members = a_group(2, [1.0, 1.0])
    members[1].turns[0].observation = "P slipped"
    path.write_bytes(gzip.compress("".join(json.dumps(each.to_json()) + "\n" for each in members).encode()))
    for address in serve_site(tmp_path, page="/episodes?run=slippery&kind=train", shown="2 episodes"):
        text = httpx.get(f"{address}/group?{group.replace('calm', 'slippery')}").text
    marks = re.findall(r'<li class="parts">.*?</li>', text, re.DOTALL)
    assert "Turn 1 of member 1" in marks[1] and "another state than member 0, goes on alone" in marks[1]
    assert ">start (1)<" in text and ">start (2)<" in text


def test_a_group_says_what_a_reply_without_an_action_was(site: str) -> None:
    text = httpx.get(f"{site}/group?{GROUP.replace('group=1', 'group=3')}").text
    assert 'no action</span><q class="sub" title="nonsense xylophone">nonsense xylophone</q>' in text


def test_a_run_that_was_cut_off_in_its_update_has_its_verdicts_computed_again(calm: Path, tmp_path: Path) -> None:
    shutil.copytree(calm, tmp_path / "cut")
    (tmp_path / "cut" / "episodes" / "train-000150.update.gz").unlink()
    for address in serve_site(tmp_path, page="/episodes?run=cut&kind=train", shown="5 episodes"):
        text = httpx.get(f"{address}/group?{GROUP.replace('calm', 'cut')}").text
        assert "number 1 of 3; top_fraction 0.5 keeps 1." in text and "1 of the step's 3" in text
        assert "In the loss" not in httpx.get(f"{address}/episode?{GROUP.replace('calm', 'cut')}&member=0").text


def test_tokens_say_what_the_update_made_of_them(site: str) -> None:
    text = httpx.get(f"{site}/episode?{GROUP}&member=1").text
    assert "<span>trained on</span>" in text and "8 tokens, policy version 149; 1 clipped" in text
    rows = re.findall(r"<tr><td><code>66</code></td>(.*?)</tr>", text)
    assert [re.sub("<[^>]*>", " ", row).split() for row in rows] == [
        ["66", "0.9418", "149", "-0.867", "0.7402", "below", "yes"],
        ["66", "0.8869", "149", "+0.2", "1.0596", "below", "yes"],
    ]
    assert 'class="token clipped"' in text and 'class="token left-out"' in text
    text = httpx.get(f"{site}/episode?{GROUP.replace('group=1', 'group=2')}&member=1").text
    assert "<span>left out of the update</span>" in text and "In the loss" not in text


def test_an_episode_turn_by_turn(site: str) -> None:
    text = httpx.get(f"{site}/episode?{GROUP}&member=0").text
    assert 'id="t1"' in text and 'id="t2"' in text and "the hole is &lt;next&gt; to me" in text
    assert "policy version" in text and 'title="id 65, probability' in text
    assert "starpod ui " in text and "--serve frozen_lake-v1</code>" in text
    assert httpx.get(f"{site}/episode?{GROUP}&member=9").status_code == 404


def test_a_turn_shows_what_was_read_and_all_that_was_noted(site: str, calm: Path, tmp_path: Path) -> None:
    text = httpx.get(f"{site}/episode?{GROUP}&member=0").text
    assert '<summary>Prompt, 2 tokens</summary><pre class="mono">1 2</pre>' in text
    for told in (
        "<dt>plan</dt><dd>go &lt;down&gt;</dd>",
        '<span class="plus">reached: met</span>, <span class="minus">dry: not met</span>',
        "<dt>score</dt><dd>+0.25</dd>",
        "<dt>value</dt><dd>0.5 ",
        '<dt>time</dt><dd class="muted">200 ms generating, 3 ms stepping</dd>',
    ):
        assert told in text
    assert "<dt>value</dt>" not in httpx.get(f"{site}/episode?{GROUP.replace('group=1', 'group=2')}&member=0").text
    shutil.copytree(calm, tmp_path / "read")
    (tmp_path / "read" / "initial").mkdir()
    words = Tokenizer(WordLevel({"<user>": 1, "where?": 2}, unk_token="<user>"))
    words.save(str(tmp_path / "read" / "initial" / "tokenizer.json"))
    for address in serve_site(tmp_path, page="/episodes?run=read&kind=train", shown="5 episodes"):
        text = httpx.get(f"{address}/episode?{GROUP.replace('calm', 'read')}&member=0").text
    assert '<pre class="mono">&lt;user&gt; where?</pre>' in text


def test_a_member_is_not_told_by_a_number_that_ends_before_it(site: str) -> None:
    assert "<span>group 1 (2 members), member 1</span>" in httpx.get(f"{site}/episode?{GROUP}&member=1").text


def test_pictures_that_the_run_has_drawn_need_no_server(site: str) -> None:
    drawn = "run=calm&file=final-000150.jsonl&group=3&member=0"
    text = httpx.get(f"{site}/episode?{drawn}").text
    assert text.count(' alt="" loading="lazy" width="96"') == text.count(' loading="lazy" width="260"') == 4
    assert 'alt="The state before turn 1"' in text and 'alt="The state at the end"' in text
    assert f"/picture?{drawn}&turn=0".replace("&", "&amp;") in text
    assert httpx.get(f"{site}/picture?{drawn}&turn=1").content == b"\x89PNG two"
    assert httpx.get(f"{site}/picture?{drawn}&turn=7").status_code == 404
    other = drawn.replace("group=3", "group=4")
    assert "/picture?" not in httpx.get(f"{site}/episode?{other}").text
    assert httpx.get(f"{site}/picture?{other}&turn=0").status_code == 404  # no server was named


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
def test_what_is_not_there_is_a_sentence(site: str, path: str, status: int) -> None:
    reply = httpx.get(site + path)
    assert reply.status_code == status and "Traceback" not in reply.text and "<h1>" in reply.text


def test_other_names_are_refused(site: str) -> None:
    assert httpx.get(site, headers={"host": "evil.example"}).status_code == 421


def test_a_page_hears_of_a_change(tmp_path: Path, calm: Path) -> None:
    """The stream tells of a new line; the page fetched again has it. A deleted run is a sentence."""
    shutil.copytree(calm, tmp_path / "calm")
    folder = RunFolder(tmp_path / "calm")
    process = ServerProcess([sys.executable, "-m", "starpod.cli.main", "ui", str(tmp_path)])
    try:
        site = process.address.rstrip("/")
        wait_until(lambda: httpx.get(f"{site}/runs/calm").status_code == 200)
        with httpx.stream("GET", f"{site}/events?run=calm", timeout=30.0) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            next(lines)
            sink = JsonlSink(folder.metrics)
            sink.write(151, metrics_at(151), ["it echoes now"])
            sink.close()
            wait_until(lambda: next(lines) != "" and "it echoes now" in httpx.get(f"{site}/runs/calm").text)
        folder.path.rename(tmp_path.parent / f"{tmp_path.name}-gone")
        wait_until(lambda: httpx.get(f"{site}/runs/calm").status_code == 404)
        assert process.terminate() == 0
    finally:
        process.close()


def test_where_others_reach_it_a_token_is_asked_for(runs: Path) -> None:
    process = ServerProcess([sys.executable, "-m", "starpod.cli.main", "ui", str(runs), "--host", "0.0.0.0"])
    try:
        link = process.address.replace("0.0.0.0", "127.0.0.1")
        bare = link.partition("?")[0]
        assert "?token=" in link and httpx.get(bare).status_code == 401
        assert httpx.get(f"{bare}?token=wrong").status_code == 401
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(link).url == bare and browser.get(f"{bare}runs/calm").status_code in (200, 404)
    finally:
        process.close()


def test_a_call_that_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "ui", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "is no folder" in done.stderr
    command = [sys.executable, "-m", "starpod.cli.main", "ui", str(tmp_path), "--serve", "frozen_leak"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "frozen_lake" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([*command, "--address", "127.0.0.1:1"], capture_output=True, text=True)
    assert done.returncode == 2 and "give one of the two" in done.stderr
