// mpi.h: stands before the real mpi.h. A simulation (llmc/cpu/simulate.h) has no MPI: the
// calls that the trainers make are done among the simulated processes. Otherwise, and on a
// GPU, the calls go to the real MPI.
#ifndef LLMC_MPI_MPI_H
#define LLMC_MPI_MPI_H

#include_next <mpi.h>

#ifndef __CUDACC__
#include "llmc/cpu/simulate.h"

static inline size_t simulated_bytes(int count, MPI_Datatype type) {
    size_t width = type == MPI_INT                        ? sizeof(int)
                   : type == MPI_BYTE || type == MPI_CHAR ? 1
                                                          : sizeof(double);
    return (size_t)count * width;
}

// Other communicators than the world have one rank here: each device is a node of its own.
static inline int simulated_rank(MPI_Comm comm, int *rank) {
    return *rank = comm == MPI_COMM_WORLD ? cpu_simulation().rank : 0, MPI_SUCCESS;
}
static inline int simulated_size(MPI_Comm comm, int *size) {
    return *size = comm == MPI_COMM_WORLD ? cpu_simulation().size : 1, MPI_SUCCESS;
}

// Counts the splits, which all processes make in the same order: timing.h knows the ranks.
static inline int simulated_split(int color, MPI_Comm *made) {
    if (++cpu_simulation().splits == CPU_SIMULATED_SPLITS)
        cpu_abort("a simulated rank makes at most %d communicators", CPU_SIMULATED_SPLITS);
    return *made = color == MPI_UNDEFINED ? MPI_COMM_NULL : MPI_COMM_SELF, MPI_SUCCESS;
}

// Reduces one int to its minimum, the only reduction of a simulation.
static inline int simulated_least(const void *from, void *to) {
    int least = INT_MAX;
    cpu_exchange(from == MPI_IN_PLACE ? to : from, sizeof(int),
                 [&](int, const char *theirs, size_t, size_t) {
                     least = std::min(least, *(const int *)theirs);
                 });
    return *(int *)to = least, MPI_SUCCESS;
}

static inline int simulated_bcast(void *data, size_t bytes, int root) {
    int from = cpu_process_of(root);
    cpu_exchange(data, bytes, [=](int process, const char *piece, size_t first, size_t n) {
        if (process == from) memcpy((char *)data + first, piece, n);
    });
    return MPI_SUCCESS;
}

// Gathers on rank 0, to to[at[rank]] of `width` bytes, or [rank][bytes]; there ranks
// without a process give zeros.
static inline int simulated_gather(const void *from, size_t bytes, void *to, const int *at,
                                   size_t width) {
    const CpuSimulation &s = cpu_simulation();
    if (s.rank == 0 && !at) memset(to, 0, (size_t)s.size * bytes);
    cpu_exchange(
        from, bytes, [=, &s](int process, const char *piece, size_t first, size_t n) {
            size_t rank = (size_t)s.ranks[(size_t)process];
            if (s.rank == 0)
                memcpy((char *)to + (at ? (size_t)at[rank] * width : rank * bytes) + first,
                       piece, n);
        });
    return MPI_SUCCESS;
}

// A macro's own name within it is not expanded again: it is the real call.
#define MPI_Init_thread(argc, argv, wanted, provided)        \
    (cpu_simulates() ? (*(provided) = (wanted), MPI_SUCCESS) \
                     : MPI_Init_thread(argc, argv, wanted, provided))
#define MPI_Finalize() (cpu_simulates() ? MPI_SUCCESS : MPI_Finalize())
#define MPI_Comm_rank(comm, rank) \
    (cpu_simulates() ? simulated_rank(comm, rank) : MPI_Comm_rank(comm, rank))
#define MPI_Comm_size(comm, size) \
    (cpu_simulates() ? simulated_size(comm, size) : MPI_Comm_size(comm, size))
#define MPI_Comm_split(comm, color, key, made)      \
    (cpu_simulates() ? simulated_split(color, made) \
                     : MPI_Comm_split(comm, color, key, made))
#define MPI_Comm_split_type(comm, type, key, info, made)      \
    (cpu_simulates() ? (*(made) = MPI_COMM_SELF, MPI_SUCCESS) \
                     : MPI_Comm_split_type(comm, type, key, info, made))
#define MPI_Comm_free(comm) (cpu_simulates() ? MPI_SUCCESS : MPI_Comm_free(comm))
#define MPI_Allreduce(from, to, count, type, op, comm) \
    (cpu_simulates() ? simulated_least(from, to)       \
                     : MPI_Allreduce(from, to, count, type, op, comm))
#define MPI_Bcast(data, count, type, root, comm)                                 \
    (cpu_simulates() ? simulated_bcast(data, simulated_bytes(count, type), root) \
                     : MPI_Bcast(data, count, type, root, comm))
#define MPI_Gather(from, count, type, to, counts, types, root, comm)                     \
    (cpu_simulates() ? simulated_gather(from, simulated_bytes(count, type), to, NULL, 0) \
                     : MPI_Gather(from, count, type, to, counts, types, root, comm))
#define MPI_Gatherv(from, count, type, to, counts, at, types, root, comm)           \
    (cpu_simulates() ? simulated_gather(from, simulated_bytes(count, type), to, at, \
                                        simulated_bytes(1, type))                   \
                     : MPI_Gatherv(from, count, type, to, counts, at, types, root, comm))
#endif

#endif
