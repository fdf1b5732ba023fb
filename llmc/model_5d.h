// model_5d.h: Llama's blocks with a mixture of experts in the place of the MLP, as Mixtral
// has them (Jiang et al. 2024), and the flags of train_5d.
// lesson: 5d
//
// Each expert's gate, up and down are tensors of their own, by Hugging Face's names, and
// stand together in memory. Tensor ranks cut them as an MLP's; of e expert ranks each holds
// the tensors of E/e experts.
//
// defines: ROUTER, MoeLlama, moe_llama_make, moe_llama_of, expert_step, table_keep_experts,
//          Options5D, ROWS_5D, sizes_5d, moe_llama_resolve
#ifndef LLMC_MODEL_5D_H
#define LLMC_MODEL_5D_H

#include "llmc/host/context.h"
#include "llmc/host/moe.h"
#include "llmc/llama.h"

enum { ROUTER = FCB };  // a kind of GPT-2's that Llama has not

// A Llama, and what its experts add.
typedef struct {
    Llama llama;          // the first member: the spec of a configuration is its first
    size_t E, k;          // experts of a layer (0: an MLP), experts of a token
    bool normalised;      // a token's k probabilities are divided by their sum
    TensorSpec *rows;     // the spec's, if there are experts
    char (*names)[96];    // of the router and the experts' tensors
} MoeLlama;

static inline const MoeLlama *moe_llama_of(const GPTConfig *g) {
    return (const MoeLlama *)(const void *)g->spec;
}

// Llama's, with k MLPs for one, and the router.
static inline double moe_llama_flops(const GPTConfig *g, double tokens, size_t T) {
    const MoeLlama *m = moe_llama_of(g);
    double C = (double)g->C, F = (double)m->llama.F, E = (double)m->E;
    double more = 3 * ((double)m->k - 1) * C * F + E * C;
    return llama_flops(g, tokens, T) + 6 * tokens * (double)g->L * more;
}

static inline size_t moe_llama_dimension(const GPTConfig *g, char letter) {
    return letter == 'E' ? moe_llama_of(g)->E : llama_dimension(g, letter);
}

static inline bool moe_llama_read(const char *path, GPTConfig *config, Error *err);
static inline bool moe_llama_write(const char *path, const GPTConfig *g, bool bf16,
                                   Error *err);

// Fills in the spec. Experts come last in a layer: they are a bucket of their own.
static inline void moe_llama_make(MoeLlama *m) {
    ModelSpec *spec = &m->llama.spec;
    llama_make(&m->llama);
    spec->read = moe_llama_read;
    spec->write = moe_llama_write;
    free(m->rows);
    free(m->names);
    m->rows = NULL;
    m->names = NULL;
    if (m->E == 0) return;

    static const struct {
        const char *name;
        int like;  // the kind of an MLP that it is
    } parts[] = {{"w1", FCW}, {"w3", UPW}, {"w2", FCPROJW}};
    const char *in_layer = "model.layers.%zu.block_sparse_moe";
    size_t name_size = sizeof m->names[0];
    TensorSpec mlp[3];
    TensorSpec *rows = (TensorSpec *)host_alloc(spec->count + 3 * m->E + 1, sizeof *rows);
    m->names = (char (*)[96])host_alloc(3 * m->E + 1, name_size);

    size_t count = 0, behind = 0;
    for (size_t i = 0; i < spec->count; i++) {
        const TensorSpec *row = &spec->tensors[i];
        int part = 0;
        while (part < 3 && row->kind != parts[part].like) part++;
        if (part < 3)
            mlp[part] = *row;
        else
            rows[count++] = *row;
        if (i != spec->behind - 1) continue;

        // the end of a layer
        char *name = m->names[3 * m->E];
        const TensorSpec router = {ROUTER, name, 'E', 'C', SPLIT_NONE, INIT_NORMAL,
                                   TENSOR_DECAYS};
        snprintf(name, name_size, "%s.gate.weight", in_layer);
        rows[count++] = router;
        for (size_t x = 0; x < 3 * m->E; x++) {
            name = m->names[x];
            snprintf(name, name_size, "%s.experts.%zu.%s.weight", in_layer, x / 3,
                     parts[x % 3].name);
            rows[count] = mlp[x % 3];
            rows[count].name = name;
            rows[count++].flags |= TENSOR_EXPERTS;
        }
        behind = count;
    }
    m->rows = rows;
    spec->tensors = rows;
    spec->count = count;
    spec->behind = behind;
    spec->flops = moe_llama_flops;
    spec->dimension = moe_llama_dimension;
}

