"""Reference pages generated from the code: commands, recipes, Python API; and the page of memory per GPU.

The pages ask the command line itself: the option parser of each command, and the recipes as `limner train` resolves
them. A new command, option, recipe or setting therefore appears without an edit here. mkdocs calls `pages()`;
`python docs/reference.py` writes reference/memory.md from what `limner plan` prints, which takes longer.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import pkgutil
import re
import shlex
import warnings
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from unittest.mock import patch

import tyro

import limner
from limner import recipes, validation
from limner.cli import COMMANDS
from limner.recipes.recipe import Recipe

SOURCE = Path(limner.__path__[0])
STAGES = [field.name for field in dataclasses.fields(Recipe)]  # of a recipe: the first part of its settings' names
PLANS = [  # arguments of `limner plan`: GPUs, their kind, samples per GPU
    (1, "v100-16gb", 4),
    (1, "h100-80gb", 4),
    (8, "v100-16gb", 4),
    (8, "h100-80gb", 8),
]


class Options(NamedTuple):
    """The option parser of a command, its limits by option, and the variants that options choose between."""

    parser: ArgumentParser
    limits: dict[str, str]
    variants: dict[str, list[str]]


class _Parsed(Exception):
    """Carries what a command passes to tyro."""


def pages() -> dict[str, str]:
    """Markdown of each generated page by its path under docs/."""
    found = {"reference/cli.md": cli(), "reference/recipes/index.md": recipe_index()}
    found |= {f"reference/recipes/{name}.md": recipe_page(name) for name in recipes.SUMMARIES}
    found |= {"reference/recipes/variants.md": variants()}
    return found | api_pages()


def ordered(names: list[str]) -> list[str]:
    """Pages of a folder in navigation order: recipes as the command line lists them, the log newest first."""
    order = {f"reference/recipes/{name}.md": i for i, name in enumerate(recipes.SUMMARIES)}
    names = names[::-1] if names[0].startswith("log/") else names
    return sorted(names, key=lambda name: order.get(name, len(order)))


# ---------------------------------------------------------------------------- command line


@functools.cache
def options_of(*words: str) -> Options | str:
    """The options of `limner WORDS`, or what it prints if it only names its own commands."""

    def capture(cls: type, args: object, **options: Any) -> None:
        raise _Parsed(cls, options)

    printed = io.StringIO()
    with patch.object(tyro, "cli", capture), contextlib.redirect_stdout(printed):
        try:
            import_module(COMMANDS[words[0]].module).main([*words[1:], "--help"])
        except _Parsed as parsed:
            cls, options = parsed.args
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                parser = tyro.extras.get_parser(cls, **options)
            variants = re.findall(r"^  (--[\w.-]+) (.+)$", options["description"], re.MULTILINE)
            chosen = {option: names.split(", ") for option, names in variants}
            return Options(parser, dict(_limits(cls, options.get("default"))), chosen)
    return printed.getvalue()


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command: `("draw",)`, `("data", "show")`."""
    for name in COMMANDS:
        own = options_of(name)
        if isinstance(own, str):
            yield from ((name, inner) for inner in re.findall(r"^  ([\w-]+)  ", own, re.MULTILINE))
        else:
            yield (name,)


def cli() -> str:
    """Every command with its options."""
    lines = [
        "# Command line\n",
        "`limner COMMAND --help` prints the same. `--debug` with any command shows the traceback of an error and the",
        "number of threads. Exit codes: 0 success, 2 an error that the message explains, 130 Ctrl-C. If an option is",
        "given twice, its last value counts, also for a list.\n",
    ]
    for words in commands():
        options = options_of(*words)
        assert isinstance(options, Options)
        name = " ".join(("limner", *words))
        lines += [f"## {name}\n", *_description(options.parser)]
        if words == ("train",):
            lines += ["The settings of each recipe are options, too: [recipes and their settings](recipes/index.md).\n"]
        actions = [a for a in _actions(options.parser) if _option(a).lstrip("-").partition(".")[0] not in STAGES]
        lines += _table(actions, options.limits)
    return "\n".join(lines)


def _description(parser: ArgumentParser) -> list[str]:
    text = re.split(r"\n[^\n]*\n  --", str(parser.description or ""))[0].strip()  # without the list of variants
    return [f"{_prose(text)}\n"] if text else []


