// model.h: a model's configuration, THE parameter table, and its parameter and FLOP counts.
//
// A ModelSpec lists the tensors of a kind of model: GPT-2's is here, and a lesson with
// other blocks brings its own. The table made of it is the only place that knows which
// tensors exist. For each it has the name, the shape, the split over tensor ranks, the
// initialisation, the decay, and the place in a rank's flat buffer. Initialisation,
// checkpoints, gradient dumps, the optimizer, ZeRO slices and the gradient norm all walk
// this table.
//
// defines: GPTConfig, padded_vocabulary, Split, Init, TensorKind, MAX_KINDS, TENSOR_*,
//          TensorSpec, ModelSpec, gpt2_dimension, gpt2_flops, GPT2, config_spec,
//          config_dimension, count_tensors, Shard, shard_whole, Tensor, tensor_describe,
//          ParamTable, table_make, table_free, table_find, Run, tensor_run,
//          count_parameters, count_flops
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

typedef struct {
    size_t L, C, NH;               // layers, channels, heads (head size HS = C / NH)
    size_t V, Vp;                  // vocabulary; the same padded to a multiple of 128
    size_t maxT;                   // longest sequence: rows of the position embedding
    const struct ModelSpec *spec;  // what kind of model it is; NULL: GPT-2
} GPTConfig;

static inline size_t round_up(size_t x, size_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}
static inline size_t padded_vocabulary(size_t V) {
    return round_up(V, 128);
}

// The ways to cut a tensor of shape [rows, cols] over t tensor ranks.
typedef enum {
    SPLIT_NONE,     // replicated
    SPLIT_COLUMNS,  // each rank has cols / t columns
    SPLIT_QKV,      // columns are q|k|v, and each of the three parts is cut
    SPLIT_ROWS,     // each rank has rows / t rows
    SPLIT_VOCAB,    // each rank has Vp / t rows; files have only rows below V
} Split;

// INIT_NORMAL is N(0, stddev), INIT_RESIDUAL the same / sqrt(2L).
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } Init;

// The kinds of GPT-2's tensors, in memory order: w[QKVW] is one of a layer. Other models
// name theirs alike, and number more kinds from NUM_KINDS.
typedef enum {
    WTE, WPE,                                         // embeddings of tokens and positions
    LN1W, LN1B, QKVW, QKVB, PROJW, PROJB,             // attention
    LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB,           // the MLP
    LNFW, LNFB,                                       // the last layernorm
    NUM_KINDS
} TensorKind;

enum { MAX_KINDS = 24 };

// A tensor starts at a multiple of this many elements, unless it is joined.
enum { TENSOR_ALIGN = 64 };

// Buckets of gradients: 0 wte, 1 the other embeddings, then the layers, at last ln_f.
enum { BUCKET_LAYERS = 2 };

enum {
    TENSOR_DECAYS = 1,  // weight decay: matrices and embeddings
    TENSOR_NORM = 2,    // a norm: sequence parallelism gives a rank its own rows' gradient
    TENSOR_FIRST = 4,   // outside the layers, on the first stage
    TENSOR_LAST = 8,    // on the last stage; FIRST and LAST: tied, both stages hold it

    // Lessons behind the four have three more. GPT-2 has none of them.
    TENSOR_JOINED = 16,   // begins where the tensor before it ends: one product takes both
    TENSOR_EXPERTS = 32,  // cut over expert ranks; last in a layer, a bucket of their own
    TENSOR_MUON = 64,     // updated by Muon: has one momentum instead of two moments
};

typedef struct {
    int kind;
    const char *name;  // as printf prints it with the layer
    char rows, cols;   // '1' (files have one dimension), 'V', 'T', 'C', or the model's own
    Split split;
    Init init;
    unsigned flags;  // TENSOR_*
} TensorSpec;

// A kind of model: its tensors in memory order. Tensors [layer, behind) repeat for every
// layer.
typedef struct ModelSpec {
    const TensorSpec *tensors;
    size_t count, layer, behind;
    double stddev;  // of initial weights

    // Returns a dimension by the model's own letter; 'F': hidden units.
    size_t (*dimension)(const GPTConfig *g, char letter);
    // Returns the FLOPs of a step; MFU counts these.
    double (*flops)(const GPTConfig *g, double tokens, size_t T);
    // Read and write config.json; NULL: host/config_json.h reads and writes GPT-2's.
    bool (*read)(const char *path, GPTConfig *config, Error *err);
    bool (*write)(const char *path, const GPTConfig *config, bool bf16, Error *err);
} ModelSpec;