// Elements from an expert's weights to the next one's, C channels and F hidden units: gate
// and up together, then down.
static inline size_t expert_step(size_t C, size_t F) {
    return round_up(2 * F * C, TENSOR_ALIGN) + round_up(C * F, TENSOR_ALIGN);
}

// Returns which of E experts a tensor is of.
static inline size_t tensor_expert(const GPTConfig *g, const Tensor *x, size_t E) {
    size_t in_layer = tensors_of_layer(config_spec(g));
    return ((x->id - config_spec(g)->layer) % in_layer - (in_layer - 3 * E)) / 3;
}

// Leaves of a table's experts those that rank e_rank of e holds, and moves all tensors
// together, in the same buckets.
static inline void table_keep_experts(ParamTable *table, size_t E, size_t e,
                                      size_t e_rank) {
    const Shard *shard = &table->shard;
    size_t align = shard->bucket_align ? shard->bucket_align : (size_t)TENSOR_ALIGN;
    size_t count = 0, bucket = 0, end = 0;
    table->total = 0;
    for (size_t i = 0; i < table->count; i++) {
        Tensor x = table->tensors[i];
        for (; bucket < table->bucket_count && x.offset >= table->buckets[bucket]; bucket++)
            table->buckets[bucket] = table->total = round_up(table->total, align);
        bool experts = x.spec->flags & TENSOR_EXPERTS;
        if (experts && tensor_expert(&table->config, &x, E) / (E / e) != e_rank) continue;

        x.offset = x.spec->flags & TENSOR_JOINED ? end : table->total;
        end = x.offset + x.size;
        table->total = round_up(end, TENSOR_ALIGN);
        table->tensors[count++] = x;
    }
    table->count = count;
    table->total = round_up(table->total, align);
    for (; bucket <= table->bucket_count; bucket++) table->buckets[bucket] = table->total;
}

// ----------------------------------------------------------------------------------------
// config.json

// Reads Mixtral's config.json, or one without experts.
static inline bool moe_llama_read(const char *path, GPTConfig *config, Error *err) {
    MoeLlama *m = (MoeLlama *)(void *)config->spec;
    static const char *const OWN[] = {"num_local_experts", "num_experts_per_tok",
                                      "output_router_logits", "router_aux_loss_coef",
                                      "router_jitter_noise"};
    cJSON *root = json_read(path, 1 << 20, err);
    if (!root) return false;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "model_type");
    bool ok = true;
    m->E = m->k = 0;
    m->normalised = false;
    if (cJSON_IsString(item) && strcmp(item->valuestring, "mixtral") == 0) {
        m->normalised = true;
        ok = config_size(root, "num_local_experts", 128, &m->E, path, err) &&
             config_size(root, "num_experts_per_tok", 128, &m->k, path, err) &&
             config_is(root, "router_jitter_noise", "0|null", path, err);
        if (ok && m->k > m->E)
            ok = error_set(err, "%s: %zu experts of a token are more than the %zu of a layer",
                           path, m->k, m->E);
        for (size_t i = 0; i < sizeof OWN / sizeof OWN[0]; i++)
            cJSON_DeleteItemFromObjectCaseSensitive(root, OWN[i]);
        cJSON_ReplaceItemInObjectCaseSensitive(root, "model_type",
                                               cJSON_CreateString("llama"));
    }
    ok = ok && llama_read_root(root, path, config, err);
    cJSON_Delete(root);
    if (ok) moe_llama_make(m);
    return ok;
}

