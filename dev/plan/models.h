// models.h: the models that the planner knows by name.
//
// defines: Model, model_find, model_nearest, model_names
#ifndef DEV_PLAN_MODELS_H
#define DEV_PLAN_MODELS_H

#include "dev/plot/tool.h"

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
enum { MODEL_COUNT = sizeof MODELS / sizeof MODELS[0] };

static inline const Model *model_find(const char *name) {
    for (size_t i = 0; i < MODEL_COUNT; i++)
        if (strcmp(MODELS[i].name, name) == 0) return &MODELS[i];
    return NULL;
}

static inline const char *model_nearest(const char *name) {
    const char *names[MODEL_COUNT];
    for (size_t i = 0; i < MODEL_COUNT; i++) names[i] = MODELS[i].name;
    return tool_nearest(name, names, MODEL_COUNT);
}

static inline void model_names(FILE *file) {
    for (size_t i = 0; i < MODEL_COUNT; i++) fprintf(file, "%s%s", i ? ", " : "", MODELS[i].name);
}

#endif
