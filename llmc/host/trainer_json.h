// trainer_json.h: trainer.json: where training stands and with which options it came there.
//
// defines: TrainerState, trainer_state_read, trainer_state_write, trainer_state_compare
#ifndef LLMC_TRAINER_JSON_H
#define LLMC_TRAINER_JSON_H

#include "llmc/host/folder.h"
#include "llmc/host/json.h"

#include <inttypes.h>

enum { TRAINER_DATA_SIZE = 2304, TRAINER_VALUE_SIZE = TRAINER_DATA_SIZE + 8 };  // of a field as JSON

typedef struct {
    size_t step;        // updates done
    size_t sample;      // number of the next training sample
    size_t first_step;  // where this run started; not in the file: reading sets it to step
    uint64_t seed;
    bool shuffle, bf16;
    size_t seq, global_batch, steps, warmup;
    int lr_schedule;    // ramp.h's LRSchedule
    double lr, lr_final, weight_decay, clip, beta1, beta2, eps;
    size_t ramp_start, ramp_increment, ramp_samples;
    int lr_unit;        // LR_UNIT_* of options_table.h
    double dropout;
    char data[TRAINER_DATA_SIZE];  // what --train-data names, as dataloader_describe says it; "": nothing, or not known
} TrainerState;

typedef enum { FIELD_SIZE, FIELD_SEED, FIELD_BOOL, FIELD_INT, FIELD_DOUBLE, FIELD_TEXT } FieldType;
// Fixed: another value is another run. Later: free, and 0 in checkpoints from before the field was there. Data: may be
// missing too, and is compared when the data are open (progress_data).
typedef enum { FIELD_POSITION, FIELD_FIXED, FIELD_FREE, FIELD_LATER, FIELD_DATA } FieldRole;

typedef struct {
    const char *name;
    FieldType type;
    FieldRole role;
    size_t offset;
} TrainerField;

