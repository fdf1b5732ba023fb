// model.h: a GPT-2's configuration, THE parameter table, and its parameter and FLOP counts.
//
// The table is the only place that knows which tensors exist, how they are named, shaped, split over
// tensor ranks, initialised and decayed, and where each stands in a rank's flat buffer. Initialisation,
// checkpoints, gradient dumps, the optimizer, ZeRO slices and the gradient norm all walk this table.
//
// defines: GPTConfig, padded_vocabulary, Split, Init, TensorKind, Shard, shard_whole, Tensor, TENSOR_SPECS,
//          is_layernorm,
//          tensor_describe, tensor_by_id, ParamTable, table_make, table_make_tensor, table_make_whole, table_free,
//          table_find, table_offset, table_largest, Run, tensor_run_count, tensor_run, count_tensors,
//          count_parameters, count_flops, count_flops_llmc
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "llmc/host/memory.h"

typedef struct {
    size_t L, C, NH;  // layers, channels, heads (head size HS = C / NH)
    size_t V, Vp;     // vocabulary, and the same padded to a multiple of 128 whatever the layout is
    size_t maxT;      // longest sequence: rows of the position embedding
} GPTConfig;

static inline size_t round_up(size_t x, size_t multiple) { return (x + multiple - 1) / multiple * multiple; }
static inline size_t padded_vocabulary(size_t V) { return round_up(V, 128); }

// How a tensor of shape [rows, cols] is cut over t tensor ranks.
typedef enum {
    SPLIT_NONE,     // replicated
    SPLIT_COLUMNS,  // each rank has cols / t columns
    SPLIT_QKV,      // columns are q|k|v, and each of the three parts is cut
    SPLIT_ROWS,     // each rank has rows / t rows
    SPLIT_VOCAB,    // each rank has Vp / t rows; files have only rows below V
} Split;

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } Init;  // N(0, 0.02); residual: / sqrt(2L)

// Kinds in memory order: LN1W .. FCPROJB repeat for every layer.
typedef enum {
    WTE, WPE,
    LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB,
    LNFW, LNFB,
    NUM_KINDS
} TensorKind;

enum { TENSORS_PER_LAYER = LNFW - LN1W, TENSOR_ALIGN = 64 };  // every tensor starts at a multiple of 64 elements

// The part of the model that one rank holds.
typedef struct {
    size_t t, t_rank;      // tensor size and rank
    bool embedding, head;  // holds wte and wpe (first stage); holds ln_f and wte (last stage)
    size_t n_layers;
    const size_t *layers;  // [n_layers] global layer numbers in the order of memory; NULL: 0, 1, 2, ...
    size_t bucket_align;   // buckets start at multiples of this many elements (0: as tensors do)
} Shard;

typedef struct {
    char name[40];       // Hugging Face's name without the prefix "transformer."
    TensorKind kind;
    size_t layer;        // global layer number; 0 outside the layers
    size_t id;           // position in the table of the unsharded model: keys random numbers, orders sums
    int dims;            // 1 or 2; with 1, rows is 1
    size_t rows, cols;   // global shape, as in files
    size_t lrows, lcols; // this rank's shape, as in memory (wte: padded rows)
    size_t offset, size; // elements: place in the rank's flat buffer, and lrows * lcols
    Split split;
    size_t t, t_rank;
    bool decay;          // weight decay: matrices and embeddings
    Init init;
    bool counted;        // this rank adds its squared norm: one of the ranks that hold the tensor
} Tensor;

typedef struct {
    GPTConfig config;
    Shard shard;     // shard.layers points to the copy below
    size_t *layers;
    size_t count;    // tensors
    size_t total;    // elements of the flat buffer, gaps of the alignment included
    Tensor *tensors; // [count] in memory order
    size_t first_layer_tensor;
    size_t *buckets; // [n_layers + 3] starts of the gradient buckets: embeddings, each layer, ln_f; then total
} ParamTable;

typedef struct {
    const char *name;  // %zu stands for the layer
    int dims;
    char rows, cols;   // '1', 'V', 'T' (maxT), 'C', 'Q' (3C), 'F' (4C)
    Split split;
    bool decay;
    Init init;
} TensorSpec;

