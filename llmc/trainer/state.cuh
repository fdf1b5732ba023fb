// state.cuh: what training changes, on the device: weights, gradients, and the optimizer's moments and master weights.
// How they are initialised, loaded, saved and stepped; all of it by walking the parameter table.
//
// defines: State, state_create, state_own, state_layout, state_start, state_save, state_download, state_pieces
#ifndef LLMC_STATE_CUH
#define LLMC_STATE_CUH

#include "llmc/kernels/adamw.cuh"
#include "llmc/trainer/arena.cuh"
#include "llmc/host/checkpoint.h"
#include "llmc/kernels/cuda_common.cuh"
#include "llmc/kernels/global_norm.cuh"
#include "llmc/model.h"
#include "llmc/host/rand.h"

// Flat buffers of one rank, all laid out by its table. The optimizer may own slices of it only (ZeRO). A sharded state
// holds no more than these slices of weights and gradients either, and the trainer gathers buckets elsewhere (FSDP).
typedef struct {
    const ParamTable *table;
    Piece *slices;   // [slice_count], ascending
    size_t slice_count, owned;  // owned: elements of all slices together
    bool sharded;
    Piece *pieces, *host_pieces;  // [piece_count] of tensors that lie in the slices, as params and grads have them
    size_t piece_count;
    floatX *params;  // (total), or (owned) if sharded
    float *grads;    // the same, always fp32: micro-batches accumulate in it
    float *m, *v;    // (owned) first and second moments
    float *master;   // (owned) fp32 weights; NULL when floatX is float, where params are the master weights
} State;

enum { STATE_CHUNK = 16 << 20 };  // elements that pass through the host at a time

// Gives a rank the flat buffer of a table, of which it owns nothing yet.
static inline void state_create(State *state, const ParamTable *table) {
    memset(state, 0, sizeof *state);
    state->table = table;
    state->slices = (Piece *)host_alloc(table->bucket_count, sizeof(Piece));
}

// Makes this rank the owner of `count` elements from lo on, behind all that it owns already.
static inline void state_own(State *state, size_t lo, size_t count) {
    Piece *before = state->slice_count ? &state->slices[state->slice_count - 1] : NULL;
    if (count == 0) return;
    if (before && before->hi == lo) before->hi += count;
    else state->slices[state->slice_count++] = {lo, lo + count, state->owned, 0, 0, false};
    state->owned += count;
}

static inline size_t state_held(const State *state) { return state->sharded ? state->owned : state->table->total; }

// Where params and grads have the first element of a slice.
static inline size_t state_place(const State *state, Piece slice) { return state->sharded ? slice.at : slice.lo; }

static inline void state_layout(State *state, Arena *weights, Arena *gradients, Arena *optimizer) {
    take(weights, state->params, state_held(state));
    take(gradients, state->grads, state_held(state));
    take(optimizer, state->m, state->owned);
    take(optimizer, state->v, state->owned);
    if (sizeof(floatX) != sizeof(float)) take(optimizer, state->master, state->owned);
}

static inline float *state_moments(const State *state, int kind) {
    return kind == STATE_M ? state->m : kind == STATE_V ? state->v : state->master;
}

