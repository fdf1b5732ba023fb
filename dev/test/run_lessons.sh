#!/usr/bin/env bash
# run_lessons.sh: bounds the sizes of the trainers, so that they stay lessons. It counts the tokens
# of each, and the tokens that it adds to its parent and removes from it. It checks the line where
# the mathematics begins. Later lessons insert into a layer and rewrite none of it. Lines are free,
# as long as each has one statement and is easy to read. `make lessons` shows the diffs. Ends with
# `N passed, N failed`.
. "$(dirname "$0")/report.sh"
export LC_ALL=C.UTF-8  # a line's length is in characters

at_most() {  # at_most VALUE BOUND NAME
    [ "$1" -le "$2" ]
    report $? "$3: $1, at most $2"
}

# ---- sizes ---------------------------------------------------------------------------------------

# tokens FILE...: names, numbers, strings and operators outside comments, one a line.
tokens() {
    cat "$@" | awk '
        {
            for (left = $0; left != ""; left = substr(left, RLENGTH + 1)) {
                if (inside) {  # a comment of several lines
                    at = index(left, "*/")
                    RLENGTH = at ? at + 1 : length(left)
                    inside = !at
                } else if (match(left, /^[ \t]+/)) {
                } else if (match(left, /^\/\/.*/)) {
                } else if (match(left, /^\/\*/)) {
                    inside = 1
                } else {
                    if (!match(left, /^"([^"\\]|\\.)*"/) &&
                        !match(left, /^\047([^\047\\]|\\.)*\047/) &&
                        !match(left, /^[A-Za-z_][A-Za-z0-9_]*/) &&
                        !match(left, /^[0-9][A-Za-z0-9_.]*/)) RLENGTH = 1  # an operator
                    print substr(left, 1, RLENGTH)
                }
            }
        }'
}

# reads FILE TOKENS: bounds for the tokens of a trainer, for its lines' widths and for how much
# stands on a line.
reads() {
    local count lines wide tenth
    count=$(tokens "$1" | wc -l)
    read -r lines tenth wide < <(awk 'NF { print length($0) }' "$1" | sort -n |
        awk '{ width[NR] = $1 } END { print NR, width[1 + int(0.9 * (NR - 1))], width[NR] }')
    at_most "$count" "$2" "tokens of $1"
    at_most $((10 * count)) $((105 * lines)) \
        "tenths of a token of $1, where its lines have 10.5 tokens on average"
    at_most "$wide" 100 "columns of the longest line of $1"
    at_most "$tenth" 92 "columns of nine tenths of the lines of $1"
}
reads train_gpt.cu 3150
reads train_gpt_tp.cu 4554
reads train_gpt_pp.cu 6208
reads train_gpt_3d.cu 7183
reads dev/lessons/train_data.cu 4154
reads dev/lessons/train_context.cu 6458
reads dev/lessons/train_moe.cu 5662
reads dev/lessons/train_fsdp.cu 5520
reads dev/lessons/train_llama.cu 9008
reads dev/lessons/train_muon.cu 5436
reads dev/lessons/train_zero_bubble.cu 7685
reads dev/lessons/train_v.cu 8181
reads dev/lessons/train_offload.cu 4255
reads dev/lessons/train_documents.cu 7671
reads dev/lessons/train_5d.cu 11624

lessons=(train_gpt*.cu dev/lessons/*.cu)
packed=$(sed 's|//.*||; s|"[^"]*"||g; s/for (.*) *//' "${lessons[@]}" |
    grep -cE ';.*[^ }]|, take\(')
[ "$packed" = 0 ]
report $? "no line of a trainer has two statements: $packed"