// Replaces the first `from` in a text of `size` bytes by `to`.
static inline void text_replace(char *text, size_t size, const char *from, const char *to) {
    char *at = strstr(text, from);
    size_t rest = at ? strlen(at + strlen(from)) + 1 : 0;
    if (!at || (size_t)(at - text) + strlen(to) + rest > size) return;
    memmove(at + strlen(to), at + strlen(from), rest);
    memcpy(at, to, strlen(to));
}

// Writes Llama's config.json, with other names and two numbers more if there are experts.
static inline bool moe_llama_write(const char *path, const GPTConfig *g, bool bf16,
                                   Error *err) {
    const MoeLlama *m = moe_llama_of(g);
    char text[4096], more[200];
    size_t bytes;
    if (!llama_write(path, g, bf16, err)) return false;
    if (m->E == 0) return true;

    char *written = file_read(path, sizeof text - sizeof more, &bytes, err);
    if (!written) return false;
    memcpy(text, written, bytes);
    text[bytes] = '\0';
    free(written);
    snprintf(more, sizeof more,
             "{\n  \"num_local_experts\": %zu,\n  \"num_experts_per_tok\": %zu,\n", m->E,
             m->k);
    text_replace(text, sizeof text, "LlamaForCausalLM", "MixtralForCausalLM");
    text_replace(text, sizeof text, "\"llama\"", "\"mixtral\"");
    text_replace(text, sizeof text, "{\n", more);
    return file_write_text(path, text, err);
}

// ----------------------------------------------------------------------------------------
// The command line

// Values of the command line; sizes of the model are 0 if left out.
typedef struct {
    LlamaOptions llama;
    Context context;
    size_t E, k, e;
    double capacity;    // an expert has capacity * T k / E places for a rank's T tokens of a
                        // sequence; 0: T
    double balance, z;  // coefficients of the two losses
} Options5D;

// The names behind LLAMA_NAMES.
typedef struct {
    LlamaSize llama;
    size_t E, k;
} MoeSize;

#define NAMES_5D LLAMA_NAMES "|mixtral|mixtral-8x7b|mixtral-8x22b"
static const MoeSize MOE_SIZES[] = {
    {{LLAMA, 0, 0, 0, 0, 0, 0, 0, 1e6, 1e-5, 0, false}, 8, 2},
    {{LLAMA, 32, 4096, 32, 8, 14336, 32000, 32768, 1e6, 1e-5, 0, false}, 8, 2},
    {{LLAMA, 56, 6144, 48, 8, 16384, 32768, 65536, 1e6, 1e-5, 0, false}, 8, 2},
};

#define ROW(name, type, field, initial, min, max, tags, value, help) \
    { name, type, offsetof(Options5D, field), initial, min, max, tags, value, help }
static const Field ROWS_5D[] = {
    ROW("Model", FIELD_TITLE, e, NULL, 0, 0, OPTION_BASIC, NULL, NULL),
    ROW("model", FIELD_CHOICE, llama.model, "llama", 0, 0, OPTION_BASIC, NAMES_5D,
        "kind of blocks, or a published model's sizes"),
    ROW("kv-heads", FIELD_SIZE, llama.KV, NULL, 1, 1e5, OPTION_BASIC, "N",
        "key/value heads; must divide --heads (default: --heads)"),
    ROW("hidden", FIELD_SIZE, llama.F, NULL, 1, 1e7, OPTION_BASIC, "N",
        "hidden units of the MLP, or of an expert (default 3 --channels; nemotron 4)"),
    ROW("Experts", FIELD_TITLE, e, NULL, 0, 0, OPTION_BASIC, NULL, NULL),
    ROW("experts", FIELD_SIZE, E, NULL, 1, 128, OPTION_BASIC, "N",
        "of each layer (default: the model's; llama has an MLP)"),
    ROW("top-k", FIELD_SIZE, k, NULL, 1, 128, OPTION_BASIC, "N",
        "experts of a token (default: the model's, else 2)"),
    ROW("capacity", FIELD_REAL, capacity, "0", 0, 128, OPTION_BASIC | OPTION_COMPUTES, "X",
        "an expert takes X * T * top-k / experts of a rank's T tokens of a sequence (0: all)"),
    ROW("expert-parallel", FIELD_SIZE, e, "1", 1, 128, OPTION_BASIC, "N",
        "neighbours of the data ranks that share out the experts"),
    ROW("balance-loss", FIELD_REAL, balance, "0.001", 0, 1e3, OPTION_COMPUTES, "X",
        "coefficient of the loss of uneven experts"),
    ROW("z-loss", FIELD_REAL, z, "0", 0, 1e3, OPTION_COMPUTES, "X",
        "coefficient of the loss of large logits"),
    ROW("Context parallelism", FIELD_TITLE, e, NULL, 0, 0, OPTION_BASIC, NULL, NULL),
    ROW("context", FIELD_SIZE, context.c, "1", 1, 1e6, OPTION_BASIC, "N",
        "neighbours of the data ranks that share each sequence"),
};
#undef ROW

