#!/usr/bin/env bash
# run_site.sh: `make site`: every link of the pages leads somewhere, nothing comes from elsewhere,
# and the explorer's links lead to pages of the site. Chromium opens every deep link into the
# explorer, and the links that its scripts make lead to anchors of the site. Without cmark-gfm it is
# skipped, and without Chromium that part.
. "$(dirname "$0")/report.sh"
command -v cmark-gfm >/dev/null || skip 'no cmark-gfm'

python3 dev/site.py "$dir/site" >"$dir/out" 2>&1
report $? "every link leads somewhere: $(tail -n 3 "$dir/out")"
elsewhere=$(grep -rlE '<(img|script|link|iframe)[^>]*(src|href)="?https?:' "$dir/site")
[ -z "$elsewhere" ]
report $? "no page loads anything from elsewhere $elsewhere"
for page in index.html doc/explorer.html doc/lab/explorer.html doc/course/1-one-rank.html \
    doc/pictures/1f1b.svg train_gpt_pp.cu.html; do
    [ -s "$dir/site/$page" ]
    report $? "$page is there"
done
line=$(grep -n '^static void run_batch' train_gpt_pp.cu | cut -d : -f 1)
grep -q "id=\"L$line\".*run_batch" "$dir/site/train_gpt_pp.cu.html" &&
    grep -q 'cu.html#L\|file}.html#L' "$dir/site/doc/explorer.html"
report $? 'the explorer leads to the line of a source'
wrong=$(grep -oE 'explorer\.html#[a-z]*\?[^" )]*' "$dir/site/index.html" |
    grep -vE '#(schedules|layout|collectives|tour)\?')
[ -z "$wrong" ]
report $? "the deep links are the explorer's own $wrong"
grep -q 'href="doc/explorer.html#tour"' "$dir/site/index.html"
report $? 'README leads to the tour'

# The course in README's order, each lesson's diff behind it: `next` leads through all of it, and on
# to the laboratory.
read_in_order() {
    local page=index.html next
    while [ -n "$page" ]; do
        echo "$page"
        next=$(grep -oE '<a rel="next"[^>]*href="[^"]*"' "$dir/site/$page" |
            sed 's/.*href="//; s/"$//')
        page=${next:+$(realpath -m --relative-to="$dir/site" \
            "$dir/site/$(dirname "$page")/$next")}
    done
}
read_in_order >"$dir/order"
missing=$(cd doc && find course lab -name '*.md' | sed 's/md$/html/' | while read -r page; do
    [ "$(grep -cx "doc/$page" "$dir/order")" = 1 ] || echo "$page"
done)
[ -z "$missing" ]
report $? "next leads once to each of $(wc -l <"$dir/order") pages $missing"
awk '/^## The course/ { on = 1; next } /^## / { on = 0 } on' README.md |
    grep -oE '\(doc/course/[^)#/]*\.md' | sed 's/^(//; s/md$/html/' |
    awk '!seen[$0]++' >"$dir/readme"
grep '^doc/course' "$dir/order" | grep -v /diffs/ | head -n "$(wc -l <"$dir/readme")" |
    cmp -s - "$dir/readme"
report $? 'the order is that of README'
grep -A 1 -x doc/course/2-tensor.html "$dir/order" | grep -qx doc/course/diffs/2-tensor.html
report $? "a lesson's diff comes behind it"

# Each hunk stands beside its text with its code, and no line of it is lost.
wrong=
for page in doc/course/diffs/*.md; do
    lesson=$(tr '\n' ' ' <"$page" | grep -oE 'LESSON=[a-z0-9_]+')
    printed=$(dev/lessons.sh "${lesson#*=}" | grep -v '^---- ' | grep -c '^[+-]')
    shown=$(grep -oE '<span class="(add|del)">' "$dir/site/${page%md}html" | wc -l)
    [ "$shown" = "$printed" ] || wrong+=" $page: $shown of $printed lines"
done
[ -z "$wrong" ]
report $? "the diffs have every line that make lessons prints$wrong"

wrong=$(find "$dir/site" -name '*.html' | while read -r page; do
    grep -q 'name="description" content="[^"]' "$page" &&
        grep -q 'og:image" content="[^"]' "$page" ||
        echo "$page"
done)
[ -z "$wrong" ] && SITE_URL=https://example.org/x python3 dev/site.py "$dir/hosted" \
    >"$dir/out" 2>&1 &&
    grep -q 'content="https://example.org/x/doc/pictures/explorer.png"' "$dir/hosted/index.html"
report $? "each page has a description and a picture for a link's preview $wrong"

mkdir "$dir/tree"
tar c --exclude=./build --exclude=./.git --exclude=./site . | tar x -C "$dir/tree"
printf '# X\n[a](nowhere.md) [b](words.md#nowhere)\n' >"$dir/tree/doc/course/site-test.md"
python3 "$dir/tree/dev/site.py" "$dir/broken" >"$dir/out" 2>&1
[ $? = 1 ] && [ "$(grep -c '^dead link: doc/course/site-test' "$dir/out")" -ge 2 ]
report $? "a dead link is found: $(grep -c '^dead' "$dir/out")"

# ---- in Chromium ---------------------------------------------------------------------------------

chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
[ -n "$chromium" ] || { echo 'skip the deep links: no Chromium'; finish; }
# At 390 pixels no page of the book scrolls sideways, and at each width the smallest text of its
# pictures has at least 8.5 pixels. On a page of each kind, light and dark, search finds a word over
# file:// and axe, if it is there, finds no violation.
axe=$(python3 - 2>/dev/null <<'EOF'
import glob, importlib.util
spec = importlib.util.find_spec("axe_core_python")
folders = spec.submodule_search_locations if spec else []
for path in glob.glob(folders[0] + "/**/axe.min.js", recursive=True) if folders else []:
    print(path)
