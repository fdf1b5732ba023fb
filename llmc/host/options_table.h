// options_table.h: every flag of the trainers: its name, where its value goes, default, range and help.
//
// defines: OPTIONS_TENSOR, OPTIONS_PIPELINE, OPTIONS_DATA, OPTION_LEFT_OUT, Options, Option, OPTIONS, OPTION_COUNT
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/host/ramp.h"

// Which groups of flags a trainer has beyond the common ones.
enum { OPTIONS_TENSOR = 1, OPTIONS_PIPELINE = 2, OPTIONS_DATA = 4 };

enum { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_LAYER };

enum { LR_UNIT_STEPS, LR_UNIT_SAMPLES };

#define OPTION_LEFT_OUT SIZE_MAX  // a count whose 0 means "off", so that 0 cannot mean "left out"

// Texts point into argv (NULL: left out). A size that is 0 was left out until options_resolve fills it in.
typedef struct {
    unsigned sections;  // OPTIONS_TENSOR | ..., as given to options_parse
    bool help;          // --help: print options_help and exit with 0
    const char *init, *resume, *out;
    bool verify;
    int model;  // position in MODEL_PRESETS, -1: left out
    size_t layers, heads, channels, vocab, max_seq;
    const char *train_data, *val_data, *tokenizer;
    bool shuffle;
    size_t micro_batch, seq, global_batch;  // sequences, tokens of one, sequences per step over all ranks
    const char *ramp_text;
    Ramp ramp;            // of the global batch; options_resolve makes it of the text
    size_t steps;
    double lr, lr_final;  // lr_final is a fraction of lr
    size_t warmup;
    int lr_schedule;      // ramp.h's LRSchedule
    int lr_unit;          // LR_UNIT_*: what warmup and the decay count
    double weight_decay, clip, beta1, beta2, eps;  // clip 0: off
    double dropout;
    uint64_t seed;
    int recompute;        // RECOMPUTE_*
    size_t val_every, val_batches, sample_every, sample_tokens;
    const char *prompt;
    size_t save_every, keep;
    const char *log, *trace, *dump_gradients, *eval;
    size_t trace_steps;
    bool dry_run, debug_replicas;
    size_t tensor;
    bool sequence_parallel;
    size_t max_in_flight;     // 0: left out
    size_t pipeline, chunks;  // chunks: --virtual, v of the paper
    int schedule;             // pipeline.h's Schedule; -1 until resolved
    const char *schedule_file;
    size_t data;
    bool zero, overlap;
    const char *order;
    const char *virtual_time, *simulate;  // a cluster file: see doc/virtual_time.md
    size_t ranks;             // of a simulation
} Options;

typedef enum {
    OPTION_SIZE,    // size_t: decimal digits
    OPTION_SEED,    // uint64_t: decimal digits
    OPTION_REAL,    // double
    OPTION_SWITCH,  // bool: 0 or 1
    OPTION_MARK,    // bool: present or not, takes no value
    OPTION_TEXT,    // const char *
    OPTION_CHOICE,  // int: position in the list `value` ("a|b|c")
} OptionType;

typedef struct {
    const char *name;      // without the dashes
    OptionType type;
    size_t offset;         // of the field of Options
    const char *initial;   // default, as one would type it; NULL: left out
    double min, max;       // range of a size or a real
    unsigned section;      // 0: every trainer
    const char *value;     // how --help names the value; the choices of OPTION_CHOICE
    const char *help;      // NULL: the row is the title of a group of flags
} Option;

// How the rows below are written; the ranges of SIZE and REAL include both ends.
#define GROUP(title, section) {title, OPTION_MARK, 0, NULL, 0, 0, section, NULL, NULL}
#define SIZE(name, field, initial, min, max, section, help) \
    {name, OPTION_SIZE, offsetof(Options, field), initial, min, max, section, "N", help}
#define REAL(name, field, initial, min, max, section, help) \
    {name, OPTION_REAL, offsetof(Options, field), initial, min, max, section, "X", help}
#define SWITCH(name, field, initial, section, help) \
    {name, OPTION_SWITCH, offsetof(Options, field), initial, 0, 0, section, "0|1", help}
#define CHOICE(name, field, initial, section, list, help) \
    {name, OPTION_CHOICE, offsetof(Options, field), initial, 0, 0, section, list, help}
