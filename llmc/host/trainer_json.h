// trainer.json: the progress of a run, and the options that it was trained with.
//
// defines: TrainerState, TRAINER_KEYS, trainer_key_print, trainer_state_read, trainer_state_write,
//          trainer_state_compare, progress_resume, progress_data
#ifndef LLMC_TRAINER_JSON_H
#define LLMC_TRAINER_JSON_H

#include "llmc/host/dataloader.h"
#include "llmc/host/json.h"
#include "llmc/host/options.h"

enum { TRAINER_VERSION = 1, TRAINER_DATA_SIZE = 2304, TRAINER_VALUE_SIZE = TRAINER_DATA_SIZE + 8 };  // of a JSON value
enum { TRAINER_MAX_FILE = 64 << 20 };  // the checksums of 10000 layers
#define TRAINER_MOST_SAVES 1000000000000000u

typedef struct {
    size_t step;        // updates done
    size_t sample;      // number of the next training sample
    size_t first_step;  // start of this run; not in the file
    bool bf16;
    char data[TRAINER_DATA_SIZE];  // the training data as dataloader_describe prints them, or "" if there are none yet
    size_t save;        // orders the checkpoints of a folder, whatever their steps: each save counts on
    size_t lr_unit;     // 0: steps, the only unit of --warmup and the decay
    Options opt;        // of a state that was read: the options in TRAINER_KEYS, 0 elsewhere
} TrainerState;

// The fields of trainer.json that are not flags; the other rows are in OPTIONS.
#define STATE_FIELD(name, type, field, max, value) \
    {name, type, offsetof(TrainerState, field), NULL, 0, max, 0, value, NULL}
static const Field STATE_FIELDS[] = {
    STATE_FIELD("step", FIELD_SIZE, step, 1e15, NULL), STATE_FIELD("sample", FIELD_SIZE, sample, JSON_MAX_WHOLE, NULL),
    STATE_FIELD("bf16", FIELD_SWITCH, bf16, 1, "0|1"),
    STATE_FIELD("ramp-start", FIELD_SIZE, opt.ramp.start, JSON_MAX_WHOLE, NULL),
    STATE_FIELD("ramp-increment", FIELD_SIZE, opt.ramp.increment, JSON_MAX_WHOLE, NULL),
    STATE_FIELD("ramp-samples", FIELD_SIZE, opt.ramp.samples, JSON_MAX_WHOLE, NULL),
    STATE_FIELD("lr-unit", FIELD_SIZE, lr_unit, 0, NULL),
    STATE_FIELD("data", FIELD_CHARS, data, TRAINER_DATA_SIZE, "0123456789 x+"),
    STATE_FIELD("save", FIELD_SIZE, save, TRAINER_MOST_SAVES, NULL),
};
#undef STATE_FIELD

// Fixed: a resumed run must have the same value. Free: it may have another. Sparse: the checksum "state" leaves out the
// value 0 or "".
enum { KEY_FIXED = 1, KEY_FREE = 2, KEY_SPARSE = 4 };

typedef struct {
    const char *name;
    unsigned roles;
} TrainerKey;

// In the order of the checksum "state": new keys go to the end.
static const TrainerKey TRAINER_KEYS[] = {
    {"step", 0}, {"sample", 0}, {"seed", KEY_FIXED}, {"shuffle", KEY_FIXED}, {"bf16", KEY_FIXED}, {"seq", KEY_FIXED},
    {"global_batch", KEY_FREE}, {"steps", KEY_FREE}, {"warmup", KEY_FREE}, {"lr_schedule", KEY_FREE},
    {"lr", KEY_FREE}, {"lr_final", KEY_FREE}, {"weight_decay", KEY_FREE}, {"clip", KEY_FREE},
    {"beta1", KEY_FREE}, {"beta2", KEY_FREE}, {"eps", KEY_FREE},
    {"ramp_start", KEY_FREE | KEY_SPARSE}, {"ramp_increment", KEY_FREE | KEY_SPARSE},
    {"ramp_samples", KEY_FREE | KEY_SPARSE}, {"lr_unit", KEY_SPARSE}, {"dropout", KEY_FREE | KEY_SPARSE},
    {"data", KEY_SPARSE},  // compared by progress_data, when the data are open
    {"save", KEY_SPARSE},
};
enum { TRAINER_KEY_COUNT = sizeof TRAINER_KEYS / sizeof TRAINER_KEYS[0] };

// Finds the row of a key and the object it belongs to. A flag has - where its key has _.
static inline const Field *trainer_field(const TrainerState *state, const TrainerKey *key, void **object) {
    const FieldTable tables[] = {{STATE_FIELDS, sizeof STATE_FIELDS / sizeof STATE_FIELDS[0], (void *)state},
                                 {OPTIONS, OPTION_ROWS, (void *)&state->opt}};
    char flag[32];
    snprintf(flag, sizeof flag, "%s", key->name);
    for (char *c = flag; *c; c++) {
        if (*c == '_') *c = '-';
    }
    return fields_find(tables, 2, flag, object);
}

