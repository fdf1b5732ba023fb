// types.h: NCCL's types, with NCCL's names and values, and the bytes that a ring carries
// for a call. Plain C. A type or reduction that nccl.h cannot carry is missing here, so
// that it does not compile.
//
// defines: NCCL_MPI_TYPES, NcclMpiOp, nccl_mpi_op_name, NcclMpiCounter, ring_traffic
#ifndef LLMC_MPI_TYPES_H
#define LLMC_MPI_TYPES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclInProgress = 7
} ncclResult_t;

#define NCCL_SPLIT_NOCOLOR -1

// Initialise with NCCL_CONFIG_INITIALIZER. The name appears in reports; the number of
// blocks means nothing here. Beyond NCCL, for the virtual clock: a simulation, where most
// ranks do not exist, needs to know the communicator's ranks.
#define NCCL_CONFIG_UNDEF_INT INT_MIN
typedef struct {
    size_t size;
    int minCTAs, maxCTAs;  // blocks of a kernel of the communicator, at least and at most
    const char *commName;
    const int *ranks;      // [count] of the job that are in it, in the order of their keys;
                           // NULL: 0, 1, ...
    size_t count, groups;  // of them, 0: in none; of the split's communicators, 0: unknown
    bool waited;           // compute waits for each of its collectives
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER                                                            \
    {                                                                                      \
        sizeof(ncclConfig_t), NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NULL, NULL, 0, \
            0, false                                                                       \
    }

typedef enum { ncclSum = 0, ncclMax = 2 } ncclRedOp_t;

typedef enum {
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

// By number.
static const struct {
    const char *name;
    size_t bytes;
} NCCL_MPI_TYPES[] = {{NULL, 0},      {NULL, 0},      {NULL, 0}, {NULL, 0},
                      {NULL, 0},      {NULL, 0},      {NULL, 0}, {"float32", 4},
                      {"float64", 8}, {"bfloat16", 2}};

typedef enum {
    NCCL_MPI_ALL_REDUCE,
    NCCL_MPI_REDUCE_SCATTER,
    NCCL_MPI_ALL_GATHER,
    NCCL_MPI_BROADCAST,
    NCCL_MPI_REDUCE,
    NCCL_MPI_SEND,
    NCCL_MPI_RECV,
    NCCL_MPI_OPS
} NcclMpiOp;

static inline const char *nccl_mpi_op_name(int op) {
    static const char *const names[NCCL_MPI_OPS] = {
        "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
        "ncclReduce",    "ncclSend",          "ncclRecv"};
    return names[op];
}

// The calls of one rank on one communicator, and their payload bytes without headers.
typedef struct {
    size_t calls, bytes_sent, bytes_received;
} NcclMpiCounter;

// Adds a call of `count` elements of `width` bytes by rank `rank` of n. On a ring, rank r
// keeps part r of an all-reduced buffer, and the last rank of a broadcast does not send. A
// reduction begins behind its root. A message to oneself leaves no rank.
static inline void ring_traffic(NcclMpiCounter *c, NcclMpiOp op, size_t count, size_t width,
                                size_t n, size_t rank, size_t root) {
    size_t bytes = count * width;
    size_t own = (count / n + (rank < count % n)) * width, sent, received;
    switch (op) {
        case NCCL_MPI_ALL_REDUCE: sent = received = 2 * (bytes - own); break;
        case NCCL_MPI_SEND:
            sent = rank == root ? 0 : bytes;
            received = 0;
            break;
        case NCCL_MPI_RECV:
            sent = 0;
            received = rank == root ? 0 : bytes;
            break;
        case NCCL_MPI_BROADCAST:
            sent = (rank + 1) % n == root ? 0 : bytes;
            received = rank == root ? 0 : bytes;
            break;
        case NCCL_MPI_REDUCE:
            sent = rank == root ? 0 : bytes;
            received = rank == (root + 1) % n ? 0 : bytes;
            break;
        default: sent = received = (n - 1) * bytes; break;
    }
    c->calls++;
    c->bytes_sent += sent;
    c->bytes_received += received;
}

#endif