// Copies `count` elements of a device buffer to host floats, or back. Synchronous.
template <typename T> static inline void state_download(float *host, const T *device, size_t count) {
    T *copy = (T *)host_alloc(count, sizeof(T));
    CUDA_CHECK(cudaMemcpy(copy, device, count * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) host[i] = to_float(copy[i]);
    free(copy);
}

template <typename T> static inline void state_upload(T *device, const float *host, size_t count) {
    T *copy = (T *)host_alloc(count, sizeof(T));
    for (size_t i = 0; i < count; i++) copy[i] = from_float<T>(host[i]);
    CUDA_CHECK(cudaMemcpy(device, copy, count * sizeof(T), cudaMemcpyHostToDevice));
    free(copy);
}

// Makes the model's initial weights of elements [lo, hi). Every element depends on (seed, tensor, its global position)
// alone, so each rank makes its own shard and any layout starts from the same model.
static inline void state_random(const ParamTable *table, float *host, size_t lo, size_t hi, uint64_t seed) {
    SliceWalk walk = {table, lo, hi, 0, 0};
    const Tensor *x;
    memset(host, 0, (hi - lo) * sizeof(float));
    for (Run run; (x = slices_next(&walk, &run)) != NULL;) {
        float *out = host + (x->offset + run.local - lo);
        double stddev = config_spec(&table->config)->stddev;
        if (x->spec->init == INIT_RESIDUAL) stddev /= sqrt(2.0 * (double)table->config.L);
        for (size_t j = 0; j < run.count && x->spec->init == INIT_ONE; j++) out[j] = 1.0f;
        if (x->spec->init == INIT_NORMAL || x->spec->init == INIT_RESIDUAL)
            random_normal_fill(out, seed, x->id, run.global, run.count, stddev);
    }
}

// How many kinds of state a rank has: weights, two moments and perhaps master weights.
static inline int state_kinds(const State *state) { return state->master ? STATE_MASTER + 1 : STATE_MASTER; }

// The state as a run begins: with a checkpoint's weights (--init), also with its optimizer (--resume), or with random
// weights (dir NULL). Without an optimizer moments are 0, and master weights are the weights before they are rounded.
static inline bool state_start(State *state, const char *dir, bool optimizer, uint64_t seed, Error *err) {
    float *host = (float *)host_alloc(STATE_CHUNK, sizeof(float));
    Piece whole = {0, state->table->total, 0, 0, 0, false};
    bool ok = true;
    CUDA_CHECK(cudaMemset(state->grads, 0, state_held(state) * sizeof(float)));
    CUDA_CHECK(cudaMemset(state->m, 0, state->owned * sizeof(float)));
    CUDA_CHECK(cudaMemset(state->v, 0, state->owned * sizeof(float)));
    for (int kind = STATE_WEIGHTS; kind < state_kinds(state); kind++) {
        bool all = kind == STATE_WEIGHTS && !state->sharded;  // every data rank has the weights of all
        if (!optimizer && (kind == STATE_M || kind == STATE_V)) continue;
        for (size_t i = 0; i < (all ? 1 : state->slice_count); i++) {
            Piece slice = all ? whole : state->slices[i];
            for (size_t lo = slice.lo, hi; lo < slice.hi && ok; lo = hi) {
                hi = slice.hi - lo < STATE_CHUNK ? slice.hi : lo + STATE_CHUNK;
                size_t at = slice.at + (lo - slice.lo);
                StateKind of = optimizer ? (StateKind)kind : STATE_WEIGHTS;
                if (dir) ok = checkpoint_read(dir, of, state->table, host, lo, hi, err);
                else state_random(state->table, host, lo, hi, seed);
                if (kind == STATE_WEIGHTS) state_upload(state->params + at, host, hi - lo);
                else state_upload(state_moments(state, kind) + at, host, hi - lo);
            }
        }
    }
    free(host);
    return ok;
}

// Writes what this rank owns into the folder that checkpoint_create has made, or, without sums, its gradients into the
// unfinished file of a dump.
static inline bool state_save(const State *state, const char *path, Checksums *sums, Error *err) {
    float *host = (float *)host_alloc(STATE_CHUNK, sizeof(float));
    bool ok = true;
    for (size_t i = 0; i < state->slice_count; i++) {
        Piece slice = state->slices[i];
        for (int kind = STATE_WEIGHTS; kind < (sums ? state_kinds(state) : STATE_M); kind++) {
            for (size_t lo = slice.lo, hi; lo < slice.hi && ok; lo = hi) {
                hi = slice.hi - lo < STATE_CHUNK ? slice.hi : lo + STATE_CHUNK;
                size_t place = state_place(state, slice) + (lo - slice.lo), at = slice.at + (lo - slice.lo);
                if (!sums) state_download(host, state->grads + place, hi - lo);
                else if (kind == STATE_WEIGHTS) state_download(host, state->params + place, hi - lo);
                else state_download(host, state_moments(state, kind) + at, hi - lo);
                ok = slices_write(path, (StateKind)kind, state->table, host, lo, hi, sums, err);
            }
        }
    }
    free(host);
    return ok;
}

// Lists the pieces, on the host, once all slices are known. Each piece begins a tensor, a slice or both.
static inline void state_pieces(State *state) {
    const ParamTable *table = state->table;
    state->host_pieces = (Piece *)host_alloc(table->count + state->slice_count, sizeof(Piece));
    for (size_t i = 0, first = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        while (first < state->slice_count && state->slices[first].hi <= x->offset) first++;  // both ascend
        for (size_t s = first; s < state->slice_count; s++) {
            Piece slice = state->slices[s];
            size_t lo = x->offset > slice.lo ? x->offset : slice.lo;
            size_t hi = x->offset + x->size < slice.hi ? x->offset + x->size : slice.hi;
            if (lo >= hi) break;  // nor do later slices meet x
            size_t place = state_place(state, slice) + (lo - slice.lo), at = slice.at + (lo - slice.lo);
            bool decays = x->spec->flags & TENSOR_DECAYS;
            state->host_pieces[state->piece_count++] = {place, place + hi - lo, at, i, 0, decays};
        }
    }
}

#endif
