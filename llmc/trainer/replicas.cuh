// replicas.cuh: are copies of weights that several ranks hold still the same, bit for bit? For --debug-replicas.
//
// defines: Replicas, replicas_check
#ifndef LLMC_REPLICAS_CUH
#define LLMC_REPLICAS_CUH

#include <nccl.h>

#include "llmc/trainer/job.cuh"
#include "llmc/trainer/state.cuh"

// Which tensors all ranks of the group hold alike.
typedef enum { REPLICAS_UNSPLIT, REPLICAS_TIED, REPLICAS_ALL } Replicas;

// A 64-bit hash (FNV-1a) of a tensor's weights.
static inline uint64_t replicas_hash(const State *state, const Tensor *x) {
    size_t bytes = x->size * sizeof(floatX);
    unsigned char *host = (unsigned char *)host_alloc(bytes, 1);
    CUDA_CHECK(cudaMemcpy(host, state->params + x->offset, bytes, cudaMemcpyDeviceToHost));
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ host[i]) * 0x100000001b3u;
    free(host);
    return hash;
}

// All ranks of the group call it, with nothing queued that writes weights. False, naming the first tensor that differs.
static inline bool replicas_check(const State *state, const ParamTable *table, Replicas which, ncclComm_t comm,
                                  const char *group, cudaStream_t stream, Error *err) {
    uint64_t *device, host[2];
    bool ok = true;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof host));
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        if (which == REPLICAS_UNSPLIT ? x->split != SPLIT_NONE : which == REPLICAS_TIED && x->kind != WTE) continue;
        host[0] = host[1] = replicas_hash(state, x) >> 1;  // as int64 never negative
        CUDA_CHECK(cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, stream));
        NCCL_CHECK(ncclAllReduce(device, device, 1, ncclInt64, ncclMin, comm, stream));
        NCCL_CHECK(ncclAllReduce(device + 1, device + 1, 1, ncclInt64, ncclMax, comm, stream));
        CUDA_CHECK(cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        if (host[0] != host[1] && ok)
            ok = error_set(err, "%s differs between the %s ranks that hold it", x->name, group);
    }
    CUDA_CHECK(cudaFree(device));
    return ok;
}

#endif