#define TEXT(name, field, initial, section, value, help) \
    {name, OPTION_TEXT, offsetof(Options, field), initial, 0, 0, section, value, help}
#define MARK(name, field, help) {name, OPTION_MARK, offsetof(Options, field), NULL, 0, 0, 0, NULL, help}

static const Option OPTIONS[] = {
    GROUP("Model", 0),
    CHOICE("model", model, NULL, 0, "d12|d24|d36|d48", "GPT-2 small, medium, large or XL"),
    SIZE("layers", layers, NULL, 1, 5000, 0, "transformer layers (default 4)"),
    SIZE("heads", heads, NULL, 1, 1e5, 0, "attention heads; must divide --channels (default 4)"),
    SIZE("channels", channels, NULL, 1, 1e6, 0, "width of the model (default 128)"),
    SIZE("vocab", vocab, NULL, 1, 1e7, 0, "vocabulary (default 257: bytes and <|endoftext|>)"),
    SIZE("max-seq", max_seq, NULL, 1, 1e7, 0, "rows of the position embedding (default: --seq)"),

    GROUP("Checkpoints", 0),
    TEXT("init", init, NULL, 0, "DIR", "start from these weights (ours, or Hugging Face's GPT-2)"),
    TEXT("resume", resume, NULL, 0, "DIR|auto", "continue, same bits at the same layout; auto: what --out saved last"),
    SWITCH("verify", verify, "1", 0, "--resume compares the files and the data with trainer.json"),
    TEXT("out", out, NULL, 0, "DIR", "where checkpoints go; with it the end of the run is always saved"),
    SIZE("save-every", save_every, "0", 0, 1e15, 0, "steps between checkpoints (0: only the end)"),
    SIZE("keep", keep, "2", 0, 1e15, 0, "newest checkpoints that stay (0: all)"),

    GROUP("Data", 0),
    TEXT("train-data", train_data, NULL, 0, "GLOB", "training shards (quote it); 0.7:GLOB,0.3:GLOB blends sets"),
    TEXT("val-data", val_data, NULL, 0, "GLOB", "validation shards"),
    TEXT("tokenizer", tokenizer, NULL, 0, "FILE", "tokenizer.json for prompts and samples (default: bytes)"),
    SWITCH("shuffle", shuffle, "0", 0, "permute the samples of each epoch by --seed"),
    SIZE("micro-batch", micro_batch, "4", 1, 1e6, 0, "sequences that go through the model at once"),
    SIZE("seq", seq, NULL, 1, 1e7, 0, "tokens of a sequence (default: --max-seq, or 128)"),
    SIZE("global-batch", global_batch, NULL, 1, 1e9, 0,
           "sequences of a step (default: one micro-batch each)"),
    TEXT("ramp", ramp_text, NULL, 0, "S,I,N", "first steps have S sequences, I more and more over N samples"),

    GROUP("Optimizer", 0),
    SIZE("steps", steps, NULL, 0, 1e15, 0,
         "updates, those before a resume included (default 100; simulated 2)"),
    REAL("lr", lr, "1e-3", 0, 1e3, 0, "learning rate after warm-up"),
    SIZE("warmup", warmup, "0", 0, 1e15, 0, "steps of linear warm-up"),
    CHOICE("lr-schedule", lr_schedule, "cosine", 0, "cosine|linear", "how it falls after warm-up"),
    CHOICE("lr-unit", lr_unit, "steps", 0, "steps|samples", "what --warmup and the fall count"),
    REAL("lr-final", lr_final, "0.1", 0, 1, 0, "fraction of --lr that is reached at the last step"),
    REAL("weight-decay", weight_decay, "0.1", 0, 1e3, 0, "decoupled, on matrices and embeddings"),
    REAL("clip", clip, "1.0", 0, 1e30, 0, "largest norm of the gradient (0: off)"),
    REAL("beta1", beta1, "0.9", 0, 0.999999, 0, "AdamW's decay of the mean"),
    REAL("beta2", beta2, "0.95", 0, 0.99999999, 0, "AdamW's decay of the square"),
    REAL("eps", eps, "1e-8", 1e-30, 1, 0, "AdamW's epsilon"),
    REAL("dropout", dropout, "0", 0, 0.99, 0, "of embedding, attention and both residual branches in training"),
    {"seed", OPTION_SEED, offsetof(Options, seed), "1337", 0, 0, 0, "N", "of weights, shuffling, dropout and samples"},
    CHOICE("recompute", recompute, "none", 0, "none|gelu|layer", "activations that backward computes again"),

    GROUP("Reports", 0),
    SIZE("val-every", val_every, NULL, 0, 1e15, 0, "steps between validations (0: never; default 20 with --val-data)"),
    SIZE("val-batches", val_batches, "10", 1, 1e9, 0,
           "global batches of one validation, if there are so many"),
    SIZE("sample-every", sample_every, "0", 0, 1e15, 0, "steps between samples of text (0: never)"),
    SIZE("sample-tokens", sample_tokens, "128", 1, 1e6, 0, "tokens of a sample"),
    TEXT("prompt", prompt, NULL, 0, "TEXT", "what a sample starts with (default: <|endoftext|>)"),
    TEXT("log", log, NULL, 0, "FILE", "JSON Lines of every step; a resumed run appends"),
    TEXT("trace", trace, NULL, 0, "FILE", "Chrome trace of what ran; on a CPU also a table of kernels"),
    SIZE("trace-steps", trace_steps, "10", 1, 1e6, 0, "first steps that --trace covers"),
    TEXT("dump-gradients", dump_gradients, NULL, 0, "FILE", "safetensors of the first step's gradients"),
    TEXT("eval", eval, NULL, 0, "FILE", "measure the model on a file's rows and stop: doc/evaluation.md"),
    MARK("dry-run", dry_run, "print configuration, ranks and bytes per rank, then stop"),
    MARK("help", help, "this text"),

    GROUP("Virtual time", 0),
    TEXT("virtual-time", virtual_time, NULL, 0, "FILE", "train, but report the times of this cluster (dev/clusters)"),
    TEXT("simulate", simulate, NULL, 0, "FILE", "neither train nor need data: only the times on this cluster"),
    SIZE("ranks", ranks, NULL, 1, 1e6, 0, "ranks of the simulation, started without mpirun"),

    GROUP("Tensor parallelism", OPTIONS_TENSOR),
    SIZE("tensor", tensor, NULL, 1, 1e6, OPTIONS_TENSOR,
           "ranks that share each layer (default: all in _tp, else 1)"),
    SWITCH("sequence-parallel", sequence_parallel, "0", OPTIONS_TENSOR,
           "cut layernorms and residuals along the sequence"),
    SWITCH("debug-replicas", debug_replicas, "0", OPTIONS_TENSOR,
           "check at every step that replicas are bit-equal"),

    GROUP("Pipeline parallelism", OPTIONS_PIPELINE),
    SIZE("pipeline", pipeline, NULL, 1, 1e6, OPTIONS_PIPELINE,
           "stages (default: the ranks left over in _pp, else 1)"),
    SIZE("virtual", chunks, "1", 1, 1e6, OPTIONS_PIPELINE,
           "chunks of layers per stage; needs the interleaved schedule"),
    CHOICE("schedule", schedule, NULL, OPTIONS_PIPELINE, "gpipe|1f1b|interleaved|zb-h1|zb-auto",
           "order of forward and backward (default: 1f1b; interleaved with --virtual)"),
    TEXT("schedule-file", schedule_file, NULL, OPTIONS_PIPELINE, "FILE",
         "a schedule of your own, a line for each stage: F0 F1 B0 W0 B1 W1"),
    SIZE("max-in-flight", max_in_flight, NULL, 1, 1e6, OPTIONS_PIPELINE,
         "micro-batches that a stage may hold under zb-auto (default: twice the stages)"),

    GROUP("Data parallelism", OPTIONS_DATA),
    SIZE("data", data, NULL, 1, 1e6, OPTIONS_DATA, "replicas (default: ranks / (tensor * pipeline))"),
    SWITCH("zero", zero, "1", OPTIONS_DATA, "each data rank owns a slice of the optimizer's state (ZeRO-1)"),
    SWITCH("overlap", overlap, "1", OPTIONS_DATA, "communicate while backward and the next forward compute"),
    TEXT("order", order, "tdp", OPTIONS_DATA, "ORDER",
           "rank order, fastest first: t tensor, d data, p pipeline"),
};

#undef GROUP
#undef SIZE
#undef REAL
#undef SWITCH
#undef CHOICE
#undef TEXT
#undef MARK

enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0] };

#endif
