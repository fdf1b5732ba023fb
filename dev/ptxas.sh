#!/usr/bin/env bash
# ptxas.sh [NVCC]: compiles every kernel of llmc/ in both precisions, as the trainers ship them, and prints what the
# assembler says of each: registers, static shared memory, stack and spills. Fails if a kernel spills. No GPU is
# needed. ARCHITECTURES='90 80' names what is compiled for.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

nvcc=${1:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "ptxas.sh needs nvcc in PATH, or its path as argument"; exit 1; }
architectures=${ARCHITECTURES:-90 80}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

headers=$(ls llmc/kernels/*.cuh)
dev/kernels.sh >"$folder/kernels.cu"

for architecture in $architectures; do
    for precision in fp32 bf16; do
        "$nvcc" -std=c++17 -O3 -I. "-DPRECISION_${precision^^}" -arch="sm_$architecture" -diag-suppress 177 -cubin \
            -Xptxas -v -o "$folder/kernels.cubin" "$folder/kernels.cu" 2>"$folder/$architecture-$precision" || {
            cat "$folder/$architecture-$precision"
            exit 1
        }
    done
done

# kernel registers shared stack spilled, a line each; a mangled name is _Z, its length, the name, and perhaps
# template arguments.
table() {
    awk -v architecture="$1" -v precision="$2" '
        /Compiling entry function/ {
            split($0, part, "\047"); mangled = substr(part[2], 3)
            length_ = mangled + 0; sub(/^[0-9]+/, "", mangled)
            name = substr(mangled, 1, length_); rest = substr(mangled, length_ + 1); arguments = ""
            if (rest ~ /^I/) {
                if (match(rest, /Ev/)) rest = substr(rest, 1, RSTART - 1)  # from here on: what it returns and takes
                while (match(rest, /L[a-z][0-9]+E/)) {
                    arguments = arguments (arguments == "" ? "" : ", ") substr(rest, RSTART + 2, RLENGTH - 3)
                    rest = substr(rest, RSTART + RLENGTH)
                }
                name = name "<" (arguments == "" ? "..." : arguments) ">"
            }
        }
        /bytes stack frame/ { stack = $1; spill = $5 + $9 }
        /Used [0-9]+ registers/ {
            registers = $0; sub(/.*Used /, "", registers); sub(/ .*/, "", registers)
            shared = 0
            if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
            printf "sm_%s %s %-46s %9d %7d %6d %8d\n", architecture, precision, name, registers, shared, stack, spill
        }' "$folder/$1-$2" | sort
}

printf '%-5s %-4s %-46s %9s %7s %6s %8s\n' arch type kernel registers shared stack spilled
for architecture in $architectures; do
    for precision in fp32 bf16; do table "$architecture" "$precision"; done
done | tee "$folder/table"

# A kernel that no function launches would go unseen.
failed=0
# shellcheck disable=SC2086
kernels=$(cat $headers | tr '\n' ' ' | grep -oE '__global__ void[^;{]*\(' |
          sed 's/__launch_bounds__([^()]*\(([^()]*)[^()]*\)*)//' | grep -oE 'void +[a-z0-9_]+' |
          sed 's/void *//' | sort -u)
for kernel in $kernels; do
    grep -qE " $kernel(<| )" "$folder/table" || { echo "FAIL $kernel was not compiled"; failed=1; }
done
awk '$NF > 0 { bad = 1; print "FAIL " $3 " spills " $NF " bytes (" $1 ", " $2 ")" } END { exit bad }' \
    "$folder/table" || failed=1
[ "$failed" -eq 0 ] &&
    echo "no spills in the $(wc -l <"$folder/table") kernels of llmc/ (sm_${architectures// /, sm_}; fp32, bf16)"
exit "$failed"