#define TRAINER_FIELD(name, type, role) {#name, type, role, offsetof(TrainerState, name)}
static const TrainerField TRAINER_FIELDS[] = {
    TRAINER_FIELD(step, FIELD_SIZE, FIELD_POSITION),
    TRAINER_FIELD(sample, FIELD_SIZE, FIELD_POSITION),
    TRAINER_FIELD(seed, FIELD_SEED, FIELD_FIXED),
    TRAINER_FIELD(shuffle, FIELD_BOOL, FIELD_FIXED),
    TRAINER_FIELD(bf16, FIELD_BOOL, FIELD_FIXED),
    TRAINER_FIELD(seq, FIELD_SIZE, FIELD_FIXED),
    TRAINER_FIELD(global_batch, FIELD_SIZE, FIELD_FREE),
    TRAINER_FIELD(steps, FIELD_SIZE, FIELD_FREE),
    TRAINER_FIELD(warmup, FIELD_SIZE, FIELD_FREE),
    TRAINER_FIELD(lr_schedule, FIELD_INT, FIELD_FREE),
    TRAINER_FIELD(lr, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(lr_final, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(weight_decay, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(clip, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(beta1, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(beta2, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(eps, FIELD_DOUBLE, FIELD_FREE),
    TRAINER_FIELD(ramp_start, FIELD_SIZE, FIELD_LATER),
    TRAINER_FIELD(ramp_increment, FIELD_SIZE, FIELD_LATER),
    TRAINER_FIELD(ramp_samples, FIELD_SIZE, FIELD_LATER),
    TRAINER_FIELD(lr_unit, FIELD_INT, FIELD_LATER),
    TRAINER_FIELD(dropout, FIELD_DOUBLE, FIELD_LATER),
    TRAINER_FIELD(data, FIELD_TEXT, FIELD_DATA),
};
#undef TRAINER_FIELD
enum { TRAINER_FIELD_COUNT = (int)(sizeof TRAINER_FIELDS / sizeof TRAINER_FIELDS[0]), TRAINER_VERSION = 1 };
enum { TRAINER_MAX_FILE = 64 << 20 };  // the checksums of 10000 layers

// A field as JSON. 17 digits give back the same double; a seed can pass 2^53, so it is a string.
static inline void trainer_field_print(const TrainerState *state, const TrainerField *f, char *text,
                                       size_t size) {
    const char *at = (const char *)state + f->offset;
    switch (f->type) {
        case FIELD_SIZE: snprintf(text, size, "%zu", *(const size_t *)at); break;
        case FIELD_SEED: snprintf(text, size, "\"%" PRIu64 "\"", *(const uint64_t *)at); break;
        case FIELD_BOOL: snprintf(text, size, "%s", *(const bool *)at ? "true" : "false"); break;
        case FIELD_INT: snprintf(text, size, "%d", *(const int *)at); break;
        case FIELD_DOUBLE: snprintf(text, size, "%.17g", *(const double *)at); break;
        case FIELD_TEXT: snprintf(text, size, "\"%s\"", at); break;
    }
}

// Is the printed value what a checkpoint has that lacks the field?
static inline bool trainer_field_absent(const TrainerField *f, const char *text) {
    return (f->role == FIELD_LATER && strcmp(text, "0") == 0) || (f->role == FIELD_DATA && strcmp(text, "\"\"") == 0);
}

static inline bool trainer_field_parse(TrainerState *state, const TrainerField *f, const cJSON *item) {
    char *at = (char *)state + f->offset, *end;
    uint64_t n;
    switch (f->type) {
        case FIELD_SIZE:
            if (!json_whole(item, &n)) return false;
            *(size_t *)at = (size_t)n;
            return true;
        case FIELD_SEED:
            if (!cJSON_IsString(item) || item->valuestring[0] < '0' || item->valuestring[0] > '9') {
                return false;
            }
            errno = 0;
            *(uint64_t *)at = strtoull(item->valuestring, &end, 10);
            return errno == 0 && *end == '\0';
        case FIELD_BOOL:
            *(bool *)at = cJSON_IsTrue(item);
            return cJSON_IsBool(item);
        case FIELD_INT:
            if (!json_whole(item, &n) || n > 1000000) return false;
            *(int *)at = (int)n;
            return true;
        case FIELD_DOUBLE:
            if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) return false;
            *(double *)at = item->valuedouble;
            return true;
        case FIELD_TEXT:  // of these characters, so that it can be printed as it is
            if (!cJSON_IsString(item) || strlen(item->valuestring) >= TRAINER_DATA_SIZE ||
                item->valuestring[strspn(item->valuestring, "0123456789 x+")]) return false;
            snprintf(at, TRAINER_DATA_SIZE, "%s", item->valuestring);
            return true;
    }
    return false;
}

// checksums: a JSON object, or NULL.
static inline bool trainer_state_write(const char *path, const TrainerState *state, const char *checksums, Error *err) {
    size_t room = 4096 + TRAINER_VALUE_SIZE + (checksums ? strlen(checksums) : 0);
    char *text = (char *)host_alloc(room, 1), value[TRAINER_VALUE_SIZE];
    size_t n = (size_t)snprintf(text, room, "{\n  \"version\": %d", (int)TRAINER_VERSION);
    for (int i = 0; i < TRAINER_FIELD_COUNT; i++) {
        trainer_field_print(state, &TRAINER_FIELDS[i], value, sizeof value);
        n += (size_t)snprintf(text + n, room - n, ",\n  \"%s\": %s", TRAINER_FIELDS[i].name, value);
    }
    if (checksums) n += (size_t)snprintf(text + n, room - n, ",\n  \"checksums\": %s", checksums);
    snprintf(text + n, room - n, "\n}\n");
    bool ok = file_write_text(path, text, err);
    free(text);
    return ok;
}

static inline bool trainer_state_read(const char *path, TrainerState *state, Error *err) {
    cJSON *root = json_read(path, TRAINER_MAX_FILE, err);
    if (!root) return false;
    TrainerState s;
    memset(&s, 0, sizeof s);
    const cJSON *item;
    bool ok = json_get(root, "version", &item, path, err);
    if (ok && !(cJSON_IsNumber(item) && item->valuedouble == TRAINER_VERSION)) {
        ok = error_set(err, "%s is not of version %d", path, (int)TRAINER_VERSION);
    }
    for (int i = 0; i < TRAINER_FIELD_COUNT && ok; i++) {
        ok = json_get(root, TRAINER_FIELDS[i].name, &item, path, err);
        if (ok && !item && TRAINER_FIELDS[i].role >= FIELD_LATER) continue;
        if (ok && (!item || !trainer_field_parse(&s, &TRAINER_FIELDS[i], item))) {
            ok = error_set(err, "%s: \"%s\" is %s", path, TRAINER_FIELDS[i].name,
                           item ? "malformed" : "missing");
        }
    }
    cJSON_Delete(root);
    s.first_step = s.step;
    if (ok) *state = s;
    return ok;
}

// Can a run with the options of `now` continue `saved`? False with a sentence where the data or the precision
// would be others. `changed` lists what differs and may ("lr 0.001 -> 0.0005, ..."); empty: at the same layout the run
// continues with the same bits.
static inline bool trainer_state_compare(const TrainerState *saved, const TrainerState *now, char *changed,
                                         size_t size, Error *err) {
    size_t n = 0;
    changed[0] = '\0';
    for (int i = 0; i < TRAINER_FIELD_COUNT; i++) {
        const TrainerField *f = &TRAINER_FIELDS[i];
        char a[64], b[64];
        if (f->role == FIELD_POSITION || f->role == FIELD_DATA) continue;
        trainer_field_print(saved, f, a, sizeof a);
        trainer_field_print(now, f, b, sizeof b);
        if (strcmp(a, b) == 0) continue;
        if (f->role == FIELD_FIXED) {
            return error_set(err, "the checkpoint was trained with %s = %s, this run has %s: make them equal, "
                             "or start anew from its weights with --init", f->name, a, b);
        }
        if (n < size) {
            n += (size_t)snprintf(changed + n, size - n, "%s%s %s -> %s", n ? ", " : "", f->name, a, b);
        }
    }
    return true;
}

#endif
