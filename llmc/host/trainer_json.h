// trainer_json.h: trainer.json, which has the progress of a run, and the options that it
// was trained with.
//
// defines: TRAINER_MOST_SAVES, TrainerState, TRAINER_KEYS, trainer_state_print,
//          trainer_state_read, trainer_state_compare, progress_lesson, progress_resume,
//          progress_data, progress_tuned
#ifndef LLMC_TRAINER_JSON_H
#define LLMC_TRAINER_JSON_H

#include "llmc/host/dataloader.h"
#include "llmc/host/json.h"
#include "llmc/host/options.h"

enum {
    TRAINER_VERSION = 1,
    TRAINER_DATA_SIZE = 2304,
    TRAINER_VALUE_SIZE = TRAINER_DATA_SIZE + 8
};  // of a JSON value
enum { TRAINER_LESSON_SIZE = 512 };
enum { TRAINER_MAX_FILE = 64 << 20 };  // the checksums of 10000 layers
#define TRAINER_MOST_SAVES 1000000000000000u

typedef struct {
    size_t step;        // updates done
    size_t sample;      // number of the next training sample
    size_t first_step;  // start of this run; not in the file
    bool bf16;
    char data[TRAINER_DATA_SIZE];  // the training data as dataloader_describe prints them,
                                   // or "" if there are none yet
    size_t save;  // orders the checkpoints of a folder, whatever their steps: each save
                  // counts on
    size_t validated,
        sampled;     // steps of the last validation and of the last sample; 0: none
    size_t lr_unit;  // 0: steps, the only unit of --warmup and the decay
    char lesson[TRAINER_LESSON_SIZE];  // a lesson's own options, as progress_lesson prints
                                       // them, or ""
    char tuned[20];  // checksum of the file of `make tune`, or "" if there is none
    Options opt;  // of a state that was read: the options in TRAINER_KEYS, 0 elsewhere
} TrainerState;

//   KEY_FIXED   A resumed run must have the same value.
//   KEY_FREE    It may have another.
//   KEY_SPARSE  The checksum "state" leaves out the value 0 or "".
//   KEY_LATE    Older files lack it, which is the value 0 or "".
enum { KEY_FIXED = 1, KEY_FREE = 2, KEY_SPARSE = 4, KEY_LATE = 8 };

// The keys, in the order of the checksum "state": new ones go to the end. The values of
// flags have no limits here: the command line has them.
#define KEY(name, type, field, max, value, roles) \
    { name, type, offsetof(TrainerState, field), NULL, 0, max, roles, value, NULL }
#define SIZE(name, field, max, roles) KEY(name, FIELD_SIZE, field, max, NULL, roles)
#define REAL(name, roles) KEY(#name, FIELD_REAL, opt.name, 1e300, NULL, roles)
static const Field TRAINER_KEYS[] = {
    SIZE("step", step, 1e15, 0),
    SIZE("sample", sample, JSON_MAX_WHOLE, 0),
    KEY("seed", FIELD_SEED, opt.seed, 0x1p64, NULL, KEY_FIXED),
    KEY("shuffle", FIELD_SWITCH, opt.shuffle, 1, "0|1", KEY_FIXED),
    KEY("bf16", FIELD_SWITCH, bf16, 1, "0|1", KEY_FIXED),
    SIZE("seq", opt.seq, JSON_MAX_WHOLE, KEY_FIXED),
    SIZE("global_batch", opt.global_batch, JSON_MAX_WHOLE, KEY_FREE),
    SIZE("steps", opt.steps, JSON_MAX_WHOLE, KEY_FREE),
    SIZE("warmup", opt.warmup, JSON_MAX_WHOLE, KEY_FREE),
    KEY("lr_schedule", FIELD_CHOICE, opt.lr_schedule, 0, LR_SCHEDULES, KEY_FREE),
    REAL(lr, KEY_FREE),
    REAL(lr_final, KEY_FREE),
    REAL(weight_decay, KEY_FREE),
    REAL(clip, KEY_FREE),
    REAL(beta1, KEY_FREE),
    REAL(beta2, KEY_FREE),
    REAL(eps, KEY_FREE),
    SIZE("ramp_start", opt.ramp.start, JSON_MAX_WHOLE, KEY_FREE | KEY_SPARSE),
    SIZE("ramp_increment", opt.ramp.increment, JSON_MAX_WHOLE, KEY_FREE | KEY_SPARSE),
    SIZE("ramp_samples", opt.ramp.samples, JSON_MAX_WHOLE, KEY_FREE | KEY_SPARSE),
    SIZE("lr_unit", lr_unit, 0, KEY_SPARSE),
    REAL(dropout, KEY_FREE | KEY_SPARSE),
    KEY("data", FIELD_CHARS, data, TRAINER_DATA_SIZE,
        "0123456789abcdefghijklmnopqrstuvwxyz +,",
        KEY_SPARSE),  // progress_data compares it
    SIZE("save", save, TRAINER_MOST_SAVES, KEY_SPARSE),
    SIZE("validated", validated, 1e15, KEY_SPARSE | KEY_LATE),
    SIZE("sampled", sampled, 1e15, KEY_SPARSE | KEY_LATE),
    KEY("lesson", FIELD_CHARS, lesson, TRAINER_LESSON_SIZE,
        "abcdefghijklmnopqrstuvwxyz0123456789-+.,= ",
        KEY_SPARSE | KEY_LATE),  // trainer_state_compare looks at each of its options
    KEY("tuned", FIELD_CHARS, tuned, 20, "0123456789abcdef",
        KEY_SPARSE | KEY_LATE),  // progress_tuned compares it
};
#undef KEY
#undef SIZE
#undef REAL
enum { TRAINER_KEY_COUNT = sizeof TRAINER_KEYS / sizeof TRAINER_KEYS[0] };

