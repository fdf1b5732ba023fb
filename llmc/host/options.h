// options.h: the command line. The table of options_table.h makes the parser, its range checks, the defaults
// and --help; options_resolve then fills in what was left out and checks the sizes against each other.
//
// defines: Options, options_parse, options_help, options_resolve, options_config
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>

#include "llmc/host/error.h"
#include "llmc/model.h"
#include "llmc/host/options_table.h"

enum { SIMULATED_STAGES = 1024 };  // most of --simulate

typedef struct {
    size_t layers, heads, channels;
} ModelPreset;

// The choices of --model: GPT-2 small, medium, large and XL; V = 50257 and maxT = 1024 in all of them.
static const ModelPreset MODEL_PRESETS[] = {{12, 12, 768}, {24, 16, 1024}, {36, 20, 1280}, {48, 25, 1600}};

// Position of `text` in a list "a|b|c", or -1.
static inline int option_choice(const char *list, const char *text) {
    size_t length = strlen(text);
    for (int position = 0;; position++) {
        size_t end = strcspn(list, "|");
        if (end == length && strncmp(list, text, length) == 0) return position;
        if (list[end] == '\0') return -1;
        list += end + 1;
    }
}

// Writes `text` into the option's field.
static inline bool option_set(Options *o, const Option *option, const char *text, Error *err) {
    char *field = (char *)o + option->offset, *end;
    errno = 0;
    if (option->type == OPTION_TEXT) {
        if (text[0] == '\0' && strcmp(option->name, "prompt") != 0) {
            return error_set(err, "--%s is empty: give a value or leave it out", option->name);
        }
        *(const char **)(void *)field = text;
    } else if (option->type == OPTION_SIZE || option->type == OPTION_SEED) {
        bool digits = text[0] != '\0' && strspn(text, "0123456789") == strlen(text);
        unsigned long long number = digits ? strtoull(text, &end, 10) : 0;
        if (!digits) return error_set(err, "--%s needs a whole number, not '%s'", option->name, text);
        if (option->type == OPTION_SEED) {
            if (errno) return error_set(err, "--%s %s does not fit in 64 bits", option->name, text);
            *(uint64_t *)(void *)field = number;
            return true;
        }
        if (errno || (double)number < option->min || (double)number > option->max) {
            return error_set(err, "--%s %s is out of range: it must lie between %.0f and %.0f", option->name,
                             text, option->min, option->max);
        }
        *(size_t *)(void *)field = (size_t)number;
    } else if (option->type == OPTION_REAL) {
        double number = strtod(text, &end);
        if (text[0] == '\0' || *end != '\0' || strspn(text, "0123456789.eE+-") != strlen(text)) {
            return error_set(err, "--%s needs a number, not '%s'", option->name, text);
        }
        if (!(number >= option->min && number <= option->max)) {
            return error_set(err, "--%s %s is out of range: it must lie between %g and %g", option->name,
                             text, option->min, option->max);
        }
        *(double *)(void *)field = number;
    } else if (option->type == OPTION_SWITCH) {
        if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) {
            return error_set(err, "--%s must be 0 or 1, not '%s'", option->name, text);
        }
        *(bool *)(void *)field = text[0] == '1';
    } else if (option->type == OPTION_CHOICE) {
        int choice = option_choice(option->value, text);
        if (choice < 0) {
            return error_set(err, "--%s must be one of %s, not '%s'", option->name, option->value, text);
        }
        *(int *)(void *)field = choice;
    } else {
        *(bool *)(void *)field = true;
    }
    return true;
}

// True if a row of the table is a flag that a trainer with these sections knows.
static inline bool option_known(const Option *option, unsigned sections) {
    return option->help && (option->section == 0 || (option->section & sections));
}

// Why a word is not accepted, with the trainer to use if only a later one knows it.
static inline bool option_unknown(const char *word, unsigned sections, Error *err) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        size_t length = strlen(OPTIONS[i].name);
        if (!OPTIONS[i].help || option_known(&OPTIONS[i], sections)) continue;
        if (strncmp(word, "--", 2) == 0 && strncmp(word + 2, OPTIONS[i].name, length) == 0 &&
            (word[2 + length] == '\0' || word[2 + length] == '=')) {
            unsigned section = OPTIONS[i].section;
            const char *who = section == OPTIONS_TENSOR     ? "train_gpt_tp and the trainers after it"
                              : section == OPTIONS_PIPELINE ? "train_gpt_pp and train_gpt_3d"
                                                            : "train_gpt_3d";
            return error_set(err, "--%s is for %s, not for this trainer", OPTIONS[i].name, who);
        }
    }
    return error_set(err, "unknown flag '%s': --help lists all flags", word);
}

