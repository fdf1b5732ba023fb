// test_nccl_replicas.cu: replicas_check finds equal weights equal, and a single bit that differs on a single rank.
// Started by mpirun with two ranks or more; dev/test/run_nccl.sh runs it.
#include "llmc/trainer/replicas.cuh"

#include "dev/test/check.h"

// One call by all ranks, of which the last has bit `bit` of element `element` turned over while it lasts.
// `names`: a part of what must be said, or NULL where all must be well. True if all ranks saw what they should.
static bool seen_by_all(const Job *job, State *state, const ParamTable *table, Replicas which, size_t element,
                        unsigned char bit, const char *names, cudaStream_t stream) {
    unsigned char *byte = (unsigned char *)(state->params + element), value;
    bool flips = bit && job->rank == job->size - 1;
    Error err = {""};
    if (flips) {
        CUDA_CHECK(cudaMemcpy(&value, byte, 1, cudaMemcpyDeviceToHost));
        value ^= bit;
        CUDA_CHECK(cudaMemcpy(byte, &value, 1, cudaMemcpyHostToDevice));
    }
    bool same = replicas_check(state, table, which, job->world, "test", stream, &err);
    if (flips) {
        value ^= bit;
        CUDA_CHECK(cudaMemcpy(byte, &value, 1, cudaMemcpyHostToDevice));
    }
    int mine = same == !names && (same || strstr(err.text, names)), all;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    Job job;
    Check c = {0, 0};
    State state;
    cudaStream_t stream;
    job_start(&job, &argc, &argv);
    job_connect(&job);
    CUDA_CHECK(cudaStreamCreate(&stream));
    const size_t layers[] = {0, 1};
    GPTConfig g = {2, 16, 2, 61, padded_vocabulary(61), 8};
    Shard shard = {2, 0, true, true, 2, layers, 0};
    ParamTable table = table_make(&g, &shard);
    state_create(&state, &table, 1, 0);
    CUDA_CHECK(cudaMalloc((void **)&state.params, table.total * sizeof(floatX)));
    CUDA_CHECK(cudaMemset(state.params, 0x3c, table.total * sizeof(floatX)));
    size_t wte = table_offset(&table, WTE, 0), norm = table_offset(&table, LN2B, 1),
           split = table_offset(&table, FCW, 1);

    static const struct { Replicas which; const char *text; } WHICH[] = {
        {REPLICAS_UNSPLIT, "tensor ranks"}, {REPLICAS_TIED, "embedding ranks"}, {REPLICAS_ALL, "data ranks"}};
    for (int i = 0; i < 3; i++) {
        Replicas which = WHICH[i].which;
        check(&c, seen_by_all(&job, &state, &table, which, 0, 0, NULL, stream), "%s: equal weights are equal",
              WHICH[i].text);
        const char *says = which == REPLICAS_TIED ? NULL : "h.1.ln_2.bias";
        check(&c, seen_by_all(&job, &state, &table, which, norm + 3, 1, says, stream),
              "%s: a bit of a tensor that is not split, \"layernorm drift\": %s", WHICH[i].text,
              says ? "seen" : "not theirs");
        says = which == REPLICAS_ALL ? "h.1.mlp.c_fc.weight" : NULL;
        check(&c, seen_by_all(&job, &state, &table, which, split, 128, says, stream), "%s: a bit of a split tensor: %s",
              WHICH[i].text, says ? "seen" : "not theirs");
        says = which == REPLICAS_UNSPLIT ? NULL : "wte.weight";
        check(&c, seen_by_all(&job, &state, &table, which, wte + 5, 2, says, stream), "%s: a bit of the embedding: %s",
              WHICH[i].text, says ? "seen" : "not theirs");
    }
    CUDA_CHECK(cudaFree(state.params));
    CUDA_CHECK(cudaStreamDestroy(stream));
    free(state.slices);
    table_free(&table);
    int code = check_summary(&c);
    job_finish(&job);
    return code;
}
