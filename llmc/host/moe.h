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
    size_t E = 0, k = 0;
    static const char *const own[] = {"num_local_experts", "num_experts_per_tok", NULL};
    cJSON *root = config_read_kind(path, "gpt2_moe", own, config, err);
    bool ok = root && config_size(root, "num_local_experts", 128, &E, path, err) &&
              config_size(root, "num_experts_per_tok", 128, &k, path, err);
    cJSON_Delete(root);
    if (ok && (E != moe->E || k != moe->k))
        ok = error_set(err, "--experts %zu --top-k %zu contradict the checkpoint, which has %zu and %zu", moe->E,
                       moe->k, E, k);
    return ok;
}

// GPT-2's config.json with another "model_type", so that nobody takes it for one, and Mixtral's names for E and k.
static inline bool moe_config_write(const char *path, const GPTConfig *g, bool bf16, Error *err) {
    char members[160];
    snprintf(members, sizeof members,
             "  \"model_type\": \"gpt2_moe\",\n  \"num_local_experts\": %zu,\n  \"num_experts_per_tok\": %zu,\n",
             moe_of(g)->E, moe_of(g)->k);
    return config_write_kind(path, g, bf16, members, err);
}

#endif
