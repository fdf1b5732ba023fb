// options_table.h: every flag of train_gpt.cu, which all trainers have: its field, default,
// range and help.
//
// defines: OPTION_BASIC, OPTION_TRAINS, OPTION_COMPUTES, OPTION_LEFT_OUT, Grid,
//          RankOptions, Options, OPTIONS, OPTION_ROWS
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H

#include "llmc/host/choices.h"
#include "llmc/host/error.h"
#include "llmc/host/field.h"
#include "llmc/host/ramp.h"
#include "llmc/model.h"

// Tags of a row.
enum {
    OPTION_BASIC = 1,   // --help shows it without "all"
    OPTION_TRAINS = 2,  // refused under --simulate, which has no data
    // Of a lesson's row that changes what is computed: trainer.json has it.
    OPTION_COMPUTES = 32,
};

#define OPTION_LEFT_OUT SIZE_MAX  // for counts in which 0 means "off"

// The place of a rank among all t * d * p = world of them, see llmc/grid.h. One rank alone
// has the sizes 1.
typedef struct {
    size_t world, rank;             // all ranks, and this one
    size_t t, d, p;                 // sizes of the tensor, data and pipeline groups
    size_t t_rank, d_rank, p_rank;  // this rank's coordinates
    char order[4];  // the digits of a rank's number from fastest to slowest, as "tdp"
} Grid;

typedef struct Options Options;

// The rows that a trainer of several ranks adds to the command line, see
// llmc/host/options_ranks.h.
typedef struct {
    const Field *fields;  // [count] rows of Options
    size_t count;
    unsigned sections;  // OPTIONS_TENSOR | ...: a row with tags above OPTION_TRAINS needs
                        // one of them
    const char *(*trainers)(unsigned tags);  // those that have a row with these tags
    // Makes o->grid, whose rank is set.
    bool (*resolve)(Options *o, size_t ranks, Error *err);
} RankOptions;

// Texts point into argv (NULL: left out). options_resolve replaces sizes that are 0 because
// they were left out.
struct Options {
    RankOptions groups;    // as given to options_parse
    FieldTable tables[3];  // rows of the lesson, of several ranks, and OPTIONS: the first
                           // with a name counts
    int help, version;     // help 1: --help, 2: --help all
    const char *init, *resume, *out;
    bool verify;
    int model;  // position in MODEL_NAMES, -1: left out
    GPTConfig config;
    const char *train_data, *val_data, *tokenizer;
    bool shuffle;
    // Sequences, tokens of one, sequences per step over all ranks.
    size_t micro_batch, seq, global_batch;
    const char *ramp_text;
    Ramp ramp;  // of the global batch; options_resolve parses ramp_text
    size_t steps;
    double lr, lr_final;  // lr_final is a fraction of lr
    size_t warmup;
    int lr_schedule;                               // ramp.h's LRSchedule
    double weight_decay, clip, beta1, beta2, eps;  // clip 0: off
    double dropout;
    uint64_t seed;
    int recompute;  // RECOMPUTE_*
    size_t val_every, val_batches, sample_every, sample_tokens;
    const char *prompt;
    size_t save_every, keep;
    const char *log, *trace, *dump_gradients, *eval;
    size_t trace_steps;
    int dry_run;
    bool debug_replicas;
    Grid grid;  // its rank is set before options_resolve, which fills in the rest
    bool sequence_parallel;
    size_t max_in_flight;          // 0: left out
    size_t chunks;                 // --virtual, v of the paper
    const char *layers_per_stage;  // see grid.h's stage_list_is
    int schedule;                  // Schedule; -1 until resolved
    const char *schedule_file;
    // How many neighbouring data ranks share each sequence: 1 but in a lesson.
    size_t context;
    bool zero, overlap;
    const char *order;
    const char *virtual_time, *simulate;  // a cluster file: see doc/lab/virtual_time.md
    size_t ranks;                         // of a simulation
};

#define MODEL_NAMES                                                                      \
    "d12|d24|d36|d48|gpt2|gpt2-medium|gpt2-large|gpt2-xl|gpt3-175b|ptdp-1.7b|ptdp-3.6b|" \
    "ptdp-7.5b|"                                                                         \
    "ptdp-18b|ptdp-39b|ptdp-76b|ptdp-145b|ptdp-310b|ptdp-530b|ptdp-1t"