# edge PARENT CHILD ADDED REMOVED: bounds for the tokens of a diff.
edge() {
    local difference
    difference=$(diff <(tokens "$1") <(tokens "$2"))
    at_most "$(grep -c '^>' <<<"$difference")" "$3" "tokens that $2 adds to $1"
    at_most "$(grep -c '^<' <<<"$difference")" "$4" "tokens of $1 that $2 removes"
}
edge train_gpt.cu train_gpt_tp.cu 1471 67
edge train_gpt_tp.cu train_gpt_pp.cu 1688 34
edge train_gpt_pp.cu train_gpt_3d.cu 986 11
edge train_gpt_3d.cu dev/lessons/train_zero_bubble.cu 921 419
edge dev/lessons/train_zero_bubble.cu dev/lessons/train_v.cu 642 146
edge train_gpt.cu dev/lessons/train_data.cu 1015 11
edge dev/lessons/train_data.cu dev/lessons/train_context.cu 2382 78
edge dev/lessons/train_context.cu dev/lessons/train_documents.cu 1245 38
edge dev/lessons/train_data.cu dev/lessons/train_moe.cu 1714 206
edge dev/lessons/train_data.cu dev/lessons/train_fsdp.cu 1516 150
edge dev/lessons/train_data.cu dev/lessons/train_muon.cu 1387 105
edge train_gpt.cu dev/lessons/train_offload.cu 1155 50
edge train_gpt_3d.cu dev/lessons/train_llama.cu 2275 450
# Not in this diff: the ring and the all-to-alls, which lessons 7 and 8 show. They are in headers,
# llmc/trainer/context_ranks.cuh and expert_ranks.cuh.
edge dev/lessons/train_llama.cu dev/lessons/train_5d.cu 2956 340
for lesson in dev/lessons/*.cu; do
    parent=$(sed -n '2s,^// parent: ,,p' "$lesson")
    [ -f "$parent" ]
    report $? "$lesson names its parent in line 2: $parent"
done
# `make test` compiles all of them as one program, where one may use what another one includes.
if [ "$device" = cpu ]; then
    mapfile -t programs < <(printf 'build/alone/%s\n' train_gpt*.cu dev/lessons/*.cu |
        sed 's,dev/lessons/,,; s,\.cu$,,')
    make -k -j2 DEVICE=cpu PRECISION=fp32 DIR=build/alone OPTIMIZE=-fsyntax-only \
        "${programs[@]}" >"$dir/out" 2>&1 && ! grep -qE '(warning|error):' "$dir/out"
    report $? "${#programs[@]} trainers compile, each by itself, without a warning"
    rm -rf build/alone
fi
shown=$(dev/lessons.sh | grep -c '^====')
[ "$shown" = $((3 + $(find dev/lessons -name '*.cu' | wc -l))) ]
report $? "make lessons prints every edge of the tree: $shown"
begin=$(sed '/^static void layer_forward(/,$d' train_gpt.cu >"$dir/before" && tokens "$dir/before" |
    wc -l)
grep -q '^static void layer_forward(' train_gpt.cu && [ "$begin" -gt 0 ]
report $? 'train_gpt.cu has a layer_forward'
at_most "$begin" 717 'tokens of train_gpt.cu before the mathematics begins (layer_forward)'

# Patches and generated files keep their lines.
mapfile -t sources < <(find . -regex '\./\(build\|puzzles\|site\|\.git\)' -prune -o -type f \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \
    -o -name '*.sh' -o -name '*.py' -o -name '*.js' -o -name '*.css' -o -name '*.sbatch' \
    -o -name Makefile -o -path './dev/explorer/*.html' \) -print)
long=$(grep -nE '^.{101,}' "${sources[@]}" | cut -d: -f1,2)
[ ${#sources[@]} -gt 250 ] && [ -z "$long" ]
report $? "no line of ${#sources[@]} sources has more than 100 columns${long:+: ${long//$'\n'/, }}"
# behind TRAINER: the headers of llmc/ that it includes on a GPU build. The compiler only looks for
# them (-MG: headers of CUDA and NCCL may be missing).
behind() {
    ${CXX:-g++} -x c++ -std=c++17 -I. -D__CUDACC__ -DPRECISION_FP32 -MM -MG "$1" |
        tr ' \\' '\n\n' | grep '^llmc/' | grep -vE '^llmc/(cpu|mpi|sim)/' | sort -u
}
mapfile -t first < <(behind train_gpt.cu)
[ ${#first[@]} -gt 20 ]
report $? 'the headers that train_gpt.cu includes are known'
at_most "$(tokens "${first[@]}" | wc -l)" 89374 \
    'tokens of headers behind train_gpt.cu on a GPU build'
# A header of a lesson behind the four has a line in its head that names the lesson: `// lesson:
# moe`.
mapfile -t library < <(grep -rL '^// lesson: ' llmc)
at_most "$(tokens "${library[@]}" | wc -l)" 158514 \
    'tokens of llmc/ without the headers of lessons behind the four'
foreign=$(behind train_gpt_3d.cu | xargs grep -l '^// lesson: ')
[ -z "$foreign" ]
report $? "train_gpt_3d.cu includes no such header${foreign:+, but ${foreign//$'\n'/, }}"
twins=$(printf '%s\n' "${library[@]##*/}" | sed 's/\..*//' | sort | uniq -d | xargs)
[ -z "$twins" ]
report $? "no two headers of llmc/ have one name${twins:+, but $twins}"

