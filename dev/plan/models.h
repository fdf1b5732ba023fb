// models.h: the models that the planner knows by name, which are the models of the trainers'
// --model. train_llama's and train_5d's are among them. With PLAN_WITHOUT_EXPERTS train_5d is
// left out.
//
// defines: Model, model_find, model_nearest, model_names, llama_name, llama_size, llama_experts
#ifndef DEV_PLAN_MODELS_H
#define DEV_PLAN_MODELS_H

#include "dev/plot/tool.h"
#include "llmc/host/options.h"
#include "llmc/llama.h"

#include <stddef.h>

#ifndef PLAN_WITHOUT_EXPERTS
#include "llmc/model_5d.h"
enum { MOE_SIZE_COUNT = sizeof MOE_SIZES / sizeof MOE_SIZES[0] };
#else
#define NAMES_5D LLAMA_NAMES
typedef struct {
    LlamaSize llama;
    size_t E, k;
} MoeSize;
static const MoeSize MOE_SIZES[1] = {};
enum { LLAMA_SIZE_COUNT = sizeof LLAMA_SIZES / sizeof LLAMA_SIZES[0], MOE_SIZE_COUNT = 0 };
#endif

typedef struct {
    const char *name;
    size_t layers, heads, channels, seq, vocabulary;
} Model;

enum {
    MODEL_COUNT = MODEL_ALIASES + MODEL_PRESET_COUNT,
    LLAMA_COUNT = (int)LLAMA_SIZE_COUNT + (int)MOE_SIZE_COUNT,
    LLAMA_SEQ = 8192
};  // of a sequence, unless --seq says otherwise or the model has fewer positions

// Copies the name at a place of a list "a|b|c".
static inline void list_name(const char *at, int place, char name[32]) {
    for (int i = 0; i < place; i++) at += strcspn(at, "|") + 1;
    snprintf(name, 32, "%.*s", (int)strcspn(at, "|"), at);
}

// Copies the name of a model of train_llama or train_5d, by its place in NAMES_5D.
static inline void llama_name(int place, char name[32]) { list_name(NAMES_5D, place, name); }

// Returns the sizes of the model at this place.
static inline const LlamaSize *llama_size(int place) {
    return place < LLAMA_SIZE_COUNT ? &LLAMA_SIZES[place]
                                    : &MOE_SIZES[place - LLAMA_SIZE_COUNT].llama;
}

// Returns the sizes of a mixture of experts, or NULL for a model without.
static inline const MoeSize *llama_experts(int place) {
    return place < LLAMA_SIZE_COUNT ? NULL : &MOE_SIZES[place - LLAMA_SIZE_COUNT];
}

// Finds a model by name. *model's name is the argument; *llama is its place in NAMES_5D, 0 for a
// GPT-2.
static inline bool model_find(const char *name, Model *model, int *llama) {
    *llama = 0;
    int place = field_choice(MODEL_NAMES, name);
    if (place >= 0) {
        const GPTConfig *g = &MODEL_PRESETS[place < MODEL_ALIASES ? place : place - MODEL_ALIASES];
        Model found = {name, g->L, g->NH, g->C, g->maxT, g->V};
        return *model = found, true;
    }
    for (int i = 1; i < LLAMA_COUNT; i++) {
        const LlamaSize *s = llama_size(i);
        char known[32];
        llama_name(i, known);
        if (!s->L || strcmp(known, name) != 0) continue;
        Model found = {name, s->L, s->NH, s->C, s->maxT < LLAMA_SEQ ? s->maxT : (size_t)LLAMA_SEQ,
                       s->V};
        return *model = found, *llama = i, true;
    }
    return false;
}

// Copies all names. Returns their number.
static inline size_t model_list(char names[MODEL_COUNT + LLAMA_COUNT][32]) {
    size_t count = 0;
    for (int i = 0; i < MODEL_COUNT; i++) list_name(MODEL_NAMES, i, names[count++]);
    for (int i = 1; i < LLAMA_COUNT; i++)
        if (llama_size(i)->L) llama_name(i, names[count++]);
    return count;
}

// Copies the nearest name.
static inline void model_nearest(const char *name, char nearest[32]) {
    char names[MODEL_COUNT + LLAMA_COUNT][32];
    const char *pointers[MODEL_COUNT + LLAMA_COUNT];
    size_t count = model_list(names);
    for (size_t i = 0; i < count; i++) pointers[i] = names[i];
    snprintf(nearest, 32, "%s", tool_nearest(name, pointers, count));
}

static inline void model_names(FILE *file) {
    char names[MODEL_COUNT + LLAMA_COUNT][32];
    size_t count = model_list(names);
    for (size_t i = 0; i < count; i++) fprintf(file, "%s%s", i ? ", " : "", names[i]);
}

#endif
