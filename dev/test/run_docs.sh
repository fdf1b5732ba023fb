#!/usr/bin/env bash
# run_docs.sh [BUILD]: are README.md and doc/ true? Checks the tables of numbers that take seconds,
# the drawings, the plan that lesson 4 prints of `make train`, and the code of the recipes. Checks
# every link, flag, file and known bug that the pages name.
# needs: fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_pp fp32/train_gpt_3d bf16/train_gpt_3d
# needs: bf16/train_zero_bubble fp32/train_v bf16/train_gpt bf16/train_offload
# needs: fp32/train_documents fp32/train_5d
# needs: bf16/train_context bf16/train_data bf16/train_fsdp bf16/train_moe bf16/train_gpt_tp
# needs: fp32/train_moe fp32/train_data
# needs: fp32/train_context fp32/train_fsdp fp32/train_llama fp32/train_zero_bubble
# needs: tools/figures tools/schedule tools/scale tools/study tools/plan tools/timeline
# needs: tools/bubbles
# needs: tools/profile tools/byte_corpus
. "$(dirname "$0")/report.sh"
cpu_only 'the numbers are those of the stand-ins'
pages=(README.md doc/course/*.md doc/course/diffs/*.md doc/lab/*.md dev/slurm/README.md \
    dev/scale/README.md dev/results/*.md)

verdicts 'tables of the pages' dev/plot/tables.sh check "$build"

check() { # check TEXT WRONG: passes if nothing is wrong, else says what
    [ -z "$2" ]
    report $? "$1${2:+
$2}"
}

# The table of the paper's rates takes a minute, so only three of its rows are computed here. In all
# twelve, on the paper's times the lists of 1f1b, zb-h1 and zb-auto with p have the paper's rates.
rates() {
    local rows
    build/tools/bubbles paper "${build/fp32/bf16}" dev/clusters/dgx-a100.json 6.2B 2>&1 |
        grep -v '^|-' |
        while read -r row; do grep -qxF -- "$row" dev/results/schedules.md ||
            echo "not there: $row"; done
    rows=$(awk -F' *[|,] *' '/^<!-- table bubbles_paper/ { on = 1 } /^<!-- end/ { on = 0 }
        on && $2 ~ /B$/ && $6 == $7 && $12 == $13 && $15 == $16' dev/results/schedules.md | wc -l)
    [ "$rows" = 12 ] || echo "$rows rows of 12 have the paper's rates"
}
check "the lists have the rates of Zero Bubble's Table 5, and the clock's rows are as written" \
    "$(rates)"

drawings() {
    build/tools/figures "$dir" 2>&1
    build/tools/study dev/scale/rows_a100.csv "$dir" 2>&1 >/dev/null
    for drawn in "$dir"/*.svg; do cmp "$drawn" "doc/pictures/${drawn##*/}"; done 2>&1
}
check "the drawings are what build/tools/figures draws (else: make doc)" "$(drawings)"

schedules() {
    dev/plot/schedules.sh "$build" "$dir" >/dev/null 2>&1 || echo 'dev/plot/schedules.sh fails'
    dev/plot/traced.sh "${build/fp32/bf16}" "$dir" || echo 'dev/plot/traced.sh fails'
    for drawn in gpipe 1f1b interleaved zb-h1 zb-auto zb-v hsdp offload-auto offload-1; do
        cmp "$dir/$drawn.svg" doc/pictures/$drawn.svg
    done 2>&1
}
check "the schedules' pictures are those of a simulated step (else: make doc)" "$(schedules)"

# Draws a run like `make train` on the virtual clock, where its text makes no difference.
main_run() {
    local flags
    flags=$(make --no-print-directory -n DEVICE=cpu run-train 2>/dev/null |
        sed -n 's/^ *then .*train_gpt_3d \(.*--virtual-time.*\)/\1/p')
    build/tools/byte_corpus "$dir/text.bin" "$dir/rest.bin" README.md >/dev/null
    # shellcheck disable=SC2086
    $launch -n 8 "$build/train_gpt_3d" $flags --train-data "$dir/text.bin" --trace \
        "$dir/main.json" </dev/null \
        >/dev/null 2>&1
    build/tools/timeline --step 5 --pipeline 2 --out "$dir/main.svg" "$dir/main.json" 2>/dev/null
    build/tools/profile --out "$dir/profile.svg" "$dir/main.json" >/dev/null 2>&1
    for drawn in main profile; do cmp "$dir/$drawn.svg" doc/pictures/$drawn.svg; done 2>&1
}
check "the main run's pictures are those of its step on the virtual clock (else: make doc)" \
    "$(main_run)"

