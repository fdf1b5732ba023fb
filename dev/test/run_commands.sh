#!/usr/bin/env bash
# run_commands.sh [BUILD]: runs every block of commands on README.md and the pages of doc/ as it
# is printed, in a copy of the repository. Another test may run a block instead, or the table
# below has the reason why none does. A block that is in no table fails, and so does a row without
# a block.
# needs: fp32/train_gpt fp32/train_gpt_pp fp32/train_gpt_3d fp32/train_zero_bubble
# needs: bf16/train_gpt_3d bf16/train_data
# needs: tools/plan tools/schedule tools/timeline tools/byte_corpus tools/scale
. "$(dirname "$0")/report.sh"
cpu_only 'the commands are those of the stand-ins'
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
shown="$dir/out"

# The columns: page | how its block begins | what happens to it. The last is one of these:
#   runs           This test runs it, as printed.
#   runs s/A/B/    This test runs it with this change: fewer steps, a smaller model.
#   FILE           That test or script runs it, or the same command on less.
#   not: REASON    No test runs it.
# The 64 processes of virtual_time.md are 4: they would take the tests' cores.
smaller='s/--ranks 3072/--ranks 192/; s/--layers 128/--layers 8/; s/--pipeline 64/--pipeline 4/'
smaller+='; s/batch 3072/batch 48/'
three="s/zb-h1.txt/& --steps 1 --layers 3 --seq 32/"
cat >"$dir/table" <<END
README.md | make train # | dev/test/run_train.sh
README.md | make train LAYOUT | dev/test/run_train.sh
README.md | mpirun --oversubscribe -n 8 | runs s/--global-batch 16/& --steps 2/
doc/course/puzzles.md | make puzzle | dev/test/run_puzzles.sh
doc/course/puzzles.md | make detective | dev/test/run_detectives.sh
doc/course/11-muon.md | awk 'BEGIN | runs
doc/course/12-v.md | build/tools/schedule --stages 4 | runs
doc/lab/attention.md | make kernels | not: minutes; make test runs each of these programs
doc/lab/bugs.md | make test ONLY=test_gpt | not: it is a part of make test itself
doc/lab/checkpoints.md | train_gpt_3d ... | not: a sketch, its flags are left out
doc/lab/choosing.md | make plan MODEL=gpt3 | runs
doc/lab/cpu_speed.md | PEER=python3 make bench | not: minutes; run_bench.sh runs make bench
doc/lab/cpu_speed.md | OMP_NUM_THREADS=1 perf | not: needs perf and its rights
doc/lab/data.md | make corpus | runs 1q
doc/lab/evaluation.md | python3 dev/data/prepare.py windows | runs
doc/lab/evaluation.md | hf download | not: needs the network
doc/lab/explorer.md | make explorer | not: needs clang for wasm32; run_explorer.sh builds it
doc/lab/fine_tuning.md | hf download | not: needs the network
doc/lab/fine_tuning.md | make DEVICE=cpu build/cpu-fp32/train_llama | dev/test/run_fine_tuning.sh
doc/lab/gpus.md | make DEVICE=cuda | not: needs GPUs
doc/lab/gpus.md | make sass | not: needs nvcc and minutes
doc/lab/gpus.md | python3 dev/data/prepare.py fineweb | not: needs the network, GPUs and days
doc/lab/lessons-clock.md | build/cpu-bf16/train_data | runs
doc/lab/recipes.md | make test | not: it is a part of make test itself
doc/lab/recipes.md | F="--train-data | runs
doc/lab/stand_ins.md | CPU_STREAM_ORDER | runs
doc/lab/testing.md | make test | not: it is make test itself
doc/lab/training.md | make reproduce | not: hours
doc/lab/two_rules.md | make test ONLY=test_grid | not: it is a part of make test itself
doc/lab/unlike_nodes.md | make plan | runs
doc/lab/virtual_time.md | build/cpu-bf16/train_gpt_3d | runs s/dgx-a100.json/& --steps 2/; $smaller
doc/lab/zero_bubble.md | make schedule | runs
doc/lab/zero_bubble.md | mpirun --oversubscribe -n 3 | runs $three
END