static const TensorSpec TENSOR_SPECS[NUM_KINDS] = {  // in the order of TensorKind
    {"wte.weight",               2, 'V', 'C', SPLIT_VOCAB,   true,  INIT_NORMAL},
    {"wpe.weight",               2, 'T', 'C', SPLIT_NONE,    true,  INIT_NORMAL},
    {"h.%zu.ln_1.weight",        1, '1', 'C', SPLIT_NONE,    false, INIT_ONE},
    {"h.%zu.ln_1.bias",          1, '1', 'C', SPLIT_NONE,    false, INIT_ZERO},
    {"h.%zu.attn.c_attn.weight", 2, 'C', 'Q', SPLIT_QKV,     true,  INIT_NORMAL},
    {"h.%zu.attn.c_attn.bias",   1, '1', 'Q', SPLIT_QKV,     false, INIT_ZERO},
    {"h.%zu.attn.c_proj.weight", 2, 'C', 'C', SPLIT_ROWS,    true,  INIT_RESIDUAL},
    {"h.%zu.attn.c_proj.bias",   1, '1', 'C', SPLIT_NONE,    false, INIT_ZERO},
    {"h.%zu.ln_2.weight",        1, '1', 'C', SPLIT_NONE,    false, INIT_ONE},
    {"h.%zu.ln_2.bias",          1, '1', 'C', SPLIT_NONE,    false, INIT_ZERO},
    {"h.%zu.mlp.c_fc.weight",    2, 'C', 'F', SPLIT_COLUMNS, true,  INIT_NORMAL},
    {"h.%zu.mlp.c_fc.bias",      1, '1', 'F', SPLIT_COLUMNS, false, INIT_ZERO},
    {"h.%zu.mlp.c_proj.weight",  2, 'F', 'C', SPLIT_ROWS,    true,  INIT_RESIDUAL},
    {"h.%zu.mlp.c_proj.bias",    1, '1', 'C', SPLIT_NONE,    false, INIT_ZERO},
    {"ln_f.weight",              1, '1', 'C', SPLIT_NONE,    false, INIT_ONE},
    {"ln_f.bias",                1, '1', 'C', SPLIT_NONE,    false, INIT_ZERO},
};

static inline bool is_layernorm(TensorKind kind) {
    return kind == LN1W || kind == LN1B || kind == LN2W || kind == LN2B || kind == LNFW || kind == LNFB;
}

static inline size_t config_dimension(const GPTConfig *g, char letter) {
    switch (letter) {
        case 'V': return g->V;
        case 'T': return g->maxT;
        case 'C': return g->C;
        case 'Q': return 3 * g->C;
        case 'F': return 4 * g->C;
        default: return 1;
    }
}

// Describes tensor `kind` of global layer `layer` as tensor rank t_rank of t holds it; offset is left at 0.
static inline Tensor tensor_describe(const GPTConfig *g, TensorKind kind, size_t layer, size_t t, size_t t_rank) {
    const TensorSpec *spec = &TENSOR_SPECS[kind];
    Tensor x;
    memset(&x, 0, sizeof x);
    x.kind = kind;
    x.layer = layer;
    size_t before = kind < LN1W ? 0 : kind < LNFW ? layer : g->L;  // layers that come before it
    x.id = kind < LN1W   ? (size_t)kind
           : kind < LNFW ? 2 + before * TENSORS_PER_LAYER + (size_t)(kind - LN1W)
                         : 2 + before * TENSORS_PER_LAYER + (size_t)(kind - LNFW);
    bool in_layer = kind >= LN1W && kind < LNFW;
    const char *number = strstr(spec->name, "%zu");
    if (in_layer) {
        snprintf(x.name, sizeof x.name, "%.*s%zu%s", (int)(number - spec->name), spec->name, layer, number + 3);
    } else {
        snprintf(x.name, sizeof x.name, "%s", spec->name);
    }
    x.dims = spec->dims;
    x.rows = config_dimension(g, spec->rows);
    x.cols = config_dimension(g, spec->cols);
    x.split = spec->split;
    x.t = t;
    x.t_rank = t_rank;
    x.decay = spec->decay;
    x.init = spec->init;
    x.lrows = x.split == SPLIT_ROWS ? x.rows / t : x.split == SPLIT_VOCAB ? g->Vp / t : x.rows;
    x.lcols = x.split == SPLIT_COLUMNS || x.split == SPLIT_QKV ? x.cols / t : x.cols;
    x.size = x.lrows * x.lcols;
    return x;
}

