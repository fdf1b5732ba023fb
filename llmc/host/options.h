// options.h: the command line. Parses it by the tables of its fields and prints --help.
// Fills in sizes that were left out and checks the sizes against each other.
//
// defines: options_parse, options_help, options_resolve, options_take_model
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "llmc/host/error.h"
#include "llmc/host/nearest.h"
#include "llmc/host/options_table.h"

#ifndef VERSION  // of the Makefile: the commit
#define VERSION "unknown"
#endif

// The sizes of MODEL_NAMES from gpt2 on. d12 to d48 are aliases of the first four. The
// sizes are of GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020), and Table 1 of PTD-P
// (Narayanan et al. 2021).
enum { MODEL_PRESET_COUNT = 15, MODEL_ALIASES = 4 };
static const GPTConfig MODEL_PRESETS[MODEL_PRESET_COUNT] = {
    {12, 768, 12, 50257, 50304, 1024, NULL},    {24, 1024, 16, 50257, 50304, 1024, NULL},
    {36, 1280, 20, 50257, 50304, 1024, NULL},   {48, 1600, 25, 50257, 50304, 1024, NULL},
    {96, 12288, 96, 51200, 51200, 2048, NULL},  {24, 2304, 24, 51200, 51200, 2048, NULL},
    {30, 3072, 32, 51200, 51200, 2048, NULL},   {36, 4096, 32, 51200, 51200, 2048, NULL},
    {40, 6144, 48, 51200, 51200, 2048, NULL},   {48, 8192, 64, 51200, 51200, 2048, NULL},
    {60, 10240, 80, 51200, 51200, 2048, NULL},  {80, 12288, 96, 51200, 51200, 2048, NULL},
    {96, 16384, 128, 51200, 51200, 2048, NULL}, {105, 20480, 128, 51200, 51200, 2048, NULL},
    {128, 25600, 160, 51200, 51200, 2048, NULL}};

// True if a trainer with these sections has the row.
static inline bool option_is_in(const Field *f, unsigned sections) {
    unsigned of = f->tags & ~(OPTION_BASIC | OPTION_TRAINS | OPTION_COMPUTES);
    return !of || (of & sections);
}

// Refuses a flag that no trainer has. Names this trainer's flag that it may mean, if that
// is at most two letters away.
static inline bool option_unknown(const Options *o, const char *word, const char *name,
                                  Error *err) {
    const char *nearest = NULL;
    int least = 3;
    for (const FieldTable *t = o->tables; t < o->tables + 3; t++) {
        for (const Field *f = t->fields; f < t->fields + t->count; f++) {
            if (f->type == FIELD_TITLE || !option_is_in(f, o->groups.sections)) continue;
            int distance = word_distance(name, f->name);
            if (distance >= least || distance >= (int)strlen(f->name)) continue;
            least = distance;
            nearest = f->name;
        }
    }
    if (nearest)
        return error_set(err,
                         "unknown flag '%s': did you mean --%s? --help all lists all flags "
                         "of this trainer",
                         word, nearest);
    return error_set(err, "unknown flag '%s': --help all lists all flags of this trainer",
                     word);
}

// Reads the flag argv[*i] and its value, which may be the next word. Moves *i to the last
// word read. Refuses a flag that this trainer lacks.
static inline bool option_read(const Options *o, int argc, char **argv, int *i,
                               Error *err) {
    char name[64], wanted[256];
    void *object;
    const char *word = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    const char *text = strchr(word, '='), *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (word[0] != '-' || strcmp(word, "--") == 0)
        return error_set(err, "'%s' is not a flag: a value follows its --flag", word);
    bool dashes = strncmp(word, "--", 2) == 0;
    snprintf(name, sizeof name, "%.*s", dashes ? (int)strcspn(word + 2, "=") : 0,
             word + 2 * dashes);
    const Field *f = dashes ? fields_find(o->tables, 3, name, &object) : NULL;
    if (!f) return option_unknown(o, word, name, err);
    if (f->type == FIELD_MARK && text)
        return error_set(err, "unknown flag '%s': --%s takes no value", word, name);
    if (!option_is_in(f, o->groups.sections))
        return error_set(err, "--%s is for %s, not for this trainer", f->name,
                         o->groups.trainers(f->tags));
    if (f->type == FIELD_MARK) {
        bool more = f->value && next && strcmp(next, f->value) == 0;
        *(int *)(void *)((char *)object + f->offset) = 1 + more;
        *i += more;
        return true;
    }
    if (!text) {
        if (!next) return error_set(err, "--%s needs a value", f->name);
        if (strncmp(next, "--", 2) == 0)
            return error_set(err, "--%s needs a value, but '%s' follows", f->name, next);
        ++*i;
    }
    text = text ? text + 1 : next;
    if (field_set(object, f, text)) return true;
    field_wanted(f, wanted, sizeof wanted);
    return error_set(err, "--%s must be %s, not '%s'", f->name, wanted, text);
}

