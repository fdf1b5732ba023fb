#!/usr/bin/env bash
# run_terminal.sh [BUILD]: the terminal as a user meets it. Checks --help and --version of every
# tool, the proposal for a misspelt name, make help, and the sentences after a signal.
# needs: fp32/train_gpt fp32/train_gpt_3d tools/plan tools/experts tools/figures tools/study
# needs: tools/scale tools/bubbles tools/schedule tools/timeline tools/profile tools/loss
# needs: tools/byte_corpus
. "$(dirname "$0")/report.sh"
cpu_only 'the words are the same'

here=$PWD tools=$(ls dev/data/*.c dev/plot/*.c dev/scale/*.c dev/plan/*.cu |
    sed 's|.*/||; s|[.].*||')
for tool in $tools; do
    mkdir "$dir/$tool"
    for flag in --help -h; do
        (cd "$dir/$tool" && "$here/build/tools/$tool" $flag >../out 2>../err)
        [ $? = 0 ] && grep -q "^usage: $tool" "$dir/out" && [ ! -s "$dir/err" ] &&
            rmdir "$dir/$tool"
        report $? "$tool $flag says how it is used, and does nothing else"
        mkdir -p "$dir/$tool"
    done
    (cd "$dir/$tool" && "$here/build/tools/$tool" --version >../out 2>&1) && rmdir "$dir/$tool" &&
        grep -qE "^$tool, built from commit [0-9a-z.-]+$" "$dir/out"
    report $? "$tool --version: $(cat "$dir/out")"
    ! "build/tools/$tool" --hepl >"$dir/out" 2>&1 &&
        grep -q 'no flag --hepl: did you mean --help?' "$dir/out"
    report $? "$tool --hepl: $(cat "$dir/out")"
done
for script in dev/*.sh dev/[a-su-z]*/*.sh dev/*.py dev/data/*.py; do
    case $script in
        dev/launch.sh | dev/torch_gpt2.py | dev/data/eval_rows.py) continue ;;  # parts of others
    esac
    run=bash
    [[ $script == *.py ]] && run=python3
    timeout 20 $run "$script" --help >"$dir/out" 2>"$dir/err"
    [ $? = 0 ] && grep -q "$(basename "$script")" "$dir/out" && [ ! -s "$dir/err" ]
    report $? "$script --help says how it is used"
done

says() { # says WHAT PATTERN COMMAND...: it fails, and its sentence has the pattern
    local what=$1 pattern=$2
    shift 2
    "$@" >"$dir/out" 2>&1
    [ $? != 0 ] && grep -q -- "$pattern" "$dir/out"
    report $? "$what: $(head -n 1 "$dir/out")"
}
says 'a misspelt flag of a trainer' "unknown flag '--layer': did you mean --layers?" \
    "$build/train_gpt_3d" --layer 4
says 'a flag of another trainer' '^error: --tensor is for train_gpt_tp and the trainers after it' \
    "$build/train_gpt" --tensor 2
says 'a misspelt flag of a tool' 'did you mean --width' build/tools/timeline --widht 3
says 'a misspelt flag of the planner' 'did you mean --cluster' build/tools/plan --model gpt2 \
    --clutser dgx-a100
says 'a misspelt schedule of the planner' 'did you mean zb-auto' build/tools/plan --model gpt2 \
    --cluster dgx-a100 --gpus 8 --batch 8 --schedule zbauto
says 'a misspelt model of a trainer' 'gpt3-175b|ptdp-1.7b' "$build/train_gpt_3d" --model gpt3 \
    --dry-run
says 'a misspelt model' 'did you mean gpt3-175b' build/tools/plan --model gpt3-175 \
    --cluster dgx-a100 --gpus 8 --batch 8
says 'a misspelt cluster' 'did you mean dgx-a100' build/tools/plan --model gpt2 --cluster dgxa100 \
    --gpus 8 --batch 8
says 'a misspelt schedule' 'did you mean zb-auto' build/tools/schedule --stages 4 --micros 8 zbauto
says 'a list of one step' 'stage 1 has 1 step, and' build/tools/schedule 'F0 B0; F0'
says 'a cluster that nobody could mean' \
    'no cluster .foo.: there are dgx-a100 dgx-h100 .*vtrain-a100' make plan CLUSTER=foo
says 'a misspelt target' \
    'there is no target .trian.: did you mean .make train.. .make help. lists' make trian
says 'a target that nobody could mean' 'there is no target .quux.: .make help. lists' make quux
says 'a program of another folder' 'PRECISION' make build/cpu-bf17/train_gpt_3d
# One list of models: the trainers' own, train_llama's among them; the planner and the explorer have
# all of them.
names=$({ "$build/train_gpt_3d" --help | sed -n '/--model NAME/,/--layers/p'
          sed -n '/define LLAMA_NAMES/,/[^\\]$/p' llmc/llama.h | grep -v '^//'; } |
          grep -oE '[a-z0-9.]+-[a-z0-9.-]+|gpt2|d[0-9]+')
missing=
for name in $names; do
    build/tools/plan --help | grep -qwF -- "$name" && grep -qF "\"$name\": [" doc/explorer.html ||
        missing+=" $name"
done
[ "$(wc -w <<<"$names")" = 33 ] && [ -z "$missing" ]
report $? "the planner and the explorer know the trainers' $(wc -w <<<"$names") models$missing"
"$build/train_gpt_3d" --model ptdp-1.7b --dry-run --data 1 >"$dir/out" 2>&1
grep -q '24 layers, 24 heads, 2304 channels' "$dir/out"
report $? "a trainer knows the planner's models: $(sed -n 2p "$dir/out")"
make lessons LESSON=foo >"$dir/out" 2>&1
lessons=$(sed -n "s/^no lesson 'foo': there are //p" "$dir/out")
wrong=
for lesson in $lessons; do dev/lessons.sh "$lesson" | grep -q '^==== ' || wrong+=" $lesson"; done
[ "$(wc -w <<<"$lessons")" = $((3 + $(ls dev/lessons/*.cu | wc -l))) ] && [ -z "$wrong" ]
report $? "a misspelt lesson: the names that LESSON= takes are $lessons$wrong"
make --no-print-directory -n -W train_gpt.cu DEVICE=cpu build/cpu-fp32/train_gpt V=1 2>&1 |
    grep -q '^[a-z+]* .*-o build/cpu-fp32/train_gpt'
report $? 'V=1 shows the commands'
make --no-print-directory -n -W train_gpt.cu DEVICE=cpu build/cpu-fp32/train_gpt 2>&1 |
    grep -q "^echo 'build/cpu-fp32/train_gpt';"
report $? 'a program that is built is one short line'

make help >"$dir/out" 2>&1
[ "$(awk 'NR == 2 || NR == 3 { print $1 }' "$dir/out" | xargs)" = 'train test' ]
report $? 'make help begins with train and test'
[ "$(awk 'NR > 1 { print $1 }' "$dir/out" | sort | uniq -d | wc -l)" = 0 ]
report $? 'and names each target once'

"$build/train_gpt_3d" --version >"$dir/out" 2>&1 &&
    grep -qE "train_gpt_3d, built from commit [0-9a-z.-]+$" "$dir/out"
report $? "--version: $(cat "$dir/out")"
"$build/train_gpt_3d" -h >"$dir/out" 2>&1
report $? "-h is --help: $(head -n 1 "$dir/out")"

mkdir "$dir/run"
"$build/train_gpt_3d" --train-data dev/test/golden/train.bin --layers 1 --heads 1 --channels 16 \
    --seq 16 --vocab 61 --global-batch 4 --steps 1000000 --out "$dir/run" >"$dir/out" 2>&1 &
job=$!
await grep -q '^step *2/' "$dir/out"
kill -INT $job 2>/dev/null
wait $job
grep -q '^stopped by a signal after step [0-9]*: the same command with --resume auto goes on' \
    "$dir/out"
report $? "a signal: $(grep '^stopped' "$dir/out")"
widest=$(grep '^step .* loss .* tok/s' "$dir/out" | wc -L)
[ "$widest" -gt 0 ] && [ "$widest" -le 100 ]
report $? "its lines of steps have at most 100 columns: $widest"
finish