// Prints the value of a key as JSON.
static inline void trainer_key_print(const TrainerState *state, const TrainerKey *key, char *text, size_t size) {
    void *object;
    const Field *f = trainer_field(state, key, &object);
    json_print_field(object, f, text, size);
}

// Writes the file. checksums: a JSON object, or NULL.
static inline bool trainer_state_write(const char *path, const TrainerState *state, const char *checksums, Error *err) {
    char *text, value[TRAINER_VALUE_SIZE];
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    fprintf(out, "{\n  \"version\": %d", (int)TRAINER_VERSION);
    for (int i = 0; i < TRAINER_KEY_COUNT; i++) {
        trainer_key_print(state, &TRAINER_KEYS[i], value, sizeof value);
        fprintf(out, ",\n  \"%s\": %s", TRAINER_KEYS[i].name, value);
    }
    if (checksums) fprintf(out, ",\n  \"checksums\": %s", checksums);
    fprintf(out, "\n}\n");
    fclose(out);
    bool ok = file_write_text(path, text, err);
    free(text);
    return ok;
}

// Reads the file. Returns false with a sentence if a key is missing or malformed.
static inline bool trainer_state_read(const char *path, TrainerState *state, Error *err) {
    cJSON *root = json_read(path, TRAINER_MAX_FILE, err);
    if (!root) return false;
    memset(state, 0, sizeof *state);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "version");
    bool ok = (cJSON_IsNumber(item) && item->valuedouble == TRAINER_VERSION) ||
              error_set(err, "%s is not of version %d", path, (int)TRAINER_VERSION);
    for (int i = 0; i < TRAINER_KEY_COUNT && ok; i++) {
        const TrainerKey *key = &TRAINER_KEYS[i];
        void *object;
        const Field *f = trainer_field(state, key, &object);
        item = cJSON_GetObjectItemCaseSensitive(root, key->name);
        if (!item) ok = error_set(err, "%s: \"%s\" is missing", path, key->name);
        else if (!json_set_field(object, f, item)) ok = error_set(err, "%s: \"%s\" is malformed", path, key->name);
    }
    cJSON_Delete(root);
    state->first_step = state->step;
    return ok;
}

// Compares the options of a checkpoint with those of a run that continues it. Returns false with a sentence if a fixed
// one differs. Lists the others that differ in `changed`: "lr 0.001 -> 0.0005, ...". If none does and the layout is the
// same, the run continues with the same bits.
static inline bool trainer_state_compare(const TrainerState *saved, const TrainerState *now, char *changed,
                                         size_t size, Error *err) {
    size_t n = 0;
    changed[0] = '\0';
    for (int i = 0; i < TRAINER_KEY_COUNT; i++) {
        const TrainerKey *key = &TRAINER_KEYS[i];
        char a[64], b[64];
        if (!(key->roles & (KEY_FIXED | KEY_FREE))) continue;
        trainer_key_print(saved, key, a, sizeof a);
        trainer_key_print(now, key, b, sizeof b);
        if (strcmp(a, b) == 0) continue;
        if (key->roles & KEY_FIXED)
            return error_set(err, "the checkpoint was trained with %s = %s, this run has %s: make them equal, or start "
                             "from its weights alone with --init", key->name, a, b);
        if (n < size)
            n += (size_t)snprintf(changed + n, size - n, "%s%s %s -> %s", n ? ", " : "", key->name, a, b);
    }
    return true;
}

// Continues at the step and the sample of the checkpoint in dir. Prints the options that changed. Returns false with a
// sentence if a run with these options cannot continue it.
static inline bool progress_resume(TrainerState *progress, const char *dir, Error *err) {
    TrainerState saved;
    char changed[512], path[PATH_MAX];
    if (!path_print(path, sizeof path, err, "%s/trainer.json", dir) || !trainer_state_read(path, &saved, err) ||
        !trainer_state_compare(&saved, progress, changed, sizeof changed, err)) return false;
    saved.opt = progress->opt;
    *progress = saved;
    printf("resuming     %s after step %zu%s%s\n", dir, saved.step, changed[0] ? "; changed: " : "", changed);
    if (saved.step >= progress->opt.steps)
        printf("note: the checkpoint has done all of --steps %zu: nothing is trained\n", progress->opt.steps);
    return true;
}

// Notes the training data. Returns false with a sentence if the checkpoint was trained on other data, unless `anyway`.
static inline bool progress_data(TrainerState *progress, const DataLoader *data, bool anyway, Error *err) {
    char now[TRAINER_DATA_SIZE];
    dataloader_describe(data, now, sizeof now);
    if (progress->data[0] && strcmp(progress->data, now) != 0 && !anyway)
        return error_set(err, "the checkpoint was trained on other data (weight x samples: %s) than --train-data names "
                         "(%s): name the same, or start from its weights alone with --init (--verify 0 continues with "
                         "these)", progress->data, now);
    memcpy(progress->data, now, sizeof now);
    return true;
}

#endif
