"""Specifications of hosted environments, and the options that callers may set."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal

import pytest

from starpod.env_server.hosting.families import add_hosted
from starpod.env_server.hosting.request import HostingError, HostingRequest, check_arguments, options_model
from starpod.env_server.registry import Registry, RegistryError

FAMILIES = ("gymnasium", "openenv", "reasoning_gym", "skyrl_gym", "textarena", "textworld")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_package_is_one_line(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("starpod.env_server.hosting.", f"{family}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, family, None)
    spelled = family.replace("_", "-")
    with pytest.raises(RegistryError) as caught:
        add_hosted(Registry(), f"{spelled}:X-v0")
    assert str(caught.value) == f"{spelled}:X-v0 needs the package {family}: pip install {spelled}"


def test_an_id_is_hosted_once() -> None:
    registry = Registry()
    assert add_hosted(registry, "gymnasium:CliffWalking-v1") == ["gymnasium-cliff-walking-v1"]
    assert add_hosted(registry, "gymnasium:CliffWalking-v1#id=other-v1") == ["other-v1"]
    with pytest.raises(RegistryError, match=r"already hosted; .*#id=name-vN"):
        add_hosted(registry, "gymnasium:CliffWalking-v1")
    with pytest.raises(RegistryError, match="not of the form name-vN"):
        add_hosted(registry, "gymnasium:CliffWalking-v1#id=Other")


def test_a_star_matches_any_text() -> None:
    registry = Registry()
    ids = add_hosted(registry, "gymnasium:Frozen*#instructions=brief")
    assert ids == registry.ids == ["gymnasium-frozen-lake-v1", "gymnasium-frozen-lake8x8-v1"]
    with pytest.raises(RegistryError, match="no matching environment can be hosted"):
        add_hosted(registry, "gymnasium:Molten*")


def test_arguments_are_json_or_text_and_settings_are_text() -> None:
    wanted = HostingRequest.parse("a.b:C-v1?x=1&y=two&z=[1,%22a%26b%22]&flag=true#actions=a,b&id=my-v1", ("actions",))
    assert wanted.name == "a.b:C-v1"
    assert wanted.arguments == {"x": 1, "y": "two", "z": [1, "a&b"], "flag": True}
    assert wanted.settings == {"actions": "a,b", "id": "my-v1"}
    assert HostingRequest.parse("X-v0", ()).arguments == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("X?a=1&a=2", "'a=2' is given twice"),
        ("X#rows=1", "there is no setting 'rows' after the #"),
        ("X#concurency=inline", "did you mean concurrency"),
        ("#id=x-v1", "not of the form"),
        ("", "not of the form"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, problem: str) -> None:
    with pytest.raises(HostingError, match=problem):
        HostingRequest.parse(text, ())


def construct(
    size: int = 4,
    share: float = 0.5,
    hard: bool = False,
    mode: Literal["a", "b"] = "a",
    name: str = "x",
    path: Any = None,
    code: object = print,
    old=3,  # type: ignore[no-untyped-def]
) -> None:
    """Accept all kinds of arguments."""


SIGNATURE = inspect.signature(construct, eval_str=True)


def test_callers_choose_switches_numbers_and_closed_choices_and_never_text() -> None:
    options = options_model(HostingRequest.parse("X?size=6", ()), SIGNATURE, {"size": 6})
    assert options().model_dump() == {"size": 6, "share": 0.5, "hard": False, "mode": "a", "old": 3}
    for refused in ({"name": "/etc/passwd"}, {"path": "x"}, {"code": "x"}, {"mode": "c"}, {"share": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            options.model_validate(refused)


def test_the_operator_says_which_of_them() -> None:
    options = options_model(HostingRequest.parse("X#options=hard,size", ()), SIGNATURE, {})
    assert [*options.model_fields] == ["hard", "size"]
    assert not options_model(HostingRequest.parse("X#options=", ()), SIGNATURE, {}).model_fields
    with pytest.raises(HostingError, match="'name' cannot be open to callers"):
        options_model(HostingRequest.parse("X#options=name", ()), SIGNATURE, {})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [("sise=3", "takes no 'sise'; did you mean size"), ("size=big", "size='big'"), ("mode=c", "mode='c'")],
)
def test_the_operators_arguments_are_checked(arguments: str, problem: str) -> None:
    with pytest.raises(HostingError, match=problem):
        check_arguments(HostingRequest.parse(f"X?{arguments}", ()), SIGNATURE)


def test_what_the_constructor_takes_passes() -> None:
    check_arguments(HostingRequest.parse("X?size=3&path=a&old=7", ()), SIGNATURE)
