// state.cuh: the state of training on the device: weights, gradients, and the optimizer's
// moments and master weights. Initialises, loads, saves and steps them, all by walking the
// parameter table.
//
// defines: State, state_create, state_own, state_layout, state_initialise, state_start,
//          state_save, state_download
#ifndef LLMC_STATE_CUH
#define LLMC_STATE_CUH

#include "llmc/kernels/adamw.cuh"
#include "llmc/trainer/arena.cuh"
#include "llmc/host/checkpoint.h"
#include "llmc/kernels/cuda_common.cuh"
#include "llmc/kernels/global_norm.cuh"
#include "llmc/model.h"
#include "llmc/host/rand.h"

// Flat buffers of one rank, all laid out by its table. The optimizer may own slices of it
// only (ZeRO). A sharded state holds no more than these slices of weights and gradients
// either, and the trainer gathers buckets elsewhere (FSDP).
typedef struct {
    const ParamTable *table;
    bool sharded;
    size_t owned;  // elements of all slices together
    // [piece_count] of tensors that lie in the slices, ascending
    Piece *pieces, *host_pieces;
    size_t piece_count;
    floatX *params;  // (total), or (owned) if sharded
    float *grads;    // the same, always fp32: micro-batches accumulate in it
    size_t momenta;  // of the owned elements, the last ones: they have no second moment
    float *m, *v;    // (owned), (owned - momenta) first and second moments
    float *master;  // (owned) fp32 weights; NULL when floatX is float, where params are the
                    // master weights
} State;

// Gives a rank the flat buffer of a table; the rank owns nothing of it yet. Each piece
// begins a tensor, a slice or both; a bucket has one slice at most.
static inline void state_create(State *state, const ParamTable *table) {
    memset(state, 0, sizeof *state);
    state->table = table;
    state->host_pieces =
        (Piece *)host_alloc(table->count + table->bucket_count, sizeof(Piece));
}

// Makes this rank the owner of `count` elements from lo on, behind all that it owns
// already.
static inline void state_own(State *state, size_t lo, size_t count) {
    const ParamTable *table = state->table;
    size_t hi = lo + count;
    size_t i = state->piece_count ? state->host_pieces[state->piece_count - 1].tensor : 0;
    for (; i < table->count && table->tensors[i].offset < hi; i++) {
        const Tensor *x = &table->tensors[i];
        size_t begin = x->offset > lo ? x->offset : lo;
        size_t end = x->offset + x->size < hi ? x->offset + x->size : hi;
        if (begin >= end) continue;
        size_t at = state->owned + (begin - lo), place = state->sharded ? at : begin;
        bool decays = x->spec->flags & TENSOR_DECAYS;
        state->host_pieces[state->piece_count++] = {place,  place + end - begin, at, i, 0,
                                                    decays, begin - x->offset};
    }
    state->owned += count;
}

static inline size_t state_held(const State *state) {
    return state->sharded ? state->owned : state->table->total;
}

static inline void state_layout(State *state, Arena *weights, Arena *gradients,
                                Arena *optimizer) {
    take(weights, state->params, state_held(state));
    take(gradients, state->grads, state_held(state));
    take(optimizer, state->m, state->owned);
    take(optimizer, state->v, state->owned - state->momenta);
    if (sizeof(floatX) != sizeof(float)) take(optimizer, state->master, state->owned);
}

static inline float *state_moments(const State *state, int kind) {
    return kind == STATE_M ? state->m : kind == STATE_V ? state->v : state->master;
}

// Calls each(i) for i < count, with all cores if they are many.
template <class Each>
static inline void state_each(size_t count, Each each) {
#ifdef _OPENMP
#pragma omp parallel for if (count > 65536)
#endif
    for (size_t i = 0; i < count; i++) each(i);
}

// Copies `count` elements of a device buffer to host floats, or back. Synchronous.
template <typename T>
static inline void state_download(float *host, const T *device, size_t count) {
    T *copy = (T *)host_alloc(count, sizeof(T));
    CUDA_CHECK(cudaMemcpy(copy, device, count * sizeof(T), cudaMemcpyDeviceToHost));
    state_each(count, [&](size_t i) { host[i] = to_float(copy[i]); });
    free(copy);
}

template <typename T>
static inline void state_upload(T *device, const float *host, size_t count) {
    T *copy = (T *)host_alloc(count, sizeof(T));
    state_each(count, [&](size_t i) { copy[i] = from_float<T>(host[i]); });
    CUDA_CHECK(cudaMemcpy(device, copy, count * sizeof(T), cudaMemcpyHostToDevice));
    free(copy);
}

// Makes the initial weights of elements [lo, hi) of a tensor's part. Every element depends
// on (seed, tensor, its global position) alone, so each rank makes its own shard and any
// layout starts from the same model.
static inline void state_random(const GPTConfig *config, const Tensor *x, float *host,
                                size_t lo, size_t hi, uint64_t seed) {
    double stddev = config_spec(config)->stddev;
    if (x->spec->init == INIT_RESIDUAL) stddev /= sqrt(2.0 * (double)config->L);
    Run run;
    state_each(hi - lo, [&](size_t i) { host[i] = 0.0f; });
    for (size_t i = 0; tensor_run(x, i, lo, hi, &run); i++) {
        float *out = host + (run.local - lo);
        for (size_t j = 0; j < run.count && x->spec->init == INIT_ONE; j++) out[j] = 1.0f;
        if (x->spec->init == INIT_NORMAL || x->spec->init == INIT_RESIDUAL)
            random_normal_fill(out, seed, x->id, run.global, run.count, stddev);
    }
}

