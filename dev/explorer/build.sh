#!/usr/bin/env bash
# build.sh [OUT]: makes doc/explorer.html, or OUT: one page with its style, its script and the
# trainers' C compiled to WebAssembly. Needs clang with the target wasm32, and wasm-ld. The same
# version of clang makes the same bytes; which one made the page stands in its last line.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
out=${1:-doc/explorer.html}
clang=${CLANG:-clang} linker=${WASM_LD:-wasm-ld}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# Standard headers by their names: of the C library, CUDA, NCCL and MPI.
mkdir -p "$dir/include/nvtx3"
for name in ctype errno fcntl limits math pthread sched signal stdarg stdbool stddef stdint stdio \
    stdlib string time \
            unistd; do
    echo '#include "dev/explorer/libc.h"' >"$dir/include/$name.h"
done
for name in cuda_profiler_api cuda_runtime mpi nccl nvtx3/nvToolsExt; do
    echo '#include "dev/explorer/device.h"' >"$dir/include/$name.h"
done
echo '#include "dev/explorer/device.h"' >"$dir/include/type_traits"
cp llmc/cpu/cuda_bf16.h "$dir/include/"

# Formats are not checked: %zu is right here for a size_t of 64 bits, which the compiler thinks has
# 32. Kernels are not launched, so their parameters are unused.
flags=(--target=wasm32 -nostdinc -ffreestanding -fno-builtin -mbulk-memory -fvisibility=hidden
       -ffunction-sections -fdata-sections -Wall -Wextra -Wno-format -Wno-unused-function
       -Wno-unused-variable -Wno-unused-parameter -I"$dir/include" -I.)
compile() { "$clang" "${flags[@]}" -c "$@"; }
compile -std=gnu11 -Os -o "$dir/libc.o" dev/explorer/libc.c
compile -std=gnu11 -O3 -o "$dir/schedule.o" dev/explorer/schedule.c
compile -std=gnu11 -Os -o "$dir/context.o" dev/explorer/context.c
for precision in fp32 bf16; do
    renamed=()
    for name in run rank group place buffers; do
        renamed+=("-Dlayout_$name=layout_${name}_$precision")
    done
    compile -x c++ -std=c++17 -Oz -fno-exceptions -fno-rtti -fno-threadsafe-statics -Idev/explorer \
        "${renamed[@]}" \
        "-DPRECISION_${precision^^}" -o "$dir/layout_$precision.o" dev/explorer/layout.cu
done
# Fewer functions are inlined: the page has 11 KB less, and a search is as fast as with -O2.
compile -x c++ -std=c++17 -Os -mllvm -inlinehint-threshold=40 -fno-exceptions -fno-rtti \
    -fno-threadsafe-statics -Idev/explorer -DPRECISION_BF16 -o "$dir/plan.o" dev/explorer/plan.cu
exports=()
for name in stderr_text schedule_text command_text schedule_run schedule_result schedule_list \
    compare_run ring_run context_run \
            layout_{run,rank,group,place,buffers}_{fp32,bf16} \
                plan_{text,cluster,time,beside,search,rows,flags}; do
    exports+=("--export=$name")
