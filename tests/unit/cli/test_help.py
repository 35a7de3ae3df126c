"""The text of `--help`."""

import contextlib
import pkgutil
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

import limner.cli
from limner.cli import COMMANDS, main
from limner.cli.arguments import help_of
from limner.config import union_members


def options(cls: Any, seen: set[type]):
    """(class, setting, annotation) of each option within a dataclass, whichever members of unions are chosen."""
    if cls in seen:
        return
    seen.add(cls)
    hints = get_type_hints(cls, include_extras=True)
    for setting in fields(cls):
        hint = hints[setting.name]
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        nested = [kind for kind in union_members(bare) or [bare] if is_dataclass(kind)]
        for kind in nested:
            yield from options(kind, seen)
        if not nested:
            yield cls, setting.name, hint


def test_every_option_of_every_command_has_help():
    found, seen = set(), set()
    for module in pkgutil.walk_packages(limner.cli.__path__, "limner.cli."):
        for cls in vars(import_module(module.name)).values():
            if isinstance(cls, type) and is_dataclass(cls) and cls.__module__.startswith("limner.cli."):
                found |= set(options(cls, seen))
    assert len(found) > 200
    assert not [
        f"{cls.__module__}.{cls.__name__}.{name}"
        for cls, name, hint in found
        if not any(getattr(note, "help", None) for note in getattr(hint, "__metadata__", ())) and not help_of(cls, name)
    ]


def test_help_shows_one_type_for_each_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    commands = [[name] for name in COMMANDS]
    for words in commands:  # the loop appends the subcommands
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert "--help" in shown and "{None}|" not in shown and "PATH" not in shown, words
        if "COMMAND [OPTIONS]" in shown:
            commands += [[*words, name] for name in re.findall(r"^  ([\w-]+)  ", shown, re.MULTILINE)]
    assert len(commands) > 25


def test_help_flows(monkeypatch, capsys):
    """Its lines end where the terminal does, not where the source's do."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "a shard of it (fsdp), all weights and a shard of" in shown
    assert "It provides the tokenizer, initial weights for the trained stages" in shown


def test_a_default_is_shown_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["draw", "--help"])
    shown = capsys.readouterr().out
    assert "by default a file named after the caption." in shown
    assert "(default: None)" not in shown.partition("by default a file")[2].splitlines()[0]
    assert "Sample only among the k likeliest tokens. (default: None)" in shown


def test_the_recipes_and_kinds_are_listed(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "--recipe", "photos", "--prior.training.schedule", "Plateau"])
    shown = capsys.readouterr().out
    assert "dalle-12b: the same with 12 billion, the paper's model" in shown
    assert "--prior.training.schedule Constant, Cosine, MultiStep, Plateau" in shown
    assert "--prior.training.schedule.halvings INT" in shown and "--prior.training.schedule.end" not in shown
