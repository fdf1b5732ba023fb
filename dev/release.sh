#!/usr/bin/env bash
# release.sh [TAG]: makes build/release/llm-parallel-VERSION.tar.gz of a tag or commit (default:
# HEAD). It has the tracked files, and site/ with the pages and the explorer, made from these files.
# VERSION is the first heading of its CHANGELOG.md; a tag vVERSION must agree. Needs no network. The
# same commit gives the same bytes.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
tag=${1:-HEAD}
fail() {
    echo "error: $1" >&2
    exit 2
}

commit=$(git rev-parse --quiet --verify "$tag^{commit}") || fail "there is no tag or commit '$tag'"
command -v cmark-gfm >/dev/null || fail \
    'the site needs cmark-gfm (on Debian: apt-get install cmark-gfm)'
version=$(git show "$commit:CHANGELOG.md" | sed -n 's/^## \([0-9][0-9.]*\).*/\1/p' | head -n 1)
[ -n "$version" ] || fail "CHANGELOG.md of $tag has no heading '## VERSION'"
[[ $tag != v[0-9]* || $tag = "v$version" ]] ||
    fail "the tag $tag is not v$version, the first version of its CHANGELOG.md"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
name=llm-parallel-$version
git archive --prefix="$name/" "$commit" | tar -x -C "$folder"
python3 "$folder/$name/dev/site.py" "$folder/site"
mv "$folder/site" "$folder/$name/site"
mkdir -p build/release
archive=build/release/$name.tar.gz
date=@$(git log -1 --format=%ct "$commit")
tar -c -C "$folder" --sort=name --owner=0 --group=0 --numeric-owner --mtime="$date" "$name" |
    gzip -n >"$archive.tmp"
mv "$archive.tmp" "$archive"
echo "$archive: $(du -h "$archive" | cut -f 1), of $(git rev-parse --short "$commit")"
echo "its site begins at $name/site/index.html"
