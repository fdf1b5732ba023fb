#!/usr/bin/env bash
# probe.sh cpu|cuda COMPILER [C_COMPILER [MPI]]: links small programs to find out which libraries
# work. It prints variables for the Makefile, which keeps the answer in build/probe-DEVICE.mk. No
# other part of the build looks for libraries. The build stops if this reports MISSING ones, which
# dev/setup.sh installs. It can do without the ones reported under WITHOUT. With MPI, mpicxx.MPI and
# mpirun.MPI are taken, as Debian names them: openmpi or mpich.
set -uo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac

device=$1 compiler=$2 c_compiler=${3:-cc} mpi=${4:+.$4}
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT

# links 'C++ source' FLAG...: true if it compiles and links.
links() {
    local source=$1
    shift
    printf '%s\n' "$source" >"$folder/probe.cpp"
    # shellcheck disable=SC2086  # a compiler may come with flags
    $compiler -o "$folder/probe" "$folder/probe.cpp" "$@" >/dev/null 2>&1
}

found=() missing=() without=()
say() { printf '%s := %s\n' "$1" "$2"; }
answer() {
    say FOUND "$(printf '%s, ' "${found[@]}" | sed 's/, $//')"
    say MISSING "${missing[*]}"
    say WITHOUT "${without[*]}"
    exit 0
}
host=() # how a flag reaches the host compiler
[ "$device" = cuda ] && host=(-Xcompiler)

# Without a compiler nothing else can be found out.
printf 'int main(void) { return 0; }\n' >"$folder/probe.c"
# shellcheck disable=SC2086
if ! links 'int main() { return 0; }' || ! $c_compiler -o "$folder/probe" "$folder/probe.c" \
    >/dev/null 2>&1; then
    missing+=(compiler)
    answer
fi

# The widest vectors that there are: compilers prefer 32 bytes for the clock of older processors.
for native in '-march=native -mprefer-vector-width=512' -march=native; do
    # shellcheck disable=SC2086
    if links 'int main() { return 0; }' $(printf -- "${host[*]} %s " $native); then say NATIVE \
        "$native" && break; fi
done

if links '#include <omp.h>
int main() { return omp_get_max_threads() < 1; }' "${host[@]}" -fopenmp; then
    say OPENMP -fopenmp
    found+=(OpenMP)
else
    without+=(OpenMP)
fi

if [ "$device" = cuda ]; then
    if links '#include <cublasLt.h>
int main() { cublasLtHandle_t h; return cublasLtCreate(&h) != 0; }' -lcublasLt; then
        say BLAS_LIBS -lcublasLt
        found+=(cuBLASLt)
    else
        missing+=(cuBLASLt)
    fi
    if links '#include <nccl.h>
int main() { int v; return ncclGetVersion(&v) != 0; }' -lnccl; then
        say NCCL_LIBS -lnccl
        found+=(NCCL)
    else
        without+=(NCCL)
    fi
else
    sgemm='float a = 1, b = 1, c;'
    blas=
    if links "#include <dnnl.h>
int main() { $sgemm
return dnnl_sgemm('N', 'N', 1, 1, 1, 1, &a, 1, &b, 1, 0, &c, 1) != 0; }" -ldnnl; then
        say BLAS_LIBS -ldnnl
        blas=oneDNN
    else
        # The reference BLAS is not looked for: it is many times slower.
        for library in openblas cblas; do
            if links "#include <cblas.h>
int main() { $sgemm
cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &a, 1, &b, 1, 0, &c, 1);
return c != 1; }" -l$library
            then
                say BLAS_LIBS "-l$library"
                say BLAS_DEFINES -DUSE_CBLAS
                blas="CBLAS (lib$library)"
                break
            fi
        done
    fi
    if [ -n "$blas" ]; then found+=("$blas"); else missing+=(oneDNN); fi
fi

# Open MPI and MPICH both print the compiler's whole command line for -show.
mpi_include=() mpi_libs=()
for word in $("mpicxx$mpi" -show 2>/dev/null); do
    case $word in
        -I*) mpi_include+=(-isystem "${word#-I}") ;;
        -lmpi_cxx | -lmpicxx | -lmpichcxx) ;;  # the old C++ binding, which nothing here uses
        -L*) mpi_libs+=("$word" -Xlinker -rpath -Xlinker "${word#-L}") ;;
        -l*) mpi_libs+=("$word") ;;
    esac
done
plain_c='-DOMPI_SKIP_MPICXX=1 -DMPICH_SKIP_MPICXX=1'
# shellcheck disable=SC2086
if links '#include <mpi.h>
int main(int argc, char **argv) { return MPI_Init(&argc, &argv); }' $plain_c \
    "${mpi_include[@]}" "${mpi_libs[@]}" && command -v "mpirun$mpi" >/dev/null; then
    say MPI_FLAGS "$plain_c ${mpi_include[*]}"
    say MPI_LIBS "${mpi_libs[*]}"
    # Ranks share cores on a small machine, and a container's user is root.
    if "mpirun$mpi" --version 2>/dev/null | grep -q 'Open MPI'; then
        options=' --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none'
        [ "$(id -u)" -eq 0 ] && options="$options --allow-run-as-root"
        found+=('Open MPI')
    else
        options=
        found+=(MPI)
    fi
    say MPIRUN "mpirun$mpi$options"
else
    missing+=(MPI)
fi

if links '#include <cjson/cJSON.h>
int main() { return cJSON_Parse("1") == 0; }' -lcjson; then
    say CJSON_LIBS -lcjson
    found+=(cJSON)
else
    missing+=(cJSON)
fi

if links '#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
int main() { return pcre2_config(PCRE2_CONFIG_UNICODE, 0) < 0; }' -lpcre2-8; then
    say PCRE2_LIBS -lpcre2-8
    found+=(PCRE2)
else
    missing+=(PCRE2)
fi

answer