// Returns the part that one rank holds alone: all of the model.
static inline Shard shard_whole(const GPTConfig *g) {
    Shard whole = {1, 0, true, true, g->L, NULL, 0};
    return whole;
}

// Builds the table of one rank. C, NH, 4C and Vp must be divisible by t (the trainer has checked).
static inline ParamTable table_make(const GPTConfig *g, const Shard *shard) {
    ParamTable table;
    memset(&table, 0, sizeof table);
    table.config = *g;
    table.shard = *shard;
    table.layers = (size_t *)host_alloc(shard->n_layers, sizeof(size_t));
    table.tensors = (Tensor *)host_alloc(4 + shard->n_layers * TENSORS_PER_LAYER, sizeof(Tensor));
    table.buckets = (size_t *)host_alloc(shard->n_layers + 3, sizeof(size_t));
    for (size_t i = 0; i < shard->n_layers; i++) table.layers[i] = shard->layers ? shard->layers[i] : i;
    table.shard.layers = table.layers;
    size_t n = 0;
    if (shard->embedding || shard->head) table.tensors[n++] = tensor_describe(g, WTE, 0, shard->t, shard->t_rank);
    if (shard->embedding) table.tensors[n++] = tensor_describe(g, WPE, 0, shard->t, shard->t_rank);
    table.first_layer_tensor = n;
    for (size_t i = 0; i < shard->n_layers; i++) {
        for (int kind = LN1W; kind < LNFW; kind++) {
            table.tensors[n++] = tensor_describe(g, (TensorKind)kind, table.layers[i], shard->t, shard->t_rank);
        }
    }
    if (shard->head) {
        table.tensors[n++] = tensor_describe(g, LNFW, 0, shard->t, shard->t_rank);
        table.tensors[n++] = tensor_describe(g, LNFB, 0, shard->t, shard->t_rank);
    }
    table.count = n;
    size_t align = shard->bucket_align ? shard->bucket_align : (size_t)TENSOR_ALIGN;
    for (size_t i = 0, bucket = 0; i <= n; i++) {
        const Tensor *x = &table.tensors[i];
        size_t in = i == n ? shard->n_layers + 2 : x->kind < LN1W ? 0 : x->kind >= LNFW ? shard->n_layers + 1
                    : 1 + (i - table.first_layer_tensor) / TENSORS_PER_LAYER;  // the bucket that tensor i is in
        while (bucket <= in) {
            table.total = round_up(table.total, align);
            table.buckets[bucket++] = table.total;
        }
        if (i == n) break;
        table.tensors[i].offset = table.total;
        // Tensor ranks hold whole tensors alike, and the first and the last stage wte.
        bool first_rank = x->split != SPLIT_NONE || shard->t_rank == 0;
        bool first_stage = x->kind != WTE || shard->embedding;
        table.tensors[i].counted = first_rank && first_stage;
        table.total = round_up(table.total + x->size, TENSOR_ALIGN);
    }
    return table;
}

// Tensor `id` of the unsharded model.
static inline Tensor tensor_by_id(const GPTConfig *g, size_t id) {
    size_t in_layers = id - 2, layer = in_layers / TENSORS_PER_LAYER;
    bool inside = id >= 2 && layer < g->L;
    size_t kind = id < 2   ? id
                  : inside ? (size_t)LN1W + in_layers % TENSORS_PER_LAYER
                           : (size_t)LNFW + in_layers - g->L * TENSORS_PER_LAYER;
    return tensor_describe(g, (TensorKind)kind, inside ? layer : 0, 1, 0);
}

// How many tensors the unsharded model has.
static inline size_t count_tensors(const GPTConfig *g) { return 4 + g->L * TENSORS_PER_LAYER; }

// The table of all layers, as tensor rank t_rank of t holds them.
static inline ParamTable table_make_tensor(const GPTConfig *g, size_t t, size_t t_rank) {
    Shard shard = shard_whole(g);
    shard.t = t, shard.t_rank = t_rank;
    return table_make(g, &shard);
}

// The table of the whole model on one rank.
static inline ParamTable table_make_whole(const GPTConfig *g) { return table_make_tensor(g, 1, 0); }

static inline void table_free(ParamTable *table) {
    free(table->tensors);
    free(table->layers);
    free(table->buckets);
    memset(table, 0, sizeof *table);
}