def _actions(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if action.default != SUPPRESS]


def _option(action: Action) -> str:
    return max(action.option_strings, key=len) if action.option_strings else str(action.metavar or action.dest)


def _table(actions: list[Action], limits: dict[str, str]) -> list[str]:
    lines = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for action in actions:
        help_text = re.fullmatch(r"(.*?)\s*(?:\((required|default:.*)\))?\s*", str(action.help or ""), re.DOTALL)
        assert help_text is not None
        text, default = help_text[1], (help_text[2] or "").removeprefix("default:").strip() or "none"
        if action.nargs == 0:
            default = {"True": "on", "False": "off"}.get(default, default)
        name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar}`"
        values = limits.get(_option(action).lstrip("-"), "") or _kind(action)
        default = "none" if default == "None" else default
        shown = default if default in ("required", "none", "on", "off") else f"`{default}`"
        lines.append(f"| {name} | {_cell(shown)} | {_cell(values)} | {_cell(_prose(text))} |")
    return [*lines, ""]


def _kind(action: Action) -> str:
    metavar = str(action.metavar or "")
    if action.nargs == 0 or not metavar:
        return "flag, turns it off" if _option(action).rpartition(".")[2].startswith("no-") else "flag, turns it on"
    return f"`{metavar}`"


def _limits(cls: type, default: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The numbers that each option takes, by its name without dashes."""
    hints = get_type_hints(cls, include_extras=True)
    rules = {name: rule for name, rule in validation.rules(cls).items() if rule.allowed}
    for field in dataclasses.fields(cls):
        notes = getattr(hints[field.name], "__metadata__", ())
        names = [note.name for note in notes if getattr(note, "name", None) is not None]
        name = (names or [field.name.replace("_", "-")])[0]
        option = f"{path}.{name}".strip(".") if name else path
        value = getattr(default, field.name, None)
        inner = type(value) if dataclasses.is_dataclass(value) else next(_classes(hints[field.name]), None)
        if rule := rules.get(field.name):
            yield option, _range(dataclasses.astuple(rule.allowed), rule.whole, rule.words)
        elif inner is not None:
            yield from _limits(inner, value if dataclasses.is_dataclass(value) else None, option)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in get_args(hint):
        yield from _classes(inner)


def _range(ends: tuple[float | None, ...], whole: bool, words: tuple[Any, ...]) -> str:
    """A `Range` in words; `ends` are its inclusive and then its exclusive bounds."""
    ge, le, gt, lt = ends
    low = f"≥ {_number(ge)}" if ge is not None else f"> {_number(gt)}" if gt is not None else ""
    high = f"≤ {_number(le)}" if le is not None else f"< {_number(lt)}" if lt is not None else ""
    others = [f"`{word}`" if isinstance(word, str) else "none" for word in words]
    return ", ".join(filter(None, ["integer" if whole else "number", low, high])) + "".join(f"; {o}" for o in others)


def _number(value: float) -> str:
    for power in (64, 63, 40, 32, 24, 20, 16, 14, 12):
        if value == 2**power or value == 2**power - 1:
            return f"2^{power}" + (" - 1" if value == 2**power - 1 else "")
    if value == int(value) and abs(value) >= 10_000 and str(int(abs(value))).strip("0") == "1":
        return f"{'-' if value < 0 else ''}10^{len(str(int(abs(value)))) - 1}"
    return f"{value:,}"


def _prose(text: str) -> str:
    """Help as Markdown: one line for each recipe or model in a list, no raw HTML."""
    return re.sub(r"<(?=[A-Za-z/])", "&lt;", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


# ---------------------------------------------------------------------------- recipes


def recipe_options(name: str, *words: str) -> Options:
    """The settings of a recipe as options; `words` choose variants."""
    options = options_of("train", "DATA", "--out", "RUN", "--recipe", name, *words)
    assert isinstance(options, Options)
    return options


def recipe_index() -> str:
    """The list of recipes."""
    lines = [
        "# Recipes and their settings\n",
        "A recipe is a Python function that returns a full configuration "
        "([`recipes/presets.py`](../../../src/limner/recipes/presets.py)). `limner train DATA --recipe NAME` runs it; "
        "every setting is an option, such as `--prior.training.steps 20000`. Each page lists all settings of a recipe "
        "with their values and the values that they take. [Choose a recipe](../../recipes.md) says which one is for "
        "which data and hardware, [variants](variants.md) lists optimizers, schedules, objectives and other "
        "interchangeable parts.\n",
        "| recipe | what it trains |",
        "|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| [`{n}`]({n}.md) | {_cell(_prose(about))} |" for n, about in recipes.SUMMARIES.items())]
    )


def recipe_page(name: str) -> str:
    """All settings of a recipe, one table for each part."""
    options = recipe_options(name)
    lines = [
        f"# Recipe {name}\n", f"`limner train DATA --recipe {name} --out RUN` trains it: {recipes.SUMMARIES[name]}.\n",
        "The defaults are those of this recipe.\n",
    ]  # fmt: skip
    for group, actions in _groups(options.parser).items():
        chosen = options.variants.get(f"--{group}")
        lines.append(f"## {group}\n")
        if chosen:
            lines.append(f"`--{group}` chooses {_words(chosen)} ([variants](variants.md)).\n")
        lines += _table(actions, options.limits)
    return "\n".join(lines)


def _groups(parser: ArgumentParser) -> dict[str, list[Action]]:
    groups: dict[str, list[Action]] = {}
    for action in _actions(parser):
        path = _option(action).lstrip("-").split(".")
        if action.option_strings and path[0] in STAGES:
            groups.setdefault(".".join(path[:-1]) or path[0], []).append(action)
    return groups


def _words(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def variants() -> str:
    """Every interchangeable part of a recipe, with its settings."""
    lines = [
        "# Variants\n",
        "Some settings name a class, whose fields are then the settings: `--prior.training.schedule Plateau "
        "--prior.training.schedule.halvings 3`. In a recipe's JSON the name is the value of `type`. The three stages "
        "share optimizers and schedules, so these are listed once.\n",
    ]
    seen = set()
    for option, names in sorted(recipe_options("scenes").variants.items()):
        kind = option.rpartition(".")[2]
        if kind in ("optimizer", "schedule") and not option.startswith("--prior."):
            continue
        lines.append(f"## {option}\n")
        for name in names:
            options = recipe_options("scenes", *([option, name]))
            actions = [a for a in _actions(options.parser) if _option(a).startswith(f"{option}.")]
            deeper = [a for a in actions if ".training." in _option(a) and "training" not in option]
            lines += [f"### {name} ({option.lstrip('-')})\n" if name in seen else f"### {name}\n"]
            seen.add(name)
            lines += _table([a for a in actions if a not in deeper], options.limits) if actions else ["No settings.\n"]
    return "\n".join(lines)