EOF
)
axe=${axe%%$'\n'*}
[ -n "$axe" ] || echo 'skip axe on the site: python3 -m pip install axe-core-python'
cat >"$dir/probe.js" <<'EOF'
(async () => {
    const found = [], wide = document.documentElement.scrollWidth;
    if (wide > innerWidth) found.push(`${wide} pixels wide`);
    for (const img of document.images) {
        const name = img.src.split("/").pop();
        const text = SMALLEST[name] * img.getBoundingClientRect().width;
        if (text && text < 8.5) found.push(`${name}: text of ${text} pixels`);
    }
    const done = () => {
        parent.postMessage(`${innerWidth} pixels: ${PAGE}|${found.join(" || ")}`, "*");
    };
    if (!KINDS.includes(PAGE)) return done();
    if (typeof axe !== "undefined") {
        for (const {id, nodes} of (await axe.run(document)).violations)
            found.push(`${id} ${nodes[0].target} ${nodes[0].failureSummary}`.replace(/\s+/g, " "));
    }
    box.focus();
    box.value = "deadlock";
    box.dispatchEvent(new Event("input"));
    for (let i = 0; i < 100 && !list.querySelector("a"); i++)
        await new Promise(go => setTimeout(go, 20));
    const hit = list.querySelector("a");
    if (!hit || !hit.textContent.toLowerCase().includes("deadlock"))
        found.push("search finds no deadlock");
    box.value = "zzzyyyxxx";
    box.dispatchEvent(new Event("input"));
    if (list.querySelector("a")) found.push("search finds a word that is nowhere");
    done();
})();
EOF
kinds=(index.html doc/course/words.html doc/course/3-pipeline.html doc/course/diffs/6-fsdp.html
    doc/lab/README.html llmc/model.h.html)
{
    printf 'const KINDS = ['
    printf '"%s", ' "${kinds[@]}"
    echo '];'
    echo 'const SMALLEST = {'
    for svg in doc/pictures/*.svg; do
        awk -v name="${svg##*/}" -F 'font-size="' '
            /<svg/ { split($0, w, "width=\""); width = w[2] + 0 }
            { for (i = 2; i <= NF; i++) if (!least || $i + 0 < least) least = $i + 0 }
            END { if (least) printf "\"%s\": %f,\n", name, least / width }' "$svg"
    done
    echo '};'
    [ -z "$axe" ] || cat "$axe"
} >"$dir/site/probe-first.js"
while read -r page; do
    { cat "$dir/site/$page"
      echo "<script src='$(realpath -m --relative-to="$dir/site/$(dirname "$page")" \
          "$dir/site/probe-first.js")'></script><script>const PAGE = '$page';"
      cat "$dir/probe.js"
      echo '</script>'; } >"$dir/site/${page%.html}.probe.html"
done < <(cat "$dir/order"; echo llmc/model.h.html)
for pages in order kinds; do
    printf '%s\n' "${kinds[@]}" >"$dir/probed"
    [ $pages = kinds ] || { cat "$dir/order"; echo llmc/model.h.html; } >"$dir/probed"
    sed -i 's/html$/probe.html/' "$dir/probed"
    cat >"$dir/site/probes-$pages.html" <<EOF
