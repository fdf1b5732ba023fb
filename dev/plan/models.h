// models.h: the models that the planner knows by name: GPT-2's, GPT-3's and PTD-P's here, and those of train_llama.
//
// defines: Model, model_find, model_nearest, model_names, llama_name
#ifndef DEV_PLAN_MODELS_H
#define DEV_PLAN_MODELS_H

#include "dev/plot/tool.h"
#include "llmc/llama.h"

#include <stddef.h>

typedef struct {
    const char *name;
    size_t layers, heads, channels, seq, vocabulary;
} Model;

// GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020) and the rows of Table 1 of PTD-P (Narayanan et al. 2021).
static const Model MODELS[] = {
    {"gpt2", 12, 12, 768, 1024, 50257},           {"gpt2-medium", 24, 16, 1024, 1024, 50257},
    {"gpt2-large", 36, 20, 1280, 1024, 50257},    {"gpt2-xl", 48, 25, 1600, 1024, 50257},
    {"gpt3-175b", 96, 96, 12288, 2048, 51200},    {"ptdp-1.7b", 24, 24, 2304, 2048, 51200},
    {"ptdp-3.6b", 30, 32, 3072, 2048, 51200},     {"ptdp-7.5b", 36, 32, 4096, 2048, 51200},
    {"ptdp-18b", 40, 48, 6144, 2048, 51200},      {"ptdp-39b", 48, 64, 8192, 2048, 51200},
    {"ptdp-76b", 60, 80, 10240, 2048, 51200},     {"ptdp-145b", 80, 96, 12288, 2048, 51200},
    {"ptdp-310b", 96, 128, 16384, 2048, 51200},   {"ptdp-530b", 105, 128, 20480, 2048, 51200},
    {"ptdp-1t", 128, 160, 25600, 2048, 51200},
};
enum { MODEL_COUNT = sizeof MODELS / sizeof MODELS[0], LLAMA_COUNT = sizeof LLAMA_SIZES / sizeof LLAMA_SIZES[0],
       LLAMA_SEQ = 8192 };  // of a sequence, unless --seq says otherwise or the model has fewer positions

// Copies the name of a size in LLAMA_SIZES.
static inline void llama_name(int size, char name[32]) {
    const char *at = LLAMA_NAMES;
    for (int i = 0; i < size; i++) at += strcspn(at, "|") + 1;
    snprintf(name, 32, "%.*s", (int)strcspn(at, "|"), at);
}

// Finds a model by name. *model's name is the argument; *llama is its place in LLAMA_SIZES, 0 for a GPT-2.
static inline bool model_find(const char *name, Model *model, int *llama) {
    *llama = 0;
    for (size_t i = 0; i < MODEL_COUNT; i++)
        if (strcmp(MODELS[i].name, name) == 0) return *model = MODELS[i], true;
    for (int i = 1; i < LLAMA_COUNT; i++) {
        const LlamaSize *s = &LLAMA_SIZES[i];
        char known[32];
        llama_name(i, known);
        if (!s->L || strcmp(known, name) != 0) continue;
        Model found = {name, s->L, s->NH, s->C, s->maxT < LLAMA_SEQ ? s->maxT : (size_t)LLAMA_SEQ, s->V};
        return *model = found, *llama = i, true;
    }
    return false;
}

// Copies the nearest name.
static inline void model_nearest(const char *name, char nearest[32]) {
    char llama[LLAMA_COUNT][32];
    const char *names[MODEL_COUNT + LLAMA_COUNT];
    size_t count = 0;
    for (size_t i = 0; i < MODEL_COUNT; i++) names[count++] = MODELS[i].name;
    for (int i = 1; i < LLAMA_COUNT; i++) {
        llama_name(i, llama[i]);
        if (LLAMA_SIZES[i].L) names[count++] = llama[i];
    }
    snprintf(nearest, 32, "%s", tool_nearest(name, names, count));
}

static inline void model_names(FILE *file) {
    for (size_t i = 0; i < MODEL_COUNT; i++) fprintf(file, "%s%s", i ? ", " : "", MODELS[i].name);
    for (int i = 1; i < LLAMA_COUNT; i++) {
        char name[32];
        llama_name(i, name);
        if (LLAMA_SIZES[i].L) fprintf(file, ", %s", name);
    }
}

#endif
