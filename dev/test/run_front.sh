#!/usr/bin/env bash
# run_front.sh: the repository's front. Workflows, issue forms, the dev container and the citation
# are well-formed and name commands that exist. The changes begin with the citation's version. `make
# release` makes an archive with the site and the explorer. Ends with `N passed, N failed`.
. "$(dirname "$0")/report.sh"
cpu_only 'the files are the same'

# ---- files that others read ----------------------------------------------------------------------

# Prints what is wrong with a file of the front, by the keys that its reader needs; nothing if all
# is well.
check_files='
import json, sys
import yaml
problems = []
def need(path, it, keys):
    problems.extend(f"{path}: no {key}" for key in keys if not it.get(key))
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        it = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    if "/workflows/" in path:
        need(path, it, ["name", True, "jobs", "permissions"])  # YAML 1.1 reads `on` as true
        for name, job in it["jobs"].items():
            need(f"{path}, {name}", job, ["runs-on", "steps"])
            for step in job["steps"]:
                if ("run" in step) == ("uses" in step):
                    problems.append(f"{path}, {name}: a step of nothing")
    elif "ISSUE_TEMPLATE" in path and not path.endswith("config.yml"):
        need(path, it, ["name", "description", "body"])
        ids = [field.get("id") for field in it["body"] if field["type"] != "markdown"]
        problems += [f"{path}: ids are not unique"] * (len(set(ids)) != len(ids) or None in ids)
        kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        problems += [f"{path}: {f}" for f in it["body"]
                     if f["type"] not in kinds or not f["attributes"].get("label")]
    elif path.endswith(".cff"):
        need(path, it, ["cff-version", "message", "title", "authors", "version", "license"])
    elif path.endswith("devcontainer.json"):
        need(path, it, ["image", "onCreateCommand", "postCreateCommand"])
print("\n".join(problems))
'
files=(.github/workflows/*.yml .github/ISSUE_TEMPLATE/*.yml CITATION.cff \
    .devcontainer/devcontainer.json)
python=${PYTHON:-python3}
if "$python" -c 'import yaml' 2>/dev/null; then
    for file in "${files[@]}"; do
        wrong=$("$python" -c "$check_files" "$file" 2>&1)
        [ -z "$wrong" ]
        report $? "$file is well-formed $wrong"
    done
else
    echo 'skip the YAML files: no python3 with yaml'
fi

# The commands of workflows and of the container: each `make TARGET` and each script exists.
commands=$(sed -n 's/^ *- run: //p; s/^ *run: //p' .github/workflows/*.yml
    sed -n 's/.*Command": "\(.*\)".*/\1/p' .devcontainer/devcontainer.json)
wrong=
for target in $(grep -oE '^make( [a-z][a-z-]*)?' <<<"$commands" | sed 's/^make *//'); do
    grep -qE "^$target:" Makefile || wrong+=" make $target"
done
for script in $(grep -oE '^(dev/[a-z_]+\.sh|\.ci/run)' <<<"$commands"); do
    [ -x "$script" ] || wrong+=" $script"
done
[ "$(wc -l <<<"$commands")" -ge 8 ] && [ -z "$wrong" ]
report $? "workflows and the container call what exists$wrong"
pattern=$(sed -n 's/.*make test ONLY=\([^ ]*\).*/\1/p' .github/workflows/test.yml)
planned=$(dev/test/run_tests.sh --plan cpu "$pattern" | sort -u | wc -l)
[ -n "$pattern" ] && [ "$planned" -ge 20 ]
report $? "the quick tests, ONLY=$pattern, are $planned programs"
missing=
named='\b(dev|doc|llmc)/[A-Za-z0-9_/.-]*[a-z]'
for file in $(grep -hoE "$named" .github/CONTRIBUTING.md CITATION.cff CHANGELOG.md | sort -u); do
    [ -e "$file" ] || case $file in
        */NAME* | */train_NAME*) ;;
        *) missing+=" $file" ;;
    esac
done
[ -z "$missing" ]
report $? "files that they name exist$missing"

# AGENTS.md names targets of make, tests, flags, variables and files, which exist.
wrong=
for target in $(grep -oE '\bmake [a-z][a-z-]*' AGENTS.md | sed 's/^make //' | sort -u); do
    grep -qE "^$target:" Makefile || wrong+=" make $target"
done
for pattern in $(tr '\n' ' ' <AGENTS.md | grep -oE 'ONLY=[a-z_]+' | sed 's/ONLY=//' | sort -u); do
    ls dev/test/run_*.sh dev/test/test_* test_gpt.c | grep -q "$pattern" || wrong+=" ONLY=$pattern"
done
for flag in $(grep -oE -- '`--[a-z-]+' AGENTS.md | sed 's/`--//' | sort -u); do
    grep -rqF "\"$flag\"" llmc || wrong+=" --$flag"
done
for variable in $(grep -oE '`(CPU|NCCL)_[A-Z_]+' AGENTS.md | tr -d '`' | sort -u); do
    grep -rqF "\"$variable\"" llmc || wrong+=" $variable"
done
for file in $(grep -oE "\b(dev|doc|\.github)/[A-Za-z0-9_/.-]*[a-z]" AGENTS.md | sort -u); do
    [ -e "$file" ] || wrong+=" $file"
done
words=$(wc -w <AGENTS.md)
[ -z "$wrong" ] && [ "$words" -le 500 ]
report $? "AGENTS.md, $words words, names what exists$wrong"

# ---- the release ---------------------------------------------------------------------------------

version=$(sed -n 's/^## \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md | head -n 1)
[ -n "$version" ] && grep -qxF "version: $version" CITATION.cff
report $? "the changes begin with the citation's version, $version"
git rev-parse --quiet --verify HEAD >/dev/null 2>&1 || skip 'no git repository'
command -v cmark-gfm >/dev/null || skip 'no cmark-gfm'

git clone -q --shared . "$dir/clone" >"$dir/out" 2>&1
name=llm-parallel-$version archive=$dir/clone/build/release/llm-parallel-$version.tar.gz
release() { (cd "$dir/clone" && dev/release.sh "$@" >"$dir/out" 2>&1 </dev/null); }
git -C "$dir/clone" tag "v$version"
release "v$version"
report $? "a release: $(tail -n 1 "$dir/out")"
tar -tzf "$archive" >"$dir/list" 2>/dev/null
for entry in README.md Makefile CHANGELOG.md train_gpt_3d.cu doc/explorer.html site/index.html \
    site/doc/explorer.html \
    site/doc/course/4-3d.html; do
    grep -qxF "$name/$entry" "$dir/list"
    report $? "it has $entry"
done
! grep -qvE "^$name/" "$dir/list" && ! grep -qE "^$name/(build|\.git)/" "$dir/list"
report $? 'all of it in one folder, and nothing that is built'
first=$(cksum <"$archive")
release && [ "$first" = "$(cksum <"$archive")" ]
report $? 'the same commit gives the same bytes'
git -C "$dir/clone" tag v99.9
release v99.9
[ $? = 2 ] && grep -q "tag v99.9 is not v$version" "$dir/out"
report $? "a tag of another version: $(cat "$dir/out")"
release v98
[ $? = 2 ] && grep -q "no tag or commit 'v98'" "$dir/out"
report $? "a tag that is not there: $(cat "$dir/out")"
finish