done
# Functions that the page provides: math, and a way to end.
printf '%s\n' pow cos exp log log2 fmod exit _exit page_seconds tell_progress >"$dir/allowed"
"$linker" --no-entry --gc-sections --strip-all -z stack-size=262144 \
    --allow-undefined-file="$dir/allowed" "${exports[@]}" -o "$dir/explorer.wasm" "$dir"/*.o

gzip -9n <"$dir/explorer.wasm" | base64 -w 0 >"$dir/wasm"  # the browser unpacks it

# Tables from their one source: the models of the trainers' --model, clusters, and lines of
# functions that the page points to. Models of train_llama and train_5d get at most 8192 positions.
# models NAMES < rows of layers, heads, channels, T, vocabulary: leaves out names that have no
# layers
models() {
    paste -d ' ' <(tr '|' '\n' <<<"$1") - | awk \
        '$2 { printf "    \"%s\": [%s, %s, %s, %s, %s],\n", $1, $2, $3, $4, $5, $6 }'
}
names() { sed -n "/define $1/,/[^\\\\]\$/p" "$2" | grep -oE '"[^"]+"' | tr -d '"\n' |
    sed 's/^|//'; }
{
    echo 'const MODELS = {  // layers, heads, channels, T, vocabulary'
    known=$(names MODEL_NAMES llmc/host/options_table.h)
    sizes=$(sed -n '/ MODEL_PRESETS\[/,/};/p' llmc/host/options.h |
            grep -oE '\{([0-9]+, ){6}NULL' | tr -d '{,' |
            awk '{ print $1, $3, $2, $6, $4 }')
    { head -n 4 <<<"$sizes"; echo "$sizes"; } | models "$known"
    echo '};'
    # llamas FILE TABLE NAMES: the models of a table, which have these names.
    llamas() {
        sed -n "/ $2\\[/,/};/p" "$1" | grep -oE '\{[A-Z0-9]+, ([0-9]+, ){7}' | tr -d '{,' |
            awk '{ print $2, $4, $3, $8 < 8192 ? $8 : 8192, $7 }' | models "$(names "$3" "$1")"
    }
    echo 'const LLAMAS = {'
    llamas llmc/llama.h LLAMA_SIZES LLAMA_NAMES
    echo '};'
    echo 'const MIXTURES = {'
    llamas llmc/model_5d.h MOE_SIZES NAMES_5D
    echo '};'
    echo 'Object.assign(LLAMAS, MIXTURES);'
    echo 'Object.assign(MODELS, LLAMAS);'
    # Most clusters have the same constants: their names once, then a row for each cluster.
    for file in dev/clusters/*.json; do
        ! grep -q '"ethernet"' "$file" || continue  # the panel has nodes of one kind
        echo "cluster $(basename "$file" .json)"
        sed -nE 's/^ *"([a-z0-9_]*)": \{"value": ([^,]*), .*/\1 \2/p' "$file"
    done | awk '
        $1 == "cluster" { clusters[++rows] = $2; next }
        !($1 in known) { known[$1]; names[++columns] = $1 }
        { value[rows, $1] = $2 }
        END {
            printf "const CONSTANTS = \""
            for (k = 1; k <= columns; k++) printf "%s%s", (k > 1 ? " " : ""), names[k]
            print "\".split(\" \");\nconst CLUSTERS = {"
            for (i = 1; i <= rows; i++) {
                printf "    \"%s\": [", clusters[i]
                for (k = 1; k <= columns; k++) printf "%s,", value[i, names[k]]
                print "],"
            }
            print "};"
        }'
    echo 'const LINES = {'
    pointed='run_batch|link_receive|link_send|forward|backward|tensor_sum|f_backward_begin'
    pointed+='|own_buckets|layout|layout_acts'
    for file in train_gpt_tp.cu train_gpt_pp.cu train_gpt_3d.cu dev/lessons/train_zero_bubble.cu \
        dev/lessons/train_{llama,5d}.cu; do
        echo "    \"$file\": {"
        grep -noE "^static [a-zA-Z *]*\b($pointed)\(" "$file" |
            sed -E 's/^([0-9]+):.* \*?([a-z_]+)\($/        \2: \1,/'
        echo '    },'
    done
    echo '};'
} >"$dir/tables"
awk -v dir="$dir" '
    function insert(file,   line) {  # indentation and comments stay in the sources
        while ((getline line < file) > 0) {
            sub(/^ +/, "", line)
            if (line !~ /^(\/\/|$)/) print line
        }
    }
    /^@@(page|worker)/ { insert("dev/explorer/" substr($0, 3)); next }
    /^@@tables/ { insert(dir "/tables"); next }
    /@@wasm/ { getline line < (dir "/wasm"); i = index($0, "@@wasm")
               print substr($0, 1, i - 1) line substr($0, i + 6); next }
    { print }' dev/explorer/page.html >"$dir/page"
"$clang" --version | sed -n '1s/.*version \([0-9.]*\).*/<!-- clang \1 -->/p' >>"$dir/page"
mv "$dir/page" "$out"
echo "$out: $(wc -c <"$out") bytes, of which WebAssembly $(wc -c <"$dir/explorer.wasm")"
