#!/usr/bin/env bash
# run_lessons.sh: the trainers are lessons, and these numbers keep them so: the length of each, the lines that it adds to
# its parent and removes from it, where the mathematics begins, and that later lessons insert into a layer and rewrite
# none of it. `make lessons` shows these diffs. Ends with `N passed, N failed`.
. "$(dirname "$0")/report.sh"
export LC_ALL=C.UTF-8  # a line's length is in characters

at_most() {  # at_most VALUE BOUND NAME
    [ "$1" -le "$2" ]
    report $? "$3: $1, at most $2"
}

# ---- lengths --------------------------------------------------------------------------------------------------------

lines() { at_most "$(wc -l <"$1")" "$2" "lines of $1"; }
# edge PARENT CHILD ADDED REMOVED: bounds for the lines of a diff.
edge() {
    local difference
    difference=$(diff "$1" "$2")
    at_most "$(grep -c '^>' <<<"$difference")" "$3" "lines that $2 adds to $1"
    at_most "$(grep -c '^<' <<<"$difference")" "$4" "lines of $1 that $2 removes"
}
lines train_gpt.cu 235
lines train_gpt_tp.cu 400
lines train_gpt_pp.cu 500
lines train_gpt_3d.cu 580
edge train_gpt.cu train_gpt_tp.cu 170 25
edge train_gpt_tp.cu train_gpt_pp.cu 170 35
edge train_gpt_pp.cu train_gpt_3d.cu 90 9
edge train_gpt_3d.cu dev/lessons/train_zero_bubble.cu 120 60
edge train_gpt.cu dev/lessons/train_data.cu 110 15
edge dev/lessons/train_data.cu dev/lessons/train_context.cu 160 15
edge dev/lessons/train_data.cu dev/lessons/train_moe.cu 170 33
edge dev/lessons/train_data.cu dev/lessons/train_fsdp.cu 130 15
edge train_gpt_3d.cu dev/lessons/train_llama.cu 220 90
for lesson in dev/lessons/*.cu; do
    parent=$(sed -n '2s,^// parent: ,,p' "$lesson")
    [ -f "$parent" ]
    report $? "$lesson names its parent in line 2: $parent"
done
shown=$(dev/lessons.sh | grep -c '^====')
[ "$shown" = $((3 + $(find dev/lessons -name '*.cu' | wc -l))) ]
report $? "make lessons prints every edge of the tree: $shown"
begin=$(grep -n -m1 '^static void layer_forward(' train_gpt.cu | cut -d: -f1)
at_most "${begin:-9999}" 120 'line of train_gpt.cu at which the mathematics begins (layer_forward)'

mapfile -t sources < <(find . -path ./build -prune -o -type f -regex '.*\.\(c\|h\|cu\|cuh\)' -print)
long=$(grep -nE '^.{121,}' "${sources[@]}" | cut -d: -f1,2)
[ ${#sources[@]} -gt 50 ] && [ -z "$long" ]
report $? "no line of ${#sources[@]} C and CUDA files has more than 120 columns${long:+, but ${long//$'\n'/, }}"
# The headers behind lesson 1 on a GPU build, and the whole library.
behind=$(${CXX:-g++} -x c++ -std=c++17 -fopenmp -Illmc/cpu -Illmc/mpi -I. -DPRECISION_FP32 -MM train_gpt.cu 2>/dev/null |
    tr ' \\' '\n\n' | grep '^llmc/' | grep -vE '^llmc/(cpu|mpi|sim)/' | sort -u)
[ "$(wc -w <<<"$behind")" -gt 20 ]
report $? 'the headers that train_gpt.cu includes are known'
# shellcheck disable=SC2086
at_most "$(cat $behind | wc -l)" 7949 'lines of headers behind train_gpt.cu on a GPU build'
# A header that a lesson behind the four brings says so in its second line: `// lesson: moe`.
mapfile -t library < <(find llmc -type f -exec sh -c 'sed -n 2p "$1" | grep -q "^// lesson: " || echo "$1"' _ {} \;)
at_most "$(cat "${library[@]}" | wc -l)" 13894 'lines of llmc/ without the headers of lessons behind the four'
twins=$(printf '%s\n' "${library[@]##*/}" | sed 's/\..*//' | sort | uniq -d | xargs)
[ -z "$twins" ]
report $? "no two headers of llmc/ have one name${twins:+, but $twins}"

# ---- a layer --------------------------------------------------------------------------------------------------------

# body FILE FUNCTION: its statements, one a line, without comments and without the breaks that the line width asked for.
body() {
    sed -n "/^static void $2(/,/^}/p" "$1" | sed 's|//.*||' | tr '\n' ' ' | tr -s ' ' | sed 's/\([;{}]\) */\1\n/g'
}

# Renames tensor parallelism's arguments as in train_gpt.cu: f's output is the layernorm's.
handed_over='s/, ln\([12]\),/, a->ln\1.out,/g'
operators='\b[fg]_(forward|backward|again)[a-z_]*\('

for function in layer_forward layer_backward; do
    difference=
    # A statement that calls f or g is inserted; the others must be those of train_gpt.cu, in their order.
    [ "$(body train_gpt.cu $function | wc -l)" -gt 10 ] &&
        difference=$(diff <(body train_gpt.cu $function) \
                          <(body train_gpt_tp.cu $function | grep -vE "$operators" | sed "$handed_over"))
    report $? "train_gpt_tp.cu: f and g are inserted into $function, and nothing else changes but what they hand over"
    [ -z "$difference" ] || sed 's/^/  | /' <<<"$difference"
    for trainer in train_gpt_pp.cu train_gpt_3d.cu; do
        [ "$(body $trainer $function)" = "$(body train_gpt_tp.cu $function)" ]
        report $? "$trainer: $function is that of train_gpt_tp.cu"
    done
done
[ "$(body dev/lessons/train_zero_bubble.cu layer_forward)" = "$(body train_gpt_3d.cu layer_forward)" ]
report $? 'train_zero_bubble.cu: layer_forward is that of train_gpt_3d.cu'
for function in layer_forward layer_backward; do
    [ "$(body dev/lessons/train_data.cu $function)" = "$(body train_gpt.cu $function)" ]
    report $? "train_data.cu: $function is that of train_gpt.cu"
    [ "$(body dev/lessons/train_fsdp.cu $function)" = "$(body train_gpt.cu $function)" ]
    report $? "train_fsdp.cu: $function is that of train_gpt.cu"
done
for function in own_buckets reduce_bucket gather_weights use_bucket; do
    [ "$(body dev/lessons/train_data.cu $function)" = "$(body train_gpt_3d.cu $function | grep -v reduce_layernorms)" ]
    report $? "train_data.cu: $function is that of train_gpt_3d.cu"
done
# Two halves of a layer: f before each and g behind it; in backward g, f's output again, f in two parts.
for row in 'layer_forward 4' 'layer_backward 8'; do
    read -r function want <<<"$row"
    inserted=$(body train_gpt_tp.cu "$function" | grep -cE "$operators")
    [ "$inserted" = "$want" ]
    report $? "train_gpt_tp.cu: $inserted calls of f and g in $function, $want expected"
done

finish