// The part of the model that one rank holds.
typedef struct {
    size_t t, t_rank;      // tensor size and rank
    bool embedding;        // the first stage: holds wte and wpe
    bool head;             // the last stage: holds ln_f and wte
    size_t n_layers;
    const size_t *layers;  // [n_layers] global numbers in memory order; NULL: 0, 1, 2, ...
    size_t bucket_align;   // buckets start at multiples of it (0: as tensors do)
    size_t e, e_rank;      // expert ranks, and this rank's place among them
} Shard;

typedef struct {
    const TensorSpec *spec;
    char name[64];     // Hugging Face's name, of GPT-2's without the prefix "transformer."
    size_t held;       // which of the layers that the rank holds; 0 outside the layers
    size_t id;         // place in the unsharded model: keys random numbers, orders sums
    size_t rows, cols; // global shape, as in files
    size_t offset;     // elements: place in the rank's flat buffer
    size_t size;       // elements of its part (wte: of padded rows)
    size_t t, t_rank;
    bool counted;      // true on one of the ranks with this part: it saves it, adds its square
} Tensor;

typedef struct {
    GPTConfig config;
    Shard shard;          // with layers of its own
    size_t count;         // tensors
    size_t total;         // elements of the flat buffer, gaps of the alignment included
    size_t largest;       // elements of the largest tensor's part
    Tensor *tensors;      // [count] in memory order
    size_t bucket_count;  // of gradients: wte, wpe, each layer (and its experts), ln_f
    size_t *buckets;      // [bucket_count + 1] their starts; then total
} ParamTable;

// kind, name, rows, columns, how it is split over tensor ranks, how it starts, flags
static const TensorSpec GPT2_TENSORS[NUM_KINDS] = {
    {WTE,     "wte.weight",               'V', 'C', SPLIT_VOCAB,   INIT_NORMAL,
     TENSOR_DECAYS | TENSOR_FIRST | TENSOR_LAST},
    {WPE,     "wpe.weight",               'T', 'C', SPLIT_NONE,    INIT_NORMAL,
     TENSOR_DECAYS | TENSOR_FIRST},

    {LN1W,    "h.%zu.ln_1.weight",        '1', 'C', SPLIT_NONE,    INIT_ONE,      TENSOR_NORM},
    {LN1B,    "h.%zu.ln_1.bias",          '1', 'C', SPLIT_NONE,    INIT_ZERO,     TENSOR_NORM},
    {QKVW,    "h.%zu.attn.c_attn.weight", 'C', 'Q', SPLIT_QKV,     INIT_NORMAL,   TENSOR_DECAYS},
    {QKVB,    "h.%zu.attn.c_attn.bias",   '1', 'Q', SPLIT_QKV,     INIT_ZERO,     0},
    {PROJW,   "h.%zu.attn.c_proj.weight", 'C', 'C', SPLIT_ROWS,    INIT_RESIDUAL, TENSOR_DECAYS},
    {PROJB,   "h.%zu.attn.c_proj.bias",   '1', 'C', SPLIT_NONE,    INIT_ZERO,     0},
    {LN2W,    "h.%zu.ln_2.weight",        '1', 'C', SPLIT_NONE,    INIT_ONE,      TENSOR_NORM},
    {LN2B,    "h.%zu.ln_2.bias",          '1', 'C', SPLIT_NONE,    INIT_ZERO,     TENSOR_NORM},
    {FCW,     "h.%zu.mlp.c_fc.weight",    'C', 'F', SPLIT_COLUMNS, INIT_NORMAL,   TENSOR_DECAYS},
    {FCB,     "h.%zu.mlp.c_fc.bias",      '1', 'F', SPLIT_COLUMNS, INIT_ZERO,     0},
    {FCPROJW, "h.%zu.mlp.c_proj.weight",  'F', 'C', SPLIT_ROWS,    INIT_RESIDUAL, TENSOR_DECAYS},
    {FCPROJB, "h.%zu.mlp.c_proj.bias",    '1', 'C', SPLIT_NONE,    INIT_ZERO,     0},

    {LNFW,    "ln_f.weight",              '1', 'C', SPLIT_NONE,    INIT_ONE,
     TENSOR_NORM | TENSOR_LAST},
    {LNFB,    "ln_f.bias",                '1', 'C', SPLIT_NONE,    INIT_ZERO,
     TENSOR_NORM | TENSOR_LAST},
};

static inline size_t gpt2_dimension(const GPTConfig *g, char letter) {
    return (letter == 'Q' ? 3 : 4) * g->C;
}