// Makes the initial weights, and their master copies before they are rounded. Each is made
// once, with all cores: a billion takes a core a minute.
static inline void state_initialise(State *state, float *host, uint64_t seed) {
    const ParamTable *table = state->table;
    for (size_t i = 0, next = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        if (!state->sharded) {  // every data rank has the weights of all
            state_random(&table->config, x, host, 0, x->size, seed);
            state_upload(state->params + x->offset, host, x->size);
        }
        for (; next < state->piece_count && state->host_pieces[next].tensor == i; next++) {
            Piece piece = state->host_pieces[next];
            size_t n = piece.hi - piece.lo;
            if (state->sharded) {
                state_random(&table->config, x, host, piece.first, piece.first + n, seed);
                state_upload(state->params + piece.lo, host, n);
            }
            if (state->master)
                state_upload(state->master + piece.at,
                             host + (state->sharded ? 0 : piece.first), n);
        }
    }
}

// Returns the number of kinds of state: weights, two moments and perhaps master weights.
static inline int state_kinds(const State *state) {
    return state->master ? STATE_MASTER + 1 : STATE_MASTER;
}

// Sets the state at the beginning of a run: a checkpoint's weights (--init), also its
// optimizer (--resume), or random weights (dir NULL). Without an optimizer moments are 0,
// and master weights are the weights before they are rounded.
static inline bool state_start(State *state, const char *dir, bool optimizer, uint64_t seed,
                               Error *err) {
    const ParamTable *table = state->table;
    float *host = (float *)host_alloc(table->largest, sizeof(float));
    bool ok = true;
    CUDA_CHECK(cudaMemset(state->params, 0, state_held(state) * sizeof(floatX)));
    CUDA_CHECK(cudaMemset(state->grads, 0, state_held(state) * sizeof(float)));
    CUDA_CHECK(cudaMemset(state->m, 0, state->owned * sizeof(float)));
    CUDA_CHECK(cudaMemset(state->v, 0, (state->owned - state->momenta) * sizeof(float)));
    if (!dir) state_initialise(state, host, seed);
    for (int kind = STATE_WEIGHTS; dir && kind < state_kinds(state) && ok; kind++) {
        // Every data rank has the weights of all.
        bool all = kind == STATE_WEIGHTS && !state->sharded;
        StateKind of = optimizer ? (StateKind)kind : STATE_WEIGHTS;
        SafeTensors st = {};
        if (!optimizer && (kind == STATE_M || kind == STATE_V)) continue;
        ok = state_open(&st, dir, of, O_RDONLY, err);
        for (size_t i = 0; i < (all ? table->count : state->piece_count) && ok; i++) {
            const Tensor *x = &table->tensors[all ? i : state->host_pieces[i].tensor];
            if (!state_has(x, of)) continue;
            Piece piece = all ? Piece{x->offset, x->offset + x->size, 0, i, 0, false, 0}
                              : state->host_pieces[i];
            size_t n = piece.hi - piece.lo;
            ok = slices_read(&st, x, of, host, piece.first, piece.first + n, err);
            if (kind == STATE_WEIGHTS)
                state_upload(state->params + piece.lo, host, n);
            else
                state_upload(state_moments(state, kind) + piece.at, host, n);
        }
        st_close(&st);
    }
    free(host);
    return ok;
}

// Writes the tensors that this rank owns into the folder that checkpoint_create has made.
// Without sums, writes its gradients into the unfinished file of a dump. Waits until they
// are on the disk.
static inline bool state_save(const State *state, const char *path, Checksums *sums,
                              Error *err) {
    float *host = (float *)host_alloc(state->table->largest, sizeof(float));
    bool ok = true;
    for (int kind = STATE_WEIGHTS; kind < (sums ? state_kinds(state) : STATE_M) && ok;
         kind++) {
        SafeTensors st = {};
        ok = sums ? state_open(&st, path, (StateKind)kind, O_RDWR, err)
                  : st_open(&st, path, O_RDWR, err);
        for (size_t i = 0; i < state->piece_count && ok; i++) {
            Piece piece = state->host_pieces[i];
            const Tensor *x = &state->table->tensors[piece.tensor];
            size_t n = piece.hi - piece.lo;
            if (!state_has(x, (StateKind)kind)) continue;
            if (!sums)
                state_download(host, state->grads + piece.lo, n);
            else if (kind == STATE_WEIGHTS)
                state_download(host, state->params + piece.lo, n);
            else
                state_download(host, state_moments(state, kind) + piece.at, n);
            ok = slices_write(&st, x, (StateKind)kind, host, piece.first, piece.first + n,
                              sums, err);
        }
        ok = ok && (fsync(st.files[0]) == 0 ||
                    error_set(err, "cannot write %s: %s", st.path, strerror(errno)));
        st_close(&st);
    }
    free(host);
    return ok;
}

#endif