// Prints the file up to its checksums, which checkpoint_commit adds.
static inline void trainer_state_print(FILE *out, const TrainerState *state) {
    char value[TRAINER_VALUE_SIZE];
    fprintf(out, "{\n  \"version\": %d", (int)TRAINER_VERSION);
    for (int i = 0; i < TRAINER_KEY_COUNT; i++) {
        json_print_field(state, &TRAINER_KEYS[i], value, sizeof value);
        fprintf(out, ",\n  \"%s\": %s", TRAINER_KEYS[i].name, value);
    }
}

// Reads the file of a checkpoint. Returns false with an error message if a key is missing
// or malformed.
static inline bool trainer_state_read(const char *dir, TrainerState *state, Error *err) {
    char path[PATH_MAX];
    cJSON *root = path_print(path, err, "%s/trainer.json", dir)
                      ? json_read(path, TRAINER_MAX_FILE, err)
                      : NULL;
    if (!root) return false;
    memset(state, 0, sizeof *state);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "version");
    bool ok = (cJSON_IsNumber(item) && item->valuedouble == TRAINER_VERSION) ||
              error_set(err, "%s is not of version %d", path, (int)TRAINER_VERSION);
    for (int i = 0; i < TRAINER_KEY_COUNT && ok; i++) {
        const Field *key = &TRAINER_KEYS[i];
        item = cJSON_GetObjectItemCaseSensitive(root, key->name);
        if (!item && (key->tags & KEY_LATE)) continue;
        if (!item)
            ok = error_set(err, "%s: \"%s\" is missing", path, key->name);
        else if (!json_set_field(state, key, item))
            ok = error_set(err, "%s: \"%s\" is malformed", path, key->name);
    }
    cJSON_Delete(root);
    state->first_step = state->step;
    return ok;
}

// Notes the options of a lesson that change what is computed: "capacity = 1.25, z-loss =
// 0.001". Numbers have as few digits as give back the same double.
static inline void progress_lesson(TrainerState *progress, const FieldTable *rows) {
    char value[64], shorter[64];
    size_t n = 0, size = sizeof progress->lesson;
    progress->lesson[0] = '\0';
    for (const Field *f = rows->fields; f < rows->fields + rows->count; f++) {
        if (!(f->tags & OPTION_COMPUTES)) continue;
        json_print_field(rows->object, f, value, sizeof value);
        snprintf(shorter, sizeof shorter, "%.15g", strtod(value, NULL));
        if (f->type == FIELD_REAL && strtod(shorter, NULL) == strtod(value, NULL))
            strcpy(value, shorter);
        if (n < size)
            n += (size_t)snprintf(progress->lesson + n, size - n, "%s%s = %s",
                                  n ? ", " : "", f->name, value);
    }
}

