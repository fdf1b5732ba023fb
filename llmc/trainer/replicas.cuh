// replicas.cuh: --debug-replicas compares the weights that several ranks hold alike, bit by bit.
//
// defines: trainer_check_replicas
#ifndef LLMC_REPLICAS_CUH
#define LLMC_REPLICAS_CUH

#include "llmc/trainer.cuh"

// Returns a 64-bit hash (FNV-1a) of a tensor's weights.
static inline uint64_t replicas_hash(const floatX *weights, const Tensor *x) {
    size_t bytes = x->size * sizeof(floatX);
    unsigned char *host = (unsigned char *)host_alloc(bytes, 1);
    CUDA_CHECK(cudaMemcpy(host, weights, bytes, cudaMemcpyDeviceToHost));
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ host[i]) * 0x100000001b3u;
    free(host);
    return hash;
}

// Compares the tensors that the ranks of a group hold alike: all of them in a group of data ranks, those not split in a
// group of tensor ranks, tied ones in a group of first and last stage. Collective. False names the first that differs.
static inline bool replicas_check(const Trainer *m, char group, ncclComm_t comm, Error *err) {
    int64_t *device, host[2];
    bool ok = true;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof host));
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        bool experts = x->flags & TENSOR_EXPERTS;  // alike only on the data ranks of a group 'x'
        if ((group == 't' && x->split != SPLIT_NONE) || (group == 'e' && !tensor_is_tied(x)) ||
            (group == 'd' && experts && x->t > 1) || (group == 'x' && !experts)) continue;
        const floatX *weights = m->w[table_layer(&m->table, i)][x->kind];
        host[0] = (int64_t)(replicas_hash(weights, x) >> 1), host[1] = -host[0];  // minima: least and greatest
        CUDA_CHECK(cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, m->stream));
        NCCL_CHECK(ncclAllReduce(device, device, 2, ncclInt64, ncclMin, comm, m->stream));
        CUDA_CHECK(cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, m->stream));
        CUDA_CHECK(cudaStreamSynchronize(m->stream));
        if (host[0] != -host[1] && ok)
            ok = error_set(err, "%s differs between the %s ranks that hold it", x->name,
                           group == 't' ? "tensor" : group == 'e' ? "embedding" : "data");
    }
    CUDA_CHECK(cudaFree(device));
    return ok;
}

// Checks all groups of this rank, with nothing queued that writes weights. A difference ends the job.
static inline void trainer_check_replicas(Trainer *m) {
    Error err;
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < m->job.group_count; i++) {
        if (m->job.letters[i] && !replicas_check(m, m->job.letters[i], m->job.groups[i], &err)) job_fail(&m->job, &err);
    }
}

#endif
