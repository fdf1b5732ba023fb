// targets.h: every reader of files from outside, as a function of bytes. fuzz.c feeds them to
// libFuzzer (make fuzz). dev/test/test_fuzz.c gives them the files of dev/fuzz/corpus (make
// test).
//
// A target ends the program if the code it calls breaks a promise; the sanitizers find the
// rest. If it has several loaders or layouts, its first bytes choose one.
//
// defines: FuzzTarget, FUZZ_TARGETS
#ifndef DEV_FUZZ_TARGETS_H
#define DEV_FUZZ_TARGETS_H

#include "dev/fuzz/checkpoints.h"
#include "dev/fuzz/files.h"
#include "dev/fuzz/texts.h"
#include "dev/fuzz/pictures.h"

typedef struct {
    const char *name;
    void (*call)(const uint8_t *, size_t);
    size_t longest;  // of the inputs that are tried
    bool leaks;      // a program that ends need not free what it has
} FuzzTarget;

static const FuzzTarget FUZZ_TARGETS[] = {
    {"shards", fuzz_shards, 2048, false},
    {"log", fuzz_log, 1024, false},
    {"eval", fuzz_eval, 2048, false},
    {"safetensors", fuzz_safetensors, 4096, false},
    {"index", fuzz_index, 2048, false},
    {"reshard", fuzz_reshard, 16, false},
    {"folder", fuzz_folder, 64, false},
    {"json", fuzz_json, 8192, false},
    {"config", fuzz_config, 40, false},
    {"tokenizer", fuzz_tokenizer, 16384, false},
    {"tokenizer_keys", fuzz_tokenizer_keys, 512, false},
    {"options", fuzz_options, 1024, false},
    {"blend", fuzz_blend, 256, false},
    {"ramp", fuzz_ramp, 64, false},
    {"schedule", fuzz_schedule, 1024, false},
    {"cluster", fuzz_cluster, 8192, false},
    {"simulate", fuzz_simulate, 16, false},
    {"rows", fuzz_rows, 2048, false},
    {"plots", fuzz_plots, 4096, true},
    {"machine", fuzz_machine, 256, true},
};
enum { FUZZ_TARGET_COUNT = sizeof FUZZ_TARGETS / sizeof FUZZ_TARGETS[0] };

#endif