// Returns the FLOPs of one step over `tokens` tokens in sequences of T (Narayanan et al.
// 2021, section 5.1, without recomputation): 72 B T L C^2 (1 + T/(6C) + V/(12 L C)). MFU
// counts these whatever is recomputed. Attention counts as if every token saw all T.
static inline double gpt2_flops(const GPTConfig *g, double tokens, size_t T) {
    double C = (double)g->C, L = (double)g->L;
    return 72.0 * tokens * L * C * C *
           (1.0 + (double)T / (6.0 * C) + (double)g->V / (12.0 * L * C));
}

static const ModelSpec GPT2 = {GPT2_TENSORS,   NUM_KINDS,  LN1W, LNFW, 0.02,
                               gpt2_dimension, gpt2_flops, NULL, NULL};

static inline const ModelSpec *config_spec(const GPTConfig *g) {
    return g->spec ? g->spec : &GPT2;
}

static inline size_t config_dimension(const GPTConfig *g, char letter) {
    switch (letter) {
        case 'V': return g->V;
        case 'T': return g->maxT;
        case 'C': return g->C;
        case '1': return 1;
        default: return config_spec(g)->dimension(g, letter);
    }
}

// Return the number of tensors of a layer, and of the unsharded model.
static inline size_t tensors_of_layer(const ModelSpec *spec) {
    return spec->behind - spec->layer;
}
static inline size_t count_tensors(const GPTConfig *g) {
    const ModelSpec *spec = config_spec(g);
    return spec->count + (g->L - 1) * tensors_of_layer(spec);
}

// Describes tensor `id` of the unsharded model as tensor rank t_rank of t holds it. Rank 0
// of 1 holds all of it. Leaves held, offset and counted at 0.
static inline Tensor tensor_describe(const GPTConfig *g, size_t id, size_t t,
                                     size_t t_rank) {
    const ModelSpec *model = config_spec(g);
    size_t in_layer = tensors_of_layer(model);
    size_t layer = id < model->layer ? 0 : (id - model->layer) / in_layer;

    // Behind the layers the spec's rows go on from the last one's.
    if (layer >= g->L) layer = g->L - 1;
    const TensorSpec *spec = &model->tensors[id - layer * in_layer];
    Tensor x;
    memset(&x, 0, sizeof x);
    x.spec = spec;
    x.id = id;
    snprintf(x.name, sizeof x.name, spec->name, layer);
    x.rows = config_dimension(g, spec->rows);
    x.cols = config_dimension(g, spec->cols);
    x.t = t;
    x.t_rank = t_rank;
    x.size = (spec->split == SPLIT_VOCAB ? g->Vp : x.rows) * x.cols /
             (spec->split == SPLIT_NONE ? 1 : t);
    return x;
}

// Returns the part that one rank holds alone: all of the model.
static inline Shard shard_whole(const GPTConfig *g) {
    Shard whole = {1, 0, true, true, g->L, NULL, 0, 1, 0};
    return whole;
}

// Begins a bucket of gradients at the next multiple of align.
static inline void table_begin_bucket(ParamTable *table, size_t align) {
    table->total = round_up(table->total, align);
    table->buckets[table->bucket_count++] = table->total;
}