// Prints a note for each option of a lesson that differs. A checkpoint of an older build,
// or of another trainer, has no text or other names: nothing is known then.
static inline void trainer_lesson_compare(const char *saved, const char *now, FILE *out) {
    for (const char *a = saved, *b = now; *a && *b;) {
        int of_a = (int)strcspn(a, ","), of_b = (int)strcspn(b, ",");
        int name = (int)strcspn(a, "=");
        bool same_name = strncmp(a, b, (size_t)name + 1) == 0;
        if (same_name && (of_a != of_b || strncmp(a, b, (size_t)of_a) != 0))
            fprintf(out, "note: the checkpoint was trained with %.*s, this run has %.*s\n",
                    of_a, a, of_b - name - 2, b + name + 2);
        a += of_a + (int)strspn(a + of_a, ", ");
        b += of_b + (int)strspn(b + of_b, ", ");
    }
}

// Compares the options of a checkpoint with the options of a run that continues it. Returns
// false with an error message if a fixed one differs. Prints a note for each other one that
// differs. Without notes, the same layout continues with the same bits.
static inline bool trainer_state_compare(const TrainerState *saved, const TrainerState *now,
                                         FILE *out, Error *err) {
    for (int i = 0; i < TRAINER_KEY_COUNT; i++) {
        const Field *key = &TRAINER_KEYS[i];
        char a[64], b[64];
        if (!(key->tags & (KEY_FIXED | KEY_FREE))) continue;
        json_print_field(saved, key, a, sizeof a);
        json_print_field(now, key, b, sizeof b);
        if (strcmp(a, b) == 0) continue;
        if (key->tags & KEY_FIXED)
            return error_set(err,
                             "the checkpoint was trained with %s = %s, this run has %s: "
                             "make them equal, or start "
                             "from its weights alone with --init",
                             key->name, a, b);
        fprintf(out, "note: the checkpoint was trained with %s = %s, this run has %s\n",
                key->name, a, b);
    }
    trainer_lesson_compare(saved->lesson, now->lesson, out);
    return true;
}

// Continues at the step and the sample of the checkpoint in dir. Returns false with an
// error message if a run with these options cannot continue it.
static inline bool progress_resume(TrainerState *progress, const char *dir, Error *err) {
    TrainerState saved;
    if (!trainer_state_read(dir, &saved, err) ||
        !trainer_state_compare(&saved, progress, stdout, err))
        return false;
    saved.opt = progress->opt;
    memcpy(saved.lesson, progress->lesson, sizeof saved.lesson);
    *progress = saved;
    printf("resuming     %s after step %zu\n", dir, saved.step);
    if (saved.step >= progress->opt.steps)
        printf("note: the checkpoint has done all of --steps %zu: nothing is trained\n",
               progress->opt.steps);
    return true;
}

// Notes the training data. Returns false with an error message if the checkpoint was
// trained on other data, unless `anyway`.
static inline bool progress_data(TrainerState *progress, const DataLoader *data,
                                 bool anyway, Error *err) {
    char now[TRAINER_DATA_SIZE];
    dataloader_describe(data, progress->opt.shuffle, now, sizeof now);
    if (progress->data[0] && strcmp(progress->data, now) != 0 && !anyway)
        return error_set(err,
                         "the checkpoint was trained on other data (weight x samples: %s) "
                         "than --train-data names "
                         "(%s): name the same, or start from its weights alone with --init "
                         "(--verify 0 continues with "
                         "these)",
                         progress->data, now);
    memcpy(progress->data, now, sizeof now);
    return true;
}

// Notes the checksum of tuned.cuh's file. Another file, or none, gives other bits but the
// same mathematics: a resumed run may use it, and prints a note.
static inline void progress_tuned(TrainerState *progress, uint64_t sum, bool resumes) {
    char now[sizeof progress->tuned] = "";
    if (sum) snprintf(now, sizeof now, "%016" PRIx64, sum);
    if (resumes && strcmp(progress->tuned, now) != 0)
        printf("note: the checkpoint was trained with tuned = \"%s\", this run has \"%s\"\n",
               progress->tuned, now);
    memcpy(progress->tuned, now, sizeof now);
}

#endif
