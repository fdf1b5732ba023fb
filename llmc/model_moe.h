// model_moe.h: the parameter table of GPT-2 with experts in the place of each MLP.
// lesson: moe
//
// The weights of E experts stand below each other, so e ranks cut them by rows. One
// expert has the weights of GPT-2's MLP: [C, F] and so on. The router is [E, C], a row
// for each expert.
//
// defines: ROUTERW, MoeSpec, moe_of, moe_spec, bucket_of_experts
#ifndef LLMC_MODEL_MOE_H
#define LLMC_MODEL_MOE_H

#include "llmc/model.h"

enum { ROUTERW = NUM_KINDS };

// The spec, and the options of experts.
typedef struct {
    ModelSpec model;  // the first member: the spec of a configuration is one of these
    size_t E, k, e;   // experts of a layer, experts of a token, expert ranks
    double capacity;  // an expert has capacity * T k / E places for a sequence; 0: as the
                      // checkpoint has it
    double of_checkpoint;  // the capacity that its config.json has; 0: none
    double balance, z;     // coefficients of the two losses
} MoeSpec;

// Experts come last in a layer: they are a bucket of their own.
static const TensorSpec MOE_TENSORS[] = {
    {WTE, "wte.weight", 'V', 'C', SPLIT_VOCAB, INIT_NORMAL,
     TENSOR_DECAYS | TENSOR_FIRST | TENSOR_LAST},
    {WPE, "wpe.weight", 'T', 'C', SPLIT_NONE, INIT_NORMAL, TENSOR_DECAYS | TENSOR_FIRST},
    {LN1W, "h.%zu.ln_1.weight", '1', 'C', SPLIT_NONE, INIT_ONE, TENSOR_NORM},
    {LN1B, "h.%zu.ln_1.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, TENSOR_NORM},
    {QKVW, "h.%zu.attn.c_attn.weight", 'C', 'Q', SPLIT_QKV, INIT_NORMAL, TENSOR_DECAYS},
    {QKVB, "h.%zu.attn.c_attn.bias", '1', 'Q', SPLIT_QKV, INIT_ZERO, 0},
    {PROJW, "h.%zu.attn.c_proj.weight", 'C', 'C', SPLIT_ROWS, INIT_RESIDUAL, TENSOR_DECAYS},
    {PROJB, "h.%zu.attn.c_proj.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, 0},
    {LN2W, "h.%zu.ln_2.weight", '1', 'C', SPLIT_NONE, INIT_ONE, TENSOR_NORM},
    {LN2B, "h.%zu.ln_2.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, TENSOR_NORM},
    {ROUTERW, "h.%zu.moe.router.weight", 'E', 'C', SPLIT_NONE, INIT_NORMAL, TENSOR_DECAYS},
    {FCW, "h.%zu.moe.c_fc.weight", 'X', 'F', SPLIT_ROWS, INIT_NORMAL,
     TENSOR_DECAYS | TENSOR_EXPERTS},
    {FCB, "h.%zu.moe.c_fc.bias", 'E', 'F', SPLIT_ROWS, INIT_ZERO, TENSOR_EXPERTS},
    {FCPROJW, "h.%zu.moe.c_proj.weight", 'Y', 'C', SPLIT_ROWS, INIT_RESIDUAL,
     TENSOR_DECAYS | TENSOR_EXPERTS},
    {FCPROJB, "h.%zu.moe.c_proj.bias", 'E', 'C', SPLIT_ROWS, INIT_ZERO, TENSOR_EXPERTS},
    {LNFW, "ln_f.weight", '1', 'C', SPLIT_NONE, INIT_ONE, TENSOR_NORM | TENSOR_LAST},
    {LNFB, "ln_f.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, TENSOR_NORM | TENSOR_LAST},
};
enum { MOE_KINDS = sizeof MOE_TENSORS / sizeof MOE_TENSORS[0] };

static inline const MoeSpec *moe_of(const GPTConfig *g) {
    return (const MoeSpec *)(const void *)g->spec;
}

// Returns a dimension: 'E' experts, 'X' rows of all their [C, F], 'Y' rows of all their
// [F, C].
static inline size_t moe_dimension(const GPTConfig *g, char letter) {
    size_t E = moe_of(g)->E;
    return letter == 'E'   ? E
           : letter == 'X' ? E * g->C
           : letter == 'Y' ? E * 4 * g->C
                           : gpt2_dimension(g, letter);
}

// Returns the FLOPs of a step: GPT-2's with k MLPs instead of one, each 48 C^2 FLOPs a
// token forward and backward, and the router's 6 E C.
static inline double moe_flops(const GPTConfig *g, double tokens, size_t T) {
    double C = (double)g->C;
    double more = 48.0 * ((double)moe_of(g)->k - 1.0) * C + 6.0 * (double)moe_of(g)->E;
    return gpt2_flops(g, tokens, T) + tokens * (double)g->L * C * more;
}

static inline MoeSpec moe_spec(size_t E, size_t k) {
    MoeSpec spec;
    memset(&spec, 0, sizeof spec);
    ModelSpec *m = &spec.model;
    m->tensors = MOE_TENSORS;
    m->count = MOE_KINDS;
    m->layer = LN1W;
    m->behind = MOE_KINDS - 2;
    m->stddev = 0.02;
    m->dimension = moe_dimension;
    m->flops = moe_flops;
    spec.E = E;
    spec.k = k;
    spec.e = 1;
    spec.capacity = 1.25;
    return spec;
}

// Returns true for a bucket of experts. Only the data ranks that hold the same experts
// sum it and share it.
static inline bool bucket_of_experts(const ParamTable *table, size_t bucket) {
    // Each layer has two buckets if there are experts.
    bool experts = table->bucket_count == BUCKET_LAYERS + 2 * table->shard.n_layers + 1;
    return experts && bucket > BUCKET_LAYERS && bucket < table->bucket_count - 1 &&
           bucket % 2 == 1;
}

#endif
