# shellcheck shell=sh
# launch.sh: sets `launch`, the command that starts ranks: `$launch -n 4 PROGRAM`. It is that of dev/probe.sh, which has
# looked what MPI there is and what it needs here (MPIRUN in build/probe-*.mk). Sourced in the root of the repository.
launch=${MPIRUN:-$(sed -n 's/^MPIRUN := //p' "build/probe-cpu${MPI:+-$MPI}.mk" "build/probe-cuda${MPI:+-$MPI}.mk" \
    2>/dev/null | head -n 1)}
launch=${launch:-mpirun}
