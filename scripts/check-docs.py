#!/usr/bin/env python3
"""Checks that links and paths in Markdown, and paths of documents in Rust comments, exist.

    scripts/check-docs.py      # file:line: path; exits 1 if there is any

Checked are relative links, anchors of headings, and paths in backticks that begin with a folder of the repository,
or with a folder below FOLDER in a file that says "Paths are below `FOLDER`".
docs/pytorch.md must have a row for each function in python/tests/flash_attn_signatures.txt.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:crates|docs|results|experiments|notebook|scripts|bench|\.ci)/[\w./*-]*[\w/*])`")
# In Rust, only paths of documents and records: others may be examples.
DOCUMENT = re.compile(r"`((?:docs|results|notebook)/[\w./-]*\w)`")
BASE = re.compile(r"Paths are below `([^`]+)`")
BELOW = re.compile(r"`(\w+/(?:\w+/)*(?:\w+\.rs)?)`")
HEADING = re.compile(r"^#+\s+(.*)")


def anchor(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def anchors(path):
    """The anchors of a Markdown file."""
    with open(path, encoding="utf-8") as file:
        return {anchor(match.group(1)) for match in map(HEADING.match, file.read().splitlines()) if match}


def exists(path):
    """True if a path from the root, with `*` for any text, exists."""
    full = os.path.join(ROOT, path)
    if "*" not in path:
        return os.path.exists(full)
    pattern = re.compile("^" + re.escape(os.path.basename(full)).replace(r"\*", ".*") + "$")
    folder = os.path.dirname(full)
    return os.path.isdir(folder) and any(pattern.match(name) for name in os.listdir(folder))


def check(path, text):
    """Yields (line number, text) of each link or path that does not exist."""
    if path.endswith(".rs"):
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, target) for target in DOCUMENT.findall(line) if not exists(target))
        return
    fenced, base = False, None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        if fenced:
            continue
        for target in LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            full = os.path.normpath(os.path.join(ROOT, os.path.dirname(path), file)) if file else os.path.join(ROOT, path)
            if not os.path.exists(full) or (fragment and fragment not in anchors(full)):
                yield number, target
        base = BASE.search(line).group(1) if BASE.search(line) else base
        below = [os.path.join(base, target) for target in BELOW.findall(line) if not PATH.match(f"`{target}`")] if base else []
        for target in PATH.findall(line) + below:
            if not exists(target):
                yield number, target


def unnamed():
    """Functions of flash_attn that docs/pytorch.md does not name."""
    with open(os.path.join(ROOT, "python", "tests", "flash_attn_signatures.txt"), encoding="utf-8") as file:
        names = {line.partition("(")[0].rpartition(".")[2] for line in file if line.strip()}
    with open(os.path.join(ROOT, "docs", "pytorch.md"), encoding="utf-8") as file:
        rows = [line.split("|")[1] for line in file if line.startswith("| ")]
    return sorted(name for name in names if not any(re.search(rf"\b{name}`", row) for row in rows))


def main():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    wrong = len(unnamed())
    for name in unnamed():
        print(f"docs/pytorch.md: no row of a table names {name} of flash_attn")
    for path in sorted(listed.stdout.split()):
        full = os.path.join(ROOT, path)
        if os.path.islink(full) or not os.path.exists(full) or path == "CHANGELOG.md":
            continue
        with open(full, encoding="utf-8") as file:
            text = file.read()
        for number, target in check(path, text):
            wrong += 1
            print(f"{path}:{number}: {target} does not exist")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