// Reads the command line of a trainer that has `sections`. False, with one sentence, for anything that is not
// exactly right; the ranges are checked here, what depends on several flags in options_resolve.
static inline bool options_parse(Options *o, int argc, char **argv, unsigned sections, Error *err) {
    struct option flags[OPTION_COUNT + 1];
    int rows[OPTION_COUNT], n = 0;
    memset(o, 0, sizeof *o);
    memset(flags, 0, sizeof flags);
    o->sections = sections;
    o->val_every = o->steps = OPTION_LEFT_OUT;
    o->model = o->schedule = -1;
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (OPTIONS[i].initial && !option_set(o, &OPTIONS[i], OPTIONS[i].initial, err)) return false;
        if (!option_known(&OPTIONS[i], sections)) continue;
        flags[n].name = OPTIONS[i].name;
        flags[n].has_arg = OPTIONS[i].type == OPTION_MARK ? no_argument : required_argument;
        rows[n++] = i;
    }
    opterr = 0;
    optind = 0;  // starts anew: getopt_long keeps its place between calls
    for (int at = 1; at < argc; at = optind) {
        int found = -1;
        int result = getopt_long(argc, argv, "+:", flags, &found);  // '+': words are not moved, ':': no value
        if (result == -1) return error_set(err, "'%s' is not a flag: a value follows its --flag", argv[at]);
        size_t length = strcspn(argv[at] + 2, "=");  // of the name as typed
        for (int i = 0; result == ':' && i < n; i++) {
            if (strlen(flags[i].name) == length && strncmp(argv[at] + 2, flags[i].name, length) == 0) {
                return error_set(err, "--%s needs a value", flags[i].name);
            }
        }
        // getopt_long also takes a unique beginning of a name, which the next new flag would make ambiguous.
        bool whole = result == 0 && strlen(flags[found].name) == length;
        if (!whole) return option_unknown(argv[at], sections, err);
        const Option *option = &OPTIONS[rows[found]];
        if (optind == at + 2 && strncmp(optarg, "--", 2) == 0) {
            return error_set(err, "--%s needs a value, but '%s' follows", option->name, optarg);
        }
        if (!option_set(o, option, optarg ? optarg : "1", err)) return false;
    }
    return true;
}

// Prints what `--help` shows.
static inline void options_help(FILE *file, const char *program, unsigned sections) {
    const char *slash = strrchr(program, '/');
    fprintf(file, "usage: %s --train-data GLOB [--flag value]...\n", slash ? slash + 1 : program);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option *option = &OPTIONS[i];
        if (option->section != 0 && !(option->section & sections)) continue;
        if (!option->help) {
            fprintf(file, "\n%s\n", option->name);
            continue;
        }
        char left[80];
        snprintf(left, sizeof left, "--%s %s", option->name, option->value ? option->value : "");
        fprintf(file, "  %-34s%s", left, strlen(left) > 33 ? "  " : "");
        fprintf(file, "%s", option->help);
        if (option->initial) fprintf(file, " (default %s)", option->initial);
        fprintf(file, "\n");
    }
}

// One size of the model: the flag, else the preset or file; a flag that contradicts the file is refused.
static inline bool option_size_of_model(size_t *field, const char *flag, size_t in_file, Error *err) {
    if (in_file && *field && *field != in_file) {
        return error_set(err, "--%s %zu contradicts the checkpoint, which has %zu: leave the flag out", flag,
                         *field, in_file);
    }
    if (!*field) *field = in_file;
    return true;
}

