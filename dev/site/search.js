// Search within the pages: INDEX, a file of its own that is loaded at the first key, has
// [address, page, section, text] of every section. Nothing leaves the browser.
"use strict";
const box = document.getElementById("search");
const list = document.getElementById("found");
const up = box.dataset.up;
const MOST = 20;

function loadIndex() {
    if (document.getElementById("index")) return;
    const script = document.createElement("script");
    script.id = "index";
    script.src = up + "index.js";
    script.onload = show;
    document.head.append(script);
}

// How well a section fits: 0 if a word is missing, more where a title has it.
function rank([, page, section, text], words) {
    let points = 0;
    for (const word of words) {
        const times = text.toLowerCase().split(word).length - 1;
        const titled = 8 * section.toLowerCase().includes(word) +
            5 * page.toLowerCase().includes(word);
        if (!times && !titled) return 0;
        points += Math.min(times, 5) + titled;
    }
    return points;
}

// The words around the first one found.
function excerpt(text, word) {
    const at = Math.max(0, text.toLowerCase().indexOf(word) - 60);
    return (at ? "..." : "") + text.slice(at, at + 160) + (at + 160 < text.length ? "..." : "");
}

function show() {
    const words = box.value.toLowerCase().split(/\s+/).filter(word => word.length > 1);
    list.replaceChildren();
    if (!words.length || typeof INDEX === "undefined") return;
    const hits = INDEX.map(entry => [rank(entry, words), entry]).filter(([points]) => points > 0);
    hits.sort((a, b) => b[0] - a[0]);
    for (const [, [url, page, section, text]] of hits.slice(0, MOST)) {
        const item = document.createElement("li");
        const link = document.createElement("a");
        const where = document.createElement("small");
        link.href = up + url;
        link.textContent = section === page ? page : `${page}: ${section}`;
        where.textContent = excerpt(text, words[0]);
        link.append(where);
        item.append(link);
        list.append(item);
    }
    const count = document.createElement("li");
    const said = document.createElement("p");
    said.textContent = hits.length === 0 ? "No page has all these words."
        : `${hits.length} sections${hits.length > MOST ? `, the best ${MOST} are shown` : ""}`;
    count.append(said);
    list.append(count);
}

box.addEventListener("focus", loadIndex);
box.addEventListener("input", () => {
    loadIndex();
    show();
});
box.closest("search").addEventListener("keydown", event => {
    if (event.key === "Escape") {
        box.value = "";
        box.focus();
        show();
    }
    if (event.key === "Enter" && event.target === box) list.querySelector("a")?.click();
});

// The contents stand beside the page: the entry of this page is to be in sight.
const here = document.querySelector("nav.contents [aria-current]");
if (here) here.closest("nav").scrollTop = here.offsetTop - here.closest("nav").offsetTop - 150;
