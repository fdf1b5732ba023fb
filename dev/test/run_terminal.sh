#!/usr/bin/env bash
# run_terminal.sh [BUILD]: the terminal as a user meets it: --help of every tool, the name that a misspelt word may
# mean, make help, and the sentences after a signal.
# needs: fp32/train_gpt_3d tools/plan tools/figures tools/simulate tools/study tools/scale tools/bubbles tools/schedule tools/timeline tools/profile tools/loss tools/byte_corpus
set -u
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
build=${1:-build/cpu-fp32}
case $build in
    *cuda*) skip terminal 'the words are the same' ;;
esac
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
make() { env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL make "$@"; }

for tool in plan figures simulate study scale bubbles schedule timeline profile loss byte_corpus; do
    here=$PWD
    (cd "$dir" && "$here/build/tools/$tool" --help >out 2>err)
    [ $? = 0 ] && grep -q "^usage: $tool" "$dir/out" && [ ! -s "$dir/err" ] && [ ! -e "$dir/--help" ]
    report $? "$tool --help says how it is used, and does nothing else"
done

says() { # says WHAT PATTERN COMMAND...: it fails, and its sentence has the pattern
    local what=$1 pattern=$2
    shift 2
    "$@" >"$dir/out" 2>&1
    [ $? != 0 ] && grep -q -- "$pattern" "$dir/out"
    report $? "$what: $(head -n 1 "$dir/out")"
}
says 'a misspelt flag' 'did you mean --layers' "$build/train_gpt_3d" --layer 4
says 'a misspelt flag' 'did you mean --tensor' "$build/train_gpt_3d" --tensr 2
says 'a misspelt model' 'did you mean gpt3-175b' build/tools/plan --model gpt3-175 --cluster dgx-a100 --gpus 8 --batch 8
says 'a misspelt cluster' 'did you mean dgx-a100' build/tools/plan --model gpt2 --cluster dgxa100 --gpus 8 --batch 8
says 'a misspelt schedule' 'did you mean zb-auto' build/tools/schedule --stages 4 --micros 8 zbauto
says 'a list of one step' 'stage 1 has 1 step, and' build/tools/schedule 'F0 B0; F0'
says 'a micro-batch too large' 'from 0 to 999999' build/tools/schedule 'F0 F999999999'
says 'a misspelt target' 'did you mean make train' make trian
says 'a misspelt target' 'did you mean make explorer' make exploror
for file in dev/clusters/*.json; do
    name=$(basename "$file" .json)
    grep -q "\"$name\"" dev/plan/plan.cu
    report $? "plan knows the cluster $name"
done

make help >"$dir/out" 2>&1
[ "$(awk 'NR == 2 || NR == 3 { print $1 }' "$dir/out" | xargs)" = 'train test' ]
report $? 'make help begins with train and test'
[ "$(awk 'NR > 1 { print $1 }' "$dir/out" | sort | uniq -d | wc -l)" = 0 ]
report $? 'and names each target once'

"$build/train_gpt_3d" -h >"$dir/out" 2>&1
report $? "-h is --help: $(head -n 1 "$dir/out")"

mkdir "$dir/run"
"$build/train_gpt_3d" --train-data dev/test/golden/train.bin --layers 1 --heads 1 --channels 16 --seq 16 --vocab 61 \
    --global-batch 4 --steps 1000000 --out "$dir/run" >"$dir/out" 2>&1 &
job=$!
for _ in $(seq 300); do
    grep -q '^step *2/' "$dir/out" && break
    sleep 0.1
done
kill -INT $job 2>/dev/null
wait $job
grep -q '^stopped by a signal after step [0-9]*: the same command with --resume auto goes on' "$dir/out"
report $? "a signal: $(grep '^stopped' "$dir/out")"
finish