// Fills in the sizes of the model and of a sequence that were left out, and checks them.
static inline bool options_resolve_model(Options *o, const GPTConfig *file, Error *err) {
    if (o->model >= 0) {
        const ModelPreset *preset = &MODEL_PRESETS[o->model];
        if (!o->layers) o->layers = preset->layers;
        if (!o->heads) o->heads = preset->heads;
        if (!o->channels) o->channels = preset->channels;
        if (!o->vocab) o->vocab = 50257;
        if (!o->max_seq) o->max_seq = 1024;
    }
    if (file && !(option_size_of_model(&o->layers, "layers", file->L, err) &&
                  option_size_of_model(&o->heads, "heads", file->NH, err) &&
                  option_size_of_model(&o->channels, "channels", file->C, err) &&
                  option_size_of_model(&o->vocab, "vocab", file->V, err) &&
                  option_size_of_model(&o->max_seq, "max-seq", file->maxT, err))) return false;
    if (!o->layers) o->layers = 4;
    if (!o->heads) o->heads = 4;
    if (!o->channels) o->channels = 128;
    if (!o->vocab) o->vocab = 257;
    if (!o->seq) o->seq = o->max_seq ? o->max_seq : 128;
    if (!o->max_seq) o->max_seq = o->seq;
    if (o->channels % o->heads) {
        return error_set(err, "--heads %zu does not divide --channels %zu: change one of them", o->heads,
                         o->channels);
    }
    if (o->channels / o->heads > 512) {  // ATTENTION_MAX_HEAD_SIZE
        return error_set(err, "heads of %zu channels are too large, 512 is the most: raise --heads",
                         o->channels / o->heads);
    }
    if (o->seq > o->max_seq) {
        return error_set(err, "--seq %zu is longer than the model's %zu positions: shorten it%s", o->seq,
                         o->max_seq, file ? "" : " or raise --max-seq");
    }
    return true;
}

// Fills in the sizes of the grid that were left out, for a run of `ranks` ranks, and checks what they divide. grid.h
// checks that they make that many ranks.
static inline bool options_resolve_grid(Options *o, size_t ranks, Error *err) {
    bool has_tensor = o->sections & OPTIONS_TENSOR, has_pipeline = o->sections & OPTIONS_PIPELINE;
    bool has_data = o->sections & OPTIONS_DATA;
    if (!has_tensor && ranks != 1) {
        return error_set(err, "train_gpt is one rank, but %zu were %s: use train_gpt_3d", ranks,
                         o->simulate ? "asked for" : "started");
    }
    if (!o->tensor) o->tensor = has_tensor && !has_pipeline ? ranks : 1;
    bool derive = has_pipeline && !has_data && ranks % o->tensor == 0;
    if (!o->pipeline) o->pipeline = derive ? ranks / o->tensor : 1;
    size_t tp = o->tensor * o->pipeline;
    if (!o->data) o->data = has_data && ranks % tp == 0 ? ranks / tp : 1;
    if (o->heads % o->tensor) {
        return error_set(err, "--tensor %zu does not divide the %zu heads: take a size that does", o->tensor,
                         o->heads);
    }
    if (padded_vocabulary(o->vocab) % o->tensor) {
        return error_set(err, "--tensor %zu does not divide the vocabulary padded to %zu: take a power of 2",
                         o->tensor, padded_vocabulary(o->vocab));
    }
    if (o->sequence_parallel && o->seq % o->tensor) {
        return error_set(err, "--tensor %zu does not divide --seq %zu, which --sequence-parallel 1 needs",
                         o->tensor, o->seq);
    }
    if (o->schedule_file && o->schedule >= 0) {
        return error_set(err, "--schedule and --schedule-file exclude each other: a file says all that a name does");
    }
    if (o->max_in_flight && o->schedule != 4) {
        return error_set(err, "--max-in-flight %zu needs --schedule zb-auto, which looks for a schedule that keeps to "
                         "it", o->max_in_flight);
    }
    if (o->schedule < 0) o->schedule = o->chunks > 1 ? 2 : 1;  // interleaved, 1f1b
    if (o->pipeline * o->chunks > o->layers) {
        return error_set(err, "%zu layers do not fill %zu stages * %zu chunks: lower --pipeline or --virtual",
                         o->layers, o->pipeline, o->chunks);
    }
    return true;
}

