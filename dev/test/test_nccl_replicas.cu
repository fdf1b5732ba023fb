// test_nccl_replicas.cu: replicas_check finds equal weights equal, and a single bit that differs
// on a single rank. Started by mpirun with two ranks or more; dev/test/run_nccl.sh runs it.
#include "llmc/trainer/ranks.cuh"

#include "dev/test/check.h"

// Compares replicas on all ranks while the last rank has bit `bit` of element `element` flipped.
// Expects a message with the part `names`, or none if it is NULL. Returns true if all ranks saw
// the expected result.
static bool seen_by_all(Trainer *m, size_t element, unsigned char bit, const char *names) {
    unsigned char *byte = (unsigned char *)(m->state.params + element), value;
    bool flips = bit && m->job.rank == m->job.size - 1;
    Error err = {""};
    if (flips) {
        CUDA_CHECK(cudaMemcpy(&value, byte, 1, cudaMemcpyDeviceToHost));
        value ^= bit;
        CUDA_CHECK(cudaMemcpy(byte, &value, 1, cudaMemcpyHostToDevice));
    }
    bool same = replicas_check(m, &err);
    if (flips) {
        value ^= bit;
        CUDA_CHECK(cudaMemcpy(byte, &value, 1, cudaMemcpyHostToDevice));
    }
    int mine = same == !names && (same || strstr(err.text, names)), all;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    static Trainer trainer, *m = &trainer;
    Check c = {0, 0};
    job_start(&m->job, &argc, &argv);
    job_connect(&m->job);
    CUDA_CHECK(cudaStreamCreate(&m->stream));
    m->config = {2, 16, 2, 61, padded_vocabulary(61), 8, NULL};
    Shard part = shard_whole(&m->config);
    part.t = 2;
    trainer_shard(m, part);
    CUDA_CHECK(cudaMalloc((void **)&m->state.params, m->table.total * sizeof(floatX)));
    CUDA_CHECK(cudaMemset(m->state.params, 0x3c, m->table.total * sizeof(floatX)));
    host_array(m->w, m->config.L);
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        m->w[x->held][x->spec->kind] = m->state.params + x->offset;
    }
    size_t wte = table_find(&m->table, WTE, 0)->offset,
           norm = table_find(&m->table, LN2B, 1)->offset,
           split = table_find(&m->table, FCW, 1)->offset;

    for (int alone = 0; alone < 2;
         alone++) {  // the last rank has a part of its own, or all have the same
        const char *what = alone ? "another tensor rank" : "a data rank";
        bool last = m->job.rank == m->job.size - 1;
        for (size_t i = 0; i < m->table.count; i++) m->table.tensors[i].t_rank = alone && last;
        check(&c, seen_by_all(m, 0, 0, NULL), "%s: equal weights are equal", what);
        check(&c, seen_by_all(m, norm + 3, 1, "h.1.ln_2.bias"),
              "%s: a bit of a tensor that is not split, "
              "\"layernorm drift\": seen",
              what);
        check(&c, seen_by_all(m, split, 128, alone ? NULL : "h.1.mlp.c_fc.weight"),
              "%s: a bit of a split tensor: %s", what, alone ? "not theirs" : "seen");
        check(&c, seen_by_all(m, wte + 5, 2, alone ? NULL : "wte.weight"),
              "%s: a bit of the embedding: %s", what, alone ? "not theirs" : "seen");
    }
    CUDA_CHECK(cudaFree(m->state.params));
    free(m->w);
    free(m->state.host_pieces);
    free(m->share.host_pieces);
    table_free(&m->table);
    int code = check_summary(&c);
    job_finish(&m->job);
    return code;
}
