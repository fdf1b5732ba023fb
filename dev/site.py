#!/usr/bin/env python3
"""site.py OUT: writes README.md and doc/ as a site that reads like a book: the course in README's
order, the laboratory apart, each lesson's diff beside its text, search, and a page of each source
that they link to, with an anchor at each line. It loads nothing from elsewhere. cmark-gfm turns
Markdown into HTML. SITE_URL=https://... is the site's address, for the picture in a link's preview.
Ends with 1 and a list if a link leads nowhere."""

import html
import json
import os
import re
import shutil
import string
import subprocess
import sys
import urllib.parse

sys.dont_write_bytecode = True
import diffs

NAME = "Megatron's parallelism in four files"
SMALLEST_TEXT = 9  # pixels: a narrower screen scrolls a picture instead of shrinking it further

WORDS = (
    "auto bool break case char const constexpr continue default do double else enum extern "
    "false float for if inline int long nullptr return short signed sizeof static static_cast "
    "struct switch template true typedef typename union unsigned void volatile while using "
    "namespace class floatX size_t uint32_t uint64_t int32_t int64_t __global__ __device__ "
    "__shared__ __restrict__ __host__ __forceinline__ "
).split()
TOKENS = {
    "c": re.compile(
        r"(?P<c>//[^\n]*|/\*.*?\*/)|(?P<s>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+')|"
        rf"(?P<k>^[ \t]*\#[ \t]*\w+|\b(?:{'|'.join(WORDS)})\b)|(?P<n>\b\d[\w.]*)",
        re.M | re.S,
    ),
    "#": re.compile(r"(?P<c>(?:^|(?<=\s))\#[^\n]*)", re.M),
}
KINDS = dict.fromkeys(("c", "cu", "cuh", "h", "cpp", "js"), "c")
KINDS |= dict.fromkeys(("py", "sh", "yml"), "#")


def colour(text, kind):
    """Code as HTML: comments, strings, words of the language and numbers in spans, none of which
    goes over the end of a line."""
    out, end = [], 0
    for m in TOKENS[kind].finditer(text) if kind else ():
        out.append(html.escape(text[end:m.start()]))
        lines = html.escape(m[0]).split("\n")
        out.append("\n".join(f'<span class="{m.lastgroup}">{line}</span>' for line in lines))
        end = m.end()
    return "".join(out) + html.escape(text[end:])


def diff_lines(text):
    """A hunk as HTML: a span for each line, with its sign and its colour."""
    out = []
    for line in text.strip("\n").split("\n"):
        name = {"+": "add", "-": "del"}.get(line[:1], "gap" if line == " ..." else "same")
        out.append(f'<span class="{name}">{line[:1]}{colour(line[1:], "c")}</span>')
    return '<pre class="diff" tabindex="0">' + "".join(out) + "</pre>"


