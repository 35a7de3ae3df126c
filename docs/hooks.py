"""Hooks of mkdocs: pages generated from the code, and links to files of the repository.

A link from a page to a file outside docs/ (`../src/limner/config.py`) works unchanged on a code host. In the site it
leads to a page with the file's text. CONTRIBUTING.md and CHANGELOG.md become pages.

If `LIMNER_ONNXRUNTIME_WEB` names the npm package onnxruntime-web (file or folder), the site has the bundled models as
pages that draw.
"""

import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import reference
from limner.export.page import export_page, read_web
from limner.pretrained import list_pretrained

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # the target of a link to a file, without its anchor
WEB = os.environ.get("LIMNER_ONNXRUNTIME_WEB")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Generate the pages, and put the pages of a folder where the navigation has `FOLDER/*`."""
    pages = reference.pages()
    pages |= {page: _moved((ROOT / name).read_text("utf-8"), page) for page, name in ROOT_PAGES.items()}
    config["generated"] = pages
    docs = Path(config.docs_dir)
    names = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))] + [*pages]
    config.nav = list(_expanded(config.nav or [], names))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page for each file of the repository that a page links to."""
    pages = config["generated"]
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for name in list_pretrained() if WEB else ():
        files.append(File.generated(config, f"browser/{name}.html", content=_drawing_page(name)))
    linked = set()
    for file in files.documentation_pages():
        for target in LINK.findall(file.content_string):
            path = _repository_file(target, file.src_uri)
            if path and path.suffix not in (".png", ".svg"):
                linked.add(path)
    for path in sorted(path for path in linked if not files.get_file_from_path(_source_page(path))):
        files.append(File.generated(config, _source_page(path), content=_source_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ at the pages with their text, and link the pages that draw."""

    def point(match: re.Match[str]) -> str:
        path = _repository_file(match[1], page.file.src_uri)
        return posixpath.relpath(_source_page(path), posixpath.dirname(page.file.src_uri) or ".") if path else match[1]

    if page.file.src_uri == "browser.md":
        markdown = markdown.replace("[[browser pages]]", _drawing_links())
    return LINK.sub(point, markdown)


def _drawing_links() -> str:
    if not WEB:
        return "This copy of the site was built without these files: `LIMNER_ONNXRUNTIME_WEB` named no npm package."
    models = list_pretrained().items()
    return "\n".join(f"- [{name}](browser/{name}.html){{target=_blank}}: {about}" for name, about in models)


def _drawing_page(model: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return export_page(model, Path(folder, "page.html"), read_web(Path(WEB))).read_bytes()


def _expanded(nav: list, names: list[str]) -> Iterator:
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else [(None, entry)]
        if isinstance(value, list):
            yield {title: list(_expanded(value, names))}
        elif value.endswith("/*"):
            inside = sorted(n for n in names if posixpath.dirname(n) == value[:-2])
            index = [n for n in inside if posixpath.basename(n) == "index.md"]
            if inside:
                yield {title: [*index, *(n for n in reference.ordered(inside) if n not in index)]}
        else:
            yield entry


def _repository_file(target: str, page: str) -> Path | None:
    """The file outside docs/ that a link of a page means, None for other links."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    outside = not path.startswith("docs/") or target.endswith(".py")
    return Path(path) if outside and (ROOT / path).is_file() else None


def _source_page(path: Path) -> str:
    return {v: k for k, v in ROOT_PAGES.items()}.get(path.as_posix(), f"source/{path}.md")


def _source_text(path: Path) -> str:
    text, language = (ROOT / path).read_text("utf-8"), LANGUAGES.get(path.suffix, "text")
    fence = "`" * (3 + max(map(len, re.findall("`{3,}", text)), default=0))
    module = path.with_suffix("").as_posix().removeprefix("src/").replace("/", ".")
    api = ""
    if module.startswith("limner.") and (page := reference.api_page(module)):
        api = f"[Reference of `{module}`]({posixpath.relpath(page, f'source/{path.parent}')})\n\n"
    head = f"---\nsearch: {{exclude: true}}\ntitle: {path.name}\nhide: [toc]\n---\n# {path}\n\n"
    return f"{head}{api}{fence}{language}\n{text}{fence}\n"


def _moved(text: str, page: str) -> str:
    """The text of a page of the root, with its links as seen from docs/."""
    return LINK.sub(lambda m: posixpath.relpath(m[1], posixpath.join("docs", posixpath.dirname(page))), text)
