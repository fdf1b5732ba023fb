// device.h: CUDA, NCCL and MPI for layout.cu, which runs the host code of one rank without a
// device or other ranks. Memory is addresses without storage. Kernels and copies do nothing.
// Messages are counted by the rules of llmc/mpi/types.h. build.sh gives this file the names of
// their headers.
//
// defines: Traffic, traffic, traffic_count, ranks_are
#ifndef EXPLORER_DEVICE_H
#define EXPLORER_DEVICE_H

#include "libc.h"
#include "llmc/mpi/types.h"

namespace std {
template <class T, T constant> struct integral_constant {
    static constexpr T value = constant;
    constexpr operator T() const { return constant; }
};
// The type of a list in braces, by the name that compilers look for.
template <class T> struct initializer_list {
    const T *first, *last;
    const T *begin() const { return first; }
    const T *end() const { return last; }
};
}  // namespace std
inline void *operator new(__SIZE_TYPE__, void *at) noexcept { return at; }

// ---- CUDA ------------------------------------------------------------------------------

#define __host__
#define __device__
#define __global__ static inline
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define UNROLL
#define ROLLED

typedef enum { cudaSuccess, cudaErrorNotReady } cudaError_t;
typedef struct NoStream *cudaStream_t;
typedef struct NoEvent *cudaEvent_t;
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking, cudaEventDisableTiming };
struct cudaDeviceProp {
    char name[8];
    int major, minor;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static dim3 threadIdx(0), blockIdx(0), blockDim(1);
struct CpuRuntime {
    bool warm;
};
static CpuRuntime runtime;
static inline CpuRuntime &cpu_runtime() { return runtime; }

// A call that has nothing to do here, whatever it is given.
#define DOES_NOTHING(type, name, result)                                  \
    template <class... T> static inline type name(T &&...) { return result; }
struct NoLaunch {
    template <class... T> void operator()(T &&...) const {}
};
DOES_NOTHING(NoLaunch, kernel_launch, NoLaunch())
DOES_NOTHING(void, cpu_check_aligned, )
DOES_NOTHING(void, __syncthreads, )
template <bool SUM, class T> static inline T warp_reduce(T x) { return x; }
template <class T> static inline T larger(T a, T b) { return b > a ? b : a; }
static inline unsigned __shfl_up_sync(unsigned, unsigned x, unsigned) { return x; }
DOES_NOTHING(const char *, cudaGetErrorString, "")
DOES_NOTHING(cudaError_t, cudaGetLastError, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaSetDevice, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaDeviceSynchronize, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaDeviceGetStreamPriorityRange, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaStreamCreateWithPriority, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaStreamSynchronize, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaStreamWaitEvent, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaStreamQuery, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaEventCreateWithFlags, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaEventRecord, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMemcpy, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMemcpyAsync, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMemset, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMemsetAsync, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMalloc, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaMallocHost, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaFree, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaProfilerStart, cudaSuccess)
DOES_NOTHING(cudaError_t, cudaProfilerStop, cudaSuccess)

static inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int) {
    return p->major = 8, cudaSuccess;
}
static inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = SIZE_MAX;
    return cudaSuccess;
}

// The kernels' own headers that are left out: nothing of them decides how much memory a rank has.
#define LLMC_ATTENTION_CUH
#define LLMC_CLASSIFIER_CUH
#define LLMC_ENCODER_CUH
#define LLMC_GELU_CUH
#define LLMC_MATMUL_CUH
typedef struct {
    int none;
} Matmul;
DOES_NOTHING(void, matmul_create, )
DOES_NOTHING(void, matmul_forward, )
DOES_NOTHING(void, matmul_backward_input, )
DOES_NOTHING(void, matmul_backward_weight, )
DOES_NOTHING(void, linear_forward, )
DOES_NOTHING(void, linear_backward_input, )
DOES_NOTHING(void, linear_backward_weight, )
DOES_NOTHING(void, attention_forward, )
DOES_NOTHING(void, attention_backward, )
DOES_NOTHING(void, classifier_stats, )
DOES_NOTHING(void, classifier_rescale, )
DOES_NOTHING(void, classifier_gradient, )
DOES_NOTHING(void, loss_sum, )
DOES_NOTHING(void, encoder_forward, )
DOES_NOTHING(void, encoder_backward, )
DOES_NOTHING(void, gelu_forward, )
DOES_NOTHING(void, gelu_backward, )

