// traffic.h: what a rank sends and receives for one call, if a ring carries it.
//
// defines: NcclMpiOp, nccl_mpi_op_name, NcclMpiCounter, ring_traffic
#ifndef LLMC_MPI_TRAFFIC_H
#define LLMC_MPI_TRAFFIC_H

#include <stddef.h>

typedef enum {
    NCCL_MPI_ALL_REDUCE,
    NCCL_MPI_REDUCE_SCATTER,
    NCCL_MPI_ALL_GATHER,
    NCCL_MPI_BROADCAST,
    NCCL_MPI_SEND,
    NCCL_MPI_RECV,
    NCCL_MPI_OPS
} NcclMpiOp;

static inline const char *nccl_mpi_op_name(int op) {
    static const char *const names[NCCL_MPI_OPS] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                                    "ncclBroadcast", "ncclSend", "ncclRecv"};
    return op >= 0 && op < NCCL_MPI_OPS ? names[op] : "an unknown operation";
}

// What one rank did on one communicator: calls issued, and payload bytes, without headers.
typedef struct {
    size_t calls, bytes_sent, bytes_received;
} NcclMpiCounter;

// Adds a call of `count` elements of `width` bytes, by rank `rank` of n. On a ring, rank r keeps part r of an
// all-reduced buffer, and the last rank of a broadcast sends nothing on.
static inline void ring_traffic(NcclMpiCounter *c, NcclMpiOp op, size_t count, size_t width, size_t n, size_t rank,
                                size_t root) {
    size_t bytes = count * width, own = (count / n + (rank < count % n)) * width;
    c->calls++;
    switch (op) {
        case NCCL_MPI_ALL_REDUCE: c->bytes_sent += 2 * (bytes - own), c->bytes_received += 2 * (bytes - own); break;
        case NCCL_MPI_SEND: c->bytes_sent += bytes; break;
        case NCCL_MPI_RECV: c->bytes_received += bytes; break;
        case NCCL_MPI_BROADCAST:
            c->bytes_sent += (rank + 1) % n == root ? 0 : bytes;
            c->bytes_received += rank == root ? 0 : bytes;
            break;
        default: c->bytes_sent += (n - 1) * bytes, c->bytes_received += (n - 1) * bytes; break;
    }
}

#endif
