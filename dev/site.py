#!/usr/bin/env python3
"""site.py OUT: writes README.md and doc/ as a site: pages, pictures, the explorer, and a page of each source that they
link to, with an anchor at each line. No external resource. cmark-gfm turns Markdown into HTML. Ends with 1 and a list
if a link leads nowhere."""

import html
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

STYLE = """:root { color-scheme: light dark; --line: #8886; --code: #8881; }
body { margin: 0 auto; max-width: 960px; padding: 0 16px 40px; font: 16px/1.55 Helvetica, Arial, sans-serif; }
nav { padding: 10px 0; border-bottom: 1px solid var(--line); } nav a { margin-right: 18px; }
a { color: #6b3fa0; } pre { overflow-x: auto; background: var(--code); padding: 10px; font-size: 13px; }
code { background: var(--code); } pre code { background: none; } img { max-width: 100%; background: #fff; }
table { border-collapse: collapse; display: block; overflow-x: auto; } th, td { border: 1px solid var(--line); padding: 3px 9px; }
.source { line-height: 1.35; } .source a { color: inherit; opacity: .6; text-decoration: none; display: inline-block;
width: 4.5em; user-select: none; } :target { outline: 2px solid #a83c15; }
@media (prefers-color-scheme: dark) { body { background: #14191f; color: #e4e9ef; } a { color: #bd9cf0; } }
"""


def slug(text):
    """The anchor that GitHub gives a heading."""
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def page(title, body, depth):
    up = "../" * depth
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{STYLE}</style></head><body>\n'
        f'<nav><a href="{up}index.html">Read me</a><a href="{up}doc/explorer.html#tour">Tour</a>'
        f'<a href="{up}doc/explorer.html">Explorer</a><a href="{up}doc/course/1-one-rank.html">Lessons</a></nav>\n'
        f"<main>\n{body}</main></body></html>\n"
    )