# Lines of the plan that lesson 4 prints and the dry run of the same command does not.
plan() {
    local flags
    flags=$(make --no-print-directory -n DEVICE=cpu run-train 2>/dev/null |
        sed -n 's/.*train_gpt_3d //p' | head -n 1 |
        sed -E 's/ *\\$//; s/--prompt "[^"]*"//
                s/--(train-data|val-data|out|log|trace|val-every) [^ ]*//g')
    # shellcheck disable=SC2086
    $launch -n 8 "$build/train_gpt_3d" $flags --dry-run >"$dir/plan" 2>&1 </dev/null
    awk '/^<!-- table main/ { on = 1 } /^<!-- end/ { on = 0 }
         on && /^(device|model|batch|[0-9]+ ranks|stage|    )/' doc/course/4-3d.md >"$dir/printed"
    [ "$(wc -l <"$dir/printed")" -ge 6 ] || echo 'it is not there'
    grep -vxFf "$dir/plan" "$dir/printed"
}
check "lesson 4: the plan of make train" "$(plan)"

# GitHub's name of a heading: lower case, no punctuation, dashes for spaces.
headings() { sed -n 's/^##* //p' "$1" | tr '[:upper:]' '[:lower:]' |
    sed -E 's/[^a-z0-9 _-]//g; s/ /-/g'; }
links() {
    local page link file target
    for page in "${pages[@]}"; do
        grep -oE '\]\([^) ]+\)' "$page" | sed 's/^](//; s/)$//' | grep -v '^http' |
            while read -r link; do
            # GitHub's pages of a workflow; its file has the name.
            if [[ $link == ../../actions/workflows/* ]]; then
                link=${link#../../actions/} && link=.github/${link%/badge.svg}
            fi
            file=${link%%#*} target=$page
            [ -n "$file" ] && target=$(dirname "$page")/$file
            [ -e "$target" ] || { echo "$page: no file $link"; continue; }
            [[ $link != *#* || $target != *.md ]] || headings "$target" |
                grep -qx -- "${link#*#}" || echo "$page: no heading $link"
        done
    done
    for page in doc/course/*.md; do grep -q "($page" README.md ||
        echo "README does not lead to $page"; done
    for page in doc/lab/*.md; do
        [ "$page" = doc/lab/README.md ] || grep -q "(${page##*/}" doc/lab/README.md ||
            echo "doc/lab/README.md does not lead to $page"
    done
    for page in doc/course/diffs/*.md; do
        grep -q "(diffs/${page##*/})" "doc/course/${page##*/}" || echo "no lesson leads to $page"
    done
    grep -q '(doc/lab/README.md)' README.md || echo 'README does not lead to doc/lab/README.md'
    for page in doc/pictures/*.svg; do
        grep -q "pictures/${page##*/})" "${pages[@]}" || echo "no page shows $page"
    done
}
check "links lead somewhere, README and the laboratory lead to all pages, pictures are shown" \
    "$(links)"

# doc/course/diffs has a text about each hunk of a lesson's diff. A hunk without one, a text about
# none, and a name that links to another line are found.
annotated() {
    dev/diffs.py check >"$dir/said" || cat "$dir/said"
    [ "$(ls doc/course/diffs | wc -l)" -ge 9 ] || echo 'pages are missing'
    [ "$(grep -oE '^[0-9]+' "$dir/said")" -ge 170 ] || echo "hunks are missing: $(cat "$dir/said")"
}
annotated_wrongly() {
    local page=$dir/tree/doc/course/diffs/5-data.md line
    mkdir "$dir/tree"
    cp -r --parents dev/diffs.py dev/lessons.sh dev/lessons train_gpt*.cu doc/course/diffs \
        "$dir/tree"
    sed -i '/^\*\*\[use_bucket/,/^$/d
            s/cu#L[0-9]*)\*\* Backward starts/cu#L3)** Backward starts/' "$page"
    printf '\n**nothing_there** This function does not exist.\n\n' >>"$page"
    "$dir/tree/dev/diffs.py" check >"$dir/said" && echo 'nothing wrong is found'
    for line in 'no text about use_bucket' 'nothing_there is annotated twice or is no hunk' \
        'the line of loss_and_gradient'; do
        grep -q "5-data.md: .*$line" "$dir/said" || echo "not found: $line"
    done
}
if command -v python3 >/dev/null; then
    check "each hunk of the lessons' diffs has one text (else: dev/diffs.py write)" "$(annotated)"
    check "a hunk without a text, a text without a hunk and a wrong line are found" \
        "$(annotated_wrongly)"
else
    echo "skip the texts about hunks: no python3"
fi

files() {
    local path
    grep -ohE '\b(llmc|dev|doc)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' "${pages[@]}" | sort -u |
        grep -v NAME |
        while read -r path; do [ -e "$path" ] || echo "$path"; done
}
check "files that the pages name are there" "$(files)"

