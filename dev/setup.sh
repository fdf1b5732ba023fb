#!/usr/bin/env bash
# Installs what the build needs and the system lacks: a C++ compiler, make, Open MPI, oneDNN (or a CBLAS) and
# cJSON. Does nothing when all is there. On Debian and Ubuntu it calls apt-get (with sudo when not root);
# elsewhere it names the packages.
set -euo pipefail
cd "$(dirname "$0")/.."

has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#include <%s>\n' "$1" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

# Sets `missing` to the Debian names of what is not there.
look() {
    missing=()
    has_command "${CXX:-g++}" || missing+=(g++)
    has_command make || missing+=(make)
    has_command mpicxx || missing+=(libopenmpi-dev)
    has_command mpirun || missing+=(openmpi-bin)
    has_header dnnl.h || has_header cblas.h || missing+=(libdnnl-dev)
    has_header cjson/cJSON.h || missing+=(libcjson-dev)
}

look
[ ${#missing[@]} -eq 0 ] && exit 0
echo "missing: ${missing[*]}"

if ! has_command apt-get; then
    cat <<'END'
Install them with the system's package manager, then run make again:
  Fedora   sudo dnf install gcc-c++ make openmpi-devel onednn-devel cjson-devel   (then: module load mpi)
  Arch     sudo pacman -S gcc make openmpi onednn cjson
  conda    conda install -c conda-forge gxx make openmpi onednn cjson
Where there is no oneDNN, OpenBLAS does (openblas-devel, openblas): it is slower.
END
    exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! has_command sudo; then
        echo "Neither root nor sudo: ask for these packages: ${missing[*]}"
        exit 1
    fi
    as_root=(sudo)
fi

install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" </dev/null
}

"${as_root[@]}" apt-get update </dev/null
# A release without oneDNN has OpenBLAS.
install "${missing[@]}" || install "${missing[@]/libdnnl-dev/libopenblas-dev}"
rm -f build/probe-*.mk  # what make remembers of the libraries

look
if [ ${#missing[@]} -ne 0 ]; then
    echo "still missing after installation: ${missing[*]}"
    exit 1
fi
