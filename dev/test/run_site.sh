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
mkdir "$dir/tree"
tar c --exclude=./build --exclude=./.git --exclude=./site . | tar x -C "$dir/tree"
printf '# X\n[a](nowhere.md) [b](words.md#nowhere)\n' >"$dir/tree/doc/course/site-test.md"
python3 "$dir/tree/dev/site.py" "$dir/broken" >"$dir/out" 2>&1
[ $? = 1 ] && [ "$(grep -c '^dead link: doc/course/site-test' "$dir/out")" -ge 2 ]
report $? "a dead link is found: $(grep -c '^dead' "$dir/out")"

# ---- in Chromium ---------------------------------------------------------------------------------

chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
[ -n "$chromium" ] || { echo 'skip the deep links: no Chromium'; finish; }
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
        const ok = await open(hash);
        out.push(`deep ${ok && location.hash.split("?")[0] === hash.split("?")[0] ? "opens" : "fails"} ${hash} ` +
                 $("refusal").textContent);
    }
    for (let step = 1; step <= TOUR.length; step++) {
        await open("#tour?step=" + step);
        $("guesses").children[0].click();
        stop();
        collect("tour-" + step);
    }
    for (const hash of ["#schedules?follow=1", "#layout?stage=0", "#layout?stage=0&model=smollm2-135m",
                        "#layout?stage=0&schedule=zb-h1"]) {
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
report $? "the explorer of the site runs in Chromium$([ -s "$dir/said" ] || tail -n 3 "$dir/browser")"
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
[ -z "$dead" ] && [ "$(grep '^link .*#L[0-9]' "$dir/said" | cut -d ' ' -f 3 | sort -u | wc -l)" -ge 12 ]
report $? "$(grep '^link ' "$dir/said" | cut -d ' ' -f 3 | sort -u | wc -l) links that the explorer's scripts make lead \
to lines and headings $dead"
finish