// Sets the options of a trainer from the defaults and the command line. own: rows of a
// lesson; NULL: none. groups: the rows of trainers of several ranks. Returns false with an
// error message for a word that is not right. Checks the range of each value;
// options_resolve compares values.
static inline bool options_parse(Options *o, const FieldTable *own, int argc, char **argv,
                                 RankOptions groups, Error *err) {
    const FieldTable ranks = {groups.fields, groups.count, o},
                     all = {OPTIONS, OPTION_ROWS, o};
    memset(o, 0, sizeof *o);
    if (own) o->tables[0] = *own;
    o->tables[1] = ranks;
    o->tables[2] = all;
    o->groups = groups;
    o->val_every = o->steps = OPTION_LEFT_OUT;
    o->model = o->schedule = -1;
    o->context = 1;
    for (const FieldTable *t = o->tables; t < o->tables + 3; t++) {
        for (size_t i = 0; i < t->count; i++) {
            if (t->fields[i].initial)
                field_set(t->object, &t->fields[i], t->fields[i].initial);
        }
    }
    for (int i = 1; i < argc; i++) {
        if (!option_read(o, argc, argv, &i, err)) return false;
    }
    return true;
}

// Prints a row of --help.
static inline void option_help(FILE *file, const Field *f) {
    char left[80];
    if (f->type == FIELD_TITLE) {
        fprintf(file, "\n%s\n", f->name);
        return;
    }
    const char *form = f->type == FIELD_MARK && f->value ? "--%s [%s]" : "--%s %s";
    bool names = f->value && strlen(f->value) > 60;  // they stand below
    snprintf(left, sizeof left, form, f->name, names ? "NAME" : f->value ? f->value : "");
    fprintf(file, "  %-34s%s%s", left, strlen(left) > 33 ? "  " : "", f->help);
    if (f->initial) fprintf(file, " (default %s)", f->initial);
    fprintf(file, "\n");
    for (const char *at = names ? f->value : ""; *at;) {  // lines that end with a |
        int n = (int)strlen(at);
        if (n > 70)
            for (n = 70; at[n - 1] != '|';) n--;
        fprintf(file, "%36s%.*s\n", "", n, at);
        at += n;
    }
}

// Prints --help of a trainer that has parsed its command line: the flags that the lessons
// need, or all.
static inline void options_help(FILE *file, const char *program, const Options *o,
                                bool all) {
    const char *slash = strrchr(program, '/');
    void *object;
    fprintf(file, "usage: %s --train-data GLOB [--flag value]...\n",
            slash ? slash + 1 : program);
    for (size_t t = 3; t-- > 0;) {  // a lesson's rows come last
        for (const Field *f = o->tables[t].fields;
             f < o->tables[t].fields + o->tables[t].count; f++) {
            bool replaced = fields_find(o->tables, t, f->name, &object) != NULL;
            if (option_is_in(f, o->groups.sections) && !replaced &&
                (all || (f->tags & OPTION_BASIC)))
                option_help(file, f);
        }
    }
}

// Fills in sizes of the model that were left out. If g is a checkpoint's, refuses flags
// that contradict it.
static inline bool options_take_model(Options *o, const GPTConfig *g, bool is_file,
                                      Error *err) {
    GPTConfig *c = &o->config;
    const struct {
        const char *flag;
        size_t *size, other;
    } sizes[] = {{"layers", &c->L, g->L},
                 {"heads", &c->NH, g->NH},
                 {"channels", &c->C, g->C},
                 {"vocab", &c->V, g->V},
                 {"max-seq", &c->maxT, g->maxT}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (!*sizes[i].size) *sizes[i].size = sizes[i].other;
        if (is_file && *sizes[i].size != sizes[i].other)
            return error_set(
                err,
                "--%s %zu contradicts the checkpoint, which has %zu: leave the flag out",
                sizes[i].flag, *sizes[i].size, sizes[i].other);
    }
    return true;
}

