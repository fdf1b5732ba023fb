// model_5d.h: Llama's blocks with experts in the place of the MLP, and the flags of
// train_5d.
// lesson: 5d
//
// Mixtral has such blocks (Jiang et al. 2024). Each expert's gate, up and down are tensors
// of their own, by Hugging Face's names, and lie together in memory. Tensor ranks cut them
// as they cut an MLP's. Each of e expert ranks holds the tensors of E/e experts.
//
// defines: ROUTER, MoeLlama, moe_llama_make, moe_llama_of, expert_step, table_keep_experts,
//          Options5D, rows_5d, experts_print, sizes_5d,
//          moe_llama_resolve
#ifndef LLMC_MODEL_5D_H
#define LLMC_MODEL_5D_H

#include "llmc/host/context.h"
#include "llmc/host/documents.h"
#include "llmc/host/moe.h"
#include "llmc/llama.h"

enum { ROUTER = FCB };  // a kind of GPT-2's that Llama does not have

// A Llama and its experts.
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

// Returns the FLOPs of a step: Llama's with k MLPs instead of one, and the router's.
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

    // Mixtral's and Qwen3-MoE's names
    static const char *const PLACES[] = {"model.layers.%zu.block_sparse_moe",
                                         "model.layers.%zu.mlp"};
    static const char *const PARTS[][3] = {{"w1", "w3", "w2"},
                                           {"gate_proj", "up_proj", "down_proj"}};
    static const int LIKE[] = {FCW, UPW, FCPROJW};  // the kinds of an MLP that they are
    bool qwen = m->llama.type == QWEN3;
    size_t name_size = sizeof m->names[0];
    TensorSpec mlp[3];
    TensorSpec *rows = (TensorSpec *)host_alloc(spec->count + 3 * m->E + 1, sizeof *rows);
    m->names = (char (*)[96])host_alloc(3 * m->E + 1, name_size);

    size_t count = 0, behind = 0;
    for (size_t i = 0; i < spec->count; i++) {
        const TensorSpec *row = &spec->tensors[i];
        int part = 0;
        while (part < 3 && row->kind != LIKE[part]) part++;
        if (part < 3)
            mlp[part] = *row;
        else
            rows[count++] = *row;
        if (i != spec->behind - 1) continue;

        // the end of a layer
        char *name = m->names[3 * m->E];
        const TensorSpec router = {ROUTER, name, 'E', 'C', SPLIT_NONE, INIT_NORMAL,
                                   TENSOR_DECAYS};
        snprintf(name, name_size, "%s.gate.weight", PLACES[qwen]);
        rows[count++] = router;
        for (size_t x = 0; x < 3 * m->E; x++) {
            name = m->names[x];
            snprintf(name, name_size, "%s.experts.%zu.%s.weight", PLACES[qwen], x / 3,
                     PARTS[qwen][x % 3]);
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

// Returns the number of the expert, below E, that a tensor belongs to.
static inline size_t tensor_expert(const GPTConfig *g, const Tensor *x, size_t E) {
    size_t in_layer = tensors_of_layer(config_spec(g));
    return ((x->id - config_spec(g)->layer) % in_layer - (in_layer - 3 * E)) / 3;
}

// Removes the experts that rank e_rank of e does not hold from a table, and moves the
// other tensors together. They stay in their buckets.
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

// Takes an item out of an object, or puts another one in its place.
static inline void config_replace(cJSON *root, const char *key, cJSON *item) {
    cJSON_DeleteItemFromObjectCaseSensitive(root, key);
    if (item) cJSON_AddItemToObject(root, key, item);
}

// Takes the members about experts out of a config.json. The rest is the config.json of a
// model without experts.
static inline bool moe_llama_read_experts(cJSON *root, MoeLlama *m, bool qwen,
                                          const char *path, Error *err) {
    static const char *const OWN[] = {
        "num_local_experts", "num_experts", "num_experts_per_tok", "output_router_logits",
        "router_aux_loss_coef", "router_jitter_noise", "norm_topk_prob", "decoder_sparse_step",
        "mlp_only_layers", "moe_intermediate_size"};
    const cJSON *normalised = cJSON_GetObjectItemCaseSensitive(root, "norm_topk_prob");
    const cJSON *dense = cJSON_GetObjectItemCaseSensitive(root, "mlp_only_layers");
    size_t F = 0;
    if (!config_size(root, qwen ? "num_experts" : "num_local_experts", 128, &m->E, path,
                     err) ||
        !config_size(root, "num_experts_per_tok", 128, &m->k, path, err) ||
        !config_is(root, "router_jitter_noise", "0|null", path, err) ||
        !config_is(root, "norm_topk_prob", qwen ? "false|true|null" : "null", path, err) ||
        !config_is(root, "decoder_sparse_step", "1|null", path, err) ||
        (qwen && !config_size(root, "moe_intermediate_size", 1 << 20, &F, path, err)))
        return false;
    if (dense && !cJSON_IsNull(dense) && cJSON_GetArraySize(dense) > 0)
        return error_set(err, "%s: \"mlp_only_layers\" must be empty: all layers have experts",
                         path);
    if (m->k > m->E)
        return error_set(err, "%s: %zu experts of a token are more than the %zu of a layer",
                         path, m->k, m->E);
    m->normalised = !qwen || cJSON_IsTrue(normalised);
    for (size_t i = 0; i < sizeof OWN / sizeof OWN[0]; i++)
        config_replace(root, OWN[i], NULL);
    if (qwen) config_replace(root, "intermediate_size", cJSON_CreateNumber((double)F));
    config_replace(root, "model_type", cJSON_CreateString(qwen ? "qwen3" : "llama"));
    return true;
}

// Reads a config.json of Mixtral, of Qwen3-MoE, or one without experts.
static inline bool moe_llama_read(const char *path, GPTConfig *config, Error *err) {
    MoeLlama *m = (MoeLlama *)(void *)config->spec;
    cJSON *root = json_read(path, 1 << 20, err);
    if (!root) return false;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "model_type");
    const char *type = cJSON_IsString(item) ? item->valuestring : "";
    bool qwen = strcmp(type, "qwen3_moe") == 0, ok = true;
    m->E = m->k = 0;
    m->normalised = false;
    if (qwen || strcmp(type, "mixtral") == 0)
        ok = moe_llama_read_experts(root, m, qwen, path, err);
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

// Writes Llama's or Qwen3's config.json with another type and the members about experts.
static inline bool moe_llama_write(const char *path, const GPTConfig *g, bool bf16,
                                   Error *err) {
    const MoeLlama *m = moe_llama_of(g);
    char text[4096], more[256];
    size_t bytes;
    if (!llama_write(path, g, bf16, err)) return false;
    if (m->E == 0) return true;

    char *written = file_read(path, sizeof text - sizeof more, &bytes, err);
    if (!written) return false;
    memcpy(text, written, bytes);
    text[bytes] = '\0';
    free(written);
    int count = snprintf(more, sizeof more, "{\n  \"num_experts_per_tok\": %zu,\n", m->k);
    if (m->llama.type == QWEN3) {
        snprintf(more + count, sizeof more - (size_t)count,
                 "  \"num_experts\": %zu,\n  \"moe_intermediate_size\": %zu,\n"
                 "  \"norm_topk_prob\": %s,\n  \"decoder_sparse_step\": 1,\n"
                 "  \"mlp_only_layers\": [],\n",
                 m->E, m->llama.F, m->normalised ? "true" : "false");
        text_replace(text, sizeof text, "Qwen3ForCausalLM", "Qwen3MoeForCausalLM");
        text_replace(text, sizeof text, "\"qwen3\"", "\"qwen3_moe\"");
    } else {
        snprintf(more + count, sizeof more - (size_t)count,
                 "  \"num_local_experts\": %zu,\n", m->E);
        text_replace(text, sizeof text, "LlamaForCausalLM", "MixtralForCausalLM");
        text_replace(text, sizeof text, "\"llama\"", "\"mixtral\"");
    }
    text_replace(text, sizeof text, "{\n", more);
    return file_write_text(path, text, err);
}

// ----------------------------------------------------------------------------------------
// The command line

// Values of the command line; sizes of the model are 0 if left out.
typedef struct {
    LlamaOptions llama;  // the first member: LLAMA_ROWS count in it
    Context context;
    size_t E, k, e;
    double capacity;    // an expert has capacity * T k / E places for a rank's T tokens of a
                        // sequence; 0: T
    double balance, z;  // coefficients of the two losses
    Documents documents;
} Options5D;

// Models with experts, whose names follow LLAMA_NAMES.
typedef struct {
    LlamaSize llama;
    size_t E, k;
} MoeSize;

#define NAMES_5D \
    LLAMA_NAMES "|mixtral|qwen3-moe|mixtral-8x7b|mixtral-8x22b|qwen3-30b-a3b|qwen3-235b-a22b"
static const MoeSize MOE_SIZES[] = {
    {{LLAMA, 0, 0, 0, 0, 0, 0, 0, 1e6, 1e-5, 0, false, 0, 0}, 8, 2},
    {{QWEN3, 0, 0, 0, 0, 0, 0, 0, 1e6, 1e-6, 0, false, 0, 0}, 8, 2},
    {{LLAMA, 32, 4096, 32, 8, 14336, 32000, 32768, 1e6, 1e-5, 0, false, 0, 0}, 8, 2},
    {{LLAMA, 56, 6144, 48, 8, 16384, 32768, 65536, 1e6, 1e-5, 0, false, 0, 0}, 8, 2},
    {{QWEN3, 48, 2048, 32, 4, 768, 151936, 40960, 1e6, 1e-6, 0, false, 128, 0}, 128, 8},
    {{QWEN3, 94, 4096, 64, 4, 1536, 151936, 40960, 1e6, 1e-6, 0, false, 128, 0}, 128, 8},
};

#define ROW(name, type, field, initial, min, max, tags, value, help) \
    { name, type, offsetof(Options5D, field), initial, min, max, tags, value, help }
static const Field ROWS_5D[] = {
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
    ROW("context-by", FIELD_CHOICE, context.ring, "ring", 0, 0, OPTION_BASIC, "ulysses|ring",
        "how queries meet other ranks' keys"),
};
#undef ROW

enum {
    LLAMA_ROW_COUNT = sizeof LLAMA_ROWS / sizeof LLAMA_ROWS[0],
    OWN_ROW_COUNT = sizeof ROWS_5D / sizeof ROWS_5D[0]
};

// Returns train_llama's rows with more names of --model and another default, and this
// lesson's own rows.
static inline FieldTable rows_5d(Options5D *flags) {
    static Field rows[LLAMA_ROW_COUNT + OWN_ROW_COUNT];
    FieldTable table = {rows, LLAMA_ROW_COUNT + OWN_ROW_COUNT, flags};
    memcpy(rows, LLAMA_ROWS, sizeof LLAMA_ROWS);
    memcpy(rows + LLAMA_ROW_COUNT, ROWS_5D, sizeof ROWS_5D);
    for (size_t i = 0; i < LLAMA_ROW_COUNT; i++)
        if (strcmp(rows[i].name, "model") == 0) {
            rows[i].value = NAMES_5D;
            rows[i].initial = "mixtral";
        }
    return table;
}

// Prints the number of places of the experts. Each takes memory and work, with a token or
// without.
static inline void experts_print(const MoeLlama *m, size_t e, size_t slots, size_t T) {
    if (m->E == 0) return;
    printf("experts      %zu of a layer, %zu on each of %zu ranks, %zu of a token; %zu places "
           "in each for %zu tokens of a sequence",
           m->E, m->E / e, e, m->k, slots, T);
    if (slots == T)
        printf(": no token is dropped, %.3g times the work of the chosen\n",
               (double)m->E / (double)m->k);
    else
        printf("\n");
}

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

// Fills in the sizes of the named model, and the number of ranks that share a sequence.
static inline bool sizes_5d(Options *o, const void *flags, Error *err) {
    const Options5D *own = (const Options5D *)flags;
    const LlamaSize *s = size_5d(own);
    const GPTConfig named = {s->L, s->C, s->NH, s->V, 0, s->maxT, NULL};
    o->context = own->context.c;
    return options_take_model(o, &named, false, err);
}

// Fills in *m from the flags. from_file: *m was read from a file, so the flags must agree
// with it. Checks the sizes against each other and against the ranks.
static inline bool moe_llama_resolve(MoeLlama *m, Options5D *flags, const Options *o,
                                     bool from_file, Error *err) {
    const MoeSize *named = moe_size(flags);
    const Grid *grid = &o->grid;
    Context *context = &flags->context;
    size_t E = flags->E ? flags->E : named ? named->E : 0;
    size_t k = flags->k ? flags->k : named ? named->k : 0;
    if (from_file && ((flags->E && E != m->E) || (flags->k && k != m->k)))
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
    if (m->E && m->llama.type != LLAMA && m->llama.type != QWEN3)
        return error_set(err, "--experts needs --model mixtral or qwen3-moe: %s has an MLP",
                         LLAMA_TYPES[m->llama.type]);
    if (!m->E && (flags->k || flags->e > 1))
        return error_set(err, "--%s needs --experts: this model has an MLP",
                         flags->k ? "top-k" : "expert-parallel");
    MoeSpec experts = moe_spec(m->E, m->k);
    experts.e = flags->e;
    if (m->E && !moe_check(&experts, grid->d, o->zero, err)) return false;

    // Each rank's chunks i and 2c-1-i of the sequence.
    context->T = o->seq;
    context->zigzag = 1;
    context->rank = grid->d_rank % context->c;
    if (!context_check(*context, o->config.NH, false, err)) return false;
    size_t c = context->c, rows = o->micro_batch * (o->seq / c);
    if (c > 1 && !context->ring && m->llama.KV / grid->t % c)
        return error_set(err,
                         "--context %zu does not divide the %zu key/value heads of a tensor "
                         "rank, which --context-by ulysses needs: take --context-by ring",
                         c, m->llama.KV / grid->t);
    return !o->sequence_parallel || rows % grid->t == 0 ||
           error_set(err,
                     "--tensor %zu does not divide the %zu tokens of a rank's micro-batch, "
                     "which --sequence-parallel 1 cuts: change --seq or --micro-batch",
                     grid->t, rows);
}

#endif