// ---- MPI: a rank that never hears of another one ---------------------------------------

static int ranks_rank, ranks_size;
typedef int MPI_Comm;
enum {
    MPI_SUCCESS,
    MPI_COMM_WORLD,
    MPI_COMM_TYPE_SHARED,
    MPI_INFO_NULL,
    MPI_THREAD_FUNNELED,
    MPI_INT,
    MPI_CHAR
};
enum {
    MPI_BYTE,
    MPI_DOUBLE,
    MPI_UNSIGNED_LONG_LONG,
    MPI_UINT64_T,
    MPI_MIN,
    MPI_SUM,
    MPI_STATUS_IGNORE,
    MPI_IN_PLACE
};
DOES_NOTHING(int, MPI_Comm_split_type, 0)
DOES_NOTHING(int, MPI_Comm_free, 0)
DOES_NOTHING(int, MPI_Gather, 0)
DOES_NOTHING(int, MPI_Bcast, 0)
DOES_NOTHING(int, MPI_Barrier, 0)
DOES_NOTHING(int, MPI_Finalize, 0)
DOES_NOTHING(int, MPI_Gatherv, 0)
typedef int MPI_Request;
static inline int MPI_Init_thread(int *, char ***, int wanted, int *provided) {
    return *provided = wanted, 0;
}
static inline int MPI_Comm_rank(MPI_Comm, int *rank) { return *rank = ranks_rank, 0; }
static inline int MPI_Comm_size(MPI_Comm, int *size) { return *size = ranks_size, 0; }
static inline int MPI_Allreduce(const int *mine, int *all, int, int, int, int) {
    return *all = *mine, 0;
}
static inline int MPI_Allreduce(int, uint64_t *, int, int, int, int) { return 0; }

// ---- NCCL: counts ----------------------------------------------------------------------

#define NCCL_OVER_MPI 1  // ranks may share a device, and their traffic is counted

enum {
    GROUP_WORLD,
    GROUP_TENSOR,
    GROUP_DATA,
    GROUP_PIPELINE,
    GROUP_EMBEDDING,
    GROUP_CONTEXT,       // the ranks of a sequence: messages
    GROUP_CONTEXT_SUMS,  // and sums
    GROUP_EXPERTS,       // ranks that share out the experts
    GROUP_EXPERT_DATA,   // ranks that hold the same experts
    GROUP_COUNT
};
struct ncclComm {
    int group, rank, size;
    const int *ranks;  // [size] of the job, in the order of their keys; NULL: all
};

// Equal calls of this rank since ncclMpiResetCounters. Calls with other counts are listed apart:
// the bytes that a rank sends for an all-reduce depend on the remainder when its count is
// divided. to: for a link's message, the rank that receives it. For another message, the other
// rank's distance in the group.
typedef struct {
    int group, to, op, calls;
    size_t count, width;
} Traffic;
enum { TRAFFIC_MOST = 1024 };
static Traffic traffic[TRAFFIC_MOST];
static int traffic_count;

// Makes this process rank `rank` of t x d x p from here on.
static inline void ranks_are(int rank, int t, int d, int p) {
    ranks_rank = rank;
    ranks_size = t * d * p;
    traffic_count = 0;
}

static inline ncclResult_t traffic_add(ncclComm_t comm, int op, size_t count, int type,
                                       int to = 0) {
    size_t width = NCCL_MPI_TYPES[type].bytes;
    for (int i = 0; i < traffic_count; i++) {
        Traffic *t = &traffic[i];
        if (t->group != comm->group || t->to != to || t->op != op) continue;
        if (t->count != count || t->width != width) continue;
        t->calls++;
        return ncclSuccess;
    }
    if (traffic_count == TRAFFIC_MOST) return ncclInternalError;
    traffic[traffic_count++] = {comm->group, to, op, 1, count, width};
    return ncclSuccess;
}