// Fills in the sizes of the model and of a sequence that were left out, and checks them.
static inline bool options_resolve_model(Options *o, const GPTConfig *file, Error *err) {
    GPTConfig *c = &o->config;
    const GPTConfig small = {4, 128, 4, 257, 384, o->seq ? o->seq : 128, NULL};
    int preset = o->model < MODEL_ALIASES ? o->model : o->model - MODEL_ALIASES;
    if (preset >= 0) options_take_model(o, &MODEL_PRESETS[preset], false, err);
    if (!options_take_model(o, file ? file : &small, file != NULL, err)) return false;
    if (!o->seq) o->seq = c->maxT;
    bool gpt2 = !config_spec(c)->read;  // Others check the widths of their heads themselves.
    if (gpt2 && c->C % c->NH)
        return error_set(err,
                         "--heads %zu does not divide --channels %zu: change one of them",
                         c->NH, c->C);
    if (gpt2 && c->C / c->NH > ATTENTION_MAX_HEAD_SIZE)
        return error_set(
            err, "heads of %zu channels are too large, %d is the most: raise --heads",
            c->C / c->NH, ATTENTION_MAX_HEAD_SIZE);
    if (o->seq > c->maxT)
        return error_set(err,
                         "--seq %zu is longer than the model's %zu positions: shorten it%s",
                         o->seq, c->maxT, file ? "" : " or raise --max-seq");
    c->Vp = padded_vocabulary(c->V);
    return true;
}

// Refuses sizes that no machine has, so that no count of bytes passes 2^64. Counts high:
// every micro-batch in flight.
static inline bool options_check_size(const Options *o, Error *err) {
    const GPTConfig *c = &o->config;
    double C = (double)c->C, layer = 12 * C * C + 13 * C;
    double tokens = (double)o->global_batch * (double)o->seq;
    double params = (double)c->L * layer + ((double)c->V + 128 + (double)c->maxT) * C;
    double acts = (double)o->micro_batch * (double)o->seq * ((double)c->V + 128 + 64 * C) +
                  tokens * (4 + (double)c->L * 40 * C);
    if (20 * params + 8 * acts < 0x1p60) return true;
    return error_set(err,
                     "--layers %zu, --channels %zu, --vocab %zu, --seq %zu, --micro-batch "
                     "%zu and --global-batch "
                     "%zu together need more than 2^60 bytes: lower them",
                     c->L, c->C, c->V, o->seq, o->micro_batch, o->global_batch);
}

// Fills in options that were left out and checks them, except for files and the schedule.
// ranks: the size of the run; o->grid.rank is this one. `file`: the configuration of the
// checkpoint of --init or --resume, or NULL.
static inline bool options_resolve(Options *o, const GPTConfig *file, size_t ranks,
                                   Error *err) {
    if (o->steps == OPTION_LEFT_OUT) o->steps = o->simulate ? 2 : 100;
    if (o->val_every == OPTION_LEFT_OUT) o->val_every = o->val_data ? 20 : 0;
    if (!options_resolve_model(o, file, err)) return false;
    if (!o->groups.resolve)
        o->grid.world = o->grid.t = o->grid.d = o->grid.p = 1;
    else if (!o->groups.resolve(o, ranks, err))
        return false;
    if (o->init && o->resume && strcmp(o->resume, "auto") != 0)
        return error_set(
            err,
            "--init and --resume exclude each other: resuming already has its weights");
    size_t unit = o->micro_batch * (o->grid.d / o->context);
    if (!o->global_batch) o->global_batch = unit;
    if (o->global_batch % unit)
        return error_set(
            err, "--global-batch %zu is not a multiple of --micro-batch %zu%s: change one",
            o->global_batch, o->micro_batch, o->grid.d > 1 ? " times the data ranks" : "");
    if (o->ramp_text && !ramp_parse(&o->ramp, o->ramp_text, o->global_batch, unit, err))
        return false;
    if (o->eval && !o->init && !o->resume)
        return error_set(err,
                         "--eval %s needs the weights that it measures: --init or --resume",
                         o->eval);
    // Without a step the weights are only looked at: a sample or a validation needs no data
    // to train on.
    bool looks = o->steps == 0 && !o->out && (o->sample_every || o->val_every);
    if (!o->train_data && !o->dry_run && !o->simulate && !o->eval && !looks)
        return error_set(err, "--train-data is missing: it names the shards");
    if (o->val_every && !o->val_data)
        return error_set(err, "--val-every %zu needs --val-data", o->val_every);
    if (o->save_every && !o->out)
        return error_set(err, "--save-every %zu needs --out", o->save_every);
    if (o->eval) {  // neither trains nor saves
        o->train_data = o->val_data = o->out = NULL;
        o->steps = o->val_every = o->sample_every = o->save_every = 0;
    }
    return options_check_size(o, err);
}

#endif