#define GROUP(title, tags) \
    { title, FIELD_TITLE, 0, NULL, 0, 0, tags, NULL, NULL }
#define SIZE(name, field, initial, min, max, tags, help) \
    { name, FIELD_SIZE, offsetof(Options, field), initial, min, max, tags, "N", help }
#define REAL(name, field, initial, min, max, tags, help) \
    { name, FIELD_REAL, offsetof(Options, field), initial, min, max, tags, "X", help }
#define SWITCH(name, field, initial, tags, help) \
    { name, FIELD_SWITCH, offsetof(Options, field), initial, 0, 1, tags, "0|1", help }
#define CHOICE(name, field, initial, tags, list, help) \
    { name, FIELD_CHOICE, offsetof(Options, field), initial, 0, 0, tags, list, help }
#define TEXT(name, field, initial, tags, value, help) \
    { name, FIELD_TEXT, offsetof(Options, field), initial, 1, 0, tags, value, help }
#define MARK(name, field, tags, value, help) \
    { name, FIELD_MARK, offsetof(Options, field), NULL, 0, 0, tags, value, help }

static const Field OPTIONS[] = {
    GROUP("Model", OPTION_BASIC),
    CHOICE("model", model, NULL, OPTION_BASIC, MODEL_NAMES,
           "the sizes of a published model"),
    SIZE("layers", config.L, NULL, 1, 5000, OPTION_BASIC, "transformer layers (default 4)"),
    SIZE("heads", config.NH, NULL, 1, 1e5, OPTION_BASIC,
         "attention heads; must divide --channels (default 4)"),
    SIZE("channels", config.C, NULL, 1, 131072, OPTION_BASIC,
         "width of the model (default 128)"),
    SIZE("vocab", config.V, NULL, 1, 1e7, 0,
         "vocabulary (default 257: bytes and <|endoftext|>)"),
    SIZE("max-seq", config.maxT, NULL, 1, 1e7, 0,
         "rows of the position embedding (default: --seq)"),

    GROUP("Checkpoints", OPTION_BASIC),
    TEXT("init", init, NULL, OPTION_BASIC | OPTION_TRAINS, "DIR",
         "start from these weights (ours, or Hugging Face's GPT-2)"),
    TEXT("resume", resume, NULL, OPTION_BASIC | OPTION_TRAINS, "DIR|auto",
         "continue, same bits at the same layout; auto: the newest in --out"),
    SWITCH("verify", verify, "1", 0,
           "--resume compares the files and the data with trainer.json"),
    TEXT("out", out, NULL, OPTION_BASIC | OPTION_TRAINS, "DIR",
         "folder of checkpoints; the end of the run is always saved"),
    SIZE("save-every", save_every, "0", 0, 1e15, OPTION_BASIC | OPTION_TRAINS,
         "steps between checkpoints (0: only the end)"),
    SIZE("keep", keep, "2", 0, 1e15, 0, "newest checkpoints that stay (0: all)"),

    GROUP("Data", OPTION_BASIC),
    TEXT("train-data", train_data, NULL, OPTION_BASIC | OPTION_TRAINS, "GLOB",
         "training shards (quote it); 0.7:GLOB,0.3:GLOB blends sets"),
    TEXT("val-data", val_data, NULL, OPTION_BASIC | OPTION_TRAINS, "GLOB",
         "validation shards"),
    TEXT("tokenizer", tokenizer, NULL, OPTION_TRAINS, "FILE",
         "tokenizer.json for prompts and samples (default: bytes)"),
    SWITCH("shuffle", shuffle, "0", 0, "permute the samples of each epoch by --seed"),
    SIZE("micro-batch", micro_batch, "4", 1, 1e6, OPTION_BASIC,
         "sequences that go through the model at once"),
    SIZE("seq", seq, NULL, 1, 1e7, OPTION_BASIC,
         "tokens of a sequence (default: --max-seq, or 128)"),
    SIZE("global-batch", global_batch, NULL, 1, 1e9, OPTION_BASIC,
         "sequences of a step (default: one micro-batch on each data rank)"),
    TEXT("ramp", ramp_text, NULL, 0, "S,I,N",
         "batch-size ramp: start at S, grow by I, over N samples"),

    GROUP("Optimizer", OPTION_BASIC),
    SIZE("steps", steps, NULL, 0, 1e15, OPTION_BASIC,
         "updates, with those before a resume (default 100; simulated 2)"),
    REAL("lr", lr, "1e-3", 0, 1e3, OPTION_BASIC,
         "largest learning rate, at the end of the warm-up"),
    SIZE("warmup", warmup, "0", 0, 1e15, 0,
         "steps of linear warm-up; the last of them has --lr"),
    CHOICE("lr-schedule", lr_schedule, "cosine", 0, LR_SCHEDULES,
           "decay from there to the last step"),
    REAL("lr-final", lr_final, "0.1", 0, 1, 0, "fraction of --lr at the last step"),
    REAL("weight-decay", weight_decay, "0.1", 0, 1e3, 0,
         "decoupled, on matrices and embeddings"),
    REAL("clip", clip, "1.0", 0, 1e30, 0, "largest norm of the gradient (0: off)"),
    REAL("beta1", beta1, "0.9", 0, 0.999999, 0, "AdamW's decay of the mean"),
    REAL("beta2", beta2, "0.95", 0, 0.99999999, 0, "AdamW's decay of the square"),
    REAL("eps", eps, "1e-8", 1e-30, 1, 0, "AdamW's epsilon"),
    REAL("dropout", dropout, "0", 0, 0.99, 0,
         "of embedding, attention and both residual branches in training"),
    {"seed", FIELD_SEED, offsetof(Options, seed), "1337", 0, 0x1p64, 0, "N",
     "of weights, shuffling, dropout and samples"},
    CHOICE("recompute", recompute, "none", 0, "none|gelu|layer",
           "what backward computes again and does not keep"),

    GROUP("Reports", OPTION_BASIC),
    SIZE("val-every", val_every, NULL, 0, 1e15, OPTION_TRAINS,
         "steps between validations (0: never; default 20 with --val-data)"),
    SIZE("val-batches", val_batches, "10", 1, 1e9, 0,
         "whole global batches of one validation, at most"),
    SIZE("sample-every", sample_every, "0", 0, 1e15, OPTION_BASIC | OPTION_TRAINS,
         "steps between samples of text (0: never)"),
    SIZE("sample-tokens", sample_tokens, "128", 1, 1e6, 0, "tokens of a sample"),
    {"prompt", FIELD_TEXT, offsetof(Options, prompt), NULL, 0, 0, 0, "TEXT",
     "start of every sample (default: <|endoftext|>)"},
    TEXT("log", log, NULL, OPTION_BASIC, "FILE",
         "JSON Lines of every step; a resumed run appends"),
    TEXT("trace", trace, NULL, 0, "FILE", "Chrome trace of ranks and streams"),
    SIZE("trace-steps", trace_steps, "10", 1, 1e6, 0, "first steps that --trace covers"),
    TEXT("dump-gradients", dump_gradients, NULL, OPTION_TRAINS, "FILE",
         "safetensors of the first step's gradients"),
    TEXT("eval", eval, NULL, OPTION_TRAINS, "FILE",
         "measure the model on a file's rows and stop: doc/lab/evaluation.md"),
    MARK("dry-run", dry_run, OPTION_BASIC | OPTION_TRAINS, NULL,
         "print configuration, ranks and bytes per rank, then stop"),
    MARK("help", help, OPTION_BASIC, "all",
         "the flags of the lessons; --help all: all flags"),
    MARK("version", version, 0, NULL, "the commit that the trainer was built from"),

    GROUP("Virtual time", 0),
    TEXT("virtual-time", virtual_time, NULL, 0, "FILE",
         "train, but report the times of this cluster (dev/clusters)"),
    TEXT("simulate", simulate, NULL, 0, "FILE",
         "report the times of this cluster without data or training"),
    SIZE("ranks", ranks, NULL, 1, 1e6, 0,
         "ranks of the simulation, started without mpirun"),
};

enum { OPTION_ROWS = sizeof OPTIONS / sizeof OPTIONS[0] };

#undef GROUP
#undef SIZE
#undef REAL
#undef SWITCH
#undef CHOICE
#undef TEXT
#undef MARK

#endif
