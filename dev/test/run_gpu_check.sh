#!/usr/bin/env bash
# run_gpu_check.sh [BUILD]: rehearses `make gpu-check` on the stand-ins. Every stage writes its part
# of the report, also if one fails or runs into its time limit. The table of kernels has the work
# that the wrappers state. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d fp32/test_gpt fp32/dev/cuda/gelu bf16/train_gpt
# needs: bf16-profile/train_gpt
. "$(dirname "$0")/report.sh"
cpu_only 'make gpu-check itself runs there'
[ "${build##*/}" = cpu-fp32 ] || skip 'it rehearses with build/cpu-fp32'
name=test-$$
base=build/gpu-check/$name
trap 'rm -rf "$dir" $base.md $base-kernels.jsonl' EXIT
shown="$dir/out $base.md"
export KERNELS=gelu LIMITS='machine=600 checks=600 golden=600 d12=600 bench=600 ranks=600'
export REHEARSE=1 BUILD=0 NAME=$name OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

check_run() { timeout 550 "$@" dev/gpu_check.sh >"$dir/out" 2>&1; }
says() { grep -qE -- "$1" $base.md; }

# llm.c's program, as far as its flags go: it takes the step modulo -v, and reads -m batches of the
# tokens it gets.
mkdir "$dir/llmc"
cat >"$dir/llmc/train_gpt2cu" <<'END'
#!/usr/bin/env bash
while [ $# -gt 1 ]; do
    case $1 in -v) every=$2 ;; -m) batches=$2 ;; -x) steps=$2 ;; esac
    shift 2
done
echo "step $((steps % every))/$steps | loss 1 | batches of validation ${batches:-20}"
END
chmod +x "$dir/llmc/train_gpt2cu"
check_run env STAGES='machine build checks golden d12 d48 bench ranks' STEPS=3 LLMC="$dir/llmc"
report $? 'a rehearsal of all stages passes'
stages=$(sed -n 's/^## //p' $base.md | xargs)
[ "$stages" = 'machine build checks golden d12 d48 bench ranks Summary' ]
report $? "each has its part of the report: $stages"
says '^build/cpu-fp32/dev/cuda/gelu: [1-9][0-9]* passed, 0 failed'
report $? "checks: $(grep -m1 'gelu:' $base.md)"
[ "$(grep -c '^[1-9][0-9]* passed, 0 failed' $base.md)" = 2 ]
report $? 'golden: both precisions pass'
says '^small model, B 2, T 32, bf16, the median step: step .* tok/s'
report $? "d12: $(grep 'median step' $base.md)"
says '^step 3/3 . loss 1 . batches of validation 1$'
batches=$(grep 'batches of validation' $base.md)
report $? "d12: llm.c is called with a -v that its steps never reach: $batches"
[ "$(grep -c ': FAIL' $base.md)" = 0 ] && [ "$(grep -c 'losses differ by' $base.md)" = 6 ]
report $? 'ranks: six layouts of eight ranks have the losses of one'
[ -s $base-kernels.jsonl ]
report $? 'bench: its log is beside the report'

# 8 steps of 2 layers; a matrix product for each size, and one kernel of each name.
for want in 'gelu_forward_kernel 16' 'gelu_backward_kernel 16' 'adamw_kernel 8' \
    'loss_sum_kernel 8'; do
    calls=$(awk -v name="${want% *}" 'index($1, name) == 1 { print $2; exit }' $base.md)
    [ "$calls" = "${want#* }" ]
    report $? "table of kernels: ${want% *} is called ${calls:-0} times, ${want#* } expected"
done
# A layer has four products forward and eight backward, the head one and two; backward's input and
# weight products move other bytes.
products=$(awk '/^matrix product of/ { n += $6 } END { print n }' $base.md)
[ "$products" = $((8 * (2 * 12 + 3))) ]
report $? "table of kernels: $products matrix products, $((8 * (2 * 12 + 3))) expected"
awk '
    /^all  / { all = $3 }
    /^matrix product of|_kernel/ {
        for (i = 2; i < NF && $(i + 1) !~ /%$/; i++) continue
        if (i < NF) sum += $i
    }
    END { exit !(all > 0 && sum > 0.99 * all && sum < 1.01 * all) }' $base.md
report $? "table of kernels: the rows add up to all"

check_run env STAGES='golden machine' LIMITS='golden=1 machine=600'
status=$?
[ $status = 1 ] && says '^stopped after 1 s' && says '^date ' && says '\| machine \| passed'
report $? 'a stage that takes too long is stopped, and the next one runs'
STAGES='nonsense' dev/gpu_check.sh >"$dir/out" 2>&1
[ $? = 2 ] && grep -q 'there is no stage nonsense' "$dir/out"
report $? 'an unknown stage is refused'

# On a GPU the golden case starts two programs, and none of several ranks: their start takes the
# time.
mkdir "$dir/cuda-fp32"
for program in train_gpt train_gpt_3d; do
    printf '#!/bin/sh\necho %s >>"%s/started"\nexec "%s" "$@"\n' $program "$dir" \
        "$PWD/$build/$program" \
        >"$dir/cuda-fp32/$program"
    chmod +x "$dir/cuda-fp32/$program"
done
"$build/test_gpt" "$dir/cuda-fp32" golden >"$dir/out" 2>&1 &&
    [ "$(xargs <"$dir/started")" = 'train_gpt train_gpt' ]
report $? "golden: a GPU starts $(xargs <"$dir/started")"

# A pack is for another machine's processor. make is a stand-in here, which keeps its arguments.
mkdir "$dir/bin"
printf '#!/bin/sh\necho "$@" >>"%s/made"\n' "$dir" >"$dir/bin/make"
chmod +x "$dir/bin/make"
mkdir -p "$dir/pack/dev" && cp dev/gpu_check.sh "$dir/pack/dev/"
mkdir -p "$dir/pack/build/cuda-bf16" && touch "$dir/pack/build/cuda-bf16/train_gpt"
env -u REHEARSE PATH="$dir/bin:$PATH" "$dir/pack/dev/gpu_check.sh" --pack >"$dir/out" 2>&1
[ "$(grep -c 'NATIVE= ' "$dir/made")" = 3 ] && [ "$(wc -l <"$dir/made")" = 3 ] &&
    [ ! -e "$dir/pack/build/cuda-bf16/train_gpt" ]
report $? '--pack builds everything anew, without -march=native'
finish