<!DOCTYPE html><iframe id="hold"></iframe><iframe id="shown"></iframe>
<script>
const PAGES = [$(sed 's/.*/"&"/' "$dir/probed" | paste -sd ,)];
const hold = document.getElementById("hold"), shown = document.getElementById("shown"), lines = [];
const todo = [1280, 390].flatMap(width => PAGES.map(page => [width, page]));
hold.contentDocument.open();  // the page's load event waits for it
const next = () => {
    if (!todo.length) {
        const result = document.createElement("pre");
        result.id = "result";
        result.textContent = "\\n" + lines.join("\\n") + "\\nend\\n";
        document.body.append(result);
        return hold.contentDocument.close();
    }
    const [width, page] = todo.shift();
    shown.style = "height:900px;border:0;width:" + width + "px";
    shown.src = page;
};
onmessage = ({data}) => { lines.push(data); next(); };
next();
</script>
EOF
done
for run in order:1 kinds:0; do
    timeout 300 "$chromium" --headless --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
        --window-size=1400,1000 --blink-settings=preferredColorScheme=${run#*:} --dump-dom \
        "file://$dir/site/probes-${run%:*}.html" 2>"$dir/browser" |
        sed -n '/<pre id="result">/,/^end$/p' |
        sed '1d; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >"$dir/said"
    seen=$(grep -c '|' "$dir/said") wanted=${#kinds[@]}
    [ "${run%:*}" = kinds ] || wanted=$(($(wc -l <"$dir/order") + 1))
    [ "$seen" = $((2 * wanted)) ]
    report $? "$seen pages of $((2 * wanted)) were seen, ${run/:/, light: }"
    while IFS='|' read -r page wrong; do
        [ "$page" = end ] && break
        [ -z "$wrong" ]
        report $? "$page $wrong"
    done <"$dir/said"
done
find "$dir/site" -name '*probe*' -delete

mapfile -t deep < <(grep -rhoE 'href="[^" ]*explorer\.html#[^" ]+' "$dir/site" --include=*.html |
    sed 's/.*html//; s/&amp;/\&/g' | sort -u)
site=$dir/site/doc
{
    cat "$site/explorer.html"
    echo "<script>const DEEP = [$(printf '"%s", ' "${deep[@]}")];"
    cat <<'EOF'
(async () => {
    const hold = document.createElement("iframe"), out = [];
    document.body.append(hold);
    hold.contentDocument.open();  // the page's load event waits for it
    const collect = from => {
        for (const a of document.querySelectorAll("main a, footer a, nav a"))
            out.push(`link ${from} ${a.getAttribute("href")}`);
    };
    for (const hash of DEEP) {
        history.replaceState(null, "", hash);
        const panel = x => x.split("?")[0];
        const opens = await open(hash) && panel(location.hash) === panel(hash);
        out.push(`deep ${opens ? "opens" : "fails"} ${hash} ` + $("refusal").textContent);
    }
    for (let step = 1; step <= TOUR.length; step++) {
        await open("#tour?step=" + step);
        $("guesses").children[0].click();
        stop();
        collect("tour-" + step);
    }
    for (const hash of ["#schedules?follow=1", "#layout?stage=0",
                        "#layout?stage=0&model=smollm2-135m", "#layout?stage=0&schedule=zb-h1"]) {
        await open(hash);
        for (let i = 0; i < 500 && hash.includes("stage") && !laid.buffers; i++)
            await new Promise(go => setTimeout(go, 10));
        collect(hash);
    }
    const result = document.createElement("pre");
    result.id = "result";
    result.textContent = "\n" + out.join("\n") + "\nend\n";
    document.body.replaceChildren(result, hold);
    hold.contentDocument.close();
})();
</script>
EOF
} >"$site/driven.html"
timeout 200 "$chromium" --headless --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
    --dump-dom \
    "file://$site/driven.html" 2>"$dir/browser" | sed -n '/<pre id="result">/,/^end$/p' |
    sed 's/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >"$dir/said"
[ "$(tail -n 1 "$dir/said")" = end ]
report $? "the site's explorer runs in Chromium$([ -s "$dir/said" ] || tail -n 3 "$dir/browser")"
while read -r _ verdict hash more; do
    [ "$verdict" = opens ]
    report $? "a deep link opens: $hash $more"
done < <(grep '^deep ' "$dir/said")
[ "$(grep -c '^deep ' "$dir/said")" -ge 10 ]
report $? "deep links: $(grep -c '^deep ' "$dir/said")"
dead=$(grep '^link ' "$dir/said" | cut -d ' ' -f 3 | sort -u | while read -r url; do
    file=${url%%#*} anchor=
    [[ $url == *#* ]] && anchor=${url#*#}
    [ -z "$file" ] && continue  # of the explorer itself
    [ -s "$site/$file" ] || { echo "$url"; continue; }
    [ -z "$anchor" ] || grep -q "id=\"$anchor\"" "$site/$file" || echo "$url"
done)
links() { grep "^link $1" "$dir/said" | cut -d ' ' -f 3 | sort -u | wc -l; }
[ -z "$dead" ] && [ "$(links '.*#L[0-9]')" -ge 12 ]
report $? "$(links '') links of the explorer's scripts lead to lines and headings $dead"
finish