// Builds the table of one rank. t must divide C, NH, 4C and Vp, which the trainer has
// checked.
static inline ParamTable table_make(const GPTConfig *g, Shard shard) {
    const ModelSpec *spec = config_spec(g);
    size_t in_layer = tensors_of_layer(spec), layers = shard.n_layers;
    size_t rows = spec->count + (layers - 1) * in_layer;
    size_t align = shard.bucket_align ? shard.bucket_align : (size_t)TENSOR_ALIGN;
    unsigned held = 0;
    if (shard.embedding) held |= TENSOR_FIRST;
    if (shard.head) held |= TENSOR_LAST;

    ParamTable table;
    memset(&table, 0, sizeof table);
    table.config = *g;
    table.shard = shard;
    table.tensors = (Tensor *)host_alloc(rows, sizeof(Tensor));
    table.buckets = (size_t *)host_alloc(2 * layers + 4, sizeof(size_t));
    size_t *numbers = (size_t *)host_alloc(layers, sizeof(size_t));
    for (size_t i = 0; i < layers; i++) numbers[i] = shard.layers ? shard.layers[i] : i;
    table.shard.layers = numbers;

    size_t end = 0;  // of the tensor before
    for (size_t i = 0; i < rows; i++) {
        // The rows of a layer repeat: `row` is the one in the spec, l the layer.
        bool before = i < spec->layer, behind = i >= spec->layer + layers * in_layer;
        bool outside = before || behind;
        size_t l = before ? 0 : behind ? layers - 1 : (i - spec->layer) / in_layer;
        size_t row = i - l * in_layer;
        const TensorSpec *kind = &spec->tensors[row];
        bool tied = (kind->flags & TENSOR_FIRST) && (kind->flags & TENSOR_LAST);
        bool experts = kind->flags & TENSOR_EXPERTS;
        bool first_expert = experts && !(kind[-1].flags & TENSOR_EXPERTS);

        // wte is a bucket of its own: the first and the last stage hold it, and must cut it
        // over the data ranks in the same way.
        if (i == 1) table_begin_bucket(&table, align);
        if (row == 0 || row == spec->layer || row == spec->behind || first_expert)
            table_begin_bucket(&table, align);
        if (outside && !(kind->flags & held)) continue;

        Tensor *x = &table.tensors[table.count++];
        size_t id = row + (before ? 0 : behind ? g->L - 1 : numbers[l]) * in_layer;
        if (experts) *x = tensor_describe(g, id, shard.e, shard.e_rank);
        else *x = tensor_describe(g, id, shard.t, shard.t_rank);
        x->held = outside ? 0 : l;
        x->offset = kind->flags & TENSOR_JOINED ? end : table.total;

        // All tensor ranks hold a whole tensor, and the first and the last stage a tied one.
        // Only one of the copies counts.
        bool once = kind->split != SPLIT_NONE || shard.t_rank == 0;
        x->counted = once && (!tied || shard.embedding);

        end = x->offset + x->size;
        if (x->size > table.largest) table.largest = x->size;
        table.total = round_up(end, TENSOR_ALIGN);
    }
    table.total = round_up(table.total, align);
    table.buckets[table.bucket_count] = table.total;
    return table;
}

static inline void table_free(ParamTable *table) {
    free(table->tensors);
    free((void *)table->shard.layers);
    free(table->buckets);
    memset(table, 0, sizeof *table);
}

// Returns the tensor of a kind, or NULL if this rank does not hold it. l counts the
// layers that this rank holds, and is ignored for tensors outside the layers.
static inline const Tensor *table_find(const ParamTable *table, int kind, size_t l) {
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        bool outside = x->spec->flags & (TENSOR_FIRST | TENSOR_LAST);
        if (x->spec->kind == kind && (outside || x->held == l)) return x;
    }
    return NULL;
}

// A run: `count` elements that are contiguous both in this rank's memory and in the
// unsharded tensor.
typedef struct {
    size_t local;   // element of the rank's part (Tensor.offset is that part's place)
    size_t global;  // element of the unsharded tensor, as in files
    size_t count;
} Run;

// Sets *run to run i of the rank's part, as far as it lies in [lo, hi) of this part: ranks
// take turns. All of a matrix is one run. The padding of the vocabulary is in none; count
// can be 0. Returns false behind the last run.
static inline bool tensor_run(const Tensor *x, size_t i, size_t lo, size_t hi, Run *run) {
    Split split = x->t == 1 ? SPLIT_NONE : x->spec->split;
    size_t runs = split == SPLIT_COLUMNS ? x->rows : split == SPLIT_QKV ? 3 * x->rows : 1;
    size_t count = x->size / runs;
    size_t begin = i * count, end = begin + count;
    size_t skip = lo > begin ? lo - begin : 0;

    // The padding of the vocabulary lies behind the whole tensor.
    size_t whole = x->rows * x->cols;
    size_t global = x->spec->split == SPLIT_NONE ? 0 : (i * x->t + x->t_rank) * count;
    size_t left = global < whole ? whole - global : 0;
    if (end > begin + left) end = begin + left;
    if (end > hi) end = hi;
    run->local = begin + skip;
    run->global = global + skip;
    run->count = end > run->local ? end - run->local : 0;
    return i < runs;
}

// Counts the parameters as the literature does: unpadded, the tied embedding once.
static inline size_t count_parameters(const GPTConfig *g) {
    size_t count = 0;
    for (size_t id = 0; id < count_tensors(g); id++) {
        Tensor x = tensor_describe(g, id, 1, 0);
        count += x.rows * x.cols;
    }
    return count;
}

static inline double count_flops(const GPTConfig *g, double tokens, size_t T) {
    return config_spec(g)->flops(g, tokens, T);
}

#endif