// The tensor of a kind; l counts the layers that this rank holds and is ignored outside them. NULL if not held.
static inline const Tensor *table_find(const ParamTable *table, TensorKind kind, size_t l) {
    if (kind >= LN1W && kind < LNFW) {
        return l < table->shard.n_layers
                   ? &table->tensors[table->first_layer_tensor + l * TENSORS_PER_LAYER + (size_t)(kind - LN1W)]
                   : NULL;
    }
    size_t behind = table->first_layer_tensor + table->shard.n_layers * TENSORS_PER_LAYER;
    for (size_t i = kind < LN1W ? 0 : behind; i < (kind < LN1W ? table->first_layer_tensor : table->count); i++) {
        if (table->tensors[i].kind == kind) return &table->tensors[i];
    }
    return NULL;
}

// Elements from the start of the flat buffer to a tensor that the rank holds.
static inline size_t table_offset(const ParamTable *table, TensorKind kind, size_t l) {
    return table_find(table, kind, l)->offset;
}

// Elements of the largest tensor that the rank holds.
static inline size_t table_largest(const ParamTable *table) {
    size_t largest = 0;
    for (size_t i = 0; i < table->count; i++) {
        if (table->tensors[i].size > largest) largest = table->tensors[i].size;
    }
    return largest;
}

// A run: `count` elements that are contiguous both in this rank's memory and in the unsharded tensor.
typedef struct {
    size_t local;   // element of the rank's part of the tensor (add Tensor.offset for the flat buffer)
    size_t global;  // element of the unsharded tensor, as in files
    size_t count;
} Run;

// How many runs the rank's part of a tensor consists of.
static inline size_t tensor_run_count(const Tensor *x) {
    return x->split == SPLIT_COLUMNS ? x->rows : x->split == SPLIT_QKV ? 3 * x->rows : 1;
}

// Run i of the rank's part. The padding of the vocabulary is in no run; count can be 0.
static inline Run tensor_run(const Tensor *x, size_t i) {
    Run run = {0, 0, x->size};
    if (x->split == SPLIT_COLUMNS) {
        run.local = i * x->lcols;
        run.global = i * x->cols + x->t_rank * x->lcols;
        run.count = x->lcols;
    } else if (x->split == SPLIT_QKV) {
        size_t row = i / 3, part = i % 3, width = x->lcols / 3;  // width of this rank's q (or k, or v)
        run.local = row * x->lcols + part * width;
        run.global = row * x->cols + part * (x->cols / 3) + x->t_rank * width;
        run.count = width;
    } else if (x->split == SPLIT_ROWS) {
        run.global = x->t_rank * x->size;
    } else if (x->split == SPLIT_VOCAB) {
        size_t first = x->t_rank * x->lrows;
        size_t rows = first >= x->rows ? 0 : x->rows - first < x->lrows ? x->rows - first : x->lrows;
        run.global = rows ? first * x->cols : 0;
        run.count = rows * x->cols;
    }
    return run;
}

// Parameters as the literature counts them: unpadded, the tied embedding once.
static inline size_t count_parameters(const GPTConfig *g) {
    return g->V * g->C + g->maxT * g->C + g->L * (12 * g->C * g->C + 13 * g->C) + 2 * g->C;
}

// FLOPs of one step over `tokens` tokens in sequences of T (Narayanan et al. 2021, section 5.1, without
// recomputation): 72 B T L C^2 (1 + T/(6C) + V/(12 L C)). MFU counts these whatever is recomputed. Attention counts as
// if every token saw all T.
static inline double count_flops(const GPTConfig *g, double tokens, size_t T) {
    double C = (double)g->C, L = (double)g->L;
    return 72.0 * tokens * L * C * C * (1.0 + (double)T / (6.0 * C) + (double)g->V / (12.0 * L * C));
}

// The same as llm.c counts them: 6 for each parameter, the vocabulary's padding included, and of attention only the
// half that is not masked. For comparison with llm.c's MFU.
static inline double count_flops_llmc(const GPTConfig *g, double tokens, size_t T) {
    double parameters = (double)count_parameters(g) + (double)((g->Vp - g->V) * g->C);
    return tokens * (6.0 * parameters + 6.0 * (double)g->L * (double)g->C * (double)T);
}

#endif