class Site:
    def __init__(self, out):
        self.out, self.sources, self.dead = out, set(), []

    def target(self, path):
        """The page of a file or folder of the repository, which it must get."""
        if path == "README.md":
            return "index.html"
        if path.endswith((".svg", ".png")) or path == "doc/explorer.html":
            return path
        if path.endswith(".md"):
            if not path.startswith("doc/"):
                self.sources.add(path)
            return path[:-3] + ".html"
        self.sources.add(path.rstrip("/"))
        return path.rstrip("/") + ".html"

    def link(self, origin, url):
        """A link of a page or of the explorer, as the site has it."""
        if re.match(r"[a-z]+:", url) or url.startswith("#"):
            return url
        path, mark, anchor = html.unescape(url).partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(origin), urllib.parse.unquote(path)))
        if not os.path.exists(path):
            self.dead.append(f"{origin}: {url}")
            return url
        there = os.path.relpath(self.target(path), os.path.dirname(self.target(origin)) or ".")
        return html.escape(there + mark + anchor)

    def write(self, path, text):
        path = os.path.join(self.out, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def links(self, origin, text):
        return re.sub(
            r'(href|src)="([^"]*)"', lambda m: f'{m[1]}="{self.link(origin, m[2])}"', text
        )

    def markdown(self, path):
        made = subprocess.run(
            ["cmark-gfm", "--unsafe", "-e", "table", path],
            check=True,
            capture_output=True,
            text=True,
        )
        seen = {}

        def heading(m):
            name = slug(m[2])
            seen[name] = seen.get(name, -1) + 1
            return (
                f'<h{m[1]} id="{name}{"-%d" % seen[name] if seen[name] else ""}">{m[2]}</h{m[1]}>'
            )

        body = re.sub(r"<h([1-6])>(.*?)</h\1>", heading, made.stdout, flags=re.S)
        title = re.search(r"<h1[^>]*>(.*?)</h1>", body, re.S)
        title = re.sub(r"<[^>]*>", "", title[1]) if title else path
        self.write(
            self.target(path), page(html.unescape(title), self.links(path, body), path.count("/"))
        )

    def source(self, path):
        if os.path.isdir(path):
            names = sorted(
                n
                for n in os.listdir(path)
                if n[0] != "." and n != "build" and "__pycache__" not in n
            )
            body = "".join(
                f'<li><a href="{self.link(path, os.path.basename(path) + "/" + n)}">{html.escape(n)}</a></li>\n'
                for n in names
            )
            body = f"<ul>\n{body}</ul>\n"
        else:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            body = "".join(f'<span id="L{i}"><a href="#L{i}">{i}</a>{html.escape(line)}</span>\n'
                           for i, line in enumerate(lines, 1))
            body = f'<pre class="source">{body}</pre>\n'
        self.write(
            path + ".html", page(path, f"<h1>{html.escape(path)}</h1>\n{body}", path.count("/"))
        )

    def make(self):
        pages = ["README.md"] + sorted(f"doc/{folder}/{n}" for folder in ("course", "lab")
                                       for n in os.listdir("doc/" + folder) if n.endswith(".md"))
        for path in pages:
            self.markdown(path)
        shutil.copytree("doc/pictures", os.path.join(self.out, "doc/pictures"), dirs_exist_ok=True)
        with open("doc/explorer.html", encoding="utf-8") as file:
            text = file.read()
        for name in re.findall(
            r'^ *"([a-z0-9_/]+\.cu)": \{$', text, re.M
        ):  # LINES, whose links a script makes
            self.target(name)
        text = text.replace("`../${file}#L", "`../${file}.html#L")
        text = text.replace(
            '"course/" + now.lesson', '"course/" + now.lesson.replace(".md", ".html")'
        )
        text = text.replace('link("doc/" + now.page, now.page)',
                            'link("doc/" + now.page, now.page.replace(".md", ".html"))')
        head, body = text.split("<body>", 1)
        static, scripts = body.split("<script", 1)
        self.write(
            "doc/explorer.html",
            head + "<body>" + self.links("doc/explorer.html", static) + "<script" + scripts,
        )
        done = set()
        while self.sources - done:
            for path in sorted(self.sources - done):
                done.add(path)
                if path.endswith(".md"):
                    self.markdown(path)
                elif os.path.isfile(path) or path.count("/") < 4:
                    self.source(path)

    def check(self):
        """Every link of the pages that were written leads to a file, and to an anchor in it."""
        anchors, files = {}, []
        for folder, _, names in os.walk(self.out):
            files += [os.path.join(folder, n) for n in names if n.endswith(".html")]
        for path in files:
            with open(path, encoding="utf-8") as file:
                anchors[path] = (text := file.read()), set(re.findall(r'id="([^"]*)"', text))
        for path, (text, own) in anchors.items():
            for url in re.findall(r'(?:href|src)="([^"]*)"', text.split("<script")[0]):
                if re.match(r"(https?|mailto):", url):
                    continue
                file, _, anchor = html.unescape(url).partition("#")
                there = (
                    os.path.normpath(
                        os.path.join(os.path.dirname(path), urllib.parse.unquote(file))
                    )
                    if file
                    else path
                )
                panel = there.endswith("doc/explorer.html")  # its anchors are settings
                if not os.path.exists(there) or (
                    anchor
                    and not panel
                    and there in anchors
                    and urllib.parse.unquote(anchor) not in anchors[there][1]
                ):
                    self.dead.append(f"{os.path.relpath(path, self.out)}: {url}")
        return len(files)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: site.py OUT", file=sys.stdout if "--help" in sys.argv else sys.stderr)
        return 0 if "--help" in sys.argv else 2
    if not shutil.which("cmark-gfm"):
        print(
            "error: make site needs cmark-gfm (on Debian: apt-get install cmark-gfm)",
            file=sys.stderr,
        )
        return 1
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    site = Site(sys.argv[1])
    site.make()
    count = site.check()
    for link in sorted(set(site.dead)):
        print("dead link:", link)
    print(f"{sys.argv[1]}: {count} pages, {len(set(site.dead))} dead links")
    return 1 if site.dead else 0


if __name__ == "__main__":
    sys.exit(main())
