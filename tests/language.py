"""A check of the language of README, docs, docstrings, comments, help and error texts.

    python tests/language.py src/limner/optim README.md

lists findings with file and line, and the number of sentences read. The check knows openings without a subject, words
with a private meaning, history, British spelling, and negations as predicates. Code and data in a text (`...`, fenced
blocks, URLs) are left out.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPENINGS = re.compile(
    r"(?:Of|What|Whatever|Whether|How|That|Where|Who|Whose|Which|Those|These|It|In (?:how|what)|Everything"
    r"|As(?! an?\b))\b"
)
WORDS = (
    r"anew|alike|beside|whatever|whoever|by heart|told|tells|said|goes on|went on|go on|going on"
    r"|no matter|at once"
    r"|as it is(?! \w+ed)|as it was|as they are|as it stands|of (?:its|their|one's|a model's) own"
    r"|strays|rooms?|houses?|roads?"
    r"|seams?|oracle|judges?|judged|ghosts?|debris|usurp\w+|foretold|foretells?|lopsided|crowds?|neighbours?"
    r"|stands (?:for itself|in its|there|behind|beside|here)|lies (?:there|beside|in|on|behind|below|above)"
    r"|besides|thereby|therein|hitherto|albeit|the latter|the former|be it|(?-i:is none|are none)|made of|in turn"
)
PATTERNS = {
    "private word": re.compile(rf"\b(?:{WORDS})\b", re.IGNORECASE),
    "history": re.compile(r"\b(?:no longer|used to (?:be|have|do)|since the .* round|anymore|any more(?! than))\b"),
    "negation as predicate": re.compile(
        r"(?<!here )\b(?:is|are|was|were|has|have|had|gives?|holds?|needs?) (?:no|none)\b (?!longer|more|effect)"
    ),
    "agentless": re.compile(
        r"\b(?:and|but) it is (?:\w+ )?(?:said|told|refused|counted)\b|\b(?:is|are) refused\b",
    ),
    "British spelling": re.compile(
        r"\b\w*(?:olours?|aviours?|avours?|isation|isations|ising|ised|entred?|entres|icences?|elled|elling|metres)\b"
        r"|\bgrey\w*|\bartefacts?\b|\boptimis(?!t|m)\w+|\bnormalis\w+|\binitialis\w+|\bparallelis(?!m)\w+|\bquantis\w+|\brecognis\w+"
    ),
}
ALLOWED = re.compile(
    r"^(?:promising|comprising|comprised|raised|raising|revised|revising|advised|rising|arising|supervised|supervising"
    r"|exercised|surprised|surprising|noised|denoised|denoising|precised|cancelled|cancelling|excelled|compelled"
    r"|propelled|expelled|spelling|misspelling|selling|telling|smelling|dwelling|swelling|compelling|quelled|spelled"
    r"|misspelled|premised|poised|devised|comprises|parallelled|advertised|improvised|disguised|likewise|otherwise"
    r"|parameters?|kilometres)$",
    re.IGNORECASE,
)

KINDS = ("page", "docstring", "help", "comment", "text")


class Text(NamedTuple):
    """A piece of prose: its file, first line, kind and words."""

    path: Path
    line: int
    kind: str
    words: str


class Finding(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.excerpt}"


def texts(path: Path) -> Iterator[Text]:
    """The prose of a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield Text(path, 1, "page", re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL))
        return
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for i, statement in enumerate(body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value
                if isinstance(value.value, str):
                    docstrings.add(id(value))
                    owner = i == 0 and not isinstance(node, (ast.If, ast.With, ast.For))
                    yield Text(path, value.lineno, "docstring" if owner else "help", value.value)
    yield from _literals(path, tree, docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#:?\s*(?:noqa|type:|fmt:|!|pragma)", token.string):
            yield Text(path, token.start[0], "comment", token.string.lstrip("#: "))


def _literals(path: Path, tree: ast.AST, docstrings: set[int]) -> Iterator[Text]:
    """Strings of three words and more: errors, help, progress."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(v.value if isinstance(v, ast.Constant) else "`x`" for v in node.values)
            parts.update(id(v) for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            words = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", words)) >= 3 and " " in words.strip():
            yield Text(path, node.lineno, "text", words)


def findings(text: Text) -> Iterator[Finding]:
    """Yield each place of a text that breaks a rule."""
    prose = re.sub(r"`[^`\n]*`|https?://\S+|\]\([^)]*\)|<[^>\n]+>|\"[^\"\n]*\"", lambda m: "x" * len(m[0]), text.words)
    if text.kind == "docstring" and (opening := OPENINGS.match(prose.lstrip())):
        yield Finding(text.path, text.line, "opening", prose.strip()[:60].replace("\n", " ") or opening[0])
    for rule, pattern in PATTERNS.items():
        for match in pattern.finditer(prose):
            if ALLOWED.match(match[0]):
                continue
            line = text.line + prose.count("\n", 0, match.start())
            yield Finding(
                text.path, line, rule, prose[max(0, match.start() - 30) : match.end() + 20].replace("\n", " ")
            )


def read(paths: list[Path], kinds: tuple[str, ...] = KINDS) -> tuple[list[Finding], int]:
    """Findings in files and folders, and the number of sentences read, of some kinds of text only."""
    found, sentences = [], 0
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md")) if path.is_dir() else [path]
        for file in files:
            for text in texts(file):
                if text.kind not in kinds:
                    continue
                sentences += max(1, len(re.findall(r"[.!?:](?:\s|$)", text.words)))
                found += findings(text)
    return found, sentences


if __name__ == "__main__":
    found, sentences = read([Path(name) for name in sys.argv[1:]])
    print(*found, f"{len(found)} findings in {sentences:,} sentences", sep="\n")
    sys.exit(bool(found))