# cut_blocks FOLDER PAGE...: writes a file for each block of commands. A block is fenced, or
# indented behind an empty line, and has a command in it. Leaves out outputs, which stand behind
# `<!-- table`. The first line of a file is `page|name`: the name behind `<!-- run`.
cut_blocks() {
    local folder=$1
    shift
    mkdir "$folder"
    awk -v folder="$folder" '
        BEGIN {
            COMMAND = "^ *((make|mpirun|python3|hf|export|git|sed|curl|sudo|apt-get|for|cd) "
            COMMAND = COMMAND "|train_gpt.* [.][.][.]"
            COMMAND = COMMAND "|build/[a-z]|dev/[a-z_/]*[.](sh|py)|[.]/|[A-Za-z_]+=)"
        }
        function flush() {
            if (text ~ /./ && has && kind != "table") {
                file = sprintf("%s/%03d", folder, ++count)
                print FILENAME "|" (kind == "run" ? name : "") "\n" text >file
                close(file)
            }
            text = ""
            has = 0
        }
        function add(line) {
            text = text (text == "" ? "" : "\n") line
            has = has || line ~ COMMAND
        }
        FNR == 1 { fence = 0; last = kind = "" }
        /^<!-- / { kind = $2; name = $3 }
        /^ *```/ {
            fence = !fence
            if (!fence) { flush(); kind = "" }
            last = $0
            next
        }
        fence { add($0) }
        !fence && /^    / && (text != "" || (last == "" && /^    [^ ]/)) { add(substr($0, 5)) }
        !fence && !/^    / { flush() }
        { last = $0 }' "$@"
}

# The row of a block. Nothing if there is none.
row_of() {  # row_of PAGE FIRST-LINE
    local there begins what
    while IFS='|' read -r there begins what; do
        begins=$(trim <<<"$begins")
        [ "$(trim <<<"$there")" = "$1" ] && [[ $2 == "$begins"* ]] || continue
        printf '%s | %s\n' "$1" "$begins" >>"$dir/used"
        trim <<<"$what"
        return
    done <"$dir/table"
}
trim() { sed 's/^ *//; s/ *$//'; }

# The copy, with the programs and nothing of an earlier run. Times are kept: make builds nothing.
tree=$dir/tree
mkdir -p "$tree/build"
tar c --exclude=./build --exclude=./.git --exclude=./site . | tar x -C "$tree"
for there in "$build" "${build/fp32/bf16}" build/tools build/probe-*.mk; do
    ln -s "$(realpath "$there")" "$tree/build/${there##*/}"
done
mpirun --version 2>/dev/null | grep -q 'Open MPI' && open_mpi=1 || open_mpi=
runs() {  # runs BLOCK CHANGE
    sed 1d "$1" | sed "$2" >"$dir/run.sh"
    [ -n "$open_mpi" ] || sed -i "s|mpirun --oversubscribe|$launch|" "$dir/run.sh"
    (cd "$tree" && timeout 200 bash -eo pipefail "$dir/run.sh") >"$dir/out" 2>&1 </dev/null
}

# Pages use the repository's own text, and evaluation.md what `make train` leaves.
(cd "$tree" && make --no-print-directory DEVICE=cpu corpus &&
    build/cpu-fp32/train_gpt --train-data build/corpus/train.bin --layers 1 --heads 2 \
        --channels 32 --seq 64 --micro-batch 4 --steps 1 --val-every 0 --out build/out &&
    mv build/out/step-00000001 build/out/step-00000500) >"$dir/out" 2>&1
report $? 'a corpus and a checkpoint for the commands'

cut_blocks "$dir/blocks" README.md doc/course/*.md doc/lab/*.md
ran=0
for block in "$dir"/blocks/*; do
    IFS='|' read -r page name <"$block"
    first=$(sed -n 2p "$block" | tr -s ' ')
    if [ -n "$name" ]; then  # what these print is compared, or `make break` runs them
        grep -qw "$name" dev/plot/tables.sh dev/test/run_experiments.sh doc/experiments/list.txt
        report $? "$page: $name is run by tables.sh, run_experiments.sh or make break"
        continue
    fi
    how=$(row_of "$page" "$first")
    case $how in
        '') false ;;
        runs*) runs "$block" "${how#runs}" && ran=$((ran + 1)) ;;
        not:*) true ;;
        *) [ -s "$how" ] ;;
    esac
    report $? "$page: $first: ${how:-is in no row of the table of this test}"
done
unused=$(cut -d '|' -f 1,2 "$dir/table" | sed 's/ *$//' | sort | comm -23 - <(sort -u "$dir/used"))
[ -z "$unused" ]
report $? "each row of the table has its block $unused"
[ $ran -ge 11 ]
report $? "$ran blocks were run here"

# A new block is seen, whether it is fenced or indented, and no row passes it over.
cat >"$dir/page.md" <<'END'
```
# says nothing
make nothing
```

    python3 nothing.py \
        --about nothing

```
words
```
END
cut_blocks "$dir/new" "$dir/page.md"
[ "$(cat "$dir"/new/* | grep -c nothing)" = 4 ] && [ "$(ls "$dir/new" | wc -l)" = 2 ] &&
    [ -z "$(row_of "$dir/page.md" 'make nothing')" ]
report $? 'a new block of commands needs a row'
finish
