// model_muon.h: which tensors of GPT-2 Muon updates, and how they are dealt to data ranks.
// lesson: muon
//
// defines: MUON_KINDS, LAYER_MATRICES, MuonSpec, muon_spec, muon_updates, MuonMatrix,
//          muon_parts, muon_part, muon_flops, MuonBlock, muon_blocks, muon_deal
#ifndef LLMC_MODEL_MUON_H
#define LLMC_MODEL_MUON_H

#include "llmc/model.h"

// The matrices of a layer, in memory order. Embeddings, biases and norms are none of them.
static const TensorKind MUON_KINDS[] = {QKVW, PROJW, FCW, FCPROJW};
enum { LAYER_MATRICES = sizeof MUON_KINDS / sizeof MUON_KINDS[0] };

// The spec, with tensors of its own. It must outlive every configuration that names it.
typedef struct {
    ModelSpec model;
    TensorSpec tensors[NUM_KINDS];
} MuonSpec;

// Makes the spec in place: model points to its tensors.
static inline void muon_spec(MuonSpec *spec) {
    spec->model = GPT2;
    memcpy(spec->tensors, GPT2_TENSORS, sizeof spec->tensors);
    spec->model.tensors = spec->tensors;
    for (size_t i = 0; i < LAYER_MATRICES; i++)
        spec->tensors[MUON_KINDS[i]].flags |= TENSOR_MUON;
}

static inline bool muon_updates(const Tensor *x) {
    return x->spec->flags & TENSOR_MUON;
}

// A matrix inside a tensor: its element (r, c) is the tensor's element r * stride + first +
// c.
typedef struct {
    size_t rows, cols, stride, first;
} MuonMatrix;

// Returns the number of matrices in a tensor: q, k and v lie side by side in one.
static inline size_t muon_parts(const Tensor *x) {
    return x->spec->kind == QKVW ? 3 : 1;
}
static inline MuonMatrix muon_part(const Tensor *x, size_t part) {
    size_t cols = x->cols / muon_parts(x);
    MuonMatrix matrix = {x->rows, cols, x->cols, part * cols};
    return matrix;
}

// Returns the FLOPs of the products of one step of Newton-Schulz.
static inline double muon_flops(MuonMatrix matrix) {
    double rows = (double)matrix.rows, cols = (double)matrix.cols;
    double m = rows < cols ? rows : cols, n = rows < cols ? cols : rows;
    return 4.0 * m * m * n + 2.0 * m * m * m;
}

// A matrix's tensor and the vectors beside it: elements [lo, hi) of the flat buffers.
typedef struct {
    size_t lo, hi;
    double cost;  // FLOPs of a step of Newton-Schulz
    int owner;    // the data rank that updates it; -1: not dealt yet
} MuonBlock;

// Cuts each layer's bucket into LAYER_MATRICES blocks: before each matrix but the first.
// Returns [L][LAYER_MATRICES], in memory order. The caller frees it.
static inline MuonBlock *muon_blocks(const ParamTable *table) {
    size_t L = table->config.L;
    MuonBlock *blocks = (MuonBlock *)host_alloc(L * LAYER_MATRICES, sizeof(MuonBlock));
    MuonBlock *block = blocks;
    for (size_t l = 0; l < L; l++) {
        const size_t *bucket = &table->buckets[BUCKET_LAYERS + l];
        for (size_t i = 0; i < LAYER_MATRICES; i++, block++) {
            const Tensor *x = table_find(table, MUON_KINDS[i], l);
            block->lo = i == 0 ? bucket[0] : x->offset;
            block->hi = bucket[1];
            block->owner = -1;
            if (i > 0) block[-1].hi = x->offset;
            for (size_t part = 0; part < muon_parts(x); part++)
                block->cost += muon_flops(muon_part(x, part));
        }
    }
    return blocks;
}

// Deals `count` blocks to d ranks: the most expensive one that is left goes to the rank with
// the least cost so far (Graham 1969).
static inline void muon_deal(MuonBlock *blocks, size_t count, size_t d) {
    double *load = (double *)host_alloc(d, sizeof(double));
    for (size_t dealt = 0; dealt < count; dealt++) {
        MuonBlock *next = NULL;
        for (MuonBlock *b = blocks; b < blocks + count; b++) {
            if (b->owner < 0 && (!next || b->cost > next->cost)) next = b;
        }
        size_t least = 0;
        for (size_t rank = 1; rank < d; rank++) {
            if (load[rank] < load[least]) least = rank;
        }
        next->owner = (int)least;
        load[least] += next->cost;
    }
    free(load);
}

#endif
