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

// Compares the ranks that hold the same part of the same tensor. Collective. False names the first one that differs.
static inline bool replicas_check(const Trainer *m, Error *err) {
    size_t parts = m->table.shard.t > m->table.shard.e ? m->table.shard.t : m->table.shard.e;
    size_t count = count_tensors(&m->config) * parts;
    uint64_t *hashes = (uint64_t *)host_alloc(count, sizeof(uint64_t));
    memset(hashes, 0xff, count * sizeof(uint64_t));  // not held
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        size_t part = x->split == SPLIT_NONE ? 0 : x->t_rank;
        hashes[x->id * parts + part] = replicas_hash(m->w[table_layer(&m->table, i)][x->kind], x);
    }
    size_t i = job_first_difference(hashes, count);
    free(hashes);
    return i == count ||
           error_set(err, "%s differs between the ranks that hold it", tensor_by_id(&m->config, i / parts).name);
}

// Checks with nothing queued that writes weights. A difference ends the job.
static inline void trainer_check_replicas(Trainer *m) {
    Error err;
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!replicas_check(m, &err)) job_stop(&m->job, 0, &err, 1);
}

#endif