# ---- a layer -------------------------------------------------------------------------------------

# body FILE FUNCTION: its statements, one a line, without comments and without the breaks that the
# line width asked for.
body() {
    sed -n "/^static void $2(/,/^}/p" "$1" | sed 's|//.*||' | tr '\n' ' ' | tr -s ' ' |
        sed 's/\([;{}]\) */\1\n/g'
}

# Renames tensor parallelism's arguments as in train_gpt.cu: f's output is the layernorm's, its
# gradient is dnorm, and g's output is proj.
handed_over='s/, ln\([12]\),/, a->ln\1.out,/g; s/, dln[12],/, m->dnorm,/g; s/, proj,/, m->proj,/g'
operators='\b[fg]_(forward|backward|gather_again)[a-z_]*\('

for function in layer_forward layer_backward; do
    difference=
    # A statement that calls f or g is inserted; the others must be those of train_gpt.cu, in their
    # order.
    [ "$(body train_gpt.cu $function | wc -l)" -gt 10 ] &&
        difference=$(diff <(body train_gpt.cu $function) <(body train_gpt_tp.cu $function |
            grep -vE "$operators" | sed "$handed_over"))
    report $? "train_gpt_tp.cu: f and g are inserted into $function, which changes only by them"
    [ -z "$difference" ] || sed 's/^/  | /' <<<"$difference"
    for trainer in train_gpt_pp.cu train_gpt_3d.cu; do
        [ "$(body $trainer $function)" = "$(body train_gpt_tp.cu $function)" ]
        report $? "$trainer: $function is that of train_gpt_tp.cu"
    done
done
[ "$(body dev/lessons/train_zero_bubble.cu layer_forward)" = \
    "$(body train_gpt_3d.cu layer_forward)" ]
report $? 'train_zero_bubble.cu: layer_forward is that of train_gpt_3d.cu'
for function in layer_forward layer_backward layer_backward_weight; do
    [ "$(body dev/lessons/train_v.cu $function)" = \
        "$(body dev/lessons/train_zero_bubble.cu $function)" ]
    report $? "train_v.cu: $function is that of train_zero_bubble.cu"
done
for function in layer_forward layer_backward; do
    [ "$(body dev/lessons/train_data.cu $function)" = "$(body train_gpt.cu $function)" ]
    report $? "train_data.cu: $function is that of train_gpt.cu"
    [ "$(body dev/lessons/train_fsdp.cu $function)" = "$(body train_gpt.cu $function)" ]
    report $? "train_fsdp.cu: $function is that of train_gpt.cu"
    [ "$(body dev/lessons/train_muon.cu $function)" = "$(body train_gpt.cu $function)" ]
    report $? "train_muon.cu: $function is that of train_gpt.cu"
done
for function in own_buckets reduce_bucket gather_weights use_bucket; do
    [ "$(body dev/lessons/train_data.cu $function)" = \
        "$(body train_gpt_3d.cu $function | grep -v reduce_layernorms)" ]
    report $? "train_data.cu: $function is that of train_gpt_3d.cu"
done
# Two halves of a layer: f before each and g behind it; in backward g, f's output again, f in two
# parts.
for row in 'layer_forward 4' 'layer_backward 8'; do
    read -r function want <<<"$row"
    inserted=$(body train_gpt_tp.cu "$function" | grep -cE "$operators")
    [ "$inserted" = "$want" ]
    report $? "train_gpt_tp.cu: $inserted calls of f and g in $function, $want expected"
done

finish
