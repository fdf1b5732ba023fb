// targets.h: everything that reads what others may have written, as functions of bytes. fuzz.c feeds them to libFuzzer
// (make fuzz), dev/test/test_fuzz.c gives them the files of dev/fuzz/corpus (make test).
//
// A target ends the program if what it calls breaks a promise; the sanitizers see to the rest. Its first byte, where
// there are several loaders or layouts, says which.
//
// defines: FuzzTarget, FUZZ_TARGETS
#ifndef DEV_FUZZ_TARGETS_H
#define DEV_FUZZ_TARGETS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/mman.h>

#include "llmc/grid.h"
#include "llmc/host/checkpoint_list.h"
#include "llmc/host/dataloader.h"
#include "llmc/host/options.h"
#include "llmc/host/tokenizer.h"
#include "llmc/pipeline_text.h"
#include "llmc/sim/cluster.h"

// The pictures: programs whose main is called with a file
#define main timeline_main
#define fail timeline_fail
#define usage timeline_usage
#define draw timeline_draw
#include "dev/plot/timeline.c"
#undef main
#undef fail
#undef usage
#undef draw
#define main profile_main
#define fail profile_fail
#define usage profile_usage
#define draw profile_draw
#define draw_legend profile_draw_legend
#define LEFT PROFILE_LEFT
#define RIGHT PROFILE_RIGHT
#define TOP PROFILE_TOP
#define MAX_RANKS PROFILE_MAX_RANKS
#include "dev/plot/profile.c"
#undef main
#undef fail
#undef usage
#undef draw
#undef draw_legend
#undef LEFT
#undef RIGHT
#undef TOP
#undef MAX_RANKS
#define main loss_main
#define fail loss_fail
#define usage loss_usage
#define draw loss_draw
#define Run LossRun
#include "dev/plot/loss.c"
#undef Run
#undef main
#undef fail
#undef usage
#undef draw

static void fuzz_promise(bool kept) {
    if (!kept) abort();
}

// A file in memory with these bytes, and its path. close() it.
static int fuzz_file(const uint8_t *data, size_t size, char path[40]) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || !file_write_at(fd, data, size, 0)) exit(1);
    snprintf(path, 40, "/proc/self/fd/%d", fd);
    return fd;
}

// A shard, opened for sequences of 1 to 16 tokens; the file may lose its end while it is read.
static void fuzz_shards(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    DataLoader dl;
    int inputs[16], targets[16];
    if (size < 2) return;
    size_t T = 1 + data[0] % 16, V = 1 + (size_t)data[1] * data[1];
    int fd = fuzz_file(data + 2, size - 2, path);
    if (dataloader_open(&dl, path, T, &err)) {
        if (data[0] & 64 && ftruncate(fd, (off_t)(size / 2)) != 0) exit(1);
        for (uint64_t n = 0; n < 3 * dl.samples && n < 200; n++) {
            if (!dataloader_read(&dl, n, data[0] & 128, 7, V, inputs, targets, &err)) continue;
            for (size_t i = 0; i < T; i++) {
                fuzz_promise(inputs[i] >= 0 && (size_t)inputs[i] < V && (size_t)targets[i] < V);
                fuzz_promise(i == 0 || inputs[i] == targets[i - 1]);
            }
        }
        dataloader_close(&dl);
    }
    close(fd);
}

// The header of a safetensors file, its tensors, and those of a tiny model by slices.
static void fuzz_safetensors(const uint8_t *data, size_t size) {
    char path[40];
    float values[512];
    Error err;
    SafeTensors st;
    int fd = fuzz_file(data, size, path);
    if (st_open(&st, path, &err)) {
        for (size_t i = 0; i < st.count && i < 50; i++) {
            const STEntry *x = &st.entries[i];
            fuzz_promise(x->end <= size && st_find(&st, x->name) != NULL);
            size_t count = x->count < 512 ? x->count : 512;
            st_read_floats(&st, x, 0, count, values, &err);
            st_read_floats(&st, x, x->count - count, count, values, &err);
            fuzz_promise(!st_read_floats(&st, x, x->count, 1, values, &err));
        }
        GPTConfig tiny = {1, 4, 2, 5, 128, 3};
        ParamTable whole = table_make_whole(&tiny);
        float *all = (float *)host_alloc(whole.total, sizeof(float));
        slices_read(&st, STATE_WEIGHTS, &whole, all, 0, whole.total, &err);  // closes it
        free(all);
        table_free(&whole);
    }
    close(fd);
}

// config.json, trainer.json, a cluster
static void fuzz_json(const uint8_t *data, size_t size) {
    char path[40], copy[40];
    Error err;
    if (size < 1) return;
    int fd = fuzz_file(data + 1, size - 1, path), other = fuzz_file(NULL, 0, copy);
    if (data[0] % 3 == 0) {
        GPTConfig a, b;
        if (config_read(path, &a, &err)) {
            fuzz_promise(config_write(copy, &a, data[0] & 64, &err) && config_read(copy, &b, &err));
            fuzz_promise(a.L == b.L && a.C == b.C && a.NH == b.NH && a.V == b.V && a.Vp == b.Vp && a.maxT == b.maxT);
        }
    } else if (data[0] % 3 == 1) {
        TrainerState a, b;
        if (trainer_state_read(path, &a, &err)) {
            fuzz_promise(trainer_state_write(copy, &a, NULL, &err) && trainer_state_read(copy, &b, &err));
            char changed[512];
            bool same = trainer_state_compare(&a, &b, changed, sizeof changed, &err);
            fuzz_promise(same && changed[0] == '\0' && a.step == b.step && a.sample == b.sample);
        }
    } else {
        Cluster cluster;
        memset(&cluster, 0, sizeof cluster);
        cluster_read(&cluster, path, &err);
    }
    close(fd);
    close(other);
}