// A simulation has no data, no weights and nothing to save; it runs for a few steps, which are all alike.
static inline bool options_resolve_simulation(Options *o, Error *err) {
    if (o->steps == OPTION_LEFT_OUT) o->steps = o->simulate ? 2 : 100;
    if (!o->simulate && o->ranks)
        return error_set(err, "--ranks %zu needs --simulate, whose ranks it counts", o->ranks);
    if (!o->simulate) return true;
    if (!o->ranks) return error_set(err, "--simulate needs --ranks, the GPUs of the job");
    if (o->virtual_time) return error_set(err, "--simulate and --virtual-time exclude each other");
    const struct { const char *name; bool given; } flags[] = {
        {"train-data", o->train_data != NULL}, {"val-data", o->val_data != NULL},
        {"tokenizer", o->tokenizer != NULL}, {"init", o->init != NULL}, {"resume", o->resume != NULL},
        {"out", o->out != NULL}, {"dump-gradients", o->dump_gradients != NULL},
        {"val-every", o->val_every && o->val_every != OPTION_LEFT_OUT}, {"sample-every", o->sample_every > 0},
        {"save-every", o->save_every > 0}, {"eval", o->eval != NULL}, {"dry-run", o->dry_run},
        {"debug-replicas", o->debug_replicas}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        if (flags[i].given)
            return error_set(err, "--%s has no meaning under --simulate, where no data move: leave it out",
                             flags[i].name);
    }
    if (o->steps == 0) return error_set(err, "--simulate needs --steps 1 or more: it has nothing but steps");
    return true;
}

// Refuses sizes that no machine has, so that no count of bytes passes 2^64. Counts high: every micro-batch in flight.
static inline bool options_check_size(const Options *o, Error *err) {
    double C = (double)o->channels, layer = 12 * C * C + 13 * C, tokens = (double)o->global_batch * (double)o->seq;
    double params = (double)o->layers * layer + ((double)o->vocab + 128 + (double)o->max_seq) * C;
    double acts = (double)o->micro_batch * (double)o->seq * ((double)o->vocab + 128 + 64 * C) +
                  tokens * (4 + (double)o->layers * 40 * C);
    if (20 * params + 8 * acts < 0x1p60) return true;
    return error_set(err, "--layers %zu, --channels %zu, --vocab %zu, --seq %zu, --micro-batch %zu and --global-batch "
                     "%zu together need more than 2^60 bytes: lower them", o->layers, o->channels, o->vocab, o->seq,
                     o->micro_batch, o->global_batch);
}

// Fills in everything that was left out and checks everything that needs no file, for a run of `ranks` ranks.
// `file`: the configuration of the checkpoint of --init or --resume, or NULL. pipeline.h checks the schedule.
static inline bool options_resolve(Options *o, const GPTConfig *file, size_t ranks, Error *err) {
    if (!options_resolve_simulation(o, err) || !options_resolve_model(o, file, err) ||
        !options_resolve_grid(o, ranks, err)) return false;
    if (o->simulate && o->pipeline > SIMULATED_STAGES)
        return error_set(err, "--simulate runs a process for each stage, at most %d, not %zu: lower --pipeline",
                         SIMULATED_STAGES, o->pipeline);
    if (o->init && o->resume && strcmp(o->resume, "auto") != 0) {
        return error_set(err, "--init and --resume exclude each other: resuming already has its weights");
    }
    if (!o->global_batch) o->global_batch = o->micro_batch * o->data;
    if (o->global_batch % (o->micro_batch * o->data)) {
        return error_set(err, "--global-batch %zu is not a multiple of --micro-batch %zu%s: change one",
                         o->global_batch, o->micro_batch, o->data > 1 ? " times the data ranks" : "");
    }
    if (o->ramp_text && !ramp_parse(&o->ramp, o->ramp_text, o->global_batch, o->micro_batch * o->data, err)) {
        return false;
    }
    if (o->val_every == OPTION_LEFT_OUT) o->val_every = o->val_data ? 20 : 0;
    if (o->eval && !o->init && !o->resume) {
        return error_set(err, "--eval %s needs the weights that it measures: --init or --resume", o->eval);
    }
    if (!o->train_data && !o->dry_run && !o->simulate && !o->eval)
        return error_set(err, "--train-data is missing: it names the shards");
    if (o->val_every && !o->val_data) return error_set(err, "--val-every %zu needs --val-data", o->val_every);
    if (o->save_every && !o->out) return error_set(err, "--save-every %zu needs --out", o->save_every);
    if (o->eval) {  // nothing is trained, saved or sampled
        o->train_data = o->val_data = o->out = NULL;
        o->steps = o->val_every = o->sample_every = o->save_every = 0;
    }
    return options_check_size(o, err);
}

// The model that resolved options describe.
static inline GPTConfig options_config(const Options *o) {
    GPTConfig g = {o->layers, o->channels, o->heads, o->vocab, padded_vocabulary(o->vocab), o->max_seq};
    return g;
}

#endif
