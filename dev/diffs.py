#!/usr/bin/env python3
"""diffs.py check|write: the pages of doc/course/diffs, which annotate each lesson's diff. A
paragraph begins with its functions in bold: **name** or **one**, **two**. `write` makes each name a
link to its line. `check` wants these links, every hunk that `make lessons` prints annotated exactly
once, and no other name. dev/site.py puts each hunk beside its text."""

import glob
import os
import re
import subprocess
import sys

PAGES = "doc/course/diffs/*.md"
NAME = r"\*\*(?:\[([^\]]+)\]\([^)]*\)|([^*\[]+))\*\*"
NAMES = re.compile(rf"{NAME}(?:,\s{NAME})*(?=\s)")


def lesson(text):
    """The lesson that a page is about, by the command that prints its diff."""
    found = re.search(r"LESSON=(\w+)", " ".join(text.split()))
    return found and found[1]


def hunks(name):
    """The files of a lesson's edge, and {function: its diff} in the order of the child."""
    made = subprocess.run(["dev/lessons.sh", name], check=True, capture_output=True, text=True)
    head, *parts = re.split(r"^---- ", made.stdout, flags=re.M)
    parent, child = re.match(r"==== (\S+) -> (\S+):", head).groups()
    return parent, child, dict(part.split("\n", 1) for part in parts)


def line_of(path, name):
    """The line on which a function, struct or table of a file begins, or 0."""
    if name == "head of the file":
        return 1
    start = re.compile(rf"(static |int |struct ).*\b{re.escape(name)}\b.*[({{]|{re.escape(name)} ")
    with open(path, encoding="utf-8") as file:
        return next((i for i, text in enumerate(file, 1) if start.match(text)), 0)


def paragraphs(text):
    """The paragraphs that annotate, each with the names of its functions."""
    for block in re.split(r"\n\n+", text):
        found = NAMES.match(block)
        if found:
            yield block, [a or b for a, b in re.findall(NAME, found[0])], block[found.end():]


def linked(page, parent, child, name):
    """A name as `write` leaves it: with the line of its child, or of its parent if it is gone."""
    path = child if line_of(child, name) else parent
    there = os.path.relpath(path, os.path.dirname(page))
    return f"**[{name}]({there}#L{line_of(path, name)})**"


def wrong_of(page, text, parent, child, parts):
    wrong = []
    left = list(parts)
    for block, names, rest in paragraphs(text):
        for name in names:
            if name in left:
                left.remove(name)
            else:
                wrong.append(f"{page}: {name} is annotated twice or is no hunk of the diff")
        if len(rest.split()) < 4:
            wrong.append(f"{page}: nothing is said about {', '.join(names)}")
        links = ", ".join(linked(page, parent, child, name) for name in names)
        if not " ".join(block.split()).startswith(links):
            wrong.append(f"{page}: run dev/diffs.py write: the line of {', '.join(names)}")
    return wrong + [f"{page}: no text about {name}" for name in left]


def wrap(block):
    """A paragraph in lines of at most 118 columns: a link is one word."""
    words = re.findall(r"(?:\[[^\]]*\]\([^)]*\)|\S)+", block)
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) > 118 and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def main():
    if sys.argv[1:] not in (["check"], ["write"]):
        print(__doc__, file=sys.stdout if "--help" in sys.argv else sys.stderr)
        return 0 if "--help" in sys.argv else 2
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    wrong, count = [], 0
    for page in sorted(glob.glob(PAGES)):
        with open(page, encoding="utf-8") as file:
            text = file.read()
        parent, child, parts = hunks(lesson(text))
        if sys.argv[1] == "write":
            for block, names, rest in paragraphs(text):
                links = ", ".join(linked(page, parent, child, name) for name in names)
                text = text.replace(block.rstrip("\n"), wrap(links + rest))
            with open(page, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            wrong += wrong_of(page, text, parent, child, parts)
            count += len(parts)
    for line in wrong:
        print(line)
    if sys.argv[1] == "check":
        print(f"{count} hunks of {len(glob.glob(PAGES))} lessons, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