# Flags of mpirun, Slurm, Open MPI's configuration and of tools are not the trainers'.
others='allow-run-as-root|quiet|oversubscribe|hostfile|map-by|mca|nodes|mpi|signal|requeue'
others="$others|kill-on-bad-exit|gpus-per-node|gpus-per-task|gpu-bind|with-pmi|pretokenized|shards"
others="$others|stride|text|help|pack|logits|document-token|separator|shard-tokens|local-dir"
flags() {
    local flag
    { "$build/train_gpt_3d" --help all; build/tools/scale; build/tools/schedule; \
        build/tools/timeline
        build/tools/plan --help
        for flag in dev/lessons/*.cu; do "$build/$(basename "$flag" .cu)" --help all; done; } 2>&1 |
        sed 's/]/ ]/g; s/$/ /' >"$dir/help"
    grep -ohE '(^|[ `("])--[a-z][a-z0-9-]*' "${pages[@]}" | sed -E 's/^[ `("]*--//' | sort -u |
        grep -vxE "$others" |
        while read -r flag; do grep -q -- "--$flag " "$dir/help" || echo "--$flag"; done
    grep -ohE '(`|^)make [a-z-]+( |`|$)' "${pages[@]}" | tr -d '\140' | sort -u |
        while read -r _ flag; do
        grep -qE "^${flag% }:" Makefile || echo "make $flag"
    done
}
check "flags of trainers and targets of make that the pages name exist" "$(flags)"

# Lines and variables for a debugger, in a folder of their own, and none of them where programs are
# to be fast.
debugger() {
    make --no-print-directory -n -W train_gpt.cu DEVICE=cpu PRECISION=fp32 GDB=1 \
        build/cpu-fp32-gdb/train_gpt 2>&1 |
        grep -q -- '-O0 -g .*-o build/cpu-fp32-gdb/train_gpt' ||
            echo 'make GDB=1 does not compile with -O0 -g'
    local fast
    fast=$(make --no-print-directory -n -W train_gpt.cu DEVICE=cpu PRECISION=fp32 \
        build/cpu-fp32/train_gpt 2>&1 |
        grep -- '-o build/cpu-fp32/train_gpt')
    [[ $fast = *' -O3 '* && $fast != *' -O0 '* && $fast != *' -g '* ]] ||
        echo 'make does not compile with -O3 alone'
}
check "make GDB=1 builds for a debugger, as doc/lab/stand_ins.md says" "$(debugger)"

# Each bug stands by its name in a string of each test that doc/lab/bugs.md gives for it.
bugs() {
    local name tests file rows=0
    while IFS='|' read -r _ name _ _ tests _; do
        name=$(xargs <<<"$name") rows=$((rows + 1))
        for file in $tests; do
            awk -v name="$name" '
                { at = index($0, name) }
                at && index(substr($0, 1, at), "\"") { found = 1 }
                END { exit !found }' "$file" || echo "\"$name\" is not in $file"
        done
    done < <(grep -E '\.(c|cu|sh) \|$' doc/lab/bugs.md)
    [ $rows = 31 ] || echo "$rows rows were read, not 31"
    rows=0
    while IFS='"' read -r file name _; do
        file=${file% } file=${file##* } rows=$((rows + 1))
        grep -qF -- "$name" "$file" || echo "\"$name\" is not in $file"
    done < <(sed -n '/^<!-- kinds -->/,/^<!-- end/s/^- //p' dev/results/bugs.md)
    [ $rows = 27 ] || echo "$rows kinds were read, not 27"
}
check "each bug is in the tests that doc/lab/bugs.md and dev/results/bugs.md name" "$(bugs)"

# The schedule of doc/lab/recipes.md is one that pipeline_prove accepts.
schedule() {
    {
        printf '#include <stdio.h>\n#include "llmc/pipeline_lists.h"\n'
        awk '/^<!-- code pipeline_eager/ { on = 1 } on && /^```$/ { exit } on && !/^(<!--|```)/' \
            doc/lab/recipes.md
        cat <<'END'
int main(void) {
    enum { P = 8, M = 32 };
    for (int p = 1; p <= P; p++) {
        for (int m = 1; m <= M; m++) {
            PipelineLists l = pipeline_empty(p, m, 1);
            Error err;
            for (int s = 0; s < p; s++)
                l.counts[s] = pipeline_steps(p, m, 1, pipeline_eager(p, s), l.steps[s]);
            if (!pipeline_prove(&l, PIPELINE_BUFFERS, &err)) return puts(err.text), 1;
        }
    }
    return 0;
}
END
    } >"$dir/schedule.c"
    ${CC:-cc} -std=gnu11 -I. -o "$dir/schedule" "$dir/schedule.c" -lm 2>&1 && "$dir/schedule"
}
check "the schedule of doc/lab/recipes.md cannot hang" "$(schedule)"

finish
