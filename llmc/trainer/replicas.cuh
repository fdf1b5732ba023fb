// replicas.cuh: --debug-replicas compares the weights that several ranks hold alike, bit by bit.
//
// defines: trainer_check_replicas
#ifndef LLMC_REPLICAS_CUH
#define LLMC_REPLICAS_CUH

#include "llmc/trainer.cuh"

// Compares the ranks that hold the same part of the same tensor, by a 64-bit hash (FNV-1a) of its weights. Collective.
// False names the first one that differs.
static inline bool replicas_check(const Trainer *m, Error *err) {
    size_t parts = m->table.shard.t > m->table.shard.e ? m->table.shard.t : m->table.shard.e;
    size_t count = count_tensors(&m->config) * parts;
    uint64_t *hashes = (uint64_t *)host_alloc(count, sizeof(uint64_t));
    memset(hashes, 0xff, count * sizeof(uint64_t));  // not held
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        const floatX *weights = m->w[x->held][x->spec->kind];
        size_t bytes = x->size * sizeof(floatX);
        unsigned char *host = (unsigned char *)host_alloc(bytes, 1);
        CUDA_CHECK(cudaMemcpy(host, weights, bytes, cudaMemcpyDeviceToHost));
        uint64_t *hash = &hashes[x->id * parts + (x->spec->split == SPLIT_NONE ? 0 : x->t_rank)];
        *hash = 0xcbf29ce484222325u;
        for (size_t k = 0; k < bytes; k++) *hash = (*hash ^ host[k]) * 0x100000001b3u;
        free(host);
    }
    size_t i = job_first_difference(hashes, count);
    free(hashes);
    return i == count ||
           error_set(err, "%s differs between the ranks that hold it",
                     tensor_describe(&m->config, i / parts, 1, 0).name);
}

// Checks with nothing queued that writes weights. A difference ends the job.
static inline void trainer_check_replicas(Trainer *m) {
    Error err;
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!replicas_check(m, &err)) job_stop(&m->job, 0, &err, 1);
}

#endif