static inline ncclResult_t ncclAllReduce(const void *, void *, size_t count, ncclDataType_t type,
                                         ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
    return traffic_add(comm, NCCL_MPI_ALL_REDUCE, count, type);
}
static inline ncclResult_t ncclReduceScatter(const void *, void *, size_t count,
                                             ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                                             cudaStream_t) {
    return traffic_add(comm, NCCL_MPI_REDUCE_SCATTER, count, type);
}
static inline ncclResult_t ncclAllGather(const void *, void *, size_t count, ncclDataType_t type,
                                         ncclComm_t comm, cudaStream_t) {
    return traffic_add(comm, NCCL_MPI_ALL_GATHER, count, type);
}
static inline ncclResult_t ncclBroadcast(const void *, void *, size_t count, ncclDataType_t type,
                                         int, ncclComm_t comm, cudaStream_t) {
    return traffic_add(comm, NCCL_MPI_BROADCAST, count, type);
}
static inline ncclResult_t ncclReduce(const void *, void *, size_t count, ncclDataType_t type,
                                      ncclRedOp_t, int, ncclComm_t comm, cudaStream_t) {
    return traffic_add(comm, NCCL_MPI_REDUCE, count, type);
}
static inline ncclResult_t message_add(ncclComm_t comm, int op, size_t count, int type, int peer) {
    bool link = comm->group == GROUP_PIPELINE;
    int further = (peer - comm->rank + comm->size) % comm->size;
    int to = link ? comm->ranks[1] : further;
    return traffic_add(comm, op, count, type, to);
}
static inline ncclResult_t ncclSend(const void *, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t) {
    return message_add(comm, NCCL_MPI_SEND, count, type, peer);
}
static inline ncclResult_t ncclRecv(void *, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t) {
    return message_add(comm, NCCL_MPI_RECV, count, type, peer);
}

static inline ncclComm_t communicator(int group, int rank, size_t size, const int *ranks) {
    ncclComm_t comm = (ncclComm_t)calloc(1, sizeof *comm);
    int *kept = (int *)calloc(size, sizeof *kept);
    if (ranks) memcpy(kept, ranks, size * sizeof *kept);
    *comm = {group, rank, (int)size, ranks ? kept : NULL};
    return comm;
}
static inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int, ncclUniqueId, int rank) {
    return *comm = communicator(GROUP_WORLD, rank, (size_t)ranks_size, NULL), ncclSuccess;
}
// The trainers' keys are numbers within the group.
static inline ncclResult_t ncclCommSplit(ncclComm_t, int color, int key, ncclComm_t *comm,
                                         ncclConfig_t *config) {
    static const char *const names[GROUP_COUNT] = {"world", "tensor", "data", "pipeline",
                                                   "embedding", "context", "context sums",
                                                   "experts", "expert data"};
    *comm = NULL;
    for (int group = 1; group < GROUP_COUNT && color >= 0; group++) {
        if (strcmp(config->commName, names[group]) != 0) continue;
        *comm = communicator(group, key, config->count, config->ranks);
    }
    return color < 0 || *comm ? ncclSuccess : ncclInvalidArgument;
}
static inline ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    return *count = comm->size, ncclSuccess;
}
static inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    return *rank = comm->rank, ncclSuccess;
}
static inline void ncclMpiResetCounters(ncclComm_t) { traffic_count = 0; }
static inline const char *ncclGetErrorString(ncclResult_t) {
    return "more kinds of calls than this page can count";
}
DOES_NOTHING(ncclResult_t, ncclGetUniqueId, ncclSuccess)
DOES_NOTHING(ncclResult_t, ncclCommDestroy, ncclSuccess)
DOES_NOTHING(ncclResult_t, ncclCommGetAsyncError, ncclSuccess)
DOES_NOTHING(ncclResult_t, ncclGroupStart, ncclSuccess)
DOES_NOTHING(ncclResult_t, ncclGroupEnd, ncclSuccess)
DOES_NOTHING(const char *, ncclGetLastError, "")

#endif