enum { LLAMA_SIZE_COUNT = sizeof LLAMA_SIZES / sizeof LLAMA_SIZES[0] };

// Returns the sizes of a name with experts, or NULL.
static inline const MoeSize *moe_size(const Options5D *flags) {
    int model = flags->llama.model;
    return model < LLAMA_SIZE_COUNT ? NULL : &MOE_SIZES[model - LLAMA_SIZE_COUNT];
}

static inline const LlamaSize *size_5d(const Options5D *flags) {
    const MoeSize *moe = moe_size(flags);
    return moe ? &moe->llama : &LLAMA_SIZES[flags->llama.model];
}

// Fills in the sizes that a name stands for, and says how many ranks share a sequence.
static inline bool sizes_5d(Options *o, const void *flags, Error *err) {
    const Options5D *own = (const Options5D *)flags;
    const LlamaSize *s = size_5d(own);
    const GPTConfig named = {s->L, s->C, s->NH, s->V, 0, s->maxT, NULL};
    o->context = own->context.c;
    return options_take_model(o, &named, false, err);
}

// Fills in *m: as the flags have it, or from_file, as it was read; the flags must then
// agree. Checks the sizes against each other and against the ranks.
static inline bool moe_llama_resolve(MoeLlama *m, Options5D *flags, const Options *o,
                                     bool from_file, Error *err) {
    const MoeSize *named = moe_size(flags);
    const Grid *grid = &o->grid;
    Context *context = &flags->context;
    size_t E = flags->E ? flags->E : named ? named->E : 0;
    size_t k = flags->k ? flags->k : named ? named->k : 0;
    if (from_file && ((E && E != m->E) || (k && k != m->k)))
        return error_set(err,
                         "the checkpoint has %zu experts, %zu of a token: leave out the "
                         "flags that contradict it",
                         m->E, m->k);
    if (!llama_resolve_size(&m->llama, size_5d(flags), &flags->llama, &o->config, from_file,
                            grid->t, err))
        return false;
    if (!from_file) {
        m->E = E;
        m->k = E ? (k ? k : 2) : 0;
        m->normalised = true;
        moe_llama_make(m);
    }
    if (m->E && m->llama.type != LLAMA)
        return error_set(err, "--experts needs --model llama or a mixtral: %s has an MLP",
                         LLAMA_TYPES[m->llama.type]);
    if (!m->E && (k || flags->e > 1))
        return error_set(err, "--%s needs --experts: this model has an MLP",
                         k ? "top-k" : "expert-parallel");
    MoeSpec experts = moe_spec(m->E, m->k);
    experts.e = flags->e;
    if (m->E && !moe_check(&experts, grid->d, o->zero, err)) return false;

    // The ring, and each rank's chunks i and 2c-1-i of the sequence.
    context->T = o->seq;
    context->ring = context->zigzag = 1;
    context->rank = grid->d_rank % context->c;
    if (!context_check(*context, o->config.NH, false, err)) return false;
    size_t c = context->c, rows = o->micro_batch * (o->seq / c);
    return !o->sequence_parallel || rows % grid->t == 0 ||
           error_set(err,
                     "--tensor %zu does not divide the %zu tokens of a rank's micro-batch, "
                     "which --sequence-parallel 1 cuts: change --seq or --micro-batch",
                     grid->t, rows);
}

#endif