# ---------------------------------------------------------------------------- memory


@functools.cache
def plan(recipe: str, gpus: int, gpu: str, each: int) -> tuple[str, str]:
    """A command of `limner plan`, and what it prints."""
    arguments = ["plan", "--recipe", recipe, "--gpus", str(gpus), "--gpu", gpu, "--batch", str(each * gpus)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        import_module(COMMANDS["plan"].module).main(arguments[1:])
    return shlex.join(["limner", *arguments]), printed.getvalue()


def planned(recipe: str, gpus: int, gpu: str, each: int) -> dict[str, str]:
    """Figures of `limner plan`: parameters, peaks in GB by format, and the fastest launch."""
    command, text = plan(recipe, gpus, gpu, each)
    first = _line(r"^launches.*\n-+\n(.+)$", text)
    layout, _, _, _, gigabytes, _, _, _, seconds = re.split(r"  +", first.strip())
    _, fp32, _, half = _line(r"^peak +(.+)$", text).split()
    fits = "--recipe" in text  # the command of a launch that fits
    return {
        "command": command, "parameters": _line(r"^all +([\d,]+)$", text), "fp32": fp32, "16-bit": half,
        "layout": layout.replace(" x ", " × ").replace("1 shards", "1 shard") if fits else "does not fit",
        "GB": gigabytes if fits else f"at least {gigabytes}", "seconds": seconds if fits else "",
    }  # fmt: skip


def _line(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, pattern
    return found[1]


def memory() -> str:
    """Memory per GPU of each size of the prior."""
    names = list(recipes.SUMMARIES)
    sizes = [name for name in names[names.index("tiny") :] if not name.startswith("clip-")]
    figures = {size: [planned(size, *case) for case in PLANS] for size in sizes}
    heads = [f"{n} × {gpu}, {each} samples per GPU" for n, gpu, each in PLANS]
    lines = [
        "# Memory per GPU\n",
        "The memory that training takes, by size of the prior (256 text and 32 × 32 image tokens), as `limner plan` "
        "calculates it. On small models the calculation is within 15% of measured peaks "
        "([benchmarks](../benchmarks.md#training-on-a-cpu)). Gigabytes are 10^9 bytes. Drawing takes the weights, and "
        'for each candidate the keys and values that `limner plan` prints under "cache when sampling".\n',
        "## The largest size that trains\n",
        "| GPUs | largest recipe |",
        "|---|---|",
    ]
    for i, head in enumerate(heads):
        largest = [size for size in sizes if figures[size][i]["seconds"]][-1]
        lines.append(f"| {head} | [`{largest}`](recipes/{largest}.md) |")
    lines += [
        "\n## Peak memory with recomputed activations\n",
        "GB per GPU, fp32 / 16-bit: one copy of the parameters is sharded over the GPUs of a machine, and activations "
        "are recomputed in the backward pass (`--prior.training.checkpoint-activations`). `16-bit` stores the matrices "
        "of the blocks and their gradients in 16 bits (`--prior.training.precision fp16weights`); `fp32` stores them "
        "in 32 bits and multiplies in bf16, or in fp16 on a V100. Optimizer and averages are those of the recipe.\n",
        f"| recipe | parameters | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(PLANS),
    ]
    for size, row in figures.items():
        peaks = " | ".join(f"{cell['fp32']} / {cell['16-bit']}" for cell in row)
        lines.append(f"| [`{size}`](recipes/{size}.md) | {_millions(row[0]['parameters'])} | {peaks} |")
    lines += [
        "\n## The fastest launch that fits\n",
        "Without recomputed activations where these fit. The command prints more launches, and the command that starts "
        "the fastest.\n",
        "| recipe | layout | GB per GPU | seconds per step | command |",
        "|---|---|---|---|---|",
    ]
    for size, row in figures.items():
        for cell in row:
            shown = f"{cell['layout']} | {cell['GB']} | {cell['seconds']}"
            lines.append(f"| `{size}` | {shown} | `{cell['command']}` |")
    return "\n".join(lines) + "\n"


def _millions(count: str) -> str:
    value = int(count.replace(",", ""))
    return f"{value / 1e9:.2f} billion" if value >= 1e9 else f"{value / 1e6:.0f} million"


# ---------------------------------------------------------------------------- Python API


def api_page(module: str) -> str | None:
    """The page of the Python API that has a module."""
    parts = module.split(".")
    return f"reference/api/{parts[1]}.md" if len(parts) > 1 and parts[1] in _modules() else None


@functools.cache
def _modules() -> dict[str, str]:
    """The first sentence on each package and module directly in limner."""
    found = {}
    for module in pkgutil.iter_modules([str(SOURCE)]):
        if module.name.startswith("__"):
            continue
        path = SOURCE / module.name / "__init__.py" if module.ispkg else SOURCE / f"{module.name}.py"
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        found[module.name] = " ".join(text.partition("\n\n")[0].split())
    return found


def api_pages() -> dict[str, str]:
    """A page for each package or module directly in limner, and one that lists them."""
    index = [
        "# Python API\n",
        "`import limner` gives `limner.load`, which returns a [`TextToImage`](pipeline.md). The other packages are "
        "importable by their names, such as `from limner.optim import StableAdamW`.\n",
        "| package or module | content |",
        "|---|---|",
        *(f"| [`limner.{name}`]({name}.md) | {_cell(_prose(about))} |" for name, about in _modules().items()),
    ]
    found = {"reference/api/index.md": "\n".join(index)}
    for name in _modules():
        found[f"reference/api/{name}.md"] = f"---\ntitle: limner.{name}\n---\n# limner.{name}\n\n::: limner.{name}\n"
    return found


if __name__ == "__main__":
    (Path(__file__).parent / "reference/memory.md").write_text(memory(), encoding="utf-8")
