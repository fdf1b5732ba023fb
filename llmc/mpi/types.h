// types.h: the part of NCCL's types that the trainers use, with NCCL's names and values. What is not here
// does not compile, so that nobody relies on a call, a type or a reduction that nccl.h cannot carry.
#ifndef LLMC_MPI_TYPES_H
#define LLMC_MPI_TYPES_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct ncclComm *ncclComm_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

#define NCCL_SPLIT_NOCOLOR -1

// Of NCCL's configuration the name means something here, and the number of blocks is checked. Initialise with
// NCCL_CONFIG_INITIALIZER.
#define NCCL_CONFIG_UNDEF_INT INT_MIN
typedef struct {
    size_t size;
    int minCTAs, maxCTAs;  // blocks that a kernel of the communicator occupies, at least and at most
    const char *commName;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {sizeof(ncclConfig_t), NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NULL}

typedef enum { ncclSum = 0, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

typedef enum {
    ncclUint8 = 1,
    ncclInt32 = 2, ncclInt = 2,
    ncclInt64 = 4,
    ncclFloat32 = 7, ncclFloat = 7,
    ncclFloat64 = 8, ncclDouble = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

namespace nccl_mpi {

// Bytes of one element; 0 for a type that is not carried.
inline size_t type_bytes(int type) {
    switch (type) {
        case ncclUint8: return 1;
        case ncclBfloat16: return 2;
        case ncclInt32: case ncclFloat32: return 4;
        case ncclInt64: case ncclFloat64: return 8;
        default: return 0;
    }
}

inline const char *type_name(int type) {
    switch (type) {
        case ncclUint8: return "uint8";
        case ncclBfloat16: return "bfloat16";
        case ncclInt32: return "int32";
        case ncclFloat32: return "float32";
        case ncclInt64: return "int64";
        case ncclFloat64: return "float64";
        default: return "unknown type";
    }
}

// NULL for a reduction that is not carried.
inline const char *redop_name(int redop) {
    switch (redop) {
        case ncclSum: return "sum";
        case ncclMax: return "max";
        case ncclMin: return "min";
        case ncclAvg: return "avg";
        default: return NULL;
    }
}

}  // namespace nccl_mpi

#endif