def slug(text):
    """The anchor that GitHub gives a heading."""
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def plain(text):
    """HTML as the words that one reads."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def section(text, heading):
    """A section of a Markdown page, from its heading to the next one."""
    return re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], flags=re.M)[0]


def links_of(text, folder, pattern):
    """The pages that a Markdown text leads to, each once, in its order."""
    found = [os.path.normpath(os.path.join(folder, x)) for x in re.findall(r"\]\(([^)#]+)", text)]
    return list(dict.fromkeys(x for x in found if re.fullmatch(pattern, x) and os.path.exists(x)))


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def least_width(path):
    """The width in pixels at which the smallest text of a picture can be read, at most its own."""
    if not path.endswith(".svg") or not os.path.isfile(path):
        return 0
    text = read(path)
    sizes = [float(x) for x in re.findall(r'font-size="([\d.]+)"', text)]
    width = float(re.search(r'<svg[^>]* width="([\d.]+)"', text)[1])
    return round(min(width, width * SMALLEST_TEXT / min(sizes))) if sizes else 0


class Site:
    def __init__(self, out):
        self.out, self.sources, self.dead, self.index = out, set(), [], []
        self.titles, self.parts = {}, {}
        readme = read("README.md")
        lessons = links_of(section(readme, "The course"), "", r"doc/course/[^/]*\.md")
        lessons += sorted(x for x in files_of("doc/course") if x not in lessons)
        self.course = ["README.md"]
        for page in lessons:
            diff = page.replace("course/", "course/diffs/")
            self.course += [page] + [diff] * os.path.exists(diff)
        lab = "doc/lab/README.md"
        self.lab = [lab] + links_of(read(lab), "doc/lab", r"doc/lab/[^/]*\.md")
        self.lab += [x for x in files_of("doc/lab") if x not in self.lab]

    def target(self, path):
        """The page of a file or folder of the repository, which it must get."""
        if path == "README.md":
            return "index.html"
        if path.endswith((".svg", ".png")) or path == "doc/explorer.html":
            return path
        if path.endswith(".md"):
            if path not in self.course + self.lab:
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
        return html.escape(self.relative(origin, path) + mark + anchor)

    def relative(self, origin, path):
        return os.path.relpath(self.target(path), os.path.dirname(self.target(origin)) or ".")

    def write(self, path, text):
        path = os.path.join(self.out, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def links(self, origin, text):
        return re.sub(
            r'(href|src)="([^"]*)"', lambda m: f'{m[1]}="{self.link(origin, m[2])}"', text
        )

    # ---- what stands around a page --------------------------------------------------------------

    def contents(self, path):
        """The list of pages: the course, then the laboratory. The sections of this page and
        a lesson's diff stand under it."""
        out = ['<nav class="contents" id="contents" aria-label="contents">']
        for heading, pages in (("The course", self.course), ("The laboratory", self.lab)):
            out.append(f"<h2>{heading}</h2>\n<ul>")
            for page in pages:
                if "/diffs/" in page:
                    continue
                diff = page.replace("course/", "course/diffs/")
                here = ' aria-current="page"' if page == path else ""
                link = f'<a href="{self.relative(path, page)}"{here}>{self.titles[page]}</a>'
                below = ""
                if page == path:
                    parts = self.parts[page]
                    below += "".join(f'<li><a href="#{a}">{t}</a></li>' for a, t in parts)
                if diff != page and diff in self.course and path in (page, diff):
                    here = ' aria-current="page"' if diff == path else ""
                    there = self.relative(path, diff)
                    below += f'<li><a href="{there}"{here}>its diff, hunk by hunk</a></li>'
                out.append(f"<li>{link}{f'<ul>{below}</ul>' if below else ''}</li>")
            out.append("</ul>")
        return "\n".join(out) + "</nav>\n"

    def turn(self, path):
        """The pages before and after this one, which the access keys p and n turn to."""
        out = ""
        for pages in (self.course, self.lab):
            if path not in pages:
                continue
            at = pages.index(path)
            after = pages[at + 1:] or (self.lab if pages is self.course else [])
            if at > 0:
                out += self.turn_to(path, pages[at - 1], "prev", "p", "before")
            if after:
                out += self.turn_to(path, after[0], "next", "n", "next")
        return f'<nav class="turn" aria-label="pages before and after">{out}</nav>\n' if out else ""

    def turn_to(self, path, page, rel, key, word):
        there = self.relative(path, page)
        return (
            f'<a rel="{rel}" accesskey="{key}" title="access key: {key}" href="{there}">'
            f"<small>{word}</small>{self.titles[page]}</a>"
        )

    def page(self, path, title, body):
        up = "../" * self.target(path).count("/")
        book = path in self.course or path in self.lab
        first = re.search(r"<p>(?!<span class=.picture)(.*?)</p>", body, re.S)
        about = plain(first[1]) if first else title
        about = about if len(about) < 200 else about[:196].rsplit(" ", 1)[0] + " ..."
        url = os.environ.get("SITE_URL")
        return string.Template(read("dev/site/page.html")).substitute(
            name=html.escape(title if title == NAME else f"{title} - {NAME}"),
            title=html.escape(title),
            about=html.escape(about),
            site=html.escape(NAME),
            up=up,
            root=url.rstrip("/") + "/" if url else up,
            jump='<a class="jump" href="#contents">Contents</a>' if book else "",
            kind="alone" if not book else "book wide" if "/diffs/" in path else "book",
            body=body,
            turn=self.turn(path),
            contents=self.contents(path) if book else "",
        )

    # ---- pages ----------------------------------------------------------------------------------

    def convert(self, path):
        """The HTML of a Markdown page, its headings with the anchors of GitHub. Takes its title,
        its sections, and its words for the index."""
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
        self.titles[path] = title = plain(title[1]) if title else path
        pieces = re.split(r'<h[23] id="([^"]*)">(.*?)</h[23]>', body, flags=re.S)
        url = self.target(path)
        head = re.sub(r"<h1.*?</h1>", "", pieces[0], flags=re.S)
        self.index.append([url, title, title, plain(head)])
        for anchor, name, text in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
            self.index.append([f"{url}#{anchor}", title, plain(name), plain(text)])
        self.parts[path] = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', body, re.S)
        return body

    def hunks(self, path, body):
        """The code of each hunk beside the paragraph that names it."""
        found = diffs.lesson(read(path))
        if not found:
            return body
        parts = diffs.hunks(found)[2]

        def hunk(m):
            names = re.findall(r">([^<]+)</a>", m[1])
            code = "".join(diff_lines(parts[name]) for name in names if name in parts)
            return (
                f'<section class="hunk" id="hunk-{slug(names[0])}"><div>'
                f'<p class="name">{m[1]}</p>\n<p>{m[2]}</p></div><div>{code}</div></section>'
            )

        several = r"<p>((?:<strong><a [^>]*>[^<]*</a></strong>(?:,\s)?)+)\s*(.*?)</p>"
        return re.sub(several, hunk, body, flags=re.S)

    def picture(self, path, m):
        """A picture that a narrow screen scrolls, so that its text can be read."""
        src = re.search(r'src="([^"]*)"', m[0])[1]
        least = least_width(os.path.normpath(os.path.join(os.path.dirname(path), src)))
        image = m[0].replace("<img", f'<img style="min-width: {least}px"') if least else m[0]
        return f'<span class="picture" tabindex="0">{image}</span>'

    def markdown(self, path, body):
        # The badge is GitHub's: it says what the repository's tests say now.
        body = re.sub(r'<p><a href="\.\./\.\./actions/.*</p>\n', "", body)
        if "/diffs/" in path:
            body = self.hunks(path, body)
        body = re.sub(r"(?:<a [^>]*>)?<img [^>]*/>(?:</a>)?", lambda m: self.picture(path, m), body)
        for tag in ("pre", "table"):
            body = body.replace(f"<{tag}>", f'<{tag} tabindex="0">')
        page = self.page(path, self.titles[path], self.links(path, body))
        self.write(self.target(path), page)

    def source(self, path):
        if os.path.isdir(path):
            names = sorted(
                n
                for n in os.listdir(path)
                if n[0] != "." and n != "build" and "__pycache__" not in n
            )
            here = os.path.basename(path)
            links = [(self.link(path, f"{here}/{n}"), html.escape(n)) for n in names]
            body = "".join(f'<li><a href="{url}">{n}</a></li>\n' for url, n in links)
            body = f"<ul>\n{body}</ul>\n"
        else:
            kind = KINDS.get(path.rsplit(".", 1)[-1], "#" if path == "Makefile" else "")
            lines = colour(read(path).rstrip("\n"), kind).split("\n")
            body = "".join(f'<span id="L{i}"><a href="#L{i}">{i}</a>{line}</span>\n'
                           for i, line in enumerate(lines, 1))
            body = f'<pre class="source" tabindex="0">{body}</pre>\n'
        body = f"<h1>{html.escape(path)}</h1>\n{body}"
        self.write(path + ".html", self.page(path, path, body))

    def explorer(self):
        """The explorer, whose links lead to Markdown and sources in a clone."""
        text = read("doc/explorer.html")
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
        url = os.environ.get("SITE_URL", "").rstrip("/")
        picture = f"{url}/doc/pictures/explorer.png" if url else "pictures/explorer.png"
        meta = f'<meta property="og:image" content="{picture}">\n'
        head = head.replace("<style>", meta + "<style>", 1)
        static, scripts = body.split("<script", 1)
        self.write(
            "doc/explorer.html",
            head + "<body>" + self.links("doc/explorer.html", static) + "<script" + scripts,
        )

    def make(self):
        bodies = {path: self.convert(path) for path in self.course + self.lab}
        for path, body in bodies.items():
            self.markdown(path, body)
        shutil.copytree("doc/pictures", os.path.join(self.out, "doc/pictures"), dirs_exist_ok=True)
        for name, there in (("style.css", "site.css"), ("search.js", "search.js")):
            self.write(there, read("dev/site/" + name))
        self.explorer()
        done = set()
        while self.sources - done:
            for path in sorted(self.sources - done):
                done.add(path)
                if path.endswith(".md"):
                    self.markdown(path, self.convert(path))
                elif os.path.isfile(path) or path.count("/") < 4:
                    self.source(path)
        self.write("index.js", f'"use strict";\nconst INDEX = {json.dumps(self.index)};\n')

    def check(self):
        """Every link of the pages that were written leads to a file, and to an anchor in it."""
        anchors, files = {}, []
        for folder, _, names in os.walk(self.out):
            files += [os.path.join(folder, n) for n in names if n.endswith(".html")]
        for path in files:
            anchors[path] = (text := read(path)), set(re.findall(r'id="([^"]*)"', text))
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


def files_of(folder):
    return sorted(f"{folder}/{n}" for n in os.listdir(folder) if n.endswith(".md"))


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
    out = os.path.abspath(sys.argv[1])
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    site = Site(out)
    site.make()
    count = site.check()
    for link in sorted(set(site.dead)):
        print("dead link:", link)
    print(f"{sys.argv[1]}: {count} pages, {len(set(site.dead))} dead links")
    return 1 if site.dead else 0


if __name__ == "__main__":
    sys.exit(main())
