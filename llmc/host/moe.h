// moe.h: the flags of a mixture of experts, and its config.json.
// lesson: moe
//
// defines: MOE_CAPACITY, MOE_OPTIONS, MOE_OPTION_ROWS, moe_take_capacity, moe_check,
//          moe_config_read, moe_config_write
#ifndef LLMC_MOE_H
#define LLMC_MOE_H

#include "llmc/host/config_json.h"
#include "llmc/host/field.h"
#include "llmc/host/options_table.h"
#include "llmc/model_moe.h"

// The capacity if neither --capacity nor a checkpoint says another one.
static const double MOE_CAPACITY = 1.25;

static const Field MOE_OPTIONS[] = {
    {"Experts", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"experts", FIELD_SIZE, offsetof(MoeSpec, E), "8", 1, 128, OPTION_BASIC, "N",
     "MLPs of each layer"},
    {"top-k", FIELD_SIZE, offsetof(MoeSpec, k), "1", 1, 128, OPTION_BASIC, "N",
     "experts of a token"},
    {"capacity", FIELD_REAL, offsetof(MoeSpec, capacity), NULL, 0.01, 128,
     OPTION_BASIC | OPTION_COMPUTES, "X",
     "an expert takes X * seq * top-k / experts tokens of a sequence (default 1.25, or the "
     "checkpoint's)"},
    {"expert-parallel", FIELD_SIZE, offsetof(MoeSpec, e), "1", 1, 128, OPTION_BASIC, "N",
     "data ranks that share out the experts"},
    {"balance-loss", FIELD_REAL, offsetof(MoeSpec, balance), "0.01", 0, 1e3,
     OPTION_COMPUTES, "X", "coefficient of the loss of uneven experts"},
    {"z-loss", FIELD_REAL, offsetof(MoeSpec, z), "0.001", 0, 1e3, OPTION_COMPUTES, "X",
     "coefficient of the loss of large logits"},
};
enum { MOE_OPTION_ROWS = sizeof MOE_OPTIONS / sizeof MOE_OPTIONS[0] };

// Takes the capacity of the checkpoint if the command line has none. Prints a note if both
// have one and differ. At a resume trainer.json's comparison prints it.
static inline void moe_take_capacity(MoeSpec *o, bool resumes, FILE *out) {
    if (o->capacity > 0 && o->of_checkpoint > 0 && o->capacity != o->of_checkpoint &&
        !resumes)
        fprintf(
            out,
            "note: the checkpoint was trained with capacity = %.15g, this run has %.15g\n",
            o->of_checkpoint, o->capacity);
    if (!(o->capacity > 0))
        o->capacity = o->of_checkpoint > 0 ? o->of_checkpoint : MOE_CAPACITY;
}

// Refuses sizes that do not fit each other or the d data ranks.
static inline bool moe_check(const MoeSpec *o, size_t d, bool zero, Error *err) {
    if (o->k > o->E)
        return error_set(err, "--top-k %zu is more than --experts %zu: lower it", o->k,
                         o->E);
    if (o->E % o->e)
        return error_set(
            err,
            "--expert-parallel %zu does not divide --experts %zu: take a size that does",
            o->e, o->E);
    if (d % o->e)
        return error_set(err,
                         "--expert-parallel %zu does not divide the %zu data rank%s: take "
                         "a size that does",
                         o->e, d, d == 1 ? "" : "s");
    return zero || o->e == 1 ||
           error_set(err,
                     "--expert-parallel %zu needs --zero 1, with which every rank saves "
                     "what it owns",
                     o->e);
}

// Reads what moe_config_write has written. The flags must name the file's experts. An older
// file has no capacity.
static inline bool moe_config_read(const char *path, GPTConfig *config, Error *err) {
    MoeSpec *moe = (MoeSpec *)(void *)config->spec;
    size_t E = 0, k = 0;
    static const char *const own[] = {"num_local_experts", "num_experts_per_tok",
                                      "capacity_factor", NULL};
    cJSON *root = config_read_kind(path, "gpt2_moe", own, config, err);
    bool ok = root && config_size(root, "num_local_experts", 128, &E, path, err) &&
              config_size(root, "num_experts_per_tok", 128, &k, path, err);
    const cJSON *capacity = cJSON_GetObjectItemCaseSensitive(root, "capacity_factor");
    moe->of_checkpoint = cJSON_IsNumber(capacity) ? capacity->valuedouble : 0;
    if (ok && capacity && !(moe->of_checkpoint >= 0.01 && moe->of_checkpoint <= 128))
        ok = error_set(err, "%s: \"capacity_factor\" must be a number from 0.01 to 128",
                       path);
    cJSON_Delete(root);
    if (ok && (E != moe->E || k != moe->k))
        ok = error_set(
            err,
            "--experts %zu --top-k %zu contradict the checkpoint, which has %zu and %zu",
            moe->E, moe->k, E, k);
    return ok;
}

// Writes GPT-2's config.json with another "model_type", so that no program takes it for
// GPT-2. E and k have Mixtral's names. It also has the capacity, which an evaluation needs.
static inline bool moe_config_write(const char *path, const GPTConfig *g, bool bf16,
                                    Error *err) {
    char members[256];
    snprintf(members, sizeof members,
             "  \"model_type\": \"gpt2_moe\",\n  \"num_local_experts\": %zu,\n  "
             "\"num_experts_per_tok\": %zu,\n"
             "  \"capacity_factor\": %.17g,\n",
             moe_of(g)->E, moe_of(g)->k, moe_of(g)->capacity);
    return config_write_kind(path, g, bf16, members, err);
}

#endif
