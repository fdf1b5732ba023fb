// replicas.cuh: --debug-replicas: checks that weights held by several ranks are the same bits on all of them.
//
// defines: Replicas, replicas_check
#ifndef LLMC_REPLICAS_CUH
#define LLMC_REPLICAS_CUH

#include <nccl.h>

#include "llmc/trainer/job.cuh"
#include "llmc/trainer/state.cuh"

// The tensors that all ranks of a group hold.
typedef enum { REPLICAS_UNSPLIT, REPLICAS_TIED, REPLICAS_ALL } Replicas;

// Returns a 64-bit hash (FNV-1a) of a tensor's weights.
static inline uint64_t replicas_hash(const State *state, const Tensor *x) {
    size_t bytes = x->size * sizeof(floatX);
    unsigned char *host = (unsigned char *)host_alloc(bytes, 1);
    CUDA_CHECK(cudaMemcpy(host, state->params + x->offset, bytes, cudaMemcpyDeviceToHost));
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ host[i]) * 0x100000001b3u;
    free(host);
    return hash;
}

// Compares the tensors of all ranks of the group, which call it with no queued work that writes weights. False, with
// the name of the first tensor that differs.
static inline bool replicas_check(const State *state, const ParamTable *table, Replicas which, ncclComm_t comm,
                                  const char *group, cudaStream_t stream, Error *err) {
    int64_t *device, host[2];
    bool ok = true;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof host));
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        if (which == REPLICAS_UNSPLIT ? x->split != SPLIT_NONE : which == REPLICAS_TIED && x->kind != WTE) continue;
        host[0] = (int64_t)(replicas_hash(state, x) >> 1), host[1] = -host[0];  // their minima: least and greatest
        CUDA_CHECK(cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, stream));
        NCCL_CHECK(ncclAllReduce(device, device, 2, ncclInt64, ncclMin, comm, stream));
        CUDA_CHECK(cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        if (host[0] != -host[1] && ok)
            ok = error_set(err, "%s differs between the %s ranks that hold it", x->name, group);
    }
    CUDA_CHECK(cudaFree(device));
    return ok;
}

#endif
