// moe.h: the flags of a mixture of experts, and its config.json.
// lesson: moe
//
// defines: MOE_OPTIONS, MOE_OPTION_ROWS, moe_check, moe_config_read, moe_config_write
#ifndef LLMC_MOE_H
#define LLMC_MOE_H

#include "llmc/host/config_json.h"
#include "llmc/host/field.h"
#include "llmc/host/options_table.h"
#include "llmc/model_moe.h"

static const Field MOE_OPTIONS[] = {
    {"Experts", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"experts", FIELD_SIZE, offsetof(MoeSpec, E), "8", 1, 128, OPTION_BASIC, "N", "MLPs of each layer"},
    {"top-k", FIELD_SIZE, offsetof(MoeSpec, k), "1", 1, 128, OPTION_BASIC, "N", "experts of a token"},
    {"capacity", FIELD_REAL, offsetof(MoeSpec, capacity), "1.25", 0.01, 128, OPTION_BASIC, "X",
     "an expert takes X * seq * top-k / experts tokens of a sequence"},
    {"expert-parallel", FIELD_SIZE, offsetof(MoeSpec, e), "1", 1, 128, OPTION_BASIC, "N",
     "data ranks that share out the experts"},
    {"balance-loss", FIELD_REAL, offsetof(MoeSpec, balance), "0.01", 0, 1e3, 0, "X",
     "coefficient of the loss of uneven experts"},
    {"z-loss", FIELD_REAL, offsetof(MoeSpec, z), "0.001", 0, 1e3, 0, "X", "coefficient of the loss of large logits"},
};
enum { MOE_OPTION_ROWS = sizeof MOE_OPTIONS / sizeof MOE_OPTIONS[0] };

// Refuses sizes that do not fit each other or the d data ranks.
static inline bool moe_check(const MoeSpec *o, size_t d, bool zero, Error *err) {
    if (o->k > o->E) return error_set(err, "--top-k %zu is more than --experts %zu: lower it", o->k, o->E);
    if (o->E % o->e)
        return error_set(err, "--expert-parallel %zu does not divide --experts %zu: take a size that does", o->e, o->E);
    if (d % o->e)
        return error_set(err, "--expert-parallel %zu does not divide the %zu data rank%s: take a size that does", o->e,
                         d, d == 1 ? "" : "s");
    return zero || o->e == 1 ||
           error_set(err, "--expert-parallel %zu needs --zero 1, with which every rank saves what it owns", o->e);
}

// Reads what moe_config_write has written. The flags must name the file's experts.
static inline bool moe_config_read(const char *path, GPTConfig *config, Error *err) {
    const MoeSpec *moe = moe_of(config);
    size_t E, k;
    cJSON *root = json_read(path, 1 << 20, err);
    const cJSON *type;
    if (!root) return false;
    bool ok = json_get(root, "model_type", &type, path, err) &&
              ((cJSON_IsString(type) && strcmp(type->valuestring, "gpt2_moe") == 0) ||
               error_set(err, "%s: \"model_type\" is not \"gpt2_moe\": it has no experts", path)) &&
              config_size(root, "n_embd", 1 << 17, &config->C, path, err) &&
              config_size(root, "n_layer", 5000, &config->L, path, err) &&
              config_size(root, "n_head", 1 << 17, &config->NH, path, err) &&
              config_size(root, "vocab_size", 1 << 24, &config->V, path, err) &&
              config_size(root, "n_positions", 1 << 24, &config->maxT, path, err) &&
              config_size(root, "num_local_experts", 128, &E, path, err) &&
              config_size(root, "num_experts_per_tok", 128, &k, path, err);
    cJSON_Delete(root);
    if (ok && config->C % config->NH)
        ok = error_set(err, "%s: n_head %zu does not divide n_embd %zu", path, config->NH, config->C);
    if (ok && (E != moe->E || k != moe->k))
        ok = error_set(err, "--experts %zu --top-k %zu contradict the checkpoint, which has %zu and %zu", moe->E,
                       moe->k, E, k);
    config->Vp = padded_vocabulary(config->V);
    return ok;
}

// GPT-2's config.json with another "model_type", so that nobody takes it for one, and Mixtral's names for E and k.
static inline bool moe_config_write(const char *path, const GPTConfig *g, bool bf16, Error *err) {
    GPTConfig dense = *g;
    dense.spec = NULL;
    if (!config_write(path, &dense, bf16, err)) return false;
    cJSON *root = json_read(path, 1 << 20, err);
    if (!root) return false;
    cJSON_DeleteItemFromObject(root, "architectures");
    cJSON_ReplaceItemInObject(root, "model_type", cJSON_CreateString("gpt2_moe"));
    cJSON_AddNumberToObject(root, "num_local_experts", (double)moe_of(g)->E);
    cJSON_AddNumberToObject(root, "num_experts_per_tok", (double)moe_of(g)->k);
    char *text = cJSON_Print(root);
    bool ok = text ? file_write_text(path, text, err) : error_set(err, "out of memory for %s", path);
    cJSON_free(text);
    cJSON_Delete(root);
    return ok;
}

#endif
