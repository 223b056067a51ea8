"""Hook of MkDocs: the site has README.md, the pages of docs/, and each file of the repository that a page links.

Every file keeps its path in the repository, so the links of the pages hold on the site, as they do in a checkout. The
site is complete in itself: it names no repository on the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kvferry import __version__

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_name += f" {__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and those of the repository in place of what MkDocs found in docs/. A link to a folder or to
    no file adds nothing: MkDocs reports it."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    site = [file for file in files if file.src_dir is None or not Path(file.src_dir).is_relative_to(docs)]
    waiting = [
        "README.md",
        *(style for style in config.extra_css if (root / style).is_file()),  # plug-ins make theirs later
        *(path.relative_to(root).as_posix() for path in sorted(docs.glob("*.md"))),
    ]
    found = set(waiting)
    while waiting:
        name = waiting.pop(0)
        site.append(File(name, str(root), config.site_dir, config.use_directory_urls))
        if not name.endswith(".md"):
            continue
        for link in LINK.findall((root / name).read_text(encoding="utf-8")):
            target = os.path.normpath(os.path.join(os.path.dirname(name), link))
            if target not in found and not target.startswith("..") and (root / target).is_file():
                found.add(target)
                waiting.append(target)
    return Files(site)
