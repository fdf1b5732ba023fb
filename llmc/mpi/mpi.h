// mpi.h: stands before the real mpi.h. In a simulation (llmc/cpu/simulate.h) there is no MPI: what the trainers call of
// it is done among the simulated processes, of which each stands for the ranks that do the same. Otherwise, and on a
// GPU, the calls go to the real one.
#ifndef LLMC_MPI_MPI_H
#define LLMC_MPI_MPI_H

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // the C interface is all we use
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include_next <mpi.h>

#ifndef __CUDACC__
#include "llmc/cpu/simulate.h"

static inline bool simulated_world(MPI_Comm comm) { return comm == MPI_COMM_WORLD; }

static inline size_t simulated_bytes(int count, MPI_Datatype type) {
    size_t width = type == MPI_INT ? sizeof(int) : type == MPI_BYTE || type == MPI_CHAR ? 1 : sizeof(double);
    return (size_t)count * width;
}

static inline int simulated_init(int *argc, char ***argv, int wanted, int *provided) {
    if (!cpu_simulates()) return MPI_Init_thread(argc, argv, wanted, provided);
    *provided = wanted;
    return MPI_SUCCESS;
}
static inline int simulated_finalize() { return cpu_simulates() ? MPI_SUCCESS : MPI_Finalize(); }

// Other communicators than the world are of one rank: each device is a node of its own.
static inline int simulated_rank(MPI_Comm comm, int *rank) {
    if (!cpu_simulates()) return MPI_Comm_rank(comm, rank);
    *rank = simulated_world(comm) ? cpu_simulation().rank : 0;
    return MPI_SUCCESS;
}
static inline int simulated_size(MPI_Comm comm, int *size) {
    if (!cpu_simulates()) return MPI_Comm_size(comm, size);
    *size = simulated_world(comm) ? cpu_simulation().size : 1;
    return MPI_SUCCESS;
}
static inline int simulated_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *made) {
    if (!cpu_simulates()) return MPI_Comm_split_type(comm, type, key, info, made);
    *made = MPI_COMM_SELF;
    return MPI_SUCCESS;
}
static inline int simulated_free(MPI_Comm *comm) {
    if (!cpu_simulates()) return MPI_Comm_free(comm);
    *comm = MPI_COMM_NULL;
    return MPI_SUCCESS;
}
static inline int simulated_allgather(const void *from, int count, MPI_Datatype type, void *to, int counts,
                                      MPI_Datatype types, MPI_Comm comm) {
    if (!cpu_simulates()) return MPI_Allgather(from, count, type, to, counts, types, comm);
    memcpy(to, from, simulated_bytes(count, type));  // of one rank
    return MPI_SUCCESS;
}

// The minimum of one int, to which process 0 comes by asking all: the one reduction of a simulation.
static inline int simulated_allreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op,
                                      MPI_Comm comm) {
    if (!cpu_simulates()) return MPI_Allreduce(from, to, count, type, op, comm);
    const CpuSimulation &s = cpu_simulation();
    int least, theirs;
    memcpy(&least, from == MPI_IN_PLACE ? to : from, sizeof least);
    if (s.stage != 0) {
        cpu_socket_write(s.sockets[0], &least, sizeof least);
        cpu_socket_read(s.sockets[0], &least, sizeof least);
    }
    for (int i = 1; s.stage == 0 && i < s.stages; i++) {
        cpu_socket_read(cpu_socket_to(i), &theirs, sizeof theirs);
        least = std::min(least, theirs);
    }
    for (int i = 1; s.stage == 0 && i < s.stages; i++) cpu_socket_write(cpu_socket_to(i), &least, sizeof least);
    *(int *)to = least;
    return MPI_SUCCESS;
}

// From a rank that is simulated to all that are, by way of process 0.
static inline int simulated_bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    if (!cpu_simulates()) return MPI_Bcast(data, count, type, root, comm);
    const CpuSimulation &s = cpu_simulation();
    size_t bytes = simulated_bytes(count, type);
    int from = cpu_process_of(root);
    if (s.stage == from && from != 0) cpu_socket_write(s.sockets[0], data, bytes);
    if (s.stage == 0 && from != 0) cpu_socket_read(cpu_socket_to(from), data, bytes);
    for (int i = 1; s.stage == 0 && i < s.stages; i++)
        if (i != from) cpu_socket_write(cpu_socket_to(i), data, bytes);
    if (s.stage != 0 && s.stage != from) cpu_socket_read(s.sockets[0], data, bytes);
    return MPI_SUCCESS;
}

// To and from rank 0.
static inline int simulated_send(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
    if (!cpu_simulates()) return MPI_Send(data, count, type, to, tag, comm);
    cpu_socket_write(cpu_socket_to(cpu_process_of(to)), data, simulated_bytes(count, type));
    return MPI_SUCCESS;
}
static inline int simulated_receive(void *data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                                    MPI_Status *status) {
    if (!cpu_simulates()) return MPI_Recv(data, count, type, from, tag, comm, status);
    cpu_socket_read(cpu_socket_to(cpu_process_of(from)), data, simulated_bytes(count, type));
    return MPI_SUCCESS;
}

#define MPI_Init_thread simulated_init
#define MPI_Finalize simulated_finalize
#define MPI_Comm_rank simulated_rank
#define MPI_Comm_size simulated_size
#define MPI_Comm_split_type simulated_split_type
#define MPI_Comm_free simulated_free
#define MPI_Allgather simulated_allgather
#define MPI_Allreduce simulated_allreduce
#define MPI_Bcast simulated_bcast
#define MPI_Send simulated_send
#define MPI_Recv simulated_receive
#endif

#endif
