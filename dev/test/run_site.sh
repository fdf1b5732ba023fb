#!/usr/bin/env bash
# run_site.sh: `make site`: every link of the pages leads somewhere, nothing comes from elsewhere, and the explorer's
# links lead to pages of the site. Without cmark-gfm it is skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
command -v cmark-gfm >/dev/null || skip site 'no cmark-gfm'
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

python3 dev/site.py "$dir/site" >"$dir/out" 2>&1
report $? "every link leads somewhere: $(tail -n 3 "$dir/out")"
elsewhere=$(grep -rlE '<(img|script|link|iframe)[^>]*(src|href)="?https?:' "$dir/site")
[ -z "$elsewhere" ]
report $? "no page loads anything from elsewhere $elsewhere"
for page in index.html doc/explorer.html doc/lessons.html doc/pictures/1f1b.svg train_gpt_pp.cu.html; do
    [ -s "$dir/site/$page" ]
    report $? "$page is there"
done
line=$(grep -n '^static void run_batch' train_gpt_pp.cu | cut -d : -f 1)
grep -q "id=\"L$line\".*run_batch" "$dir/site/train_gpt_pp.cu.html" &&
    grep -q 'cu.html#L\|file}.html#L' "$dir/site/doc/explorer.html"
report $? 'the explorer leads to the line of a source'
wrong=$(grep -oE 'explorer\.html#[a-z]*\?[^" )]*' "$dir/site/index.html" | grep -vE '#(schedules|layout|collectives|tour)\?')
[ -z "$wrong" ]
report $? "the deep links are the explorer's own $wrong"
grep -q 'href="doc/explorer.html#tour"' "$dir/site/index.html"
report $? 'README leads to the tour'
mkdir "$dir/tree"
tar c --exclude=./build --exclude=./.git --exclude=./site . | tar x -C "$dir/tree"
printf '# X\n[a](nowhere.md) [b](lessons.md#nowhere)\n' >"$dir/tree/doc/site-test.md"
python3 "$dir/tree/dev/site.py" "$dir/broken" >"$dir/out" 2>&1
[ $? = 1 ] && [ "$(grep -c '^dead link: doc/site-test' "$dir/out")" -ge 2 ]
report $? "a dead link is found: $(grep -c '^dead' "$dir/out")"
finish
