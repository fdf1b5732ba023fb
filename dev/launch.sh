# shellcheck shell=sh
# launch.sh: sets `launch`, the command that starts ranks: `$launch -n 4 PROGRAM`. dev/probe.sh has
# found the MPI of this machine and its flags (MPIRUN in build/probe-*.mk). Sourced in the root of
# the repository. Usually only one of the two files is there.
launch=${MPIRUN:-$(sed -n 's/^MPIRUN := //p' "build/probe-cpu${MPI:+-$MPI}.mk" \
    "build/probe-cuda${MPI:+-$MPI}.mk" 2>/dev/null | head -n 1 || :)}
launch=${launch:-mpirun}

# Most runs of tests are short, so they shall start quickly: Open MPI need not look for networks,
# nor hwloc for devices.
export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}" OMPI_MCA_btl="${OMPI_MCA_btl:-self,vader}"
export HWLOC_COMPONENTS="${HWLOC_COMPONENTS:--linuxio,-pci,-gl,-opencl}"
# Nor load its plugins, which bring X11 and libxml2
export HWLOC_PLUGINS_PATH="${HWLOC_PLUGINS_PATH:-/none}"