// A tokenizer.json and, behind its last 0 byte, a prompt.
static void fuzz_tokenizer(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    Tokenizer tk;
    const uint8_t *zero = size ? (const uint8_t *)memrchr(data, 0, size) : NULL;
    size_t file_size = zero ? (size_t)(zero - data) : size, bytes = zero ? size - file_size - 1 : 0, got;
    int fd = fuzz_file(data, file_size, path);
    if (tokenizer_open(&tk, path, &err)) {
        int *tokens = (int *)host_alloc(bytes + 1, sizeof(int));
        char *prompt = (char *)host_alloc(bytes + 1, 1);
        if (bytes) memcpy(prompt, zero + 1, bytes);
        size_t count = tokenizer_encode(&tk, prompt, bytes, tokens), read = 0;
        fuzz_promise(count <= bytes);
        for (size_t i = 0; i < count; i++) {
            fuzz_promise(tokens[i] < (int)tk.V);
            const char *text = tokenizer_decode(&tk, tokens[i], &got);
            fuzz_promise(text != NULL);
            for (size_t j = 0; j < got; j++) read += (unsigned char)text[j];
        }
        fuzz_promise(read <= 255 * bytes * 1024);
        tokenizer_check_prompt(&tk, prompt, tk.V, &err);
        free(prompt);
        free(tokens);
        tokenizer_free(&tk);
    }
    close(fd);
}

// A command line, a word a line, of as many ranks as the first byte says.
static void fuzz_options(const uint8_t *data, size_t size) {
    Error err = {""};
    Options o;
    char *words[64] = {"train_gpt"}, *rest;
    int count = 1;
    if (size < 2) return;
    size_t ranks = 1 + data[0] % 64;
    char *text = strndup((const char *)data + 2, size - 2);
    rest = text;
    for (char *word; count < 63 && (word = strsep(&rest, "\n"));) words[count++] = word;
    if (options_parse(&o, count, words, data[1] % 8, &err) && options_resolve(&o, NULL, ranks, &err)) {
        Grid grid;
        GPTConfig config = options_config(&o);
        fuzz_promise(o.channels % o.heads == 0 && config.Vp >= config.V && o.global_batch % o.micro_batch == 0);
        if (grid_make(&grid, ranks, data[1] % ranks, o.tensor, o.data, o.pipeline, o.order, &err)) {
            fuzz_promise(grid.t * grid.d * grid.p == ranks);
        }
    }
    for (const char *c = err.text; *c; c++) fuzz_promise((unsigned char)*c >= ' ');
    free(text);
}

// A schedule: what is proved must have every step once.
static void fuzz_schedule(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    PipelineLists lists;
    int fd = fuzz_file(data, size, path);
    if (pipeline_text_read(path, &lists, &err)) {
        // The proof's memory is that of all steps that there could be; a program asks for as many as it trains.
        if ((double)lists.p * lists.m * lists.v < 1e5 && pipeline_lists_prove(&lists, PIPELINE_BUFFERS, &err)) {
            for (int s = 0; s < lists.p; s++) fuzz_promise(lists.counts[s] >= 2 * (size_t)lists.m * (size_t)lists.v);
        }
    }
    pipeline_lists_free(&lists);
    close(fd);
}

// A trace or a log, drawn. A picture goes nowhere, but not without end.
static void fuzz_plots(const uint8_t *data, size_t size) {
    char path[40];
    if (size < 1) return;
    int fd = fuzz_file(data + 1, size - 1, path);
    char *calls[][8] = {
        {"timeline", "--out", "/dev/null", path, NULL},
        {"timeline", "--retime", "--out", "/dev/null", path, NULL},
        {"timeline", "--costs", "1,2,0.5", "--pipeline", "2", "--out", "/dev/null", path},
        {"profile", "--skip", "0", "--out", "/dev/null", path, NULL},
        {"loss", "--out", "/dev/null", path, NULL},
        {"loss", "--log-y", "--smooth", "3", "--out", "/dev/null", path, NULL},
    };
    int which = data[0] % 6, count = 0;
    while (count < 8 && calls[which][count]) count++;
    char *words[9] = {NULL};
    memcpy(words, calls[which], (size_t)count * sizeof *words);
    optind = 0;
    int code = which < 3    ? timeline_main(count, words)
               : which == 3 ? profile_main(count, words)
                            : loss_main(count, words);
    fuzz_promise(code == 0 || code == 1);
    close(fd);
}

typedef struct {
    const char *name;
    void (*call)(const uint8_t *, size_t);
    size_t longest;  // of the inputs that are tried
    bool leaks;      // a program that ends need not free what it has
} FuzzTarget;

static const FuzzTarget FUZZ_TARGETS[] = {
    {"shards", fuzz_shards, 2048, false},     {"safetensors", fuzz_safetensors, 4096, false},
    {"json", fuzz_json, 8192, false},         {"tokenizer", fuzz_tokenizer, 16384, false},
    {"options", fuzz_options, 1024, false},   {"schedule", fuzz_schedule, 1024, false},
    {"plots", fuzz_plots, 4096, true},
};
enum { FUZZ_TARGET_COUNT = sizeof FUZZ_TARGETS / sizeof FUZZ_TARGETS[0] };

#endif
