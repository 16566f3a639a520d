"""Hooks of the documentation site: the README is the first page, links to other files lead to the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\(((?!https?:|#)[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=_LINK.sub(_from_docs, readme)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls by name
    """Point links that leave docs/, and those to examples, to the repository."""
    repository = f"{config.repo_url.rstrip('/')}/blob/main"
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def to_repository(link: re.Match[str]) -> str:
        path = link[1].partition("#")[0]
        target = (folder / path).resolve().relative_to(docs.parent).as_posix()
        if target.startswith("docs/") and not f"{target}/".startswith("docs/examples/"):
            return link[0]
        return f"]({repository}/{target}{link[1].removeprefix(path)})"

    return _LINK.sub(to_repository, markdown)


def _from_docs(link: re.Match[str]) -> str:
    """Return a link of the README as one of a page in docs/."""
    target = link[1]
    return f"]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"](../{target})"
