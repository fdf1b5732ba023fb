#!/usr/bin/env bash
# setup.sh [cpu|cuda [COMPILER [C_COMPILER [MPI]]]]: installs the missing programs and libraries of
# the build: a C++ compiler, make, an MPI, oneDNN (or a CBLAS), cJSON and PCRE2. dev/probe.sh looks
# for them, here and in the Makefile, so this ends with 0 only if the build can start. On Debian
# and Ubuntu it calls apt-get (with sudo when not root); elsewhere it names the packages.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

device=${1:-cpu} compiler=${2:-${CXX:-g++}} c_compiler=${3:-${CC:-cc}} mpi=${4:-}
answer=build/probe-$device${mpi:+-$mpi}.mk

# Sets `missing`. The kept answer is replaced only by a different one, as everything is built again
# after that.
look() {
    mkdir -p build
    dev/probe.sh "$device" "$compiler" "$c_compiler" "$mpi" >"$answer.tmp"
    if cmp -s "$answer.tmp" "$answer"; then rm "$answer.tmp"; else mv "$answer.tmp" "$answer"; fi
    read -ra missing < <(sed -n 's/^MISSING := //p' "$answer")
    command -v make >/dev/null || missing+=(make)
}

# Prints Debian's packages for a NAME of the probe.
packages() {
    case $1 in
        compiler) echo g++ ;;
        # A release without oneDNN has OpenBLAS.
        oneDNN)
            if apt-cache show libdnnl-dev >/dev/null 2>&1; then
                echo libdnnl-dev
            else
                echo libopenblas-dev
            fi
            ;;
        MPI)
            if [ "$mpi" = mpich ]; then
                echo mpich libmpich-dev
            else
                echo openmpi-bin libopenmpi-dev
            fi
            ;;
        cJSON) echo libcjson-dev ;;
        PCRE2) echo libpcre2-dev ;;
        make) echo make ;;
    esac
}

wanted() { for name in "${missing[@]}"; do packages "$name"; done | xargs; }

look
[ ${#missing[@]} -eq 0 ] && exit 0
echo "missing: ${missing[*]}"

if [[ " ${missing[*]} " == *' cuBLASLt '* ]]; then
    echo "cuBLASLt is part of NVIDIA's CUDA toolkit, which has to be installed by hand;" \
        "make DEVICE=cpu needs none."
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    cat <<'END'
Install them with the system's package manager, then run make again:
  Fedora   sudo dnf install gcc-c++ make openmpi-devel onednn-devel cjson-devel pcre2-devel
           (then: module load mpi)
  Arch     sudo pacman -S gcc make openmpi onednn cjson pcre2
  conda    conda install -c conda-forge gxx make openmpi onednn cjson pcre2
Where there is no oneDNN, OpenBLAS does (openblas-devel, openblas): it is slower.
END
    exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "Neither root nor sudo: ask for the Debian packages $(wanted)"
        exit 1
    fi
    as_root=(sudo)
fi
apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" </dev/null; }

apt_get update || true  # what is known of the packages may be enough
# Twice if need be: without a compiler the probe cannot tell which libraries are missing.
before=
while [ ${#missing[@]} -gt 0 ] && [ "${missing[*]}" != "$before" ]; do
    before=${missing[*]}
    # shellcheck disable=SC2046
    apt_get install -y --no-install-recommends $(wanted) || break
    look
done
if [ ${#missing[@]} -ne 0 ]; then
    echo "still missing after installation: ${missing[*]}"
    exit 1
fi
